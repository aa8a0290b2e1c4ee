"""What frameworks do inside of their models and microbatches, and a plan cannot honour, is refused by name; the given order."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_epp.cost.memory import Static
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.optimizer import OptimizerBytes
from megatron_epp.mcore.arguments.table import names_in_loop
from megatron_epp.mcore.costs.megatron_facts import FORMULAS
from megatron_epp.mcore.iteration import microbatch_run
from megatron_epp.mcore.iteration.microbatch_agreement import AgreedShapes
from megatron_epp.mcore.iteration.microbatch_run import MicrobatchRun
from megatron_epp.mcore.iteration.microbatch_schedule import (
    Schedule,
    refuse_group_sizes,
    refuse_other_turns,
    refuse_router_replay,
)
from megatron_epp.plan import EppError, Op
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem, microbatches
from megatron_epp.port.run_facts import RunFacts
from tests.mcore.test_refusals import arguments
from tests.support.mcore.asking import ask_here
from tests.support.plan.planner_cases import pipeline as costs_of
from tests.support.runtime.agreement_runs import SHAPES

TOKENS = {"tokens": torch.zeros(1, 8, dtype=torch.int64)}


@pytest.mark.parametrize("name", ["router_replay", "routing_replay"])
def test_routers_with_queues_are_refused_unless_microbatches_keep_their_order(name: str) -> None:
    router = torch.nn.Linear(1, 1)
    model = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"router": router})})
    setattr(router, name, None)
    refuse_router_replay([model], "planned")
    setattr(router, name, object())
    with pytest.raises(EppError, match=rf"mlp\.router\.{name} hands out .* leave router replay out; set order to given"):
        refuse_router_replay([torch.nn.Linear(1, 1), model], "planned")
    refuse_router_replay([model], "given")


def test_chunks_of_a_rank_that_would_take_turns_otherwise_are_refused_in_the_given_order() -> None:
    three = SimpleNamespace(microbatch_group_size_per_vp_stage=3)
    with pytest.raises(EppError, match="set microbatch_group_size_per_vp_stage to 2; it is 3"):
        refuse_other_turns(three, 2, "given")
    refuse_other_turns(three, 2, "planned")
    refuse_other_turns(three, 3, "given")
    refuse_other_turns(SimpleNamespace(), 2, "given")


@pytest.mark.parametrize(
    "item",
    [
        TOKENS | {"local_cp_size": 2},
        (TOKENS | {"local_cp_size": torch.tensor(1)},),
        SimpleNamespace(packed_seq_params=SimpleNamespace(local_cp_size=4)),
        TOKENS | {"packed_seq_params": SimpleNamespace(local_cp_size=1)},
    ],
)
def test_microbatches_that_replicas_share_are_refused(item: Any) -> None:
    schedule = Schedule(lambda models: SimpleNamespace(), lambda item: [8])  # type: ignore[arg-type,return-value]
    _, shapes, problem = schedule._taken([iter([item])], 1, 1)
    assert shapes is None
    assert "shared by replicas, as by dynamic context parallelism (they have local_cp_size)" in problem


@pytest.mark.parametrize("item", [TOKENS, TOKENS | {"local_cp_size": None}, (TOKENS,), [TOKENS], None, 3])
def test_other_microbatches_are_taken(item: Any) -> None:
    refuse_group_sizes(item)


def test_plans_by_learnt_costs_reach_the_measured_peak_and_count_longer_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(microbatch_run, "gathered", lambda peak, *_: (peak, peak))
    monkeypatch.setattr(microbatch_run, "from_each_of_job", lambda mine: [mine])
    by_formula = costs_of(2, 2)
    held = tuple(replace(stage, static=Static(weights=1000, optimizer=3000)) for stage in by_formula.stages)
    monkeypatch.setattr(microbatch_run, "made_by_first", lambda make, *_: make())
    facts = RunFacts(vars(arguments(padded_vocab_size=1024)), OptimizerBytes.of_flags({"bf16": True}), 0, "")

    def packed(rule: str, *asked: Any) -> tuple[Any, tuple[int, ...]]:
        plan, order = getattr(microbatches, rule)(*asked)
        return SimpleNamespace(plan=lambda: plan), order

    pipeline: Any = SimpleNamespace(
        args=arguments(padded_vocab_size=1024),
        _of_formulas=lambda name, *asked: ask_here(f"{FORMULAS}:{name}", facts, *asked),
        process=SimpleNamespace(plan_microbatches=packed),
        problem=Problem((), (0, 1), (UNLIMITED_BYTES,) * 2),
        placement=SimpleNamespace(stages=lambda rank: [rank]),
        learning=SimpleNamespace(peak_bytes=1 << 40),
        links=SimpleNamespace(control=None),
        _on_gpu=True,
        _measured=AgreedShapes(SHAPES, (500, 700)),
        options=Options(),
    )
    for name in ("_planned_peaks", "_with_microbatches"):
        setattr(pipeline, name, partial(getattr(MicrobatchRun, name), pipeline))
    learnt = MicrobatchRun.completed(pipeline, replace(by_formula, stages=held))
    costs = pipeline._with_microbatches(learnt, pipeline._measured)
    lengths = tuple(shape.lengths for shape in SHAPES)

    def peak_bytes(costs: PipelineCosts, factor: int = 1) -> tuple[int, ...]:
        longer = tuple(tuple(factor * length for length in own) for own in lengths)
        return microbatches.plan_as_given(longer, pipeline.problem, costs, Options()).plan.predicted.peak_bytes

    assert peak_bytes(costs) == (1 << 40,) * 2
    bare = tuple(stage.changed(working_bytes_per_token=0.0) for stage in costs.stages)
    running = [peak - kept for peak, kept in zip(peak_bytes(costs), peak_bytes(replace(costs, stages=bare)), strict=True)]
    more = [peak - kept for peak, kept in zip(peak_bytes(costs, 3), peak_bytes(replace(costs, stages=bare), 3), strict=True)]
    assert more == pytest.approx([3 * size for size in running], abs=3)
    assert min(running) > 0


@pytest.mark.parametrize(("is_done", "cap_bytes"), [(False, 1), (True, 1), (True, 1 << 60)])
@pytest.mark.parametrize("forward_only", [False, True])
def test_the_given_order_is_kept_while_costs_are_learnt_and_where_nothing_fits_the_cap(
    caplog: pytest.LogCaptureFixture, is_done: bool, cap_bytes: int, forward_only: bool
) -> None:
    pipeline: Any = SimpleNamespace(
        args=SimpleNamespace(epp_order="given"),
        problem=Problem((), (0, 1), (min(cap_bytes, UNLIMITED_BYTES),) * 2),
        costs=costs_of(2, 2),
        learning=SimpleNamespace(is_done=is_done),
        _with_microbatches=lambda costs, agreed: costs,
        options=Options(),
        process=SimpleNamespace(plan_microbatches=lambda rule, *asked: getattr(microbatches, rule)(*asked)),
        names=names_in_loop(["memory_cap_gb"]),
    )
    plan, order = MicrobatchRun._make(pipeline, AgreedShapes(SHAPES, (0, 0)), forward_only)
    assert order == (0, 1, 2, 3)
    for row in plan.ranks:
        actions = [action for step in row for action in step.actions]
        for op in (Op.F,) if forward_only else (Op.F, Op.B):
            assert [action.chunk for action in actions if action.op is op] == [0, 1, 2, 3]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (is_done and cap_bytes == 1)
    for line in told:  # settings that a script can give, by its names for them
        assert "memory_cap_gb to " in line
        assert not any(other in line for other in ("--", "vocab", "chunk", "slices", "cap_bytes"))
