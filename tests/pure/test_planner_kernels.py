"""Inner loops of the planner: their clocks agree with two simulators, and plans are the same where they are not compiled."""

import random
import shutil
from itertools import chain
from pathlib import Path

import pytest

from megatron_epp import COMPILED_VARIABLE
from megatron_epp.features.split_weights import split
from megatron_epp.features.stages.list_scheduling import ListScheduling
from megatron_epp.features.vocabulary import shard_insertion, vocabulary_order
from megatron_epp.plan import UNLIMITED_BYTES, Action, Op
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.simulation import simulate
from megatron_epp.planner import Options, Problem
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.chunks.chunker import whole_sequences
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.evaluate import play
from megatron_epp.planner.kernels import compiled
from megatron_epp.planner.kernels.codes import KINDS, CodedOrder, Codes, encode
from megatron_epp.planner.kernels.compiled import integers, is_compiled
from megatron_epp.planner.memory.offload import timed
from megatron_epp.planner.order import CopyOrder, Order
from megatron_epp.planner.orders.completion import has_added
from megatron_epp.planner.tables import Tables, tabulate
from tests.support.calls import run_python
from tests.support.plan import second_simulator
from tests.support.plan.campaign_cases import costs_of, lengths_of
from tests.support.seeds import some_by_default

NEEDS_NUMBA = pytest.mark.skipif(not is_compiled(), reason="needs numba: pip install 'megatron-epp[fast]'")
COMPILED = {COMPILED_VARIABLE: "1"}

PLANNING = """
from dataclasses import replace
from tests.support.plan.campaign_cases import case_of, planned
from tests.support.plan.planner_cases import GIB, pipeline, problem, web_lengths
from megatron_epp.planner import Options, plan
from megatron_epp.plan import digest
from megatron_epp.planner.kernels.compiled import is_compiled

print(is_compiled())
for lengths, stages, options in [
    ((9000, 4000, 700), 2, Options(slices=3, steps=60)),
    (web_lengths(4, seed=1, longest=30000), 3, Options(steps=30)),
    (web_lengths(3, seed=2, longest=30000), 2, Options(split_weight=True, offload=True, steps=30)),
]:
    for turns in (1, 2):
        costs = replace(pipeline(stages), host_turns=turns)
        print(digest(plan(problem(lengths, stages, 30 * GIB), costs, options)))
for options in (Options(slices=4), Options(slices=2, split_weight=True)):
    twice = replace(problem((9000, 4000, 700), 4, 30 * GIB), placement=(0, 1, 0, 1), cap_bytes=(30 * GIB,) * 2)
    print(digest(plan(twice, pipeline(4), options)))
print(digest(planned(case_of(47))))  # with the vocabulary in shards
"""


@NEEDS_NUMBA
def test_plans_are_equal_with_and_without_the_compiler():
    fast, plain = (run_python(PLANNING, **{COMPILED_VARIABLE: value}).stdout.split() for value in ("1", "0"))
    assert (fast[0], plain[0]) == ("True", "False")
    assert fast[1:] == plain[1:]


UNKEPT = """
from megatron_epp.planner.kernels.compiled import compiled

def doubled(number):
    return 2 * number

def halved(number):
    return number // 2

print(compiled(doubled)(21), compiled(halved)(42))
"""


@NEEDS_NUMBA
def test_where_no_folder_can_keep_compiled_loops_they_are_compiled_again_and_a_line_says_so():
    done = run_python(UNKEPT, **COMPILED, NUMBA_CACHE_LOCATOR_CLASSES="IPythonCacheLocator")  # keeps only IPython's
    assert done.stdout == "42 21\n"
    assert done.stderr.count("NUMBA_CACHE_DIR") == 1


KEEPING = """
import numpy as np
from megatron_epp.planner.kernels.timing import mark_split
mark_split(np.array([1, 2]), np.array([0]))
"""


@NEEDS_NUMBA
def test_loops_are_compiled_once_and_kept_by_the_name_of_all_their_sources(tmp_path: Path):
    """numba looks at a function's own file alone, and a loop that is inlined, or its columns, may be in another one."""
    said = [run_python(KEEPING, **COMPILED, NUMBA_CACHE_DIR=str(tmp_path)).stderr for _ in range(2)]
    assert said == ["megatron-epp compiles the planner's loops, once for this machine: 10 to 25 s of a core\n", ""]
    (kept,) = tmp_path.rglob("*.nbi")
    assert compiled._sources() in kept.name
    folder = tmp_path / "kernels"
    shutil.copytree(Path(compiled.__file__).parent, folder)
    assert compiled._sources(folder) == compiled._sources()
    with (folder / "pass_table.py").open("a") as file:
        file.write("# another line")
    compiled._sources.cache_clear()
    assert compiled._sources(folder) != compiled._sources()


PART = 20
"""Problems of one test."""


