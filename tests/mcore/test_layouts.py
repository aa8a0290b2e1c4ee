"""Stages that begin inside a layer: checkpoints, random masks, memory, and what is refused. `test_matrix.py` trains them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_epp.mcore.arguments import ArgumentError
from megatron_epp.mcore.arguments.consequences import prepare_epp_args
from megatron_epp.mcore.model.half_layers import numbers
from megatron_epp.mcore.model.model_chunks import placed_pattern
from megatron_epp.plan import EppError
from megatron_epp.plan.layout import Layout, StageLayers
from megatron_epp.plan.placement import Placement
from tests.support.mcore.forked import job, returned
from tests.support.mcore.jobs.batches import CUT_RUNS
from tests.support.mcore.jobs.recompute_modes import CUT_RUNS as LEVELS
from tests.support.mcore.megatron_flags import arguments


@pytest.fixture(scope="module")
def report_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Return the worker's report of a part of it."""

    @functools.cache
    def report(part: str) -> dict[str, Any]:
        return returned(job(1, "layouts", folder=tmp_path_factory.mktemp("layouts"), part=part, timeout_s=300))

    return report


@pytest.mark.parametrize("name", ["one key for all layers", pytest.param("a key for every layer", marks=pytest.mark.slow)])
def test_a_checkpoint_of_cut_layers_is_one_of_whole_layers(report_of: Callable[[str], dict[str, Any]], name: str) -> None:
    found = report_of(name)
    assert found["names"] > found["of the optimizer"] > 0
    assert found["missing"] == []
    assert found["apart"] == []


def test_halves_draw_the_random_masks_of_the_whole_layer(report_of: Callable[[str], dict[str, Any]]) -> None:
    found = report_of("masks")
    assert found["outputs"]
    assert found["gradients"]
    assert found["names"]
    assert found["shared"] == []


def test_chunks_take_the_segments_of_their_stages() -> None:
    assert placed_pattern("*-*|-|*|-*-", Placement("v", 2, 2)) == "*-*|-|-*-|*"
    with pytest.raises(EppError, match=r"--epp-placement v needs .* has 2 stages of 4"):
        placed_pattern("*-|*-", Placement("v", 2, 2))
    with pytest.raises(EppError, match="on its own last stage"):
        placed_pattern("*-|-|*|-*-/*-", Placement("v", 2, 2))


@pytest.mark.slow
def test_a_hybrid_model_trains_there_and_back(report_of: Callable[[str], dict[str, Any]]) -> None:
    found = report_of("hybrid")
    assert found["placement"] == [0, 1, 1, 0]
    assert found["losses"][1] == pytest.approx(found["losses"][0], rel=1e-5)
    assert found["apart"] <= 1e-5


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By training and rank: a line for every plan that ran."""
    folder = tmp_path_factory.mktemp("batches")
    found = returned(job(1, "batches", folder=folder, batches=2, names=[*CUT_RUNS], timeout_s=400))
    assert not [ranks for ranks in found.values() if "error" in ranks], found
    return found


LEAST = {"cut layers": 0.97, "cut layers, weights apart": 0.9}
"""Least measured bytes over planned. Of whole layers and of an MLP and an attention that count as one, plans take the larger
peak; of a stage of one or two layers with split weight gradients that is up to 9 % too much."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CUT_RUNS)
def test_no_plan_of_cut_layers_holds_more_than_it_says(memory: dict[str, Any], name: str) -> None:
    for lines in memory[name]:
        assert max(line["measured"] - line["planned"] for line in lines) <= 64
        assert min(line["measured"] / line["planned"] for line in lines) >= LEAST[name]
        assert {line["left"] for line in lines} == {0}
        assert all(0.96 <= line["host"] / line["planned_host"] <= 1.03 for line in lines if line["planned_host"])


