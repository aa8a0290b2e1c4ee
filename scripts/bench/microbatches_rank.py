"""One rank of `bench/microbatches`: a GPT of Megatron's, run by Megatron's 1F1B and by plans in turn, in one process."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron_epp.contrib.demos.rounds import turns
from megatron_epp.mcore.pinned import pin
from megatron_epp.runtime.autograd.saved import SavedTensors
from scripts.tiny_stage import config_of, stage_of

HIDDEN, HEADS, LAYERS, VOCABULARY = 192, 4, 8, 512
STOCK, FULL, PLANNED, CAPPED = "1F1B", "1F1B, full recompute", "plans", "plans under the cap"
LEARNING = 5
"""Iterations before the first that counts: one to warm up, three to learn costs from, and one more."""

Times = dict[str, list[float]]


def run(rank: int, batches: Sequence[Sequence[int]], rounds: int, cap_share: float) -> dict[str, Any]:
    """Train all batches by every contender, in turn, `rounds` times; return times, peaks and losses of this rank.

    Args:
        rank: of the run; it runs on the machine's core of that number.
        batches: tokens of each microbatch of each batch.
        rounds: times that every contender trains every batch.
        cap_share: cap of the last contender, as a share of what 1F1B without recompute holds.
    """
    pin(rank)
    import megatron_epp

    model = _pipeline_stage()
    held: dict[str, int] = {}
    stock = _stock()
    _iteration(stock, model, batches[0])
    for name, recompute in ((STOCK, None), (FULL, "full")):
        held[name] = max(_peak_bytes(lambda: _iteration(stock, model, batch, recompute), model) for batch in batches)  # noqa: B023
    cap_bytes = int(cap_share * _most(held[STOCK]))
    contenders = {STOCK: _contender(stock, model), FULL: _contender(stock, model, "full")}
    free = megatron_epp.wrap()
    for name in (PLANNED, CAPPED):
        schedule = free if name == PLANNED else megatron_epp.wrap(memory_cap_gb=(cap_bytes + _static_bytes(free)) / 2**30)
        contenders[name] = _contender(_replanned(schedule), model)
        for number in range(LEARNING):
            contenders[name](batches[number % len(batches)])
        held[name] = max(_peak_bytes(lambda: contenders[name](batch), model) for batch in batches)  # noqa: B023
    times: dict[str, list[list[float]]] = {name: [[] for _ in batches] for name in contenders}
    losses: dict[str, list[float]] = {name: [0.0] * len(batches) for name in contenders}
    for order in turns(tuple(contenders), rounds):
        for number, batch in enumerate(batches):
            for name in order:
                dist.barrier()
                start_s = time.perf_counter()
                results = contenders[name](batch)
                dist.barrier()
                times[name][number].append(time.perf_counter() - start_s)
                losses[name][number] = sum(results) / max(1, len(results))
    return {"times_s": times, "held_bytes": held, "cap_bytes": cap_bytes, "losses": losses}


def _replanned(schedule: Any) -> Callable[..., list[Any]]:
    """Return the schedule with a plan made at every call: in a training no two batches are alike."""

    def call(**named: Any) -> list[Any]:
        for run in schedule._runs:
            run._plans.clear()
        results: list[Any] = schedule(**named)
        return results

    return call


def _static_bytes(schedule: Any) -> int:
    """Return the bytes of weights, gradients and optimizer state of the smallest stage, which are a part of a plan's cap."""
    (run,) = schedule._runs
    return min(stage.static_bytes for stage in run.costs.stages)


def _most(mine: int) -> int:
    most = torch.tensor([mine])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most[0])


def _pipeline_stage() -> Any:
    """Build this rank's layers. Attention is torch's fused kernel, for all contenders."""
    from megatron_epp.mcore import entry

    entry.prepare()
    logging.getLogger("megatron_epp").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(1)
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = FusedAttention
    config = config_of(LAYERS, HIDDEN, HEADS, deallocate_pipeline_outputs=True)
    return stage_of(config, spec, VOCABULARY, 4096)


class FusedAttention(torch.nn.Module):
    """Causal attention of whole sequences by torch's fused kernel, whose memory is linear in the tokens."""

    def __init__(self, *rest: object, **named: object) -> None:
        super().__init__()

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: object, **named: object) -> Any:
        """Attend; all are ``[tokens, 1, heads, channels]``. Returns ``[tokens, 1, hidden]``."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)


def _stock() -> Callable[..., list[Any]]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    schedule: Callable[..., list[Any]] = get_forward_backward_func()
    return schedule


def _contender(schedule: Callable[..., list[Any]], model: Any, recompute: str | None = None) -> Callable[..., list[float]]:
    return lambda lengths: _iteration(schedule, model, lengths, recompute)


def _iteration(
    schedule: Callable[..., list[Any]], model: Any, lengths: Sequence[int], recompute: str | None = None
) -> list[float]:
    """Train a batch; return the losses of its microbatches."""
    model.zero_grad()
    with _recomputing(model, recompute):
        results = schedule(
            forward_step_func=_forward_step,
            data_iterator=_items(lengths),
            model=model,
            num_microbatches=len(lengths),
            seq_length=max(lengths),
            micro_batch_size=1,
        )
    return [result["loss"] for result in results]


@contextmanager
def _recomputing(model: Any, granularity: str | None) -> Iterator[None]:
    config = model.config
    config.recompute_granularity = granularity
    config.recompute_method, config.recompute_num_layers = ("uniform", 1) if granularity else (None, None)
    try:
        yield
    finally:
        config.recompute_granularity = config.recompute_method = config.recompute_num_layers = None


def _items(lengths: Sequence[int]) -> Iterator[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(sum(lengths))
    for length in lengths:
        yield {name: torch.randint(VOCABULARY, (1, length), generator=draw) for name in ("tokens", "labels")}


def _forward_step(data_iterator: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    item = next(data_iterator)
    positions = torch.arange(item["tokens"].shape[1])[None]
    output = model(item["tokens"], positions, None, labels=item["labels"])

    def loss_func(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        return losses.mean(), {"loss": float(losses.detach().mean())}

    return output, loss_func


def _peak_bytes(train: Callable[[], object], model: Any) -> int:
    """Return the most bytes that autograd holds while `train` runs."""
    with SavedTensors(model.parameters()) as saved:
        train()
    return saved.peak_bytes
