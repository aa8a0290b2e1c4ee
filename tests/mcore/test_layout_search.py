"""The layout that a run finds at its start: it trains with it, keeps it with its checkpoints, and a resumed run has it too."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megatron_epp.cost import PipelineCosts
from megatron_epp.mcore.arguments.consequences import prepare_epp_args
from megatron_epp.mcore.costs.shape import for_search
from megatron_epp.mcore.training import layout_search
from megatron_epp.plan.layout import Layout
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.serialize import load
from tests.mcore.test_refusals import arguments as of_run
from tests.mcore.test_resume import losses
from tests.support.mcore.forked import launch
from tests.support.mcore.launch import PLANNED
from tests.support.mcore.synthetic_documents import documents_of, long_tailed_lengths, write_pair

FLAGS = shlex.split(
    "--pipeline-model-parallel-size 2 --num-layers 8 --seq-length 192 --max-position-embeddings 192 --hidden-dropout 0.1 "
    "--vocab-size 1023 --lr-decay-style linear --lr-decay-iters 4 --log-interval 1000 --epp-slices 3"
)


def trained(*flags: object) -> str:
    """Train on two ranks and return the output."""
    done = launch(2, "-m", "megatron_epp.mcore.pretrain_gpt", *PLANNED, *FLAGS, *flags)
    assert done.returncode == 0, done.output[-5000:]
    return done.output


def test_a_run_finds_its_layout_and_a_resumed_one_keeps_it_bitwise(tmp_path: Path) -> None:
    data = write_pair(tmp_path / "documents", documents_of(long_tailed_lengths(60, 250), vocab_size=1023))
    folder = tmp_path / "checkpoints"
    given = ["--data-path", data, "--epp-layout", "auto", "--train-iters", 4]

    said = trained(*given, "--epp-report-dir", tmp_path / "whole", "--epp-trace", 1)
    assert "less time than Megatron's layers for batches like the first 8" in said
    saving = ["--save", folder, "--save-interval", 2]
    trained(*given, *saving, "--exit-interval", 2, "--epp-report-dir", tmp_path / "before")
    layout = Layout.from_json((folder / "epp_layout.json").read_text())
    assert sum(layout.halves) == 16
    assert layout.halves[0] > layout.halves[1]  # the vocabulary's work is on the last stage
    assert layout.chosen_with["epp_layout"] == "auto"
    assert load(tmp_path / "whole" / "plan.json").num_layers == tuple(count // 2 for count in layout.halves)

    resumed = ["--load", folder, "--epp-memory-cap-gb", 100]
    said = trained(*given, *saving, *resumed, "--epp-report-dir", tmp_path / "after")
    assert "is kept, though it was chosen with other flags: --epp-memory-cap-gb was None and is 100.0" in said
    whole, before, after = (losses(tmp_path / name) for name in ("whole", "before", "after"))
    assert sorted(whole) == [1, 2, 3, 4]
    assert before | after == whole


def test_layers_are_balanced_for_logits_that_blocks_of_the_loss_compute_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_search, "first_batches", lambda args: iter([(8192, 4000)]))

    def layers(blocks: str) -> tuple[float, ...]:
        model = "--seq-length 8192 --hidden-size 4096 --num-layers 24 --pipeline-model-parallel-size 4 --global-batch-size 2"
        args = of_run(*model.split(), "--epp-layout", "balanced", "--epp-loss-block-tokens", blocks, processes=4)
        prepare_epp_args(args)
        args.padded_vocab_size, args.data_parallel_size, args.virtual_pipeline_model_parallel_size = 131_072, 1, None
        return layout_search._new(args, None).layers

    assert layers("auto") == layers("2048")
    assert layers("auto")[-1] < layers("0")[-1]


def test_a_search_knows_how_much_of_the_model_trains() -> None:
    model = "--seq-length 8192 --hidden-size 4096 --num-layers 24 --pipeline-model-parallel-size 4 --global-batch-size 2"

    def found(*more: str) -> tuple[PipelineCosts, tuple[bool, ...]]:
        args = of_run(*model.split(), "--epp-layout", "auto", "--epp-vocab-parallel", "auto", *more, processes=4)
        prepare_epp_args(args)
        args.padded_vocab_size, args.data_parallel_size, args.virtual_pipeline_model_parallel_size = 131_072, 1, None
        even = Layout((12,) * 4, Placement("looped", 4, 1))
        sample = layout_search.sample_of(args, for_search(args), even, ((8192,),))
        return sample.costs_of(even), tuple(sample.vocabulary)

    whole, both = found()
    frozen, one = found("--epp-trained-parameters", "10000000")
    assert (both, one) == ((False, True), (False,))
    for stage, of_all in zip(frozen.stages, whole.stages, strict=True):
        assert stage.static.weights == of_all.static.weights
        assert 0 < stage.static.optimizer < 0.01 * of_all.static.optimizer
        assert stage.line("backward").per_token_us < 0.7 * of_all.line("backward").per_token_us


def test_a_kept_layout_of_other_ranks_is_named_in_one_line_and_searched_again(tmp_path: Path) -> None:
    data = write_pair(tmp_path / "documents", documents_of(long_tailed_lengths(60, 250), vocab_size=1023))
    kept = tmp_path / "epp_layout.json"
    kept.write_text(Layout((6, 5, 4, 1), Placement("looped", 4, 1)).to_json())
    given = ["--data-path", data, "--epp-layout", "balanced", "--train-iters", 1, "--lr-warmup-iters", 0, "--load", tmp_path]
    said = trained(*given, "--epp-report-dir", tmp_path, "--epp-trace", 1)
    (line,) = [line for line in said.splitlines() if str(kept) in line]
    assert line.endswith("a layout for 4 pipeline ranks, where there are 2. The layout is searched again")
    assert load(tmp_path / "plan.json").num_layers == (5, 3)
