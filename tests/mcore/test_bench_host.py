"""With plans an action makes the host do no more than with Megatron's schedule, whatever is packed into the chunk, and no more
than it did on a stage of a large model."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_epp.cost import H100_NODE
from megatron_epp.launch import runs
from scripts.bench.host.bench import MEGATRON, Counts, count, count_stages, shown
from tests.support.mcore import forked

MORE_CALLS = 150
"""Python calls that an action may add to those of Megatron's pass: about 15 us."""


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Counts]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "_forks", forked.forks)  # trains in ranks of the process that other tests fork from
        found = count(Path(tmp_path_factory.mktemp("host")))
    print(shown(found))
    return {(one.op, one.segments): one for one in found}


@pytest.mark.parametrize("op", ["F", "B"])
def test_a_packed_chunk_launches_no_more_kernels_than_megatrons_microbatch(
    counts: dict[tuple[str, int], Counts], op: str
) -> None:
    stock, packed = counts[f"{op} {MEGATRON}", 1], counts[op, 5]
    assert packed.launches <= stock.launches
    assert packed.ops <= 1.05 * stock.ops
    assert packed.calls <= stock.calls + MORE_CALLS


def test_a_further_segment_launches_no_kernel(counts: dict[tuple[str, int], Counts]) -> None:
    assert counts["F", 5].launches == counts["F", 2].launches
    assert counts["F", 5].ops - counts["F", 2].ops <= 3
    assert counts["B", 5].ops == counts["B", 2].ops


def test_a_slice_pays_for_its_cache_alone(counts: dict[tuple[str, int], Counts]) -> None:
    """In each of two layers it appends keys and values, and adds up the gradients of its prefix's."""
    assert counts["F", 1].launches - counts["F", 2].launches <= 2 * 3
    assert counts["B", 1].launches - counts["B", 2].launches <= 2 * 3


STAGES = {
    ("llama3-8b", "F", 1): (70, 35, 38, 861),
    ("llama3-8b", "F", 5): (56, 29, 36, 841),
    ("llama3-8b", "B", 1): (80, 40, 40, 447),
    ("llama3-8b", "B", 5): (68, 40, 40, 367),
    ("llama3-8b", "B-W", 1): (88, 32, 56, 645),
    ("llama3-8b", "B-W", 5): (76, 32, 56, 561),
    ("llama3-8b", "W", 1): (24, 16, 8, 377),
    ("llama3-8b", "W", 5): (24, 16, 8, 377),
    ("mixtral-8x7b", "F", 1): (245, 137, 147, 1877),
    ("mixtral-8x7b", "F", 5): (231, 131, 145, 1831),
    ("mixtral-8x7b", "B", 1): (284, 138, 120, 991),
    ("mixtral-8x7b", "B", 5): (272, 138, 120, 911),
    ("mixtral-8x7b", "B-W", 1): (200, 102, 136, 965),
    ("mixtral-8x7b", "B-W", 5): (188, 102, 136, 885),
    ("mixtral-8x7b", "W", 1): (116, 72, 36, 597),
    ("mixtral-8x7b", "W", 5): (116, 72, 36, 597),
}
"""Operations, launches, allocations and Python calls of an action of two layers. A change that lowers one lowers it here."""


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, int], Counts]:
    found = count_stages(Path(tmp_path_factory.mktemp("stages")))
    print(shown(found))
    return {(one.stage, one.op, one.segments): one for one in found}


@pytest.mark.parametrize("action", STAGES)
def test_an_action_of_a_large_stage_makes_the_host_do_no_more(
    stages: dict[tuple[str, str, int], Counts], action: tuple[str, str, int]
) -> None:
    found, (ops, launches, allocations, calls) = stages[action], STAGES[action]
    assert (found.ops, found.launches, found.allocations) == (ops, launches, allocations)
    assert found.calls <= 1.05 * calls  # Python's and torch's own differ a little by release


def test_formulas_are_within_the_range_of_the_counts(stages: dict[tuple[str, str, int], Counts]) -> None:
    for op, launch_us in (("F", H100_NODE.launch_forward_us), ("B", H100_NODE.launch_backward_us)):
        least_us, most_us = stages["llama3-8b", op, 5].host_us
        assert least_us < 2 * launch_us < most_us  # of two layers
        middle_us = (least_us + most_us) / 2
        assert 2 * launch_us == pytest.approx(middle_us, rel=0.1)
