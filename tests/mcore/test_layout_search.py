"""A run's layout, given or found at its start: model, checkpoints and flags follow it, and a resumed run has it too."""

import argparse
import json
import re
import shlex
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from megatron.core import mpu
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.transformer.enums import LayerType

from megatron_epp.cost.model import PipelineCosts
from megatron_epp.mcore.arguments.consequences import prepare_epp_args
from megatron_epp.mcore.costs.megatron_facts import facts, run_facts
from megatron_epp.mcore.model.model_chunks import PlacedLayout, assign_stages, ends, layers_of_stages
from megatron_epp.mcore.patches import install
from megatron_epp.mcore.training import layout_search
from megatron_epp.plan import Op
from megatron_epp.plan.layout import Layout
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.serialize import load
from megatron_epp.planner.baselines.whole import rows_together
from megatron_epp.planner.orders.patterns import one_warm_up
from megatron_epp.port.run_facts import LayoutAnswer
from megatron_epp.tools.formulas import of_run as formulas
from tests.mcore.test_killed import losses
from tests.mcore.test_refusals import arguments as of_run
from tests.support.mcore.asking import ask_here
from tests.support.mcore.forked import job, launch, succeeded
from tests.support.mcore.launch import CHOOSING, PLANNED
from tests.support.mcore.megatron_flags import arguments
from tests.support.mcore.synthetic_documents import documents_of, long_tailed_lengths, write_pair
from tests.support.seeds import some_by_default

FLAGS = shlex.split(
    "--pipeline-model-parallel-size 2 --num-layers 8 --seq-length 192 --max-position-embeddings 192 --hidden-dropout 0.1 "
    "--vocab-size 1023 --lr-decay-style linear --lr-decay-iters 4 --log-interval 1000 --epp-slices 3"
)


LESS = "less time than Megatron's layers for batches like the first 8"
MODEL = "--seq-length 8192 --hidden-size 4096 --num-layers 24 --pipeline-model-parallel-size 4 --global-batch-size 2"
SMALL = "--seq-length 8192 --hidden-size 1024 --num-layers 8 --pipeline-model-parallel-size 2 --global-batch-size 4"


def about_to_build(model: str, *flags: str) -> argparse.Namespace:
    args = of_run(*model.split(), *flags, processes=4 if model == MODEL else 2)
    prepare_epp_args(args)
    args.padded_vocab_size, args.data_parallel_size, args.virtual_pipeline_model_parallel_size = 131_072, 1, None
    return args


def searched(args: argparse.Namespace) -> LayoutAnswer:
    return layout_search._new(args, argparse.Namespace(**vars(args)), None)


@pytest.fixture
def data(tmp_path: Path) -> str:
    return write_pair(tmp_path / "documents", documents_of(long_tailed_lengths(60, 250), vocab_size=1023))


def trained(*flags: object, begin: list[str] = PLANNED) -> str:
    return succeeded(launch(2, "-m", "megatron_epp.mcore.pretrain_gpt", *begin, *FLAGS, *flags)).output


def from_iteration(number: int, folder: Path) -> list[object]:
    """Return the flags of a run that goes on from an earlier iteration than the last one whose checkpoint is in a folder."""
    (folder / "latest_checkpointed_iteration.txt").write_text(str(number))
    return ["--load", folder]


