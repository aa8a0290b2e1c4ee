"""Jobs of `test_user_frameworks.py`: a framework whose routers record routes and replay them."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import megatron_epp
from tests.support.mcore.jobs.frameworks import Batch, Loop, Schedule, apart, begin, forward_step, megatrons_schedule, refusal

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
