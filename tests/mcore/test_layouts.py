"""Stages that begin inside a layer: checkpoints, random masks, and what is refused.

`test_matrix.py` trains them, `test_memory.py` and `test_recompute_modes.py` look at their memory and recompute.
"""

import json
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
from tests.support.mcore.megatron_flags import arguments


def report_of(part: str, folder: Path) -> dict[str, Any]:
    return returned(job(1, "layouts", folder=folder, part=part, timeout_s=300))


@pytest.mark.slow  # a key for all layers, as most models have, is in `test_vocabulary_parallel.py`
def test_a_checkpoint_of_cut_layers_with_keys_of_their_own_is_one_of_whole_layers(tmp_path: Path) -> None:
    found = report_of("checkpoints", tmp_path)
    assert found["names"] > found["of the optimizer"] > 0
    assert found["missing"] == []
    assert found["apart"] == []


def test_halves_draw_the_random_masks_of_the_whole_layer(tmp_path: Path) -> None:
    found = report_of("masks", tmp_path)
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
def test_a_hybrid_model_trains_there_and_back(tmp_path: Path) -> None:
    found = report_of("hybrid", tmp_path)
    assert found["placement"] == [0, 1, 1, 0]
    assert found["losses"][1] == pytest.approx(found["losses"][0], rel=1e-5)
    assert found["apart"] <= 1e-5


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
        ("4.5,3.5", {"decoder_first_pipeline_num_layers": 3}, "--decoder-first-pipeline-num-layers 3 says"),
        ("4.5,3.5", {"account_for_embedding_in_pipeline_split": True}, "--account-for-embedding-in-pipeline-split True says"),
        ("4.5,3.5", {PER_RANK: 2}, "--epp-layout 4.5,3.5 puts 1 stages on a rank, and --num-virtual.* says 2"),
        ("4.5,3.5 --epp-schedule stock", {}, r"cuts layers \(4.5, 3.5\), which --epp-schedule stock cannot run"),
        (
            "4.5,3.5",
            {"save": "x", "ckpt_format": "zarr"},
            "--save with --ckpt-format zarr cannot keep by layers: use torch_dist",
        ),
        ("4.5,3.5", {"hybrid_layer_pattern": "*-|*-"}, "is for GPTModel: a hybrid model's stages begin where"),
        ("4,4 --epp-placement v", {}, "--epp-placement v needs several stages on a rank"),
        ("2,2,2,2 --epp-schedule stock --epp-placement v", {}, "--epp-placement v is for --epp-schedule elastic"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_in_a_line(flags: str, megatron: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says) as refusal:
        prepare_epp_args(arguments("--epp-layout", *flags.split(), **{RANKS: 2} | megatron))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("flags", "chunks", "layout", "given"),
    [
        ("5,3", None, "5,3", "Et*5|t*3L"),
        ("4.5,3.5", None, "4.5,3.5", "Et*5|t*3L"),
        ("1.5,2,0.5,4 --epp-placement v", None, "1.5,2,0.5,4", "Et*2|t*2||t*4L"),
        ("2,2,2,2 --epp-schedule stock", None, "2,2,2,2", "Et*2|t*2|t*2|t*2L"),
        # even ones, until data decide
        ("even", None, "4,4", "Et*4|t*4L"),
        ("auto", None, "auto", "Et*4|t*4L"),
        ("balanced", 2, "balanced", "Et*2|t*2|t*2|t*2L"),
        ("even --epp-placement v", 2, "2,2,2,2", "Et*2|t*2|t*2|t*2L"),
    ],
)
def test_megatron_is_told_the_stages(flags: str, chunks: int | None, layout: str, given: str) -> None:
    args = arguments("--epp-layout", *flags.split(), **{RANKS: 2, PER_RANK: chunks})
    prepare_epp_args(args)
    assert (args.epp_layout, args.pipeline_model_parallel_layout) == (layout, given)


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
