"""Jobs of `test_layouts.py`: a hybrid model there and back; checkpoints of an output layer in shards, handed on to runs with
other ranks and without shards, and back; a resumed run; and the types of what shards exchange.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from scripts.parity.cells import CONTEXT, MODELS
from tests.support.mcore.jobs.common import flags_of, trained

RESHARDABLE = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --ckpt-format torch_dist"
SHARDS = "--epp-vocab-parallel on --pipeline-model-parallel-size"
UNEVEN = "--vocab-size 97 --make-vocab-size-divisible-by 1"
PLAIN = "--ckpt-format torch_dist"
STOCK = "--epp-schedule stock"
CHAINS = {
    "untied, other layers": (
        f"{MODELS['llama']} {RESHARDABLE}",
        ((f"{SHARDS} 2 --epp-layout 1,3", 2), (STOCK, 1), (f"{SHARDS} 4 --epp-layout 0,2,1,1", 4)),
    ),
    "uneven, plain optimizer": (f"{MODELS['llama']} {UNEVEN} {PLAIN}", ((f"{SHARDS} 4", 4), (STOCK, 1), (f"{SHARDS} 2", 2))),
    "tied, uneven": (f"{MODELS['gpt2']} {UNEVEN} {RESHARDABLE}", ((STOCK, 1), (f"{SHARDS} 4", 4), (f"{SHARDS} 2", 2))),
}
FORMATS = {"gpt2": RESHARDABLE, "llama": f"{PLAIN} --use-distributed-optimizer"}
MODEL_OF = {"resumed tied": "gpt2", "resumed untied": "llama", "bf16": "llama"}


def run(folder: Path, part: str) -> dict[str, Any]:
    if part in CHAINS:
        return handed_on(folder, *CHAINS[part])
    return (types if part == "bf16" else resumed)(folder, MODEL_OF[part])


def resumed(folder: Path, model: str) -> dict[str, Any]:
    """Train four iterations, and the last two again from the checkpoint after the second.

    Of the buffers that Megatron keeps whole, whose padding it does not initialise, only the losses tell.
    """
    common = flags_of(folder, 4, CONTEXT, 4)
    common += shlex.split(f"{SHARDS} 2 {MODELS[model]} {FORMATS[model]} --hidden-dropout 0.1")
    places = [folder / name for name in ("whole", "resumed")]
    losses = []
    for place, loads in zip(places, ([], ["--load", str(places[0]), "--ckpt-step", "2"]), strict=True):
        losses.append(_losses(folder, [*common, "--save", str(place), "--save-interval", "2", *loads]))
    ends = [tensors_of(place / "iter_0000004") for place in places]
    assert ends[0].keys() == ends[1].keys()
    return {"losses": losses[0][2:], "resumed": losses[1], "apart": [key for key in differing(*ends) if "gbuf_idx" not in key]}


def types(folder: Path, model: str) -> dict[str, Any]:
    """Train in bf16 by the stock schedule and with shards; the types that these broadcast and reduce."""
    common = flags_of(folder, 2, CONTEXT, 4)
    common += shlex.split(f"{MODELS[model]} --bf16 --pipeline-model-parallel-size 2")
    from megatron_epp.features.vocabulary import pipeline_shards

    pipeline_shards.dist = Noting(pipeline_shards.dist, folder)  # which processes forked from this one have
    own = _losses(folder, [*common, "--epp-vocab-parallel", "on"])
    return {
        "losses": own,
        "stock": _losses(folder, [*common, *STOCK.split()]),
        "broadcast": sorted(set((folder / "broadcast").read_text().split())),
        "reduced": sorted(set((folder / "reduce").read_text().split())),
    }


class Noting:
    """`torch.distributed` with the types of broadcast and reduced tensors written to files."""

    def __init__(self, real: Any, folder: Path) -> None:
        self._real, self._folder = real, folder

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if name not in ("broadcast", "reduce"):
            return found

        def noted(tensor: Any, *rest: Any, **named: Any) -> Any:
            with (self._folder / name).open("a") as file:
                file.write(f"{tensor.dtype}\n")
            return found(tensor, *rest, **named)

        return noted


def _losses(folder: Path, flags: list[str]) -> list[float]:
    return next(run.losses for run in trained(2, flags, folder) if run.losses)


def hybrid(folder: Path) -> dict[str, Any]:
    """Train a hybrid model by the stock schedule, and there and back from the same weights. Stages begin with an MLP, too."""
    common = flags_of(folder, 2, CONTEXT, 8)
    from tests.support.mcore import local_hybrid  # it imports Megatron, which has to be prepared

    local_hybrid.use_torch_norms()
    common += shlex.split(
        f"{MODELS['llama']} --pipeline-model-parallel-size 2 --ckpt-format torch_dist "
        "--spec tests.support.mcore.local_hybrid stack_spec"
    )
    del common[common.index("--num-layers") : common.index("--num-layers") + 2]
    saved = folder / "saved"
    placed = "--hybrid-layer-pattern *-|*|-*|-*- --epp-placement v --epp-slices 3 --epp-recompute 1"
    runs = [
        trained(2, [*common, "--hybrid-layer-pattern", "*-*|-*-*-", "--epp-schedule", "stock"], folder, saved),
        trained(2, [*common, *placed.split(), "--load", str(saved), "--finetune"], folder),
    ]
    losses = [next(run.losses for run in found if run.losses) for found in runs]
    final = [{name: tensor for run in found for name, tensor in run.final.items()} for found in runs]
    assert final[0].keys() == final[1].keys()
    return {
        "losses": losses,
        "apart": max(float((final[1][name] - wanted).norm() / wanted.norm()) for name, wanted in final[0].items()),
        "placement": runs[1][0].plans[0].placement,
    }


def handed_on(folder: Path, flags: str, parts: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """Train and save; load what was saved with other flags, and save that; and so on. Compare all that was saved.

    Args:
        parts: flags of each run, and its processes.
    """
    common = flags_of(folder, 2, CONTEXT, 4)
    places = [folder / f"saved{number}" for number in range(len(parts))]
    for number, (own, processes) in enumerate(parts):
        keeps = ["--load", str(places[number - 1])] if number else ["--save", str(places[0]), "--save-interval", "1"]
        trained(processes, [*common, *shlex.split(f"{flags} {own}"), *keeps], folder, places[number] if number else None)
        if number == 0:
            (places[0] / "latest_checkpointed_iteration.txt").write_text("1")
    first, *others = (tensors_of(place / f"iter_000000{0 if number else 1}") for number, place in enumerate(places))
    return {
        "names": len(first),
        "of the optimizer": sum("optimizer" in key for key in first),
        "missing": sorted({key for other in others for key in first.keys() ^ other.keys()}),
        "apart": [key for other in others for key in differing(first, other)],
        "shapes": {key: list(tensor.shape) for key, tensor in first.items() if "layers" not in key},
    }


def tensors_of(folder: Path) -> dict[str, Any]:
    reader = dcp.FileSystemReader(folder)
    entries = reader.read_metadata().state_dict_metadata.items()
    tensors = {key: entry for key, entry in entries if isinstance(entry, TensorStorageMetadata)}
    state = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in tensors.items()}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Keys of tensors that two checkpoints have and that are not bitwise equal."""
    return [key for key in one.keys() & other.keys() if not torch.equal(one[key], other[key])]
