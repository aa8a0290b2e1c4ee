"""Microbatches of frameworks: their shapes and bytes, and what is done inside of them or of models that no plan can honour."""

import warnings
from argparse import Namespace
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
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
from megatron_epp.mcore.iteration.microbatch_shapes import Microbatch, shape_of, take, tensor_bytes
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


def tokens(*shape: int) -> dict[str, torch.Tensor]:
    return {"tokens": torch.zeros(shape, dtype=torch.int64)}


def packed(ends: list[int], total: int) -> dict[str, torch.Tensor]:
    return {**tokens(1, total), "cu_seqlens": torch.tensor([ends], dtype=torch.int32)}


def ends(*positions: int) -> torch.Tensor:
    return torch.tensor(positions, dtype=torch.int32)


def positions(*rows: list[int]) -> dict[str, torch.Tensor]:
    return {"position_ids": torch.tensor(rows)}


def jagged(*lengths: int, layout: torch.layout = torch.jagged) -> torch.Tensor:
    rows = [torch.zeros(length, dtype=torch.int64) for length in lengths]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors", UserWarning)
        return torch.nested.nested_tensor(rows, layout=layout)


@dataclass(slots=True)
class Processed:
    input_ids: torch.Tensor
    cu_seqlens_padded: torch.Tensor | None


class Pair(NamedTuple):
    tokens: torch.Tensor
    labels: torch.Tensor | None


@pytest.mark.parametrize(
    ("item", "shape"),
    [
        (tokens(2, 16), Microbatch((16, 16), 2)),
        (tokens(24), Microbatch((24,))),
        ({"input_ids": torch.zeros(1, 5)}, Microbatch((5,))),
        (packed([0, 3, 10], 10), Microbatch((3, 7))),
        (packed([0, 3, 10, 10, 10], 10), Microbatch((3, 7))),
        (packed([0, 3, 10], 16), Microbatch((3, 7, 6))),
        ([tokens(1, 4)], Microbatch((4,))),
        ({"total_lengths": [4, 9]}, Microbatch((4, 9))),
        (tokens(2, 16, 8), Microbatch((16, 16), 2)),
        (tokens(1, 12) | {"original_seq_len": torch.tensor([9]), "padded_seq_len": torch.tensor([12])}, Microbatch((12,))),
        # ends of packed sequences
        (packed([0, 13, 59, 76, -1, -1], 90), Microbatch((13, 46, 17, 14))),
        ({"cu_seqlens_q": ends(0, 3, 10), "cu_seqlens": ends(0, 10)}, Microbatch((3, 7))),
        ({"cu_seqlens_q_padded": ends(0, 4, 12), "cu_seqlens_q": ends(0, 3, 10)}, Microbatch((4, 8))),
        ({"cu_seqlens_padded": numpy.array([0, 4, 12]), "cu_seqlens": [0, 3, 10]}, Microbatch((4, 8))),
        ({**tokens(2, 8), "cu_seqlens": torch.tensor([[0, 3, 8], [0, 5, -1]])}, Microbatch((3, 5, 5, 3), 2)),
        (tokens(1, 10) | {"packed_seq_params": Namespace(cu_seqlens_q=ends(0, 3, 10), qkv_format="thd")}, Microbatch((3, 7))),
        ({"packed_seq_params": Namespace(cu_seqlens_q=ends(0, 3, 9), cu_seqlens_q_padded=ends(0, 4, 12))}, Microbatch((4, 8))),
        ({**tokens(1, 4), "packed_seq_params": None, "cu_seqlens": None}, Microbatch((4,))),
        # lengths
        ({**tokens(1, 16), "seq_lens": torch.tensor([4, 9, 0])}, Microbatch((4, 9, 3))),
        ({**tokens(2, 16), "seq_lens": torch.tensor([4, 9])}, Microbatch((16, 16), 2)),
        ({"input_ids": jagged(3, 5), "seq_lens": [3, 5]}, Microbatch((3, 5))),
        # jagged tokens
        ({"input_ids": jagged(3, 5, 1), "position_ids": jagged(3, 5, 1)}, Microbatch((3, 5, 1))),
        ({"input_ids": jagged(3, 5, layout=torch.strided)}, Microbatch((3, 5))),
        # positions that begin again
        (tokens(1, 6) | positions([0, 1, 2, 0, 1, 0]), Microbatch((3, 2, 1))),
        (tokens(6) | {"position_ids": torch.tensor([0, 1, 2, 0, 1, 2])}, Microbatch((3, 3))),
        (tokens(1, 6) | positions([0, 1, 2, 0, 0, 0]), Microbatch((3, 3))),
        (tokens(2, 4) | positions([0, 1, 0, 1], [0, 1, 2, 3]), Microbatch((2, 2, 4), 2)),
        (tokens(1, 5) | {"position_ids": torch.tensor([[[0, 1, 1, 0, 1]], [[0, 0, 1, 0, 1]]])}, Microbatch((3, 2))),
        (tokens(1, 4) | positions([0, 1, 0, 1]) | {"attention_mask": torch.ones(1, 1, 4, 4)}, Microbatch((4,))),
        (tokens(1, 4) | positions([0, 1, 0, 1]) | {"attention_mask": torch.ones(1, 4)}, Microbatch((2, 2))),
        (tokens(1, 4) | positions([0, 1]), Microbatch((4,))),
        (tokens(1, 4) | positions([4, 5, 6, 7]), Microbatch((4,))),
        # objects, and parts
        (Processed(torch.zeros(1, 12), ends(0, 4, 12)), Microbatch((4, 8))),
        (Processed(torch.zeros(2, 12), None), Microbatch((12, 12), 2)),
        (Pair(torch.zeros(1, 5), None), Microbatch((5,))),
        (Namespace(packed_seq_params=Namespace(cu_seqlens_q=ends(0, 3, 10))), Microbatch((3, 7))),
        ((tokens(1, 5), 0, 0), Microbatch((5,))),
        (({"images": torch.zeros(3)}, tokens(1, 5)), Microbatch((5,))),
        ((tokens(1, 5), {"input_ids": torch.zeros(1, 5)}, None), Microbatch((5,))),
        ((torch.zeros(2, 6, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64)), Microbatch((6, 6), 2)),
    ],
)
def test_the_shape_of_a_microbatch_is_found(item: object, shape: Microbatch) -> None:
    assert shape_of(item) == shape


