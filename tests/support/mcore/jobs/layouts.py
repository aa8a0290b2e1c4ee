"""A hybrid model there and back, for `test_layouts.py`, and checkpoints that runs hand on."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.parity.cells import CONTEXT, MODELS
from tests.support.mcore.jobs.common import flags_of, trained

RESHARDABLE = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --ckpt-format torch_dist"


def run(folder: Path) -> dict[str, Any]:
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
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(folder)
    entries = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Keys of tensors that two checkpoints have and that are not bitwise equal."""
    import torch

    return [key for key in one.keys() & other.keys() if not torch.equal(one[key], other[key])]
