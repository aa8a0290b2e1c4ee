"""One training run of a parity comparison, watched from outside: what a process of it saw. And the comparison of two runs."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_epp.plan import Op, Plan
from megatron_epp.plan.document import digest

Tensors = dict[str, Tensor]


@dataclass
class Run:
    """Record of one training run on one rank.

    Attributes:
        shard: tensor- and expert-parallel rank: two ranks with the same have the same part of a tensor of the same name.
        losses: per iteration; empty where this rank has no loss.
        validation: loss on held-out documents after the last step.
        gradients: of the first iteration and of the last, as the optimizer gets them.
        plans: of the training iterations, as executed; none under Megatron's schedules.
        attention: the class that core attention had; empty where there was none.
        predictions: per iteration, the losses of multi-token prediction by depth; empty where this rank has none.
        num_turns: times that the turn changed between the two actions of a step.
    """

    shard: tuple[int, int] = (0, 0)
    losses: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    initial: Tensors = field(default_factory=dict)
    gradients: list[Tensors] = field(default_factory=list)
    final: Tensors = field(default_factory=dict)
    plans: list[Plan] = field(default_factory=list)
    attention: str = ""
    predictions: list[list[float]] = field(default_factory=list)
    num_turns: int = 0


def record(flags: Sequence[str], checkpoint: Path | None = None) -> Run:
    """Train with these flags.

    Args:
        checkpoint: where to save one before the first step.
    """
    run = Run()
    with recording(run, checkpoint):
        train(flags)
    run.final = {name: tensor.clone() for name, tensor in run.final.items()}
    return run


def train(flags: Sequence[str]) -> None:
    """Train once through `megatron.training.pretrain`, then take Megatron's global state down. Starting it takes longer than
    training a tiny GPT, so a process that has done so may train again, with other flags.
    """
    from megatron.core import mpu
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine
    from megatron.training import global_vars

    from megatron_epp.mcore.model import gpt

    sys.argv = [sys.argv[0], *flags]
    gpt.pretrain()
    global_vars.destroy_global_vars()
    destroy_num_microbatches_calculator()
    destroy_rerun_state_machine()
    mpu.destroy_model_parallel()
    gc.collect()


@contextlib.contextmanager
def recording(run: Run, checkpoint: Path | None = None) -> Iterator[None]:
    """Watch Megatron's training step, its evaluation and our executor."""
    from megatron.core import mpu
    from megatron.training import training

    from megatron_epp.contrib.overlap import exchanges
    from megatron_epp.mcore.iteration import base_run as schedule
    from megatron_epp.mcore.releases import logged_prediction_losses
    from megatron_epp.mcore.training.gradients import parameters, reduced_gradients

    step, evaluation, executor = training.train_step, training.evaluate, schedule.Executor
    together = exchanges.run_together

    def train_step(
        forward_step: Any, data: Any, model: Any, optimizer: Any, scheduler: Any, config: Any, passes: Any, **named: Any
    ) -> Any:
        def recorded_passes(**call: Any) -> Any:
            answer = passes(**call)
            # Since 0.19 the first of several tensors. They stay in a process that goes on to train another model.
            logged = logged_prediction_losses() if config.mtp_num_layers else {}
            run.predictions += [next(iter(logged.values())).tolist()] if logged else []
            run.gradients = [*run.gradients[:1], reduced_gradients(model)]
            return answer

        if not run.initial:
            run.shard = mpu.get_tensor_model_parallel_rank(), mpu.get_expert_model_parallel_rank()
            run.initial = {name: p.detach().clone() for name, p in parameters(model)}
            modules = itertools.chain.from_iterable(chunk.named_modules() for chunk in model)
            run.attention = next((type(m).__name__ for name, m in modules if name.endswith("core_attention")), "")
            if checkpoint is not None:
                save(checkpoint, model, optimizer, scheduler)
        answer = step(forward_step, data, model, optimizer, scheduler, config, recorded_passes, **named)
        if answer[0]:
            run.losses.append(float(next(iter(answer[0].values()))))  # a loss of the user's has another name
        run.final = {name: p.detach() for name, p in parameters(model)}
        return answer

    def evaluate(*args: Any, **named: Any) -> Any:
        answer = evaluation(*args, **named)
        run.validation += [float(loss) for loss in answer[0].values()]
        return answer

    class RecordedExecutor(executor):  # type: ignore[misc, valid-type]
        def __init__(self, plan: Plan, *rest: Any, **named: Any) -> None:
            if not plan.forward_only:
                run.plans.append(plan)
            super().__init__(plan, *rest, **named)

    def counted(*args: Any, **named: Any) -> int:
        run.num_turns += (turns := together(*args, **named))
        return turns

    training.train_step, training.evaluate, schedule.Executor = train_step, evaluate, RecordedExecutor
    exchanges.run_together = counted
    try:
        yield
    finally:
        training.train_step, training.evaluate, schedule.Executor = step, evaluation, executor
        exchanges.run_together = together