def test_a_run_finds_its_layout_and_a_resumed_one_keeps_it_bitwise(data: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    given = ["--data-path", data, "--epp-layout", "auto", "--train-iters", 4]
    given += ["--save", folder, "--save-interval", 2, "--epp-report-dir"]
    said = trained(*given, tmp_path / "whole", "--epp-trace", 1)
    assert LESS in said
    layout = Layout.from_json((folder / "epp_layout.json").read_text())
    assert sum(layout.layers) == 8
    assert layout.layers[0] > layout.layers[1]  # the vocabulary's work is on the last stage
    assert layout.chosen_with["epp_layout"] == "auto"
    assert load(tmp_path / "whole" / "plan.json").num_layers == layout.layers
    said = trained(*given, tmp_path / "after", *from_iteration(2, folder), "--epp-memory-cap-gb", 100)
    assert "is kept, though it was chosen with other flags: --epp-memory-cap-gb was None and is 100.0" in said
    whole, after = (losses(tmp_path / name) for name in ("whole", "after"))
    assert sorted(whole) == [1, 2, 3, 4]
    assert after == {number: whole[number] for number in (3, 4)}


def test_layers_are_balanced_for_logits_that_blocks_compute_twice_and_for_what_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_search, "first_batches", lambda args: iter([(8192, 4000)]))
    monkeypatch.setattr(layout_search, "ask", ask_here)

    def layers(blocks: str) -> tuple[float, ...]:
        return searched(about_to_build(MODEL, "--epp-layout", "balanced", "--epp-loss-block-tokens", blocks)).layout.layers

    assert layers("auto") == layers("2048")
    assert layers("auto")[-1] < layers("0")[-1]

    def found(*more: str) -> tuple[PipelineCosts, tuple[bool, ...]]:
        args = about_to_build(MODEL, "--epp-layout", "auto", "--epp-vocab-parallel", "auto", *more)
        even = Layout((6,) * 4, Placement("looped", 4, 1))
        of_model = run_facts(args, ask_here)
        asked = layout_search.question(args, even, ((8192,),))
        sample = formulas.sample_of(of_model, formulas.profile_for_search(of_model), asked)
        return sample.costs_of(even), tuple(sample.vocabulary)

    whole, both = found()
    frozen, one = found("--epp-trained-parameters", "10000000")
    assert (both, one) == ((False, True), (False,))
    for stage, of_all in zip(frozen.stages, whole.stages, strict=True):
        assert stage.static.weights == of_all.static.weights
        assert 0 < stage.static.optimizer < 0.01 * of_all.static.optimizer
        assert stage.line("backward").per_token_us < 0.7 * of_all.line("backward").per_token_us


def test_logits_are_there_at_once_where_faster_and_room_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(layout_search, "first_batches", lambda args: iter([(8192, 4000, 2000, 500) * 4]))
    monkeypatch.setattr(layout_search, "ask", ask_here)
    choices = searched(args := about_to_build(SMALL, "--epp-layout", "auto"))
    assert choices.has_whole_logits
    for others in (("--epp-memory-cap-gb", "5.2"), ("--epp-loss-block-tokens", "1024")):
        assert not searched(about_to_build(SMALL, "--epp-layout", "auto", *others)).has_whole_logits
    monkeypatch.setattr(layout_search, "_obstacle", lambda flags, layout: "")
    args.epp_loss_block_tokens = 0
    kept = replace(choices.layout, chosen_with=facts(args, "layout"))
    (tmp_path / layout_search.FILE_NAME).write_text(kept.to_json())
    again = argparse.Namespace(**vars(args) | {"load": str(tmp_path), "epp_loss_block_tokens": "auto"})
    choices_then = layout_search._kept(again, argparse.Namespace(**vars(again)), facts(again, "layout"))
    assert choices_then is not None
    assert choices_then.has_whole_logits


def test_a_kept_layout_of_other_ranks_is_named_in_one_line_and_searched_again(data: str, tmp_path: Path) -> None:
    kept = tmp_path / "epp_layout.json"
    kept.write_text(Layout((3, 2, 2, 1), Placement("looped", 4, 1)).to_json())
    given = ["--data-path", data, "--epp-layout", "balanced", "--train-iters", 1, "--lr-warmup-iters", 0, "--load", tmp_path]
    said = trained(*given, "--epp-report-dir", tmp_path, "--epp-trace", 1)
    (line,) = [line for line in said.splitlines() if str(kept) in line]
    assert line.endswith("a layout for 4 pipeline ranks, where there are 2. The layout is searched again")
    assert load(tmp_path / "plan.json").num_layers == (5, 3)


PP, PER_RANK = "--pipeline-model-parallel-size", "--num-virtual-stages-per-pipeline-rank"
EVERY = [("looped", 1), ("looped", 2), ("v", 2), ("looped", 4)]


