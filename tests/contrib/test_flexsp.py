"""FlexSP: groups of context-parallel ranks by chunk are planned, proven, simulated and trained, and their faults are found."""

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_epp.contrib.flexsp import context_groups
from megatron_epp.contrib.flexsp.context_groups import ContextGroups, Group
from megatron_epp.contrib.flexsp.degrees import flexsp
from megatron_epp.contrib.flexsp.group_costs import GroupCosts
from megatron_epp.plan import Chunk, InfeasibleError, Plan, PlanError, Segment
from megatron_epp.plan.lowering import lower
from megatron_epp.plan.proof import check
from megatron_epp.plan.proof.deadlock import blocked
from megatron_epp.plan.serialize import from_json, load, to_json
from megatron_epp.plan.simulation import simulate
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem, plan
from megatron_epp.planner.assemble import build_plan
from megatron_epp.tools.formulas import CPU, H100, analytic_profile
from megatron_epp.tools.formulas.library import load_flags, shape_of
from scripts.parity.cells import OPTIMIZERS
from tests.support.mcore.matrix import FOLDER, Matrix, Row, case, cell_of, parameters
from tests.support.mcore.parity_figures import Figures

LENGTHS = (16000, 9000, 4000, *(2000,) * 6, *(500,) * 12)
RANKS = 16


def costs_of(context_parallel: int = RANKS, node: int = 8):
    """Costs with exchanges that take longer between nodes than inside one."""
    shape = shape_of(load_flags("llama3-8b") | {"context_parallel_size": context_parallel, "seq_length": 16384})
    return analytic_profile(shape, replace(H100, devices_per_node=node)).costs([16, 16], state_bytes_per_parameter=7.5)


def problem_of(cap: int = UNLIMITED_BYTES) -> Problem:
    return Problem(LENGTHS, (0, 1), (cap,) * 2)


@pytest.fixture(scope="module")
def made() -> Plan:
    return plan(problem_of(), costs_of(), Options(planner="flexsp"))


def groups_of(made: Plan) -> ContextGroups:
    found = context_groups.groups_of(made.extensions)
    assert found is not None
    return found


def test_the_plan_is_sound_cannot_hang_and_survives_json(made: Plan):
    assert check(made) == []
    assert blocked([lower(made)]) == []
    assert from_json(to_json(made)) == made


def test_short_sequences_have_few_ranks_and_long_ones_many(made: Plan):
    degree_of = {
        made.chunks[c].segments[at].sequence: group.degree
        for c, groups in enumerate(groups_of(made).of_chunk)
        for group in groups
        for at in group.segments
    }
    assert sorted(degree_of) == list(range(len(LENGTHS)))
    assert degree_of[0] > min(degree_of.values())
    assert len({LENGTHS[q] for q, degree in degree_of.items() if degree == min(degree_of.values())} & {16000}) == 0


def test_a_chunk_takes_as_long_as_its_slowest_group():
    costs = costs_of()
    chunk = Chunk((Segment(0, 0, 16000), Segment(1, 0, 9000)))
    each = [ContextGroups(RANKS, ((Group(0, 8, (at,)),),), (2000,)) for at in (0, 1)]
    both = ContextGroups(RANKS, ((Group(0, 8, (0,)), Group(8, 8, (1,))),), (2000,))
    own = GroupCosts(costs)
    alone = [own.pass_us(0, groups, (chunk,)) for groups in each]
    for together, *times in zip(own.pass_us(0, both, (chunk,)), *alone, strict=True):
        assert together.tolist() == max(times[0].tolist(), times[1].tolist())


