"""A training on documents with vocabulary shards that learns costs: what is measured of them is replaced by given times.

What was recorded, and of which chunks, is the run's own.
"""

from __future__ import annotations

from megatron_epp.cost import LinearTime
from megatron_epp.cost.output_layer import PASS_US
from megatron_epp.mcore import entry
from megatron_epp.plan import Action, Op, Plan

SHARE = 0.5
"""Share of the vocabulary on each of two ranks."""
PASSES = {Op.S: LinearTime(3000.0, 40.0), Op.T: LinearTime(1000.0, 90.0)}
COLLECTIVES = {Op.SPREAD: LinearTime(700.0, 3.0), Op.GATHER: LinearTime(900.0, 5.0)}
WAIT_US = 20_000.0
"""Wait of the rank that enters a collective first, which is the one or the other."""


class Given:
    """Recorder of an iteration of a plan with given times of shards."""

    def __init__(self, plan, recorder, rank):
        self._plan, self._recorder, self._rank = plan, recorder, rank

    def events(self):
        found = []
        for text, start_us, end_us, cpu_us in self._recorder.events():
            action = Action.parse(text)
            if action.op in PASSES:
                end_us = start_us + pass_us(self._plan, action)
            found.append((text, start_us, end_us, cpu_us))
        return found

    def collectives(self):
        return [
            (action, collective_us(self._plan, action) + (WAIT_US if (action.chunk + self._rank) % 2 else 0.0))
            for action, _ in self._recorder.collectives()
        ]


def pass_us(plan: Plan, action: Action) -> float:
    return PASS_US + SHARE * PASSES[action.op].time_us(plan.padded_tokens(action.chunk), 0)


def collective_us(plan: Plan, action: Action) -> float:
    return COLLECTIVES[action.op].time_us(plan.padded_tokens(action.chunk), 0)


def main():
    with entry.errors_in_one_line():
        entry.prepare()
        import torch.distributed as dist

        from megatron_epp.mcore.iteration.learn_costs import CostLearning
        from megatron_epp.mcore.model import gpt

        after = CostLearning.after

        def with_given_times(self, plan, recorder, output_share=None, **measured):
            return after(self, plan, Given(plan, recorder, dist.get_rank()), output_share, **measured)

        CostLearning.after = with_given_times
        gpt.pretrain()


if __name__ == "__main__":
    main()
