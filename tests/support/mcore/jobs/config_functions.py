"""Jobs of tests of models' configurations: their functions, called by stock and by plans, and routers that replay routes."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_epp
from tests.support.mcore.jobs.frameworks import Batch, Loop, Schedule, apart, begin, forward_step, megatrons_schedule, refusal

Events = list[list[Any]]


def honoured(stages: int, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Run a loop with a model configuration's functions set in several ways, by stock and by a plan.

    Returns for each way what was called, in order, and the largest relative difference of gradients. Nothing of
    `megatron.training` can be imported, as with a wheel that does not have it.
    """
    loop = begin(lengths, stages)
    without_training()
    from megatron.core.pipeline_parallel import get_forward_backward_func

    config = loop.models[0].config
    schedules = {"stock": get_forward_backward_func(), "planned": megatron_epp.wrap(split_weight_gradient=False)}
    told = []
    for case in HONOURED:
        found = {}
        for name, schedule in schedules.items():
            before = dict(vars(config))
            found[name] = case(schedule, loop, config)
            vars(config).clear()
            vars(config).update(before)
        (ours, events), (theirs, others) = found["planned"], found["stock"]
        worst = apart(ours, theirs) if ours or theirs else 0.0
        finite = all(bool(one.isfinite().all()) for one in ours)
        said = {"case": case.__name__, "worst": worst, "finite": finite, "planned": events, "stock": others}
        told.append({"rank": dist.get_rank(), "world": len(loop.models)} | said)
    return told


def without_training() -> None:
    """Let imports of `megatron.training` fail, and let this package be imported again, which the process did beforehand.

    Patches for the training loop are undone, as a framework that calls `wrap` has none.
    """
    from megatron_epp.mcore.patches import environment, install, patching

    patching.revert((*environment.patches(), *install.patches()))
    for name in list(sys.modules):
        if name.startswith(("megatron.training", "megatron_epp.mcore.")) and not name.startswith("megatron_epp.mcore.patches"):
            del sys.modules[name]
    sys.modules["megatron.training"] = None  # type: ignore[assignment]


def _gradients(model: Any) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def watched(models: Sequence[Any], config: Any) -> Events:
    """Set all functions of a configuration to ones that note their calls, and whether gradients change after a reduction."""
    events: Events = []
    reduced: dict[int, list[Tensor | None]] = {}

    @contextlib.contextmanager
    def no_sync(number: int) -> Iterator[None]:
        events.append(["held", number])
        yield
        events.append(["released", number])

    def reduce(number: int, _: Any) -> None:
        events.append(["gradients", number])
        reduced[number] = _gradients(models[number])

    def finalize(chunks: Any, num_tokens: Any, pg_collection: Any = None, force_all_reduce: Any = None) -> None:
        for number, kept in reduced.items():
            now = _gradients(models[number])
            same = all((a is None and b is None) or torch.equal(a, b) for a, b in zip(kept, now, strict=True))
            events.append(["complete" if same else "incomplete", number])
        there = pg_collection is not None
        events.append(["finalize", len(chunks), None if num_tokens is None else int(num_tokens), there, force_all_reduce])

    numbers = range(len(models))
    config.no_sync_func = [lambda n=n: no_sync(n) for n in numbers]
    config.grad_sync_func = [lambda parameters, n=n: reduce(n, parameters) for n in numbers]
    config.param_sync_func = [lambda parameters, n=n: events.append(["parameters", n]) for n in numbers]
    config.finalize_model_grads_func = finalize
    if len(models) == 1:
        for name in ("no_sync_func", "grad_sync_func", "param_sync_func"):
            setattr(config, name, getattr(config, name)[0])
    return events


def synchronised(schedule: Schedule, loop: Loop, config: Any) -> tuple[list[Tensor], Events]:
    events = watched(loop.models, config)
    return loop.run(schedule, force_all_reduce=True)[1], events