def test_a_group_exchanges_as_a_run_of_its_own_size_does():
    """Half of the ranks take as long as a run with that many ranks, on the same tokens and pairs."""
    half = costs_of(RANKS // 2, node=RANKS)
    line, whole = GroupCosts(costs_of(node=RANKS)).line(0, RANKS // 2), half.line(0, "forward") + half.line(0, "backward")
    assert line.per_pair_us == pytest.approx(whole.per_pair_us)
    assert line.per_token_us == pytest.approx(whole.per_token_us, rel=0.02)  # heads of keys are replicated less


def test_groups_end_earlier_than_one_degree_where_that_leaves_the_node(made: Plan):
    options = Options(planner="flexsp")
    uniform = build_plan(problem_of(), costs_of(), options, flexsp(problem_of(), costs_of(), options, smallest=RANKS))
    assert {group.degree for own in groups_of(uniform).of_chunk for group in own} == {RANKS}
    assert simulate(made).makespan_us < simulate(uniform).makespan_us


def faults(made: Plan, *groups: Group, rank_tokens: int | None = None) -> str:
    own = groups_of(made)
    tokens = own.rank_tokens if rank_tokens is None else (rank_tokens, *own.rank_tokens[1:])
    tampered = replace(own, of_chunk=(groups, *own.of_chunk[1:]), rank_tokens=tokens)
    return "\n".join(map(str, check(replace(made, extensions=(tampered,)))))


FAULTS: dict[str, tuple[Callable[[tuple[int, ...]], list[Group]], int | None]] = {
    "the group of ranks 4 to 11 overlaps the group of ranks 0 to 7, which runs at the same time": (
        lambda every: [Group(0, 8, every[:1]), Group(4, 8, every[1:])],
        16000,
    ),
    "the group of rank 3 is too small: {tokens} tokens on each rank, and the bytes of the steps are for {room}": (
        lambda every: [Group(3, 1, every)],
        None,
    ),
    "ranks 8 to 23 is not within the 16 context-parallel ranks": (lambda every: [Group(8, 16, every)], None),
    "ranks 4 to 11 is none that runs have: of 1, 2, 4, ... ranks": (lambda every: [Group(4, 8, every)], None),
    "sequence 0 is in no group": (lambda every: [Group(0, RANKS, every[1:])], None),
    "sequence 0 is in the group of ranks 0 to 7 and in": (lambda every: [Group(0, 8, every), Group(8, 8, every[:1])], 16000),
}


@pytest.mark.parametrize("said", FAULTS)
def test_groups_that_cannot_be_are_found(made: Plan, said: str):
    groups, rank_tokens = FAULTS[said]
    chunk, room = made.chunks[0], groups_of(made).rank_tokens[0]
    assert chunk.num_tokens > room
    found = faults(made, *groups(tuple(range(len(chunk.segments)))), rank_tokens=rank_tokens)
    assert said.format(tokens=chunk.num_tokens, room=room) in found


def test_slices_are_shared_by_all_ranks(made: Plan):
    chunks = (Chunk((Segment(0, 0, 8000),)), Chunk((Segment(0, 8000, 16000),)))
    groups = ContextGroups(RANKS, ((Group(0, 8, (0,)),), (Group(0, RANKS, (0,)),)), (1000, 500))
    assert list(groups.faults(chunks, (16000,))) == [
        "chunk 0: groups share whole sequences, and this is a slice: all 16 ranks share it"
    ]


def test_a_cap_is_held(made: Plan):
    static = max(made.static_bytes)
    cap = static + int(0.6 * (max(made.predicted.peak_bytes) - static))
    assert max(plan(problem_of(cap), costs_of(), Options(planner="flexsp")).predicted.peak_bytes) <= cap
    with pytest.raises(InfeasibleError, match="no plan of 'flexsp' fits"):
        plan(problem_of(1 << 30), costs_of(), Options(planner="flexsp"))


def test_evaluations_have_groups_too():
    evaluation = plan(replace(problem_of(), forward_only=True), costs_of(), Options(planner="flexsp"))
    assert check(evaluation) == []
    assert groups_of(evaluation)


def test_ranks_that_are_no_power_of_two_and_one_rank_are_refused():
    for ranks in (1, 3):
        shape = replace(shape_of(load_flags("llama3-8b")), num_attention_heads=48, kv_channels=128, context_parallel=ranks)
        costs = analytic_profile(shape, H100).costs([16, 16])
        with pytest.raises(PlanError, match="'flexsp' needs costs by formula of 2, 4, 8"):
            plan(problem_of(), costs, Options(planner="flexsp"))


def test_exchanges_between_nodes_take_longer_than_inside_one():
    inside, across = (np.array(costs_of(node=node).context_exchange_us) for node in (RANKS, 8))
    assert inside[0] == across[0] == 0.0
    assert (inside[:4] == across[:4]).all()
    assert across[4] > 2 * inside[4]


def write_costs(exchange_bytes: float, folder: Path, **sizes: int) -> None:
    """Write costs of a tiny model by which ranks exchange this many bytes in a second."""
    flags = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 95} | sizes
    (folder / "costs.json").write_text(analytic_profile(shape_of(flags), replace(CPU, exchange_bytes=exchange_bytes)).to_json())


def check_trained(ranks: int, wanted: set[tuple[int, ...]], figures: Figures, folder: Path) -> None:
    """Both iterations have chunks with groups of these degrees, 0 for a rank in none, and memory is as planned or less."""
    del figures
    found = set[tuple[int, ...]]()
    for number in (1, 2):
        divided = groups_of(load(folder / "report" / f"plan-{number}.json"))
        for groups in divided.of_chunk:
            degrees = {group.degree for group in groups}
            found.add((*([0] if sum(group.degree for group in groups) < ranks else []), *sorted(degrees)))
    assert wanted <= found
    lines = [json.loads(line) for line in (folder / "report" / "iterations.jsonl").read_text().splitlines()]
    for line in lines:
        for planned, measured in zip(line["planned_peak_activation_bytes"], line["peak_activation_bytes"], strict=True):
            assert 0 < measured <= planned


def trained(cell: str, exchange_bytes: float, *wanted: tuple[int, ...], more: str = "", **how: Any) -> Row:
    ranks = cell_of(cell)
    sizes = {"tensor_model_parallel_size": ranks.tp, "context_parallel_size": ranks.cp, "sequence_parallel": ranks.sp}
    plan = f"--epp-planner flexsp --epp-costs {FOLDER}/costs.json {more} "
    plan += f"--epp-report-dir {FOLDER}/report --epp-trace 1 2 --epp-measure-memory"
    return Row(
        name=f"{cell}, degrees {', '.join(map(str, wanted))}",
        case=case(cell, plan, how.pop("model", "llama"), optimizer=how.pop("optimizer", "")),
        check=functools.partial(check_trained, ranks.cp, {*wanted}),
        prepare=functools.partial(write_costs, exchange_bytes, **sizes),
        **how,
    )


ROWS = [
    trained("cp4", 2e8, (1,), (1, 2)),
    trained("cp2 pp2", 3e8, (1,), (2,), more="--epp-recompute 1", model="grouped"),
    trained("cp2 pp2", 3e7, (1,), (0, 1), model="gpt2"),
    trained("tp2 sp cp2", 3e8, (1,), is_slow=True),
    trained("cp2 dp2", 3e8, (1,), model="learned", optimizer=OPTIMIZERS["overlapped"], is_slow=True),
]


@pytest.mark.parametrize("row", parameters(ROWS))
def test_it_trains_as_the_stock_schedule_does(matrix: Matrix, row: Row) -> None:
    matrix.check(row)
