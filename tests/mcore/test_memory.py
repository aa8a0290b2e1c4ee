"""The memory a plan predicts is the memory its run takes, per stage, a cap on it holds, and iterations leave nothing behind."""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_epp.plan import Plan
from megatron_epp.plan.recompute import MODES
from megatron_epp.plan.serialize import load
from tests.support.mcore import memory_cases
from tests.support.mcore.forked import job, of_ranks, returned
from tests.support.mcore.jobs.batches import RUNS
from tests.support.mcore.jobs.soak import CASES, LONGEST, VOCABULARY
from tests.support.mcore.memory_cases import BLOCKS, CAPPED, FREE, ITERATIONS, MORE, OFFLOADED, PIPELINES, TOKENS_SHARED
from tests.support.mcore.synthetic_documents import documents_of, write_pair
from tests.support.seeds import some_by_default

SCALARS_BYTES = 64
"""Bytes of the loss, which no cost per token has."""


@dataclass(frozen=True)
class Report:
    iterations: list[dict[str, Any]]
    plan: Plan

    def pairs(self) -> list[tuple[int, int]]:
        """Planned and measured peak bytes of activations, of every iteration and stage."""
        keys = ("planned_peak_activation_bytes", "peak_activation_bytes")
        return [pair for line in self.iterations for pair in zip(*(line[key] for key in keys), strict=True)]


Reports = Callable[[int, str], Report]
Lines = Callable[[int, str], Any]


@pytest.fixture(scope="module")
def report_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Report]:
    """The report of a setting. Those of one pipeline size and one set share a launch, made when one is first asked for."""
    folder = tmp_path_factory.mktemp("memory")
    lengths = [n + 1 for n in memory_cases.LENGTHS]
    data = write_pair(folder / "documents", documents_of(lengths, vocab_size=memory_cases.VOCABULARY))
    errors: dict[Path, str] = {}

    def report(ranks: int, name: str) -> Report:
        more = name in MORE
        reports = folder / f"{ranks}{'-more' if more else ''}"
        if reports not in errors:
            finished = job(ranks, "memory", data=data, folder=reports, more=more, timeout_s=400)
            errors[reports] = "" if finished.returncode == 0 else finished.output[-5000:]
        assert not errors[reports], errors[reports]
        lines = (reports / name / "iterations.jsonl").read_text().splitlines()
        return Report([json.loads(line) for line in lines], load(reports / name / "plan.json"))

    return report


BY_RANKS = [(ranks, name) for ranks, settings in PIPELINES.items() for name in settings]


@some_by_default(("ranks", "name"), [*BY_RANKS, *((2, name) for name in MORE)], len(BY_RANKS))
def test_measured_activations_are_what_the_plans_say_and_no_more(report_of: Reports, ranks: int, name: str) -> None:
    report = report_of(ranks, name)
    pairs = report.pairs()
    ratios = [measured / planned for planned, measured in pairs]
    print(f"\n{ranks} stages, {name}: measured over planned {min(ratios):.4f} to {max(ratios):.4f}")
    assert report.plan.num_ranks == (1 if name == TOKENS_SHARED else ranks)
    assert len(pairs) == report.plan.num_ranks * ITERATIONS
    assert min(ratios) >= 0.97, pairs
    assert max(measured - planned for planned, measured in pairs) <= SCALARS_BYTES


def test_a_cap_holds_where_the_same_batches_would_exceed_it(report_of: Callable[[int, str], Report]) -> None:
    capped, free = report_of(2, CAPPED), report_of(2, FREE)
    caps, static = capped.plan.cap_bytes * ITERATIONS, capped.plan.static_bytes * ITERATIONS
    triples = [zip(report.pairs(), static, caps, strict=True) for report in (capped, free)]
    shares = [[(base + max(peaks)) / cap for peaks, base, cap in own] for own in triples]
    print(f"\nstatic bytes and activations take {max(shares[0]):.3f} of the cap, {max(shares[1]):.3f} without it")
    assert max(shares[0]) <= 1
    assert min(shares[0][i] for i, share in enumerate(shares[1]) if share > 1) > 0.8, "the cap was far from reached"
    assert max(line["recompute_share"] for line in capped.iterations) > 0


def test_a_loss_by_blocks_takes_less_of_the_last_stage_its_workspace_included(report_of: Callable[[int, str], Report]) -> None:
    blocks, whole = report_of(2, BLOCKS), report_of(2, FREE)
    workspace = blocks.plan.static_bytes[-1] - whole.plan.static_bytes[-1]
    assert workspace > 0
    assert blocks.plan.static_bytes[0] == whole.plan.static_bytes[0]
    for with_blocks, without in zip(blocks.pairs()[1::2], whole.pairs()[1::2], strict=True):
        print(f"\nlast stage: {with_blocks[1]} bytes with blocks and {workspace} while one is computed, {without[1]} without")
        assert workspace + max(with_blocks) < min(without)


