"""Packed microbatches whose sequences begin alike, of a program with a loop of its own: by Megatron's schedule and by plans.

Jobs of `test_microbatch_prefixes.py`.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_epp
from megatron_epp.runtime.autograd.saved import SavedTensors
from scripts.demo_rl.engine import packed_attention
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


def packed(tokens: Sequence[Tensor], per_microbatch: int) -> list[dict[str, Any]]:
    """Pack sequences into microbatches of so many each."""
    batches = []
    for at in range(0, len(tokens), per_microbatch):
        own = tokens[at : at + per_microbatch]
        ends = torch.tensor([0, *(len(each) for each in own)]).cumsum(0).int()
        batches.append({"tokens": torch.cat(own)[None], "cu_seqlens": ends})
    return batches


def unread_of(batch: dict[str, Any]) -> list[int]:
    return [PROMPT - 1] * (len(batch["cu_seqlens"]) - 1)


def step(iterator: Iterator[dict[str, Any]], model: Any) -> tuple[Tensor, Callable[..., Any]]:
    """Run a microbatch, whose loss reads the logits of all its tokens, or of responses if it says so."""
    from megatron.core.packed_seq_params import PackedSeqParams

    batch = next(iterator)
    tokens, ends = batch["tokens"], batch["cu_seqlens"]
    longest = int(ends.diff().max())
    params = PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)
    positions = torch.arange(tokens.shape[1])[None] if batch.get("change") == "positions" else None
    output = model(tokens, positions, None, packed_seq_params=params)
    if batch.get("change") == "two calls":
        output = output + 0.0 * model(tokens, None, None, packed_seq_params=params)

    def loss_func(logits: Tensor) -> Any:
        weights = torch.sin(torch.arange(logits.numel(), dtype=torch.float32)).view(logits.shape)
        for start in ends[:-1] if "of_responses" in batch else ():
            weights[:, start : start + PROMPT - 1] = 0.0
        loss = (logits.log_softmax(-1) * weights).sum() / logits.shape[-1]
        return loss, {"tokens": tokens.numel(), "loss": float(loss)}

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
    groups: int = 2,
    size: int = 4,
    per_microbatch: int = 2,
    settings: Mapping[str, Any] | None = None,
    of_responses: bool = False,
    change: str = "",
    host_link: Sequence[float] | None = None,
    **parallel: Any,
) -> dict[str, Any]:
    """Run microbatches once by stock and several times by plans, and evaluate with both.

    With `of_responses` losses read the logits of these alone, and plans are told. Returns for every run by plans the largest
    relative difference of gradients, results of both, and bytes kept at the peak; and those of the last plan.
    """
    own = packed(sequences(groups, size, bool(parallel.get("stages", 0) > 2)), per_microbatch)
    more = {"change": change} | ({"of_responses": True} if of_responses else {})
    own = [batch | more for batch in own]
    loop = begin([int(batch["cu_seqlens"][-1]) for batch in own], positions="rope", apply_rope_fusion=False, **parallel)
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    DotProductAttention.forward = packed_attention
    loop.batches, loop.forward_step = partial(iter, own), step
    schedule = megatrons_schedule()
    stock = summed(loop, schedule)
    with_fixed_times(US_PER_TOKEN)
    if host_link is not None:
        from megatron_epp.features.offload import rank_offload

        rank_offload.measure_host_link = lambda device: tuple(host_link)
    functions: dict[str, Any] = {"unread_of": unread_of} if of_responses else {}
    if change == "other ends":
        functions["shape_of"] = lambda batch: [batch["tokens"].numel()]
    planned = megatron_epp.wrap(**functions, **settings or {})
    runs = []
    parameters = [parameter for model in loop.models for parameter in model.parameters()]
    for _ in range(RUNS):
        with SavedTensors(parameters, partial(cached_bytes, planned)) as saved:
            results, gradients = summed(loop, planned)
        runs.append({"worst": apart(gradients, stock[1]), "results": results, "peak_bytes": saved.peak_bytes})
    (run,) = planned._runs
    plan = run._last[1].plan
    planned_bytes = plan.predicted.peak_bytes[run.rank] - plan.static_bytes[run.rank]
    with torch.no_grad():
        evaluated = [loop.call(one, forward_only=True) for one in (planned, schedule)]
    figures = {"planned_bytes": planned_bytes, "evaluated": evaluated}
    return {"rank": dist.get_rank(), "runs": runs, "stock": stock[0]} | figures


def cached_bytes(schedule: Any) -> int:
    return sum(stage.kv_cache.num_bytes for run in schedule._runs for stage in run.stages.values())


class Reader:
    """Microbatches as slime has them: `get_next` reads columns of samples, which are packed and padded together."""

    def __init__(self, samples: Sequence[Sequence[Tensor]]) -> None:
        self.samples, self.offset = samples, 0

    def get_next(self, keys: Sequence[str]) -> dict[str, Any]:
        own = self.samples[self.offset]
        self.offset += 1
        lengths = [len(tokens) for tokens in own]
        columns = {"tokens": own, "total_lengths": lengths, "response_lengths": [length - PROMPT for length in lengths]}
        return {key: columns.get(key) for key in keys}


def read(reader: Reader, model: Any) -> tuple[Tensor, Callable[..., Any]]:
    """Run a microbatch as `step` does, whose padding is a sequence of its own."""
    columns = reader.get_next(["tokens", "total_lengths", "response_lengths"])
    padding = -sum(columns["total_lengths"]) % PADDED
    (batch,) = packed([*columns["tokens"], *([torch.zeros(padding, dtype=torch.int64)] if padding else [])], 1 << 30)
    return step(iter([batch | {"of_responses": True}]), model)


PADDED = 16


def by_slimes_plugin() -> dict[str, Any]:
    """Run microbatches by stock, then by plans that slime's hook has installed; return as `compared` does."""
    samples = sequences(2, 4)
    loop = begin([0] * 4, stages=2, positions="rope", apply_rope_fusion=False)
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from megatron_epp.callers import slime

    DotProductAttention.forward = packed_attention
    loop.batches, loop.forward_step = (lambda: Reader([samples[at : at + 2] for at in range(0, 8, 2)])), read
    results, gradients = loop.run(megatrons_schedule())
    with_fixed_times(US_PER_TOKEN)
    slime.init(Namespace(tensor_model_parallel_size=1, data_pad_size_multiplier=PADDED))
    runs = [loop.run(megatrons_schedule()) for _ in range(RUNS)]
    return {"worst": [apart(own, gradients) for _, own in runs], "results": [own for own, _ in runs], "stock": results}