@pytest.fixture(scope="module")
def levels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By training and rank: which gradients differ from those without recompute, by level."""
    return returned(job(1, "recompute_modes", folder=tmp_path_factory.mktemp("levels"), names=[*LEVELS], timeout_s=300))


@pytest.mark.slow
@pytest.mark.parametrize("name", LEVELS)
def test_gradients_of_cut_layers_are_those_without_recompute_and_offload(levels: dict[str, Any], name: str) -> None:
    for facts in levels[name]:
        assert {level: differing for level, differing in facts["differ"].items() if differing} == {}
        assert facts["kernels"][""] < facts["kernels"]["whole"] <= 2 * facts["kernels"][""]
        assert facts["peaks"]["whole"] < facts["peaks"]["linear"] < facts["peaks"]["mlp"] < facts["peaks"][""]
        assert facts["away"]["hosted"] > 0


@pytest.mark.parametrize(
    ("layers", "wanted"),
    [
        (StageLayers(0, False, 2, False), [0, 1]),
        (StageLayers(0, False, 2, True), [0, 1, 2]),
        (StageLayers(2, True, 1, False), [1, 0]),
        (StageLayers(2, True, 1, True), [1, 0, 1]),
        (StageLayers(2, True, 0, False), [0]),
    ],
)
def test_whole_layers_recompute_before_halves(layers: StageLayers, wanted: list[int]) -> None:
    assert numbers(layers) == wanted


RANKS, PER_RANK = "pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank"


@pytest.mark.parametrize(
    ("flags", "megatron", "says"),
    [
        ("3,3,2", {}, "--epp-layout 3,3,2: it has 3 stages, .* multiple of --pipeline-model-parallel-size 2"),
        ("4.25,3.75", {}, "--epp-layout 4.25,3.75: it is neither auto, even, balanced, a file, nor layers"),
        ("4.5,3.5", {"pipeline_model_parallel_layout": "Et*4|t*4L"}, "--pipeline-model-parallel-layout .* give one of them"),
        ("4.5,3.5", {"decoder_first_pipeline_num_layers": 3}, "--decoder-first-pipeline-num-layers 3 each say"),
        ("4.5,3.5", {"decoder_last_pipeline_num_layers": 3}, "--decoder-last-pipeline-num-layers 3 each say"),
        ("4.5,3.5", {"account_for_loss_in_pipeline_split": True}, "--account-for-loss-in-pipeline-split True each say"),
        ("4.5,3.5", {"account_for_embedding_in_pipeline_split": True}, "--account-for-embedding-in-pipeline-split True each"),
        ("4.5,3.5", {PER_RANK: 2}, "--epp-layout 4.5,3.5 puts 1 stages on a rank, and --num-virtual.* says 2"),
        ("4.5,3.5 --epp-schedule stock", {}, r"cuts layers \(4.5, 3.5\), which --epp-schedule stock cannot run"),
        (
            "4.5,3.5",
            {"save": "x", "ckpt_format": "zarr"},
            "--save with --ckpt-format zarr cannot keep by layers: use torch_dist",
        ),
        ("4.5,3.5", {"hybrid_layer_pattern": "*-|*-"}, "is for GPTModel: a hybrid model's stages begin where"),
        ("4,4 --epp-placement v", {}, "--epp-placement v needs several stages on a rank"),
        ("2,2,2,2 --epp-schedule stock --epp-placement v", {}, "--epp-schedule stock runs .* looped"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_in_a_line(flags: str, megatron: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says) as refusal:
        prepare_epp_args(arguments("--epp-layout", *flags.split(), **{RANKS: 2} | megatron))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("flags", "given"),
    [
        ("5,3", "Et*5|t*3L"),
        ("4.5,3.5", "Et*5|t*3L"),
        ("1.5,2,0.5,4 --epp-placement v", "Et*2|t*2||t*4L"),
        ("2,2,2,2 --epp-schedule stock", "Et*2|t*2|t*2|t*2L"),
    ],
)
def test_megatron_is_told_the_stages(flags: str, given: str) -> None:
    args = arguments("--epp-layout", *flags.split(), **{RANKS: 2})
    prepare_epp_args(args)
    assert args.pipeline_model_parallel_layout == given


def test_a_file_says_the_placement_too_and_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "layout.json"
    path.write_text(Layout((3, 5, 4, 4), Placement("v", 2, 2)).to_json())
    args = arguments("--epp-layout", str(path), **{RANKS: 2})
    prepare_epp_args(args)
    assert (args.epp_layout, args.epp_placement) == ("1.5,2.5,2,2", "v")
    path.write_text(json.dumps({}))
    with pytest.raises(ArgumentError, match=r"layout\.json: .*schema None version None, where"):
        prepare_epp_args(arguments("--epp-layout", str(path), **{RANKS: 2}))
    with pytest.raises(ArgumentError, match=r"--epp-layout nowhere\.json: it is neither auto, even, balanced, a file"):
        prepare_epp_args(arguments("--epp-layout", "nowhere.json", **{RANKS: 2}))