def save(folder: Path, model: Any, optimizer: Any, scheduler: Any) -> None:
    """Megatron's own checkpoint of this moment."""
    from megatron.training import get_args
    from megatron.training.checkpointing import save_checkpoint

    args = get_args()
    args.save = str(folder)
    save_checkpoint(0, model, optimizer, scheduler, 0)
    args.save = None  # or the end of the run would save too


# ---- the comparison --------------------------------------------------------------------------------------------------


def compare(stock: Sequence[Run], elastic: Sequence[Run]) -> dict[str, Any]:
    """Differences between a run with plans and Megatron's own.

    Args:
        elastic: the same of the run with plans; there may be more ranks.

    Returns:
        largest relative differences, over all ranks, of losses and of every tensor (norm of the difference over norm of the
        tensor), and what the runs were.

    Raises:
        AssertionError: the runs had other parameters, or began with others.
    """
    initial = _tensors(stock, elastic, lambda run: run.initial)
    assert all(torch.equal(wanted, tensor) for _, wanted, tensor in initial), "the runs began with other weights"
    losses = next(run.losses for run in stock if run.losses)
    validation = next((run.validation for run in stock if run.validation), [])
    replicas = {tuple(map(digest, run.plans)): run.plans for run in elastic}
    predictions = [_mean_predictions(runs) for runs in (stock, elastic)]
    return {
        "attention": sorted({f"{a.attention}, {b.attention}" for a in stock for b in elastic if a.attention and b.attention}),
        "num_losses": [len(losses), len(validation)],
        "losses": max(_relative_error(losses, run.losses) for run in elastic if run.losses),
        "learned": losses[0] - losses[-1],
        "validation": max((_relative_error(validation, run.validation) for run in elastic if run.validation), default=None),
        "predictions": _relative_error(*predictions) if any(predictions) else None,
        "gradients": _furthest(_tensors(stock, elastic, lambda run: run.gradients[0])),
        "last_gradients": _furthest(_tensors(stock, elastic, lambda run: run.gradients[-1])),
        "parameters": _furthest(_tensors(stock, elastic, lambda run: run.final)),
        "plans": [[contents(plan) for plan in plans] for plans in replicas.values()],
        "turns": sum(run.num_turns for run in elastic),
    }


def _mean_predictions(runs: Sequence[Run]) -> list[float]:
    """Losses of multi-token prediction of all iterations and depths, averaged over the ranks that have them."""
    predictions = [run.predictions for run in runs if run.predictions]
    return torch.tensor(predictions).mean(dim=0).flatten().tolist() if predictions else []


def _relative_error(expected: Sequence[float], actual: Sequence[float]) -> float:
    """Return the largest relative difference; what is near 0, as losses of policies may be, is taken as 1 % of the largest."""
    least = max(map(abs, expected)) / 100
    return max(abs(b - a) / max(abs(a), least) for a, b in zip(expected, actual, strict=True))


