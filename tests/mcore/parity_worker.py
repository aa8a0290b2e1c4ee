"""Trains the cases of `parity_cases` with Megatron's own schedule and with ours, and writes how far they are apart."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from in_one_process import train
from parity_cases import COMMON, CUTS, LAYOUTS, MODELS, Layout

from megatron_epp.mcore import entry
from megatron_epp.schedule import Op, Plan

Tensors = dict[str, torch.Tensor]


@dataclass
class Run:
    """What one training run did on this rank.

    Attributes:
        losses: per iteration; empty where this rank has no loss.
        validation: loss on held-out documents after the last step.
        initial: parameters before the first step.
        gradients: of the first iteration and of the last, as the optimizer gets them.
        final: parameters after the last step.
        plans: of the training iterations, as executed; none under Megatron's schedules.
        attention: the class that core attention had.
    """

    losses: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    initial: Tensors = field(default_factory=dict)
    gradients: list[Tensors] = field(default_factory=list)
    final: Tensors = field(default_factory=dict)
    plans: list[Plan] = field(default_factory=list)
    attention: str = ""


def record(flags: list[str]) -> Run:
    """Train with these flags."""
    run = Run()
    with recording(run):
        train(flags)
    return run


@contextlib.contextmanager
def recording(run: Run) -> Iterator[None]:
    """Watch Megatron's training step, its evaluation and our executor from outside."""
    from megatron.training import training

    from megatron_epp.mcore import schedule

    step, evaluation, executor = training.train_step, training.evaluate, schedule.Executor

    def train_step(
        forward_step: Any, data: Any, model: Any, optimizer: Any, scheduler: Any, config: Any, passes: Any, **named: Any
    ) -> Any:
        def recorded_passes(**call: Any) -> Any:
            answer = passes(**call)
            run.gradients = [*run.gradients[:1], reduced_gradients(model[0])]
            return answer

        if not run.initial:
            run.initial = {name: p.detach().clone() for name, p in model[0].named_parameters()}
            run.attention = next(type(m).__name__ for n, m in model[0].named_modules() if n.endswith("core_attention"))
        answer = step(forward_step, data, model, optimizer, scheduler, config, recorded_passes, **named)
        if answer[0]:
            run.losses.append(float(answer[0]["lm loss"]))
        run.final = {name: p.detach() for name, p in model[0].named_parameters()}
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

    training.train_step, training.evaluate, schedule.Executor = train_step, evaluate, RecordedExecutor
    try:
        yield
    finally:
        training.train_step, training.evaluate, schedule.Executor = step, evaluation, executor


def reduced_gradients(model: Any) -> Tensors:
    """Every parameter's gradient over all replicas. The distributed optimizer reduces a part on each; put them together."""
    whole = {}
    for buffer in model.buffers:
        whole[buffer] = buffer.grad_data.clone()
        if buffer.ddp_config.use_distributed_optimizer:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                mine = bucket.grad_data.chunk(dist.get_world_size(group))[dist.get_rank(group)]
                part = whole[buffer][bucket.offset : bucket.offset + bucket.grad_data.numel()]
                dist.all_gather_into_tensor(part, mine.clone(), group=group)
    gradients = {}
    for name, p in model.named_parameters():
        buffer = next(b for b in whole if p in b.param_index_map)
        start, end, _ = buffer.param_index_map[p]
        gradients[name] = whole[buffer][start:end].view(p.shape)
    return gradients


def furthest(expected: Tensors, found: Tensors) -> dict[str, Any]:
    """The tensor furthest from what is expected, by the norm of the difference over the tensor's norm."""
    assert expected.keys() == found.keys()
    worst: dict[str, Any] = {"relative": 0.0, "absolute": 0.0, "tensor": None, "num_tensors": len(expected)}
    for name, tensor in expected.items():
        difference, norm = found[name].double() - tensor.double(), tensor.double().norm()
        assert norm > 0, f"{name} is zero: nothing is compared"
        relative = float(difference.norm() / norm)
        worst["absolute"] = max(worst["absolute"], float(difference.abs().max()))
        if not relative <= worst["relative"]:
            worst |= {"relative": relative, "tensor": name}
    return worst


def contents(plan: Plan) -> dict[str, Any]:
    """What a plan did with the documents: slices of the longest, kinds of chunks, shares of layers that recompute, padding."""
    longest = max(range(len(plan.lengths)), key=plan.lengths.__getitem__)
    pieces = [segment.sequence for chunk in plan.chunks for segment in chunk.segments]
    counts = {(n, layers) for row, layers in zip(plan.recompute_layers, plan.num_layers, strict=True) for n in row}
    return {
        "longest": plan.lengths[longest],
        "slices": pieces.count(longest),
        "kinds": sorted({_kind(c.kind(plan.lengths), len(c.segments)) for c in plan.chunks}),
        "recompute": sorted({"none" if n == 0 else "all" if n == layers else "some" for n, layers in counts}),
        "weights": sum(action.op is Op.W for rank in range(plan.num_ranks) for action in plan.actions(rank)),
        "padding": sum(map(plan.padded_tokens, range(len(plan.chunks)))) - plan.num_tokens,
    }


def _kind(kind: str, num_segments: int) -> str:
    return kind if kind != "batched" else "packed" if num_segments > 1 else "whole"


def compare(stock: Run, elastic: Run) -> dict[str, Any]:
    """This rank's figures."""
    assert all(torch.equal(stock.initial[name], tensor) for name, tensor in elastic.initial.items())
    losses = [abs(b / a - 1) for a, b in zip(stock.losses, elastic.losses, strict=True)]
    validation = [abs(b / a - 1) for a, b in zip(stock.validation, elastic.validation, strict=True)]
    return {
        "attention": [stock.attention, elastic.attention],
        "num_losses": [len(losses), len(validation)],
        "loss": max(losses, default=0.0),
        "learned": stock.losses[0] - stock.losses[-1] if losses else None,
        "validation": max(validation, default=0.0),
        "gradients": furthest(stock.gradients[0], elastic.gradients[0]),
        "last_gradients": furthest(stock.gradients[1], elastic.gradients[1]),
        "parameters": furthest(stock.final, elastic.final),
        "plans": [contents(plan) for plan in elastic.plans],
    }


def compare_all(layout: Layout) -> dict[str, list[dict[str, Any]]]:
    """The figures of every case of a layout, one entry per rank."""
    base = [*COMMON, *shlex.split(f"{layout.sizes} {layout.flags}"), "--data-path", os.environ["PARITY_DATA"]]
    figures = {}
    for model, cuts in layout.cases.items():
        flags = [*base, *shlex.split(MODELS[model])]
        stock = record([*flags, "--epp-schedule", "stock"])
        for cut in cuts:
            elastic = record([*flags, *shlex.split(f"{CUTS[cut].flags} {layout.context}")])
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, compare(stock, elastic))
            figures[f"{model}, {cut}"] = everyone
    return figures


def main() -> None:
    entry.prepare()
    for name in json.loads(os.environ["PARITY_LAYOUTS"]):
        figures = compare_all(LAYOUTS[name])
        if dist.get_rank() == 0:
            Path(os.environ["PARITY_REPORTS"], f"{name}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
