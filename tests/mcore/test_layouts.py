"""Layouts and output layers in shards: what Megatron is told, what is refused, checkpoints. `test_matrix.py` trains them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_epp.cost.work import work_of
from megatron_epp.features.vocabulary.shards import Shard, logits_pass, weight_gradient
from megatron_epp.mcore.arguments import ArgumentError
from megatron_epp.mcore.arguments.consequences import prepare_epp_args
from megatron_epp.mcore.arguments.layout import shards_vocabulary, vocabulary_rows
from megatron_epp.mcore.model.model_chunks import placed_pattern
from megatron_epp.mcore.training.layout_search import settle_vocabulary
from megatron_epp.plan import Chunk, EppError, Op, Segment
from megatron_epp.plan.layout import Layout
from megatron_epp.plan.placement import Placement
from megatron_epp.tools.formulas import CPU, ModelShape, analytic_profile
from tests.support.mcore.forked import job, returned
from tests.support.mcore.megatron_flags import arguments
from tests.support.runtime.allocations import peak_bytes_of


def test_chunks_take_the_segments_of_their_stages() -> None:
    assert placed_pattern("*-*|-|*|-*-", Placement("v", 2, 2)) == "*-*|-|-*-|*"
    with pytest.raises(EppError, match=r"--epp-placement v needs .* has 2 stages of 4"):
        placed_pattern("*-|*-", Placement("v", 2, 2))
    with pytest.raises(EppError, match="on its own last stage"):
        placed_pattern("*-|-|*|-*-/*-", Placement("v", 2, 2))


@pytest.mark.slow
def test_a_hybrid_model_trains_there_and_back(tmp_path: Path) -> None:
    found = returned(job(1, "layouts:hybrid", folder=tmp_path, timeout_s=300))
    assert found["placement"] == [0, 1, 1, 0]
    assert found["losses"][1] == pytest.approx(found["losses"][0], rel=1e-5)
    assert found["apart"] <= 1e-5


RANKS, PER_RANK = "pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank"
FIVE, ON = "--epp-layout 5,3", "--epp-vocab-parallel on"
CLASH = f"does not go with {ON}"


@pytest.mark.parametrize(
    ("flags", "megatron", "says"),
    [
        ("--epp-layout 3,3,2", {}, "--epp-layout 3,3,2: it has 3 stages, .* multiple of --pipeline-model-parallel-size 2"),
        ("--epp-layout 4.5,3.5", {}, "--epp-layout 4.5,3.5: stages begin between layers.* such as 4,4"),
        (FIVE, {"pipeline_model_parallel_layout": "Et*4|t*4L"}, "--pipeline-model-parallel-layout .* give one of them"),
        (FIVE, {"decoder_first_pipeline_num_layers": 3}, "--decoder-first-pipeline-num-layers 3 says"),
        (FIVE, {"account_for_embedding_in_pipeline_split": True}, "--account-for-embedding-in-pipeline-split True says"),
        (FIVE, {PER_RANK: 2}, "--epp-layout 5,3 puts 1 stages on a rank, and --num-virtual.* says 2"),
        (FIVE, {"hybrid_layer_pattern": "*-|*-"}, "is for GPTModel: a hybrid model's stages begin where"),
        ("--epp-layout 4,4 --epp-placement v", {}, "--epp-placement v needs several stages on a rank"),
        ("--epp-layout 2,2,2,2 --epp-schedule stock --epp-placement v", {}, "--epp-placement v is for --epp-schedule elastic"),
        (f"{ON} --epp-schedule whole", {}, f"--epp-schedule whole {CLASH}: use elastic"),
        (ON, {RANKS: 4, "vocab_size": 3}, f"is more than the vocabulary has entries: leave out {ON}"),
        (ON, {"save": "x", "ckpt_format": "zarr"}, f"--save x {CLASH}: use --ckpt-format torch_dist"),
        (ON, {"load": "x", "ckpt_format": "torch"}, f"--load x {CLASH}: use --ckpt-format torch_dist"),
        (ON, {"fp16": True}, f"--fp16 True {CLASH}; use --bf16"),
        (ON, {"label_smoothing": 0.1}, f"--label-smoothing 0.1 {CLASH}: set it to 0"),
        (ON, {"hybrid_layer_pattern": "*-|*-"}, f"--hybrid-layer-pattern .* {CLASH}: train a GPTModel"),
        (ON, {"init_model_with_meta_device": True}, f"--init-model-with-meta-device True {CLASH}"),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_a_line(flags: str, megatron: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says) as refusal:
        prepare_epp_args(arguments(*flags.split(), **{RANKS: 2} | megatron))
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


@pytest.mark.parametrize(
    "name",
    [
        "untied, other layers",
        pytest.param("uneven, plain optimizer", marks=pytest.mark.slow),  # the same with other divisions
        pytest.param("tied, uneven", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_of_shards_and_uneven_layers_is_one_of_a_whole_output_layer(name: str, tmp_path: Path) -> None:
    found = returned(job(1, "layouts", folder=tmp_path, part=name, timeout_s=300))
    entries = 97 if "uneven" in name else 96
    assert found["names"] > found["of the optimizer"] > 0
    assert found["missing"] == []
    assert found["apart"] == []
    weights = {key: shape for key, shape in found["shapes"].items() if "embeddings" in key or "output" in key}
    words = {key: shape for key, shape in weights.items() if "optimizer" not in key and "position" not in key}
    output = [] if name.startswith("tied") else ["output_layer.weight"]
    assert words == {key: [entries, 32] for key in ("embedding.word_embeddings.weight", *output)}


@pytest.mark.parametrize("model", ["tied", pytest.param("untied", marks=pytest.mark.slow)])
def test_a_resumed_run_goes_on_bitwise(model: str, tmp_path: Path) -> None:
    found = returned(job(1, "layouts", folder=tmp_path, part=f"resumed {model}", timeout_s=300))
    assert len(found["losses"]) == 2
    assert found["losses"] == found["resumed"]
    assert found["apart"] == []


def test_the_reduction_is_in_fp32_for_weights_in_bf16(tmp_path: Path) -> None:
    found = returned(job(1, "layouts", folder=tmp_path, part="bf16", timeout_s=300))
    assert found["broadcast"] == ["torch.bfloat16"]
    assert found["reduced"] == ["torch.float32"]
    assert found["losses"] == pytest.approx(found["stock"], rel=5e-3)


@pytest.mark.parametrize(
    ("flags", "megatron", "settled"),
    [
        ("", {}, "auto"),
        ("--epp-vocab-parallel off", {}, "off"),
        (ON, {}, "on"),
        ("--epp-vocab-parallel auto", {}, "auto"),
        ("--epp-vocab-parallel auto", {"fp16": True}, "off"),
        ("--epp-vocab-parallel auto", {RANKS: 1}, "off"),
    ],
)
def test_auto_is_off_where_on_would_be_refused(flags: str, megatron: dict[str, Any], settled: str) -> None:
    args = arguments(*flags.split(), **{RANKS: 4} | megatron)
    prepare_epp_args(args)
    assert args.epp_vocab_parallel == settled
    assert shards_vocabulary(args) is (settled == "on")
    settle_vocabulary(args, shards=True)
    assert shards_vocabulary(args) is (settled != "off")


@pytest.mark.parametrize("block_tokens", [0, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_plans_count_the_bytes_that_a_shard_holds(dtype: torch.dtype, block_tokens: int) -> None:
    tokens, width, entries = 256, 32, 4096
    sizes = {"hidden_size": width, "vocab_size": entries, "num_attention_heads": 2, "loss_block_tokens": block_tokens}
    shape = ModelShape(num_layers=4, ffn_hidden_size=16, bytes_per_value=dtype.itemsize, **sizes)
    shards = analytic_profile(shape, CPU).costs([1] * 4, vocabulary_shares=[1 / 4] * 4).vocabulary
    work = work_of([Chunk((Segment(0, 0, tokens),))], [tokens])
    logits, gradient = shards.rows(Op.S, 4, work), shards.rows(Op.T, 4, work)
    weight, x = torch.randn(entries, width).to(dtype), torch.randn(tokens, width).to(dtype)
    labels, ones = torch.randint(entries, (tokens,)), torch.ones(tokens)
    rows = vocabulary_rows(entries, 4)[1]
    shard = Shard(weight[rows.start : rows.stop], rows.start, block_tokens)
    result = logits_pass(x, labels, shard, needs_gradient=True)
    tensors = [x, *(tensor for tensor in (result.part, result.exponentials) if tensor is not None)]
    assert sum(tensor.nbytes for tensor in tensors) == logits.takes[1][0] - logits.gives[1][0]
    peak = peak_bytes_of(lambda: logits_pass(x, labels, shard, needs_gradient=True))
    assert logits.takes[1][0] - x.nbytes == pytest.approx(peak, rel=0.06)
    if block_tokens:  # else the gradient is one tensor, as of any weight
        log_sum = torch.zeros(tokens)
        peak = peak_bytes_of(lambda: weight_gradient(x, labels, result, log_sum, ones, shard))
        assert gradient.takes[1][0] == pytest.approx(peak, rel=0.06)


@pytest.mark.parametrize(
    ("entries", "num_ranks", "sizes"),
    [
        (96, 4, [24, 24, 24, 24]),
        (97, 4, [24, 24, 24, 25]),
        (32000, 6, [5312, 5312, 5376, 5312, 5312, 5376]),
        (128256, 8, [16000, 16064, 16000, 16064, 16000, 16064, 16000, 16064]),
        (4, 4, [1, 1, 1, 1]),
    ],
)
def test_rows_are_divided_evenly_and_in_multiples_where_there_are_many(entries: int, num_ranks: int, sizes: list[int]) -> None:
    rows = vocabulary_rows(entries, num_ranks)
    assert [row for part in rows for row in part] == [*range(entries)]
    assert [len(part) for part in rows] == sizes


def test_a_vocabulary_smaller_than_the_ranks_is_refused() -> None:
    with pytest.raises(ArgumentError, match="on divides a vocabulary of 3 entries on each tensor-parallel rank"):
        vocabulary_rows(3, 4)
