"""Layouts: what Megatron is told of them, what is refused, and a hybrid model's segments. `test_matrix.py` trains them."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_epp.mcore.arguments import ArgumentError
from megatron_epp.mcore.arguments.consequences import prepare_epp_args
from megatron_epp.mcore.model.model_chunks import placed_pattern
from megatron_epp.plan import EppError
from megatron_epp.plan.layout import Layout
from megatron_epp.plan.placement import Placement
from tests.support.mcore.forked import job, returned
from tests.support.mcore.megatron_flags import arguments


def test_chunks_take_the_segments_of_their_stages() -> None:
    assert placed_pattern("*-*|-|*|-*-", Placement("v", 2, 2)) == "*-*|-|-*-|*"
    with pytest.raises(EppError, match=r"--epp-placement v needs .* has 2 stages of 4"):
        placed_pattern("*-|*-", Placement("v", 2, 2))
    with pytest.raises(EppError, match="on its own last stage"):
        placed_pattern("*-|-|*|-*-/*-", Placement("v", 2, 2))


@pytest.mark.slow
def test_a_hybrid_model_trains_there_and_back(tmp_path: Path) -> None:
    found = returned(job(1, "layouts", folder=tmp_path, timeout_s=300))
    assert found["placement"] == [0, 1, 1, 0]
    assert found["losses"][1] == pytest.approx(found["losses"][0], rel=1e-5)
    assert found["apart"] <= 1e-5


RANKS, PER_RANK = "pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank"


@pytest.mark.parametrize(
    ("flags", "megatron", "says"),
    [
        ("3,3,2", {}, "--epp-layout 3,3,2: it has 3 stages, .* multiple of --pipeline-model-parallel-size 2"),
        ("4.5,3.5", {}, "--epp-layout 4.5,3.5: stages begin between layers.* such as 4,4"),
        ("5,3", {"pipeline_model_parallel_layout": "Et*4|t*4L"}, "--pipeline-model-parallel-layout .* give one of them"),
        ("5,3", {"decoder_first_pipeline_num_layers": 3}, "--decoder-first-pipeline-num-layers 3 says"),
        ("5,3", {"account_for_embedding_in_pipeline_split": True}, "--account-for-embedding-in-pipeline-split True says"),
        ("5,3", {PER_RANK: 2}, "--epp-layout 5,3 puts 1 stages on a rank, and --num-virtual.* says 2"),
        ("5,3", {"hybrid_layer_pattern": "*-|*-"}, "is for GPTModel: a hybrid model's stages begin where"),
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
        ("2,2,0,4 --epp-placement v", None, "2,2,0,4", "Et*2|t*2||t*4L"),
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
    path.write_text(Layout((1, 3, 2, 2), Placement("v", 2, 2)).to_json())
    args = arguments("--epp-layout", str(path), **{RANKS: 2})
    prepare_epp_args(args)
    assert (args.epp_layout, args.epp_placement) == ("1,3,2,2", "v")
    path.write_text(json.dumps({}))
    with pytest.raises(ArgumentError, match=r"layout\.json: .*schema None version None, where"):
        prepare_epp_args(arguments("--epp-layout", str(path), **{RANKS: 2}))
    with pytest.raises(ArgumentError, match=r"--epp-layout nowhere\.json: it is neither auto, even, balanced, a file"):
        prepare_epp_args(arguments("--epp-layout", "nowhere.json", **{RANKS: 2}))
