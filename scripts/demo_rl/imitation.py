"""Imitation of a framework's update, for machines without one: verl's rule of microbatches, packed, in Megatron's 1F1B."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scripts.bench.rl.rules import verl as rule
from scripts.demo_rl import engine as verl

CLIP, CLIP_NEGATIVE = 0.2, 3.0
"""verl's defaults."""


class Imitation:
    """Model of this rank, and an update of it by whole microbatches."""

    def __init__(self, size: verl.Size) -> None:
        from megatron.core import parallel_state, tensor_parallel

        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=size.stages)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        self.module = [verl.pipeline_stage(size)]

    def update(self, samples: verl.Samples, budget: int) -> float:
        """Add the gradients of the mean over samples of each one's mean loss; return this on the last stage, elsewhere 0.

        Raises:
            ValueError: a sample is longer than the token budget.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        if max(samples.lengths) > budget:
            raise ValueError(f"a sample has {max(samples.lengths)} tokens, a microbatch at most {budget}")
        rows = by_budget(samples.lengths, budget)
        (model,) = self.module
        model.zero_grad_buffer()
        losses = get_forward_backward_func()(
            forward_step_func=partial(_forward_step, samples, len(rows)),
            data_iterator=iter(rows),
            model=self.module,
            num_microbatches=len(rows),
            seq_length=1,
            micro_batch_size=1,
        )
        return sum(losses)


def by_budget(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return the numbers of each microbatch's samples, by verl's rule: more microbatches until all keep to the budget."""
    sizes, least = rule(lengths, budget), budget
    while max(map(sum, sizes)) > budget:
        least = int(least * 0.95)
        sizes = rule(lengths, least)
    left: dict[int, list[int]] = {}
    for number, length in enumerate(lengths):
        left.setdefault(length, []).append(number)
    return [[left[length].pop(0) for length in row] for row in sizes]


def _forward_step(samples: verl.Samples, count: int, data: Iterator[list[int]], model: Any) -> tuple[Tensor, Any]:
    from megatron.core.packed_seq_params import PackedSeqParams

    row = next(data)
    tokens = [samples.tokens[number] for number in row]
    ends = torch.tensor([0, *map(len, tokens)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    longest = max(map(len, tokens))
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    output = model(torch.cat(tokens)[None], None, None, packed_seq_params=packed)
    return output, partial(_loss, samples, row, count)


def _loss(samples: verl.Samples, row: list[int], count: int, logits: Tensor) -> tuple[Tensor, float]:
    """Return the sum of mean clipped losses over all samples, times the microbatches by which Megatron divides."""
    losses, at = [], 0
    for number in row:
        tokens = samples.tokens[number]
        of_tokens = logits[0, at + verl.PROMPT - 1 : at + len(tokens) - 1].log_softmax(-1)
        at += len(tokens)
        logprobs = of_tokens.gather(-1, tokens[verl.PROMPT :, None])[:, 0]
        ratio, advantage = (logprobs - samples.old_logprobs[number]).exp(), samples.advantages[number]
        losses_of = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP))
        if advantage < 0:
            losses_of = losses_of.clamp(max=-advantage * CLIP_NEGATIVE)
        losses.append(losses_of.mean())
    mean = torch.stack(losses).sum() / len(samples.tokens)
    return mean * count, float(mean.detach())