def placement_of(draw: random.Random) -> Placement:
    chunks = draw.choice([1, 1, 2, 3])
    return Placement(draw.choice(["v", "looped"]) if chunks > 1 else "looped", draw.choice([1, 2, 3, 4, 6]), chunks)


def with_weights(order: Order, tables: Tables, recompute_steps: list[list[int]], gap_share: float) -> tuple[Order, float]:
    """Split weight gradients off; return the order, and its makespan by the clock that put them in."""
    codes, steps = encode(order, tables.columns.num_chunks), integers(chain.from_iterable(recompute_steps))
    whole, filled = split.storage(codes.actions, codes.starts, tables.columns)
    caps = integers([UNLIMITED_BYTES] * codes.num_ranks)
    took_us = split.split_off(whole, tables.columns, steps, caps, integers([]), filled, gap_share)
    rows = [filled.actions[start:end] for start, end in zip(filled.starts, filled.ends, strict=True)]
    starts = [sum(map(len, rows[:rank])) for rank in range(len(rows) + 1)]
    return CodedOrder(Codes(integers(chain.from_iterable(rows)), integers(starts)), tables.columns.num_chunks), took_us


def with_shards(order: Order, tables: Tables, recompute_steps: list[list[int]]) -> tuple[Order, float]:
    """Insert the shards' operations; return the order, and its makespan by the clock that put them in."""
    codes, run = encode(order, tables.columns.num_chunks), vocabulary_order.storage(tables, list(map(len, order)))
    columns, steps = tables.columns_with(vocabulary_order.SHARD_KINDS), integers(chain.from_iterable(recompute_steps))
    took_us = shard_insertion.insert(codes.actions, codes.starts[:-1], codes.starts[1:], columns, steps, run)
    return CodedOrder(Codes(run.out, run.first, vocabulary_order.SHARD_KINDS), tables.columns.num_chunks), took_us


def copies_of(order: Order, draw: random.Random) -> CopyOrder:
    """Copy some chunks out behind their forward, and back after any action before their backward."""
    found = []
    for row in order:
        at, row_copies = {action: position for position, action in enumerate(row)}, []
        for stage, c in [(action.stage, action.chunk) for action in row if action.op is Op.B]:
            opened, closed = at[Action(Op.F, stage, c)], at[Action(Op.B, stage, c)]
            if draw.random() < 0.4:
                after = draw.choice([position for position in range(opened, closed) if row[position].op in KINDS])
                row_copies += [(opened, Action(Op.O, stage, c), None), (after, Action(Op.L, stage, c), row[after])]
        found.append(tuple((action, after) for _, action, after in sorted(row_copies, key=lambda one: one[0])))
    return tuple(found)


@some_by_default("part", range(100), by_default=10)
def test_both_clocks_agree_with_two_simulators(part: int):
    for seed in range(part * PART, (part + 1) * PART):
        draw = random.Random(seed)
        placement = placement_of(draw)
        costs, lengths = costs_of(draw, placement), lengths_of(draw)
        forward_only, caps = draw.random() < 0.15, (UNLIMITED_BYTES,) * placement.num_ranks
        problem = Problem(lengths, placement.rank_of, caps, forward_only=forward_only)
        chunks = whole_sequences(lengths)
        tables, recompute_steps = tabulate(chunks, problem, costs), [[0] * len(chunks) for _ in placement.rank_of]
        rule = ListScheduling(draw.choice([1.0, 1.5, 2.0]), draw.random() < 0.5, draw.choice([None, 0.5, 2.0]))
        order, dispatched_us = rule.order(chunks, tables, problem), None
        if not forward_only and draw.random() < 0.5:
            order, dispatched_us = with_weights(order, tables, recompute_steps, draw.choice([split.WHOLE_GAP, split.EAGER_GAP]))
        if has_added(tables):
            order, dispatched_us = with_shards(order, tables, recompute_steps)
        made = Decisions(chunks, order, recompute_steps)
        if not forward_only and tables.offloadable_share > 0 and draw.random() < 0.5:
            copies = copies_of(order, draw)
            away = {(action.stage, action.chunk) for row in copies for action, _ in row}
            shares = tuple(
                tuple(tables.offloadable_share * ((stage, c) in away) for c in range(len(chunks)))
                for stage in range(placement.num_stages)
            )
            made = Decisions(chunks, order, recompute_steps, copies=copies, offload=shares)
        plan = build_plan(problem, costs, Options(), made, tables)
        played, line = play(order, tables, recompute_steps, timed(made.as_offload, tables)), simulate(plan)
        start_us, _ = second_simulator.times(plan)
        for name in ("start_us", "end_us", "copy_start_us", "copy_end_us"):
            times = getattr(played, name)
            assert tuple(map(tuple, times)) == getattr(line, name)[: len(times)], seed
        assert [[start_us[tuple(step.action)] for step in row] for row in plan.ranks] == list(map(list, played.start_us)), seed
        if not any(made.copies) and dispatched_us is not None:
            assert dispatched_us == pytest.approx(played.makespan_us, rel=1e-12), seed