def synchronised_by_hooks(schedule: Schedule, loop: Loop, config: Any) -> tuple[list[Tensor], Events]:
    """Without a function that starts reductions, hooks of the model start them: nothing holds them in the last backward."""
    events = watched(loop.models, config)
    config.grad_sync_func = None
    held = dict.fromkeys(range(len(loop.models)), 0)
    hooks = []
    for number, model in enumerate(loop.models):
        hooks += [p.register_post_accumulate_grad_hook(lambda _, n=number: note(n)) for p in list(model.parameters())[-1:]]

    def note(number: int) -> None:
        entered = sum(1 for event in events if event == ["held", number])
        held[number] = entered - sum(1 for event in events if event == ["released", number])

    _, found = loop.run(schedule)
    for hook in hooks:
        hook.remove()
    return found, [["held in the last backward", held[number]] for number in held]


def scaled(schedule: Schedule, loop: Loop, config: Any) -> tuple[list[Tensor], Events]:
    config.grad_scale_func = lambda loss: loss * 1024.0
    return loop.run(schedule)[1], []


def step_of_parts(loop: Loop) -> Callable[..., Any]:
    """Return a forward step whose loss is a sum beside its number of tokens, of which the third length has none."""

    def step(data_iterator: Iterator[Batch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
        return forward_step(data_iterator, model)[0], parts

    def parts(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, int]]:
        trained = 0 if losses.shape[-1] == loop.lengths[2] else losses.numel()
        mask = torch.full_like(losses, float(trained > 0))
        return (losses * mask).sum(), torch.tensor(trained, dtype=torch.int), {"tokens": trained}

    return step


def three_parts(schedule: Schedule, loop: Loop, config: Any) -> tuple[list[Tensor], Events]:
    events = watched(loop.models, config)
    _, found = loop.run(schedule, forward_step_func=step_of_parts(loop))
    return found, [event for event in events if event[0] == "finalize"]


def per_token(schedule: Schedule, loop: Loop, config: Any) -> tuple[list[Tensor], Events]:
    events = watched(loop.models, config)
    config.calculate_per_token_loss = True
    _, found = loop.run(schedule, forward_step_func=step_of_parts(loop))
    return found, [event for event in events if event[0] == "finalize"]


def autocast(schedule: Schedule, loop: Loop, config: Any) -> tuple[list[Tensor], Events]:
    seen: Events = []

    def noted(device: str, **named: Any) -> contextlib.nullcontext[None]:
        seen.append([device, str(named["dtype"])])
        return contextlib.nullcontext()

    config.enable_autocast, config.autocast_dtype = True, torch.bfloat16
    with mock.patch.object(torch, "autocast", noted):
        return loop.run(schedule)[1], seen


def forward_only(schedule: Schedule, loop: Loop, config: Any) -> tuple[list[Tensor], Events]:
    events = watched(loop.models, config)
    with torch.no_grad():
        loop.run(schedule, forward_only=True)
    return [], [event for event in events if event[0] not in ("held", "released")]


def own_groups(schedule: Schedule, loop: Loop, config: Any) -> tuple[list[Tensor], Events]:
    """Give the schedule the process groups of the parallel state, and Megatron's communicator of its pipeline."""
    from megatron.core import mpu
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.process_groups_config import ProcessGroupCollection

    communicator = P2PCommunicator(mpu.get_pipeline_model_parallel_group(), config)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return loop.run(schedule, p2p_communicator=communicator, pg_collection=groups)[1], []


HONOURED = (synchronised, synchronised_by_hooks, scaled, three_parts, per_token, autocast, forward_only)
HONOURED += (own_groups,)


EXPERTS = 4
REPLAYS = 5
"""Costs are learnt in all but the last."""


class Replay:
    """A framework that replays: its loop, the routes by router and microbatch, and what it has recorded."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.models = loop, loop.models
        self.routes: dict[tuple[int, int, int], Tensor] = {}
        self.recorded: list[Any] = []

    def routers(self, model: Any) -> list[Any]:
        return [module.router_replay for module in model.modules() if getattr(module, "router_replay", None) is not None]

    def forward_step(self, data_iterator: Iterator[Batch], model: Any) -> Any:
        """Run a forward step with the microbatch's routes set, which are queued for its backward; without any, record them."""
        from megatron.core.transformer.moe.router_replay import RouterReplayAction

        batch: dict[str, Any] = next(data_iterator)
        chunk, routers = self.models.index(model), self.routers(model)
        for number, router in enumerate(routers):
            if self.routes:
                router.set_target_indices(self.routes[chunk, number, batch["index"]])
            router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD if self.routes else RouterReplayAction.RECORD)
        found = forward_step(iter([batch]), model)
        for number, router in enumerate(routers):
            if self.routes:
                router.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
            else:
                self.recorded.append([chunk, number, batch["index"], router.get_recorded_indices().tolist()])
        return found

    def run(self, schedule: Schedule, forward_only: bool) -> tuple[list[Tensor], list[Any]]:
        """Return the gradients of a call, and what was recorded in it."""
        self.recorded = []
        numbered = [(batch | {"index": i} for i, batch in enumerate(self.loop.batches())) for _ in self.models]
        with torch.set_grad_enabled(not forward_only):
            changes = {"forward_step_func": self.forward_step, "data_iterator": numbered, "model": self.models}
            _, gradients = self.loop.run(schedule, forward_only=forward_only, **changes)
        for model in self.models:
            for router in self.routers(model):
                router.clear_indices()
                router.clear_router_replay_action()
        return gradients, self.recorded

    def compare(self, schedule: Any, wanted: Sequence[Tensor]) -> dict[str, Any]:
        """Train by a plan, and return how far gradients are from those wanted, and how many layers recompute."""
        found, _ = self.run(schedule, forward_only=False)
        rows = [[one.num_layers for one in row] for row in plan_of(schedule).recompute]
        return {"worst": apart(found, wanted), "recompute": rows}