@pytest.mark.parametrize(
    ("flags", "megatron", "layout", "placements"),
    [
        ("", {}, "auto", EVERY),
        ("--epp-layout auto", {}, "auto", EVERY),
        ("--epp-placement v", {}, "auto", [("v", 2)]),
        ("--epp-placement looped", {}, "auto", [each for each in EVERY if each[0] == "looped"]),
        ("", {"num_virtual_stages_per_pipeline_rank": 2}, "auto", [("looped", 2), ("v", 2)]),
        ("--epp-layout even", {}, "4,4", []),
        ("--epp-layout 5,3", {}, "5,3", []),
        # what flags say stays, whatever else is chosen
        ("", {"pipeline_model_parallel_layout": "Et*5|t*3L"}, None, []),
        ("--epp-layout even", {"pipeline_model_parallel_layout": "Et*5|t*3L"}, None, []),
        ("", {"decoder_first_pipeline_num_layers": 3}, None, []),
        ("", {"num_layers_per_virtual_pipeline_stage": 2}, None, []),
        ("", {"hybrid_layer_pattern": "*-*-|*-*-"}, None, []),
        # where others could not be kept, or planned
        ("", {"save": "x", "ckpt_format": "torch"}, None, []),
        ("", {"load": "x", "ckpt_format": "zarr"}, None, []),
        ("--epp-planner 1f1b", {}, None, []),
        ("", {"pipeline_model_parallel_size": 1}, None, []),
    ],
)
def test_open_layouts_are_chosen(
    flags: str, megatron: dict[str, object], layout: str | None, placements: list[tuple[str, int]]
) -> None:
    args = arguments(*flags.split(), **{"pipeline_model_parallel_size": 2} | megatron)
    prepare_epp_args(args)
    assert args.epp_layout == layout
    assert args.epp_open_placements == placements


def _one(pre_process: bool = True, post_process: bool = True) -> None:
    """Build a model as scripts did before there were several on a rank."""


