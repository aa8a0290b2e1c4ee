"""Trains by plans with attention on other ranks; returns planned and measured bytes of activations of every iteration."""

from collections.abc import Sequence
from typing import Any
from unittest import mock


def run(flags: Sequence[str]) -> list[dict[str, Any]]:
    from megatron_epp.mcore.iteration import base_run
    from tests.support.mcore.trainings import recorded

    run_plan, seen = base_run.Run.run_plan, list[dict[str, Any]]()

    def watched(self: Any, models: Any, plan: Any, recorder: Any, saved: Any, *rest: Any) -> None:
        run_plan(self, models, plan, recorder, saved, *rest)
        if saved is not None:
            planned = plan.predicted.peak_bytes[self.rank] - plan.static_bytes[self.rank]
            again = sorted({str(each) for row in plan.recompute for each in row})
            seen.append({"planned": planned, "measured": saved.peak_bytes, "left": saved.live_bytes, "recompute": again})

    with mock.patch.object(base_run.Run, "run_plan", watched):
        recorded(flags)
    return seen
