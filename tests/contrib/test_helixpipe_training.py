"""HelixPipe trains: no rank keeps more than its plan says, nor much less; checkpoints are those of Megatron's schedule."""

import shlex
from pathlib import Path
from typing import Any

import torch

from scripts.parity.cells import CONTEXT, LENGTHS, VOCABULARY, common_flags
from scripts.random_documents import write_documents
from tests.support.mcore import memory_cases, worker
from tests.support.mcore.matrix import SMALL_BATCH, case, train
from tests.support.mcore.memory_cases import COMMON, GROUPED, LLAMA
from tests.support.mcore.synthetic_documents import documents_of, write_pair
from tests.support.seeds import some_by_default

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


@some_by_default("name", [*CASES], 1)
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


def test_megatrons_schedule_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    own = case("pp2 looped2", "--epp-planner helixpipe", "gpt2")
    documents = write_documents(tmp_path / "documents", LENGTHS, VOCABULARY)
    common = [*common_flags(1, CONTEXT, SMALL_BATCH, validates=False), "--data-path", documents]
    saved = ["--save", str(tmp_path / "saved"), "--save-interval", "1"]
    ends = train(2, [*own.elastic_flags(common), *saved])
    begins = train(2, [*own.stock_flags(common), "--load", str(tmp_path / "saved"), "--finetune"])
    expected, found = (
        {name: tensor for rank in ranks for name, tensor in rank.items()}
        for ranks in ([rank.final for rank in ends], [rank.initial for rank in begins])
    )
    assert expected.keys() == found.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []
