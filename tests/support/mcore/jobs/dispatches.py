"""Runs the forward of a layer with experts on ranks that share these, and measures what it holds besides what it keeps."""

import torch

from megatron_epp.mcore import entry

TOKENS = 512


def run(cases):
    """Return for every case, of sizes and flags, the bytes per token by formula and in truth."""
    entry.prepare()
    torch.distributed.init_process_group("gloo")
    return [_compared(sizes, flags) for sizes, flags in cases]


def _compared(sizes, flags):
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_epp.tools.formulas.library import shape_of
    from tests.mcore.test_refusals import arguments

    parallel_state.initialize_model_parallel(**sizes)
    model_parallel_cuda_manual_seed(1)
    args = arguments(*flags, *(f"--{name.replace('_', '-')}={size}" for name, size in sizes.items()))
    args.params_dtype = torch.bfloat16
    args.apply_rope_fusion = args.moe_grouped_gemm = False  # both need Transformer Engine
    mean = torch.tensor(_held(args, TOKENS) / TOKENS)  # of the ranks, which get different numbers of copies
    parallel_state.destroy_model_parallel()
    torch.distributed.all_reduce(mean)
    planned = shape_of({**vars(args), "vocab_size": 128}).dispatched_bytes_per_token
    return planned, mean.item() / torch.distributed.get_world_size()


def _held(args, tokens):
    """Return the peak bytes of a forward above those that it keeps for its backward."""
    from tests.support.mcore.jobs.activations import built
    from tests.support.runtime.allocations import Allocations

    layer, config, angles = built(args, tokens)
    own = tokens // args.tensor_model_parallel_size
    with Allocations() as allocated:
        x = torch.randn(own, 1, config.hidden_size, dtype=args.params_dtype, requires_grad=True)
        output, _ = layer(x, attention_mask=None, rotary_pos_emb=angles)
        torch.distributed.barrier()  # or the group's thread may hold a tensor yet
        return allocated.peak - (allocated.live - output.nbytes)
