"""With plans an action makes the host do no more than with Megatron's schedule, whatever is packed into the chunk."""

from pathlib import Path

import pytest

from scripts.bench.host import Counts, count, shown
from scripts.bench.host_rank import MEGATRON
from tests.support.mcore import forked

MORE_CALLS = 150
"""Python calls that an action may add to those of Megatron's pass: about 15 us."""


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Counts]:
    with pytest.MonkeyPatch.context() as patch:
        forked.fork_runs(patch)
        found = count(Path(tmp_path_factory.mktemp("host")))
    print(shown(found))
    return {(one.op, one.segments): one for one in found}


@pytest.mark.parametrize("op", ["F", "B"])
def test_a_packed_chunk_launches_no_more_kernels_than_a_microbatch(counts: dict[tuple[str, int], Counts], op: str) -> None:
    stock, packed = counts[f"{op} {MEGATRON}", 1], counts[op, 5]
    assert packed.launches <= stock.launches
    assert packed.ops <= 1.05 * stock.ops
    assert packed.calls <= stock.calls + MORE_CALLS


def test_a_further_segment_launches_no_kernel(counts: dict[tuple[str, int], Counts]) -> None:
    assert counts["F", 5].launches <= counts["F", 2].launches
    assert counts["F", 5].ops - counts["F", 2].ops <= 3
    assert counts["B", 5].ops == counts["B", 2].ops


def test_a_slice_pays_for_its_cache_alone(counts: dict[tuple[str, int], Counts]) -> None:
    """In each of two layers it appends keys and values, and adds up the gradients of its prefix's."""
    assert counts["F", 1].launches - counts["F", 2].launches <= 2 * 3
    assert counts["B", 1].launches - counts["B", 2].launches <= 2 * 3
