"""Cut layers next to whole ones: a checkpoint handed there and back, and the same random masks.

python -m tests.support.mcore.layouts_worker FOLDER masks|MODEL

Prints what `test_layouts.py` looks at.
"""

import os
import shlex
import sys
from pathlib import Path
from typing import Any

from scripts.parity.cells import CONTEXT, LENGTHS, MODELS, VOCABULARY, common_flags
from scripts.parity.worlds import Training, load_megatron, train_all
from scripts.random_documents import write_documents
from tests.support.mcore.figures import record_figures

RESHARDABLE = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --ckpt-format torch_dist"
CHAINS = {
    "one key for all layers": ("llama", ""),
    "a key for every layer": ("llama", "--num-experts 4 --moe-layer-freq [0,1,0,1] --moe-token-dispatcher-type alltoall"),
}
"""Models whose layers are homogeneous in checkpoints, or not."""
CUT = "--pipeline-model-parallel-size 2 --epp-layout 1.5,2.5"


def main(folder: Path, part: str) -> None:
    """Run the masks, or the chain of a model."""
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    load_megatron()
    record_figures(masks() if part == "masks" else checkpoints(folder, *CHAINS[part]))


def checkpoints(folder: Path, model: str, flags: str) -> dict[str, Any]:
    """Train cut layers; load what they saved into whole ones and save that; load this into cut ones and save again."""
    common = common_flags(2, CONTEXT, 8, validates=False)
    common += ["--data-path", write_documents(folder / "documents", LENGTHS, VOCABULARY)]
    own = [*common, *shlex.split(f"{MODELS[model]} {flags} {RESHARDABLE}")]
    first, second, third = (folder / name for name in ("trained", "whole", "cut"))
    for flags_of_part, saved, processes in (
        ([*CUT.split(), "--save", str(first), "--save-interval", "1"], None, 2),
        (["--load", str(first)], second, 1),
        ([*CUT.split(), "--load", str(second)], third, 2),
    ):
        training = Training(processes, (*own, *flags_of_part), saved)
        (runs,) = train_all([training], folder, 200).values()
        assert not isinstance(runs, str), f"{saved}: {runs}"
        if saved is None:
            (first / "latest_checkpointed_iteration.txt").write_text("1")
    cut, *others = (_tensors(folder / place) for place in ("trained/iter_0000001", "whole/iter_0000000", "cut/iter_0000000"))
    return {
        "names": len(cut),
        "of the optimizer": sum("optimizer" in key for key in cut),
        "missing": sorted({key for other in others for key in cut.keys() ^ other.keys()}),
        "apart": [key for other in others for key in cut.keys() & other.keys() if not _equal(cut[key], other[key])],
    }


def _tensors(folder: Path) -> dict[str, Any]:
    """All tensors of a checkpoint by their keys."""
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


def _equal(one: Any, other: Any) -> bool:
    import torch

    return bool(torch.equal(one, other))


def masks() -> dict[str, Any]:
    """Run a layer with hidden dropout, and its halves one after the other, from the same random state."""
    import tempfile

    import torch
    import torch.distributed as dist
    from megatron.core import mpu
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_epp.mcore.model.half_layers import attention_of, mlp_of

    dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
    mpu.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, hidden_dropout=0.3, attention_dropout=0.0)
    spec = get_gpt_layer_local_spec()
    whole, first, second = (
        build_module(one, config=config, layer_number=1) for one in (spec, attention_of(spec), mlp_of(spec))
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
        "dropped": bool(torch.any(outputs[0] == whole(x, attention_mask=mask)[0])),
        "names": halves == {*whole.state_dict()},
        "shared": [name for name in first.state_dict() if name in second.state_dict()],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
