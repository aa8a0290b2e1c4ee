"""Megatron's router replay in a framework's own loop: routes are recorded without backward, then taken from queues in training.

Prints what a plan without the given order is refused with, what stock and plans have recorded, in the order in which they have,
and for each planned run the largest relative difference of gradients from stock's.
"""

import torch
import torch.distributed as dist

from tests.support.mcore import wrap_worker
from tests.support.mcore.figures import record_figures

STAGES = int(wrap_worker.sys.argv[1])
EXPERTS = 4
RUNS = 5
"""Costs are learnt in all but the last."""


class Replay:
    """A framework that replays: its model chunks, the routes by router and microbatch, and what it has recorded."""

    def __init__(self, models):
        self.models, self.routes, self.recorded = models, {}, []

    def routers(self, model):
        return [module.router_replay for module in model.modules() if getattr(module, "router_replay", None) is not None]

    def forward_step(self, data_iterator, model):
        """Run a forward step with the microbatch's routes set, which are queued for its backward; without any, record them."""
        from megatron.core.transformer.moe.router_replay import RouterReplayAction

        batch = next(data_iterator)
        chunk, routers = self.models.index(model), self.routers(model)
        for number, router in enumerate(routers):
            if self.routes:
                router.set_target_indices(self.routes[chunk, number, batch["index"]])
            router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD if self.routes else RouterReplayAction.RECORD)
        found = wrap_worker.forward_step(iter([batch]), model)
        for number, router in enumerate(routers):
            if self.routes:
                router.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
            else:
                self.recorded.append([chunk, number, batch["index"], router.get_recorded_indices().tolist()])
        return found

    def run(self, schedule, forward_only):
        """Gradients of a call, and what was recorded in it."""
        self.recorded = []
        for model in self.models:
            model.zero_grad()
        with torch.set_grad_enabled(not forward_only):
            schedule(
                forward_step_func=self.forward_step,
                data_iterator=[numbered() for _ in self.models],
                model=self.models,
                num_microbatches=len(wrap_worker.LENGTHS),
                seq_length=1,
                micro_batch_size=1,
                forward_only=forward_only,
            )
        for model in self.models:
            for router in self.routers(model):
                router.clear_indices()
                router.clear_router_replay_action()
        return [p.grad.clone() for model in self.models for p in model.parameters() if p.grad is not None], self.recorded

    def compare(self, schedule, wanted):
        """Train by a plan, and print how far gradients are from those wanted, and how many layers recompute."""
        found, _ = self.run(schedule, forward_only=False)
        pairs = zip(found, wanted, strict=True)
        worst = max(float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30)) for ours, theirs in pairs)
        rows = [[one.num_layers for one in row] for row in plan_of(schedule).recompute]
        record_figures({"rank": dist.get_rank(), "worst": worst, "recompute": rows})


def numbered():
    for index, batch in enumerate(wrap_worker.batches()):
        yield batch | {"index": index}


def main():
    settings = {"moe_router_topk": 2, "moe_ffn_hidden_size": 32, "add_bias_linear": False, "moe_enable_routing_replay": True}
    models = wrap_worker.begin(STAGES, num_experts=EXPERTS, moe_router_load_balancing_type="none", **settings)
    from megatron.core.pipeline_parallel import get_forward_backward_func

    import megatron_epp
    from megatron_epp.plan import EppError

    replay, stock = Replay(models), get_forward_backward_func()
    try:
        replay.run(megatron_epp.wrap(), forward_only=False)
    except EppError as error:
        record_figures({"refused": str(error)})
    _, recorded = replay.run(stock, forward_only=True)
    learning = megatron_epp.wrap(order="given")
    planned = [replay.run(learning, forward_only=True)[1]]
    replay.routes = {
        (chunk, number, index): (torch.tensor(routes) + 1) % EXPERTS for chunk, number, index, routes in recorded
    }  # others than a router would choose
    wanted, _ = replay.run(stock, forward_only=False)
    for _ in range(RUNS):
        replay.compare(learning, wanted)
    under_a_cap = megatron_epp.wrap(order="given", memory_cap_gb=tight_bytes(learning) / 2**30)
    under_a_cap.load_state_dict(learning.state_dict())
    replay.compare(under_a_cap, wanted)
    replay.routes = {}
    planned.append(replay.run(under_a_cap, forward_only=True)[1])
    record_figures({"rank": dist.get_rank(), "recorded": planned, "by stock": recorded})


def plan_of(schedule):
    return schedule._pipelines[0]._last[1].plan


def tight_bytes(schedule):
    """A cap for all ranks that takes some recompute."""
    plan = plan_of(schedule)
    return max((static + peak) // 2 for static, peak in zip(plan.static_bytes, plan.predicted.peak_bytes, strict=True))


if __name__ == "__main__":
    main()
