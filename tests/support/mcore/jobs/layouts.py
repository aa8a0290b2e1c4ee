"""Cut layers next to whole ones: a checkpoint handed there and back, and the same random masks.

Jobs of `test_layouts.py`.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.parity.cells import CONTEXT, MODELS
from scripts.parity.worlds import load_megatron
from tests.support.mcore.jobs.common import flags_of, trained

RESHARDABLE = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --ckpt-format torch_dist"
OWN_KEYS = "--num-experts 4 --moe-layer-freq [0,1,0,1] --moe-token-dispatcher-type alltoall"
"""Flags of a model whose layers have keys of their own in checkpoints."""
CUT = "--pipeline-model-parallel-size 2 --epp-layout 1.5,2.5"


def run(folder: Path, part: str) -> dict[str, Any]:
    parts = {"masks": masks, "hybrid": lambda: hybrid(folder), "checkpoints": lambda: checkpoints(folder)}
    return parts[part]()


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


def checkpoints(folder: Path) -> dict[str, Any]:
    """Train cut layers; load what they saved into whole ones and save that; load this into cut ones and save again."""
    return handed_on(folder, f"{MODELS['llama']} {OWN_KEYS} {RESHARDABLE}", ((CUT, 2), ("", 1), (CUT, 2)))


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


def masks() -> dict[str, Any]:
    """Run a layer with hidden dropout, and its halves one after the other, from the same random state."""
    load_megatron()
    import tempfile

    import torch
    import torch.distributed as dist
    from megatron.core import mpu
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_epp.mcore.model.half_layers import ATTENTION, MLP, without

    dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
    mpu.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, hidden_dropout=0.3, attention_dropout=0.0)
    spec = get_gpt_layer_local_spec()
    whole, first, second = (
        build_module(one, config=config, layer_number=1) for one in (spec, without(spec, MLP), without(spec, ATTENTION))
    )
    for half in (first, second):
        half.load_state_dict({name: tensor for name, tensor in whole.state_dict().items() if name in half.state_dict()})
    x, mask = torch.randn(6, 1, 32), torch.ones(1, 1, 6, 6).triu(1).bool()
    outputs, gradients = [], []
    for layers in ([whole], [first, second]):
        torch.manual_seed(3)
        hidden = given = x.clone().requires_grad_()
        for layer in layers:
            hidden, _ = layer(hidden, attention_mask=mask)
        hidden.square().sum().backward()
        outputs.append(hidden)
        gradients.append({name: p.grad for layer in layers for name, p in layer.named_parameters()} | {"input": given.grad})
    halves = {*first.state_dict(), *second.state_dict()}
    return {
        "outputs": bool(torch.equal(*outputs)),
        "gradients": gradients[0].keys() == gradients[1].keys()
        and all(bool(torch.equal(gradients[0][name], gradients[1][name])) for name in gradients[0]),
        "names": halves == {*whole.state_dict()},
        "shared": [name for name in first.state_dict() if name in second.state_dict()],
    }