def replayed(stages: int, lengths: Sequence[int]) -> dict[str, Any]:
    """Record routes without backward by Megatron's router replay, then take them from queues in training.

    Returns what a plan without the given order is refused with, what stock and plans have recorded, in the order in which they
    have, and for each planned run the largest relative difference of gradients from stock's.
    """
    settings = {"moe_router_topk": 2, "moe_ffn_hidden_size": 32, "add_bias_linear": False, "moe_enable_routing_replay": True}
    loop = begin(lengths, stages, num_experts=EXPERTS, moe_router_load_balancing_type="none", **settings)
    replay, stock = Replay(loop), megatrons_schedule()
    refused = refusal(lambda: replay.run(megatron_epp.wrap(), forward_only=False))
    _, recorded = replay.run(stock, forward_only=True)
    learning = megatron_epp.wrap(order="given")
    planned = [replay.run(learning, forward_only=True)[1]]
    replay.routes = {
        (chunk, number, index): (torch.tensor(routes) + 1) % EXPERTS for chunk, number, index, routes in recorded
    }  # others than a router would choose
    wanted, _ = replay.run(stock, forward_only=False)
    trained = [replay.compare(learning, wanted) for _ in range(REPLAYS)]
    under_a_cap = megatron_epp.wrap(order="given", memory_cap_gb=tight_bytes(learning) / 2**30)
    under_a_cap.load_state_dict(learning.state_dict())
    trained.append(replay.compare(under_a_cap, wanted))
    replay.routes = {}
    planned.append(replay.run(under_a_cap, forward_only=True)[1])
    return {"refused": refused, "trained": trained, "recorded": planned, "by stock": recorded}


def plan_of(schedule: Any) -> Any:
    return schedule._runs[0]._last[1].plan


def tight_bytes(schedule: Any) -> int:
    """Return a cap for all ranks that takes some recompute."""
    plan = plan_of(schedule)
    return max((static + peak) // 2 for static, peak in zip(plan.static_bytes, plan.predicted.peak_bytes, strict=True))