def test_a_cap_holds_by_offload_and_the_host_has_what_was_planned(report_of: Callable[[int, str], Report]) -> None:
    report = report_of(4, OFFLOADED)
    keys = ("planned_host_peak_bytes", "host_peak_bytes")
    hosts = [pair for line in report.iterations for pair in zip(*(line[key] for key in keys), strict=True)]
    caps, static = report.plan.cap_bytes * ITERATIONS, report.plan.static_bytes * ITERATIONS
    assert all(base + peak <= cap for (_, peak), base, cap in zip(report.pairs(), static, caps, strict=True))
    assert max(line["offload_share"] for line in report.iterations) > 0.1
    assert all(0.97 <= measured / planned <= 1.03 for planned, measured in hosts if planned)


FEW, MANY = 2, 9
BY_DEFAULT = ("grouped, with dropout", "weights apart, there and back", "windows, sinks", "Mamba-2 with attention")
STATES = {"windows, sinks": 0, "Mamba-2": 4, "Mamba-2 with attention": 3}
"""Runs whose slices hand on states, with the layers of a rank that keep the decay rates of 8 heads, and what they are made of,
for every chunk: as many bytes as `SCALARS_BYTES`.
"""
OTHERS = [(MANY, name) for name in RUNS]
EACH = some_by_default(("batches", "name"), [*((FEW, name) for name in BY_DEFAULT), *OTHERS], len(BY_DEFAULT))


@pytest.fixture(scope="module")
def lines_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Any]:
    """By rank: a line for every plan that a training ran. Those by default share a launch."""

    @functools.cache
    def runs(batches: int, names: tuple[str, ...]) -> Any:
        folder = tmp_path_factory.mktemp("batches")
        found = returned(job(1, "batches", folder=folder, batches=batches, names=names, timeout_s=800))
        assert not [ranks for ranks in found.values() if "error" in ranks], found
        return found

    def lines(batches: int, name: str) -> Any:
        names = BY_DEFAULT if batches == FEW and name in BY_DEFAULT else (name,)
        return runs(batches, names)[name]

    return lines


@EACH
def test_no_plan_holds_more_than_it_says_nor_less_by_three_in_a_hundred(lines_of: Lines, batches: int, name: str) -> None:
    """Where sequences share prefixes two counts are high, but safe: of states that several chunks begin with, and of host
    memory, in which room for all rows of a sequence is taken at once.
    """
    for lines in lines_of(batches, name):
        ratios = [line["measured"] / line["planned"] for line in lines]
        print(f"\n{name}, {len(lines)} plans: measured over planned {min(ratios):.4f} to {max(ratios):.4f}")
        assert len(lines) > 5 * batches
        for line in lines:
            assert line["measured"] - line["planned"] <= SCALARS_BYTES * (1 + STATES.get(name, 0) * line["chunks"]), line
        of_states = name in STATES
        assert min(ratio for ratio, line in zip(ratios, lines, strict=True) if not (of_states and line["borrowed"])) >= 0.97
        assert {line["left"] for line in lines} == {0}, "something is left on the device or at the host"
        assert {line["offloadable"] for line in lines} == {1}, "somebody but autograd holds what chunks keep"
        hosts = [(line["host"] / line["planned_host"], line) for line in lines if line["planned_host"]]
        assert all(ratio <= 1 and (ratio >= 0.97 or (line["hosted"] and line["borrowed"])) for ratio, line in hosts)


@EACH
def test_the_plans_had_every_level_alone_and_beside_others_copies_and_trees(lines_of: Lines, batches: int, name: str) -> None:
    seen = {again for lines in lines_of(batches, name) for line in lines for again in line["recompute"]}
    assert any({f"{layers} {mode.name}" for mode in MODES.values()} <= seen for layers in (2, 4))
    assert any("+" in again for again in seen)
    assert {False, True} == {line["borrowed"] > 0 for lines in lines_of(batches, name) for line in lines}
    for borrows in (False, True):
        plans = [line for lines in lines_of(batches, name) for line in lines if bool(line["borrowed"]) is borrows]
        assert {False, True} == {line["hosted"] > 0 for line in plans}
    assert len({line["share"] for lines in lines_of(batches, name) for line in lines}) >= batches


def soaked(name: str, folder: Path) -> list[dict[int, int]]:
    lengths = [LONGEST // 2 + i % (LONGEST // 2) for i in range(61)]
    data = write_pair(folder / "documents", documents_of(lengths, vocab_size=VOCABULARY))
    case = CASES[name]
    figures = of_ranks(job(case.pipeline_size, "soak", data=data, name=name, timeout_s=0.6 * case.iterations))
    assert len(figures) == case.pipeline_size
    return [{int(iteration): count for iteration, count in own["counts"].items()} for own in figures]


def test_many_iterations_of_training_leave_no_tensor_behind(tmp_path: Path) -> None:
    case, (tensors,) = CASES["tensors"], soaked("tensors", tmp_path)
    # The thread that reads ahead may or may not hold the next batch when tensors are counted.
    assert min(tensors[i] for i in case.late) <= max(tensors[i] for i in case.early)


@pytest.mark.slow  # a thousand iterations, so that one object for every second of them shows
def test_a_thousand_iterations_of_a_pipeline_leave_no_object_behind(tmp_path: Path) -> None:
    case = CASES["objects"]
    for objects in soaked("objects", tmp_path):
        grown = min(objects[i] for i in case.late) - min(objects[i] for i in case.early)
        assert grown < (case.late.start - case.early.start) / 2, objects
