"""Checkpoints of an output layer in shards, handed on to runs with other numbers of ranks and without shards, and back.

Also a resumed run, and the types of what shards exchange.

Jobs of `test_vocabulary_parallel.py`.
"""

import shlex
from pathlib import Path
from typing import Any

from scripts.parity.cells import CONTEXT, MODELS
from tests.support.mcore.jobs.common import flags_of, trained
from tests.support.mcore.jobs.layouts import RESHARDABLE, differing, handed_on, tensors_of

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