def _tensors(stock: Sequence[Run], elastic: Sequence[Run], pick: Callable[[Run], Tensors]) -> list[tuple[str, Tensor, Tensor]]:
    """Name, what is expected and what was found, for every tensor of every rank of the run with plans."""
    expected = {(run.shard, name): tensor.double() for run in stock for name, tensor in pick(run).items()}
    tensors = [(run.shard, *_part(name), tensor.double()) for run in elastic for name, tensor in pick(run).items()]
    alone = len(stock) == 1
    names = {((0, 0) if alone else shard, name) for shard, name, _, _ in tensors}
    assert expected.keys() == names, "the runs have other parameters"
    if alone:
        return [(name, _shard(expected[(0, 0), name][rows], tensor, shard[0]), tensor) for shard, name, rows, tensor in tensors]
    return [(name, expected[shard, name][rows], tensor) for shard, name, rows, tensor in tensors]


def _shard(whole: Tensor, like: Tensor, rank: int) -> Tensor:
    """A tensor-parallel rank's part of a tensor, which has the shape of another, of a model without gates."""
    for dim, (size, part) in enumerate(zip(whole.shape, like.shape, strict=True)):
        if size != part:
            return whole.narrow(dim, rank * part, part)
    return whole


def _part(name: str) -> tuple[str, slice]:
    """Name of a tensor, and which of its rows are there."""
    name, _, rows = name.partition("[")
    return name, slice(*map(int, rows[:-1].split(":"))) if rows else slice(None)


def _furthest(tensors: list[tuple[str, Tensor, Tensor]]) -> dict[str, Any]:
    """The tensor furthest from what is expected, by the norm of the difference over the tensor's norm."""
    worst: dict[str, Any] = {"relative": 0.0, "absolute": 0.0, "tensor": None, "zeros": 0, "num_tensors": len(tensors)}
    for name, wanted, tensor in tensors:
        norm, difference = float(wanted.norm()), float((tensor - wanted).norm())
        relative = difference / norm if norm > 0 else math.inf if difference > 0 else 0.0
        worst["zeros"] += norm == 0
        worst["absolute"] = max(worst["absolute"], float((tensor - wanted).abs().max()))
        if not relative <= worst["relative"]:
            worst |= {"relative": relative, "tensor": name}
    return worst


def contents(plan: Plan) -> dict[str, Any]:
    """Summary of a plan: slices of the longest, kinds of chunks, shares of layers that recompute, padding, and
    where its stages were, with which layers.
    """
    longest = max(range(len(plan.lengths)), key=plan.lengths.__getitem__)
    pieces = [segment.sequence for chunk in plan.chunks for segment in chunk.segments]
    counts = {(again.num_layers, layers) for row, layers in zip(plan.recompute, plan.num_layers, strict=True) for again in row}
    return {
        "sequences": len(plan.lengths),
        "longest": plan.lengths[longest],
        "slices": pieces.count(longest),
        "kinds": sorted({_kind(c.kind(plan.lengths), len(c.segments)) for c in plan.chunks}),
        "recompute": sorted({"none" if n == 0 else "all" if n == layers else "some" for n, layers in counts}),
        "weights": sum(action.op is Op.W for rank in range(plan.num_ranks) for action in plan.actions(rank)),
        "joined": sum(len(step.also) > 0 for row in plan.ranks for step in row),
        "modes": sorted({mode for row in plan.recompute for again in row for mode, _ in again.by_mode()}),
        "copies": sum(map(len, plan.copies)),
        "kv_offload": len(plan.kv_offload),
        "shards": sum(action.op is Op.S for rank in range(plan.num_ranks) for action in plan.actions(rank)),
        "padding": sum(map(plan.padded_tokens, range(len(plan.chunks)))) - plan.num_tokens,
        "token_multiple": plan.token_multiple,
        "placement": list(plan.placement),
        "layers": list(plan.num_layers),
    }


def _kind(kind: str, num_segments: int) -> str:
    return kind if kind != "batched" else "packed" if num_segments > 1 else "whole"