def _each(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> None:
    """Build the model of any stage."""


@pytest.mark.parametrize(
    ("provider", "flags", "placements"),
    [(_one, "", EVERY[:1]), (_one, "--epp-placement v", [("v", 2)]), (_each, "", EVERY), (None, "", EVERY)],
)
def test_a_script_that_builds_one_model_for_a_rank_gets_no_other_unless_it_asks(
    provider: object, flags: str, placements: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments(*flags.split(), pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=None)
    prepare_epp_args(args)
    monkeypatch.setattr(install, "_provider", provider)
    monkeypatch.setattr(install, "document_args", lambda: args)
    monkeypatch.setattr(install, "_settle_choices", lambda args: None)
    install._choose_stages(lambda virtual_pipeline_model_parallel_size=None: None)
    assert args.epp_open_placements == placements


@pytest.mark.parametrize(
    ("flags", "megatron", "settled"),
    [
        ("", {}, "auto"),
        ("--epp-split-weight-gradient", {}, True),
        ("--epp-split-weight-gradient off", {}, False),
        ("", {"pipeline_model_parallel_size": 1}, False),
        ("--epp-planner 1f1b", {}, False),
        ("--epp-schedule whole", {}, False),
        ("", {"hybrid_layer_pattern": "*-*-|*-*-"}, False),
        ("", {"transformer_impl": "transformer_engine", "add_bias_linear": True}, False),
        ("", {"transformer_impl": "transformer_engine", "add_bias_linear": False}, "auto"),
    ],
)
def test_weight_gradients_are_open_where_layers_can_delay(flags: str, megatron: dict[str, object], settled: object) -> None:
    args = arguments(*flags.split(), **{"pipeline_model_parallel_size": 2} | megatron)
    prepare_epp_args(args)
    assert args.epp_split_weight_gradient == settled


def test_a_run_without_flags_says_in_a_line_what_was_chosen_and_one_with_them_chooses_not(data: str, tmp_path: Path) -> None:
    given = ["--data-path", data, "--train-iters", 1, "--lr-warmup-iters", 0, "--epp-trace", 1, "--epp-report-dir"]
    said = trained(*given, tmp_path / "chosen", begin=CHOOSING)
    (line,) = [line for line in said.splitlines() if "layout_search:layout: " in line]
    assert re.search(rf"layout: stages of .* layers.*: \d+\.\d% {LESS}", line)
    assert load(tmp_path / "chosen" / "plan.json").num_layers != (4, 4)
    assert "layout_search:" not in trained(*given, tmp_path / "even")
    assert load(tmp_path / "even" / "plan.json").num_layers == (4, 4)


@some_by_default("stages", [f"{PER_RANK} 4", "--epp-placement v"], 1)
def test_a_resumed_run_keeps_stages_that_flags_no_longer_ask_for(data: str, tmp_path: Path, stages: str) -> None:
    given = ["--data-path", data, "--train-iters", 4, "--save", tmp_path / "saved", "--save-interval", 2, "--epp-report-dir"]
    trained(*given, tmp_path / "whole", *shlex.split(stages), begin=CHOOSING)
    said = trained(*given, tmp_path / "after", *from_iteration(2, tmp_path / "saved"), begin=CHOOSING)
    assert f", {4 if PER_RANK in stages else 2} per rank" in said
    whole, after = (losses(tmp_path / name) for name in ("whole", "after"))
    assert sorted(whole) == [1, 2, 3, 4]
    assert after == {number: whole[number] for number in (3, 4)}


@pytest.mark.parametrize("form", ["", "--dist-ckpt-optim-fully-reshardable"])
def test_a_checkpoint_of_stock_goes_on_in_layers_that_its_optimizer_state_allows(data: str, tmp_path: Path, form: str) -> None:
    """Any, where that is saved for all layouts; and Megatron goes on from a checkpoint of chosen ones."""
    given = ["--data-path", data, "--use-distributed-optimizer", "--untie-embeddings-and-output-weights", *form.split()]
    given += ["--train-iters", 4, "--hidden-dropout", 0, "--save-interval", 1]
    stock = [*CHOOSING, "--epp-schedule", "stock", "--epp-layout", "even"]
    trained(*given, "--save", tmp_path / "stock", "--epp-report-dir", tmp_path / "reference", begin=stock)
    ours = ["--save", tmp_path / "ours", "--epp-report-dir", tmp_path / "after"]
    said = trained(*given, *from_iteration(2, tmp_path / "stock"), *ours, begin=CHOOSING)
    assert ("since no others can load its optimizer state" in said) == (not form)
    reference, after = losses(tmp_path / "reference"), losses(tmp_path / "after")
    assert after == pytest.approx({number: reference[number] for number in (3, 4)}, rel=1e-5)
    trained(*given, *from_iteration(3, tmp_path / "ours"), "--epp-report-dir", tmp_path / "back", begin=stock)
    assert losses(tmp_path / "back") == pytest.approx({4: reference[4]}, rel=1e-5)


ITERATIONS = 5


def test_a_layout_numbers_layers_by_stage_wherever_the_stage_is() -> None:
    placement = Placement("v", 2, 2)
    layout = PlacedLayout([["embedding", "decoder"], ["decoder", "decoder"], [], ["decoder", "loss"]], placement)
    layout.validate_layer_layout(num_layers=4, mtp_num_layers=None)
    numbers = {}
    for rank in range(2):
        for chunk, stage in enumerate(placement.stages(rank)):
            offset = layout.get_layer_offset(vp_stage=chunk, pp_rank=rank)
            numbers[stage] = list(range(offset, offset + layout.layout[rank][chunk].count(LayerType.decoder)))
    assert numbers == {0: [0], 1: [1, 2], 2: [], 3: [3]}


@pytest.mark.parametrize(("rows", "ranks", "laps"), [(8, 4, 2), (9, 4, 3), (7, 2, 2), (13, 4, 2)])
def test_planned_baselines_interleave_rows_as_megatron_does(rows: int, ranks: int, laps: int) -> None:
    together, own = rows_together(rows, ranks), Placement("looped", ranks, laps)
    table = get_schedule_table(rows, laps, together)
    for rank, row in enumerate(one_warm_up([range(c, c + 1) for c in range(rows)], own, together)):
        forwards = [(action.chunk, action.stage // ranks) for action in row if action.op is Op.F]
        backwards = [(action.chunk, laps - 1 - action.stage // ranks) for action in row if action.op is Op.B]
        assert forwards == backwards == [*map(tuple, table)]
        ahead = [action.op for action in row].index(Op.B)
        assert ahead == min(len(table), 1 + 2 * (ranks - rank - 1) + (laps - 1) * together)


def model(chunks: int, layers: int = 12, first: int | None = None, last: int | None = None, ends: bool = False) -> Namespace:
    return Namespace(
        pipeline_model_parallel_layout=None,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        num_layers=layers,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        account_for_embedding_in_pipeline_split=ends,
        account_for_loss_in_pipeline_split=ends,
    )


@pytest.mark.parametrize(
    ("flags", "chunks", "layers"),
    [
        ({}, 1, [6, 6]), ({}, 3, [2] * 6), ({"first": 4}, 2, [2, 4, 2, 4]), ({"first": 8, "last": 4}, 4, [2, 1] * 4),
        ({"layers": 10, "ends": True}, 2, [2, 3, 3, 2]),
    ],
)  # fmt: skip
def test_layers_are_shared_out_as_megatrons_flags_say(flags: dict[str, int], chunks: int, layers: list[int]) -> None:
    assert layers_of_stages(model(chunks, **flags), 2, chunks) == layers


def test_a_run_goes_on_from_its_checkpoint_with_its_stages_elsewhere(tmp_path: Path) -> None:
    """From one process to two replicas there and back, whose optimizer states are shared out and whose embedding is tied; from
    these to four ranks there and back, then to a looped pipeline, and back to one process. Layers are shared out unevenly, and
    some stages have none.
    """
    succeeded(job(1, "placement", folder=tmp_path, timeout_s=900))
    report = json.loads((tmp_path / "report.json").read_text())
    whole = report["whole"]["losses"]
    assert len(whole) == ITERATIONS
    for done, name in enumerate(("there and back", "four ranks", "looped", "alone"), start=1):
        assert report[name]["losses"] == pytest.approx(whole[done:], rel=1e-5), name
        assert report[name]["apart"] <= 1e-5, name
    # Two replicas of two ranks with two stages each overlap gathers, from the second of their four iterations on.
    assert report["gathers"] == (4 - 1) * 4 * 2
    # Megatron reduces all of a rank's later model chunk by one collective, here also the tied embedding, which has a bucket of
    # its own. A second one would hold up the first chunk's compute where a GPU has one hardware queue
    # (`test_runtime_launches.py`).
    groups = {(rank, chunk): number for rank, chunk, number in report["reductions"]}
    assert groups.keys() == {(rank, chunk) for rank in range(2) for chunk in range(2)}
    assert [groups[rank, 1] for rank in range(2)] == [1, 0]  # stage 2 has no layers


def test_layers_of_stages_there_and_back_are_laid_out_with_both_ends() -> None:
    args = Namespace(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, epp_placement="v")
    config = model(2, layers=4)
    assign_stages(config, args)
    layout = config.pipeline_model_parallel_layout
    named = [[layer.name for layer in layout.layout[rank][chunk]] for rank, chunk in ((0, 0), (1, 0), (1, 1), (0, 1))]
    assert named == [["embedding", "decoder"], ["decoder"], ["decoder"], ["decoder", "loss"]]
    assign_stages(config, args)
    assert config.pipeline_model_parallel_layout is layout


def test_a_looped_pipeline_keeps_megatrons_own_settings() -> None:
    args = Namespace(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=None, epp_placement="looped")
    config = model(1, first=3)
    before = vars(config).copy()
    assign_stages(config, args)
    assert vars(config) == before


@pytest.mark.parametrize(
    ("placement", "rank", "chunk", "first", "last"),
    [
        ("v", 0, None, True, False), ("v", 0, 1, False, True), ("v", 1, 0, False, False), ("looped", 0, 1, False, False),
        ("looped", 1, 1, False, True),
    ],
)  # fmt: skip
def test_the_chunks_at_the_models_ends_have_the_embedding_and_the_loss(
    monkeypatch: pytest.MonkeyPatch, placement: str, rank: int, chunk: int | None, first: bool, last: bool
) -> None:
    monkeypatch.setattr(mpu, "get_pipeline_model_parallel_rank", lambda: rank)
    args = Namespace(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, epp_placement=placement)
    assert ends(args, chunk) == {"pre_process": first, "post_process": last}
