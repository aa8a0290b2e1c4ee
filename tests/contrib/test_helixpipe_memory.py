"""HelixPipe: no rank keeps more than its plan says, nor much less."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.support.mcore import memory_cases, worker
from tests.support.mcore.memory_cases import COMMON, GROUPED, LLAMA
from tests.support.mcore.synthetic_documents import documents_of, write_pair

CASES = {
    "two ranks": (2, LLAMA, 4, ""),
    "four ranks, all recompute": (4, GROUPED, 8, "--epp-recompute 1"),
}
"""Ranks, model, its layers, and flags."""


def trained(folder: Path, ranks: int, model: str, layers: int, more: str) -> list[list[dict[str, Any]]]:
    lengths = [n + 1 for n in memory_cases.LENGTHS]
    data = write_pair(folder / "documents", documents_of(lengths, vocab_size=memory_cases.VOCABULARY))
    flags = f"{model} --pipeline-model-parallel-size {ranks} --num-layers {layers} --data-path {data} --epp-planner helixpipe "
    flags += f"--num-virtual-stages-per-pipeline-rank {layers // ranks} --epp-report-dir {folder / 'reports'} {more}"
    return worker.call(ranks, "tests.support.mcore.jobs.separate_attention:run", flags=[*COMMON, *shlex.split(flags)])


@pytest.mark.parametrize("name", CASES)
def test_ranks_keep_no_more_than_their_plans_say_nor_less_by_a_fifth(name: str, tmp_path: Path) -> None:
    """Plans count an attention's output twice, also where one rank attends and has the next stage."""
    ranks, *given = CASES[name]
    lines = [line for own in trained(tmp_path, ranks, *given) for line in own]
    ratios = [line["measured"] / line["planned"] for line in lines]
    print(f"\n{name}: measured over planned {min(ratios):.4f} to {max(ratios):.4f}")
    assert len(lines) == ranks * memory_cases.ITERATIONS
    assert max(ratios) <= 1
    assert min(ratios) >= 0.8
    assert {line["left"] for line in lines} == {0}
    assert {("1 full" in line["recompute"]) for line in lines} == {"recompute" in name}
