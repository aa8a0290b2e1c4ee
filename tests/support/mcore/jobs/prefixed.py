"""Packed microbatches whose sequences begin alike, of a program with a loop of its own: by Megatron's schedule and by plans.

Jobs of `test_microbatch_prefixes.py`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_epp
from scripts.demo_rl.engine import _packed_attention
from tests.support.mcore.jobs.frameworks import Loop, apart, begin, megatrons_schedule, with_fixed_times

VOCABULARY = 64
PROMPT = 40
US_PER_TOKEN = {"forward": 100.0, "backward": 200.0}
RUNS = 6
"""Costs are learnt in the first four."""


def sequences(groups: int, size: int, is_even: bool = False, seed: int = 3) -> list[Tensor]:
    """Draw groups of sequences with a prompt each, the groups mixed as by a balanced partition."""
    made = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(groups):
        first = torch.randint(VOCABULARY, (PROMPT,), generator=made)
        for _ in range(size):
            rest = 8 if is_even else int(torch.randint(4, 24, (1,), generator=made))
            found.append(torch.cat([first, torch.randint(VOCABULARY, (2 * rest,), generator=made)]))
    order = torch.randperm(len(found), generator=made).tolist()
    return [found[at] for at in order]


def packed(tokens: Sequence[Tensor], per_microbatch: int) -> list[dict[str, Tensor]]:
    """Pack sequences into microbatches of so many each."""
    batches = []
    for at in range(0, len(tokens), per_microbatch):
        own = tokens[at : at + per_microbatch]
        ends = torch.tensor([0, *(len(each) for each in own)]).cumsum(0).int()
        batches.append({"tokens": torch.cat(own)[None], "cu_seqlens": ends})
    return batches


def step(iterator: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Callable[..., Any]]:
    """Run a microbatch, whose loss reads the logits of all its tokens."""
    from megatron.core.packed_seq_params import PackedSeqParams

    batch = next(iterator)
    tokens, ends = batch["tokens"], batch["cu_seqlens"]
    longest = int(ends.diff().max())
    params = PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)
    output = model(tokens, None, None, packed_seq_params=params)

    def loss_func(logits: Tensor) -> Any:
        weights = torch.sin(torch.arange(logits.numel(), dtype=torch.float32)).view(logits.shape)
        loss = (logits.log_softmax(-1) * weights).sum() / logits.shape[-1]
        return loss, {"tokens": tokens.numel(), "loss": float(loss), "sum": float(logits.sum())}

    return output, loss_func


def summed(loop: Loop, schedule: Callable[..., Any]) -> tuple[Any, list[Tensor]]:
    """Return results and gradients, those of parameters that each tensor-parallel rank reads for its tokens in sum."""
    from megatron.core import parallel_state

    results, gradients = loop.run(schedule)
    parameters = [p for model in loop.models for p in model.parameters() if p.grad is not None]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
    return results, gradients


def compared(
    groups: int = 2, size: int = 4, per_microbatch: int = 2, settings: Mapping[str, Any] | None = None, **parallel: Any
) -> dict[str, Any]:
    """Run microbatches once by stock and several times by plans, and evaluate with both.

    Returns for every run by plans the largest relative difference of gradients, and results of both.
    """
    own = packed(sequences(groups, size, bool(parallel.get("stages", 0) > 2)), per_microbatch)
    loop = begin([int(batch["cu_seqlens"][-1]) for batch in own], positions="rope", apply_rope_fusion=False, **parallel)
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    DotProductAttention.forward = _packed_attention
    loop.batches, loop.forward_step = partial(iter, own), step
    schedule = megatrons_schedule()
    stock = summed(loop, schedule)
    with_fixed_times(US_PER_TOKEN)
    planned = megatron_epp.wrap(**settings or {})
    runs = []
    for _ in range(RUNS):
        results, gradients = summed(loop, planned)
        runs.append({"worst": apart(gradients, stock[1]), "results": results})
    with torch.no_grad():
        evaluated = [loop.call(one, forward_only=True) for one in (planned, schedule)]
    return {"rank": dist.get_rank(), "runs": runs, "stock": stock[0], "evaluated": evaluated}