@pytest.mark.parametrize(
    ("item", "said"),
    [
        (7, "a microbatch is a int, in which no lengths are found (packed_seq_params, "),
        ({}, "a microbatch is a dict with nothing, in which"),
        ({"labels": torch.zeros(1, 4)}, "a microbatch is a dict with labels, in which"),
        ((), "a microbatch is a tuple of nothing, in which"),
        ([torch.zeros(1, dtype=torch.int64)], "a microbatch is a list of Tensor, in which"),  # an index of something
        ([tokens(1, 4), tokens(1, 5)], "parts of a microbatch have 4 tokens in 1 sequences and 5 tokens in 1 sequences"),
    ],
)
def test_a_microbatch_without_lengths_is_refused_and_the_remedy_named(item: object, said: str) -> None:
    with pytest.raises(EppError) as error:
        shape_of(item)
    assert str(error.value).startswith(said)
    assert str(error.value).endswith(", shape_of")


def test_a_callers_own_function_may_return_lengths_of_any_kind_and_empty_sequences_are_none() -> None:
    assert Schedule(lambda models: Namespace(), lambda item: torch.tensor(item))._shape([4, 0, 9]) == Microbatch((4, 9))


def test_microbatches_come_back_in_any_order_and_no_more_are_taken_than_the_iteration_has() -> None:
    taken = take(iter([tokens(1, 3), tokens(1, 5), tokens(1, 7)]), 3, shape_of)
    assert taken.shapes() == (Microbatch((3,)), Microbatch((5,)), Microbatch((7,)))
    assert [next(taken.at(index))["tokens"].shape[1] for index in (2, 0, 1)] == [7, 3, 5]
    iterator = iter([tokens(1, 3), tokens(1, 5)])
    take(iterator, 1, shape_of)
    assert next(iterator)["tokens"].shape[1] == 5


def test_a_forward_step_that_takes_two_items_is_told_so() -> None:
    one = take(iter([tokens(1, 3)]), 1, shape_of).at(0)
    next(one)
    with pytest.raises(EppError, match="second item for microbatch 0"):
        next(one)


def test_a_rank_without_an_iterator_has_no_lengths_and_an_object_that_is_none_is_refused_by_its_type() -> None:
    assert take(None, 2, shape_of).shapes() is None
    assert take(None, 2, shape_of).at(0) is None
    with pytest.raises(EppError, match="is a list, which has neither __next__"):
        take([tokens(1, 3)], 1, shape_of)


def test_bytes_of_microbatches_are_those_of_their_storages_on_the_device() -> None:
    class Packed:
        def __init__(self) -> None:
            self.ends = torch.zeros(3, dtype=torch.int32)

    whole = torch.zeros(10, dtype=torch.float32)

    @dataclass(slots=True)
    class Slotted:
        inner: Packed

    batch = OrderedDict(tokens=whole[:4], more=[whole[4:], Slotted(Packed())], count=3, text="words")
    items = [batch, batch, torch.zeros(2, 2, device="meta"), torch.eye(3).to_sparse()]
    assert tensor_bytes(items, torch.device("cpu")) == 40 + 12
    pieces = jagged(3, 5)
    assert tensor_bytes([{"input_ids": pieces}], torch.device("cpu")) == 8 * 8 + pieces.offsets().nbytes
    assert take(iter([tokens(1, 3), tokens(1, 5)]), 2, shape_of).num_bytes(torch.device("cpu")) == 8 * 8
    assert take(None, 2, shape_of).num_bytes(torch.device("cpu")) == 0
