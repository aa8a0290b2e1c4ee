"""Threads of training use the device of their rank."""

import pytest

from megatron_epp.mcore.costs.watch import StageWatch
from megatron_epp.mcore.iteration.learn_costs import CostLearning
from megatron_epp.mcore.iteration.report_folder import Reports
from tests.support.runtime.device_audit import Audit, run
from tests.support.runtime.runtime_plans import two_ranks


@pytest.fixture
def audit():
    with Audit().installed() as audit:
        yield audit


def test_reports_read_times_on_their_ranks_device(audit):
    plan, reports = two_ranks(), Reports()
    recorder = run(audit, plan, 0)
    reports.begin(lambda: recorder.events() and None)
    reports.complete()
    assert audit.seen["epp-reports"] >= {"stream", "synchronize", "elapsed_time"}
    assert audit.faults == []


def test_stages_are_watched_on_their_ranks_device(audit):
    plan, watch = two_ranks(), StageWatch(0, None)
    watch.after(plan, run(audit, plan, 0))
    watch.complete()
    assert "elapsed_time" in audit.seen["epp-stage-watch"]
    assert audit.faults == []


def test_costs_are_learnt_on_their_ranks_device(audit):
    plan, learning = two_ranks(), CostLearning(lambda *_: None)
    while not learning.is_recording:
        learning.after(plan, run(audit, plan, 0))
        learning._added.result()
    learning.after(plan, run(audit, plan, 0))
    learning._added.result()
    assert "elapsed_time" in audit.seen["epp-cost-learning"]
    assert audit.faults == []
