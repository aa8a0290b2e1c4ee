"""An output layer divided over the pipeline ranks: checkpoints, resumed runs, what is refused. `test_matrix.py` trains it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_epp.cost.work import work_of
from megatron_epp.features.vocabulary.shards import Shard, logits_pass, weight_gradient
from megatron_epp.mcore.arguments import ArgumentError
from megatron_epp.mcore.arguments.consequences import prepare_epp_args
from megatron_epp.mcore.arguments.vocabulary import settle_vocabulary, shards_vocabulary, vocabulary_rows
from megatron_epp.plan import Chunk, Op, Segment
from megatron_epp.tools.formulas import CPU, ModelShape, analytic_profile
from tests.support.mcore.forked import job, returned
from tests.support.mcore.megatron_flags import arguments
from tests.support.runtime.allocations import peak_bytes_of


@pytest.mark.parametrize(
    "name",
    [
        "untied, other layers",
        pytest.param("uneven, plain optimizer", marks=pytest.mark.slow),  # the same with other divisions
        pytest.param("tied, uneven", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_of_shards_and_uneven_layers_is_one_of_a_whole_output_layer(name: str, tmp_path: Path) -> None:
    found = returned(job(1, "vocabulary", folder=tmp_path, part=name, timeout_s=300))
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
    found = returned(job(1, "vocabulary", folder=tmp_path, part=f"resumed {model}", timeout_s=300))
    assert len(found["losses"]) == 2
    assert found["losses"] == found["resumed"]
    assert found["apart"] == []


def test_the_reduction_is_in_fp32_for_weights_in_bf16(tmp_path: Path) -> None:
    found = returned(job(1, "vocabulary", folder=tmp_path, part="bf16", timeout_s=300))
    assert found["broadcast"] == ["torch.bfloat16"]
    assert found["reduced"] == ["torch.float32"]
    assert found["losses"] == pytest.approx(found["stock"], rel=5e-3)


RANKS = {"pipeline_model_parallel_size": 4}
ON = "--epp-vocab-parallel on"
CLASH = f"does not go with {ON}"


@pytest.mark.parametrize(
    ("flags", "megatron", "says"),
    [
        (f"{ON} --epp-schedule whole", {}, f"--epp-schedule whole {CLASH}: use elastic"),
        (ON, {"vocab_size": 3}, f"is more than the vocabulary has entries: leave out {ON}"),
        (ON, {"save": "x", "ckpt_format": "zarr"}, f"--save x {CLASH}: use --ckpt-format torch_dist"),
        (ON, {"load": "x", "ckpt_format": "torch"}, f"--load x {CLASH}: use --ckpt-format torch_dist"),
        (ON, {"fp16": True}, f"--fp16 True {CLASH}; use --bf16"),
        (ON, {"label_smoothing": 0.1}, f"--label-smoothing 0.1 {CLASH}: set it to 0"),
        (ON, {"hybrid_layer_pattern": "*-|*-|*-|*-"}, f"--hybrid-layer-pattern .* {CLASH}: train a GPTModel"),
        (ON, {"init_model_with_meta_device": True}, f"--init-model-with-meta-device True {CLASH}"),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_a_line(flags: str, megatron: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says) as refusal:
        prepare_epp_args(arguments(*flags.split(), **RANKS | megatron))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("flags", "megatron", "settled"),
    [
        ("", {}, "auto"), ("--epp-vocab-parallel off", {}, "off"), (ON, {}, "on"), ("--epp-vocab-parallel auto", {}, "auto"),
        ("--epp-vocab-parallel auto", {"fp16": True}, "off"),
        ("--epp-vocab-parallel auto", {"pipeline_model_parallel_size": 1}, "off"),
    ],
)  # fmt: skip
def test_auto_is_off_where_on_would_be_refused(flags: str, megatron: dict[str, Any], settled: str) -> None:
    args = arguments(*flags.split(), **RANKS | megatron)
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
        (96, 4, [24, 24, 24, 24]), (97, 4, [24, 24, 24, 25]), (32000, 6, [5312, 5312, 5376, 5312, 5312, 5376]),
        (128256, 8, [16000, 16064, 16000, 16064, 16000, 16064, 16000, 16064]), (4, 4, [1, 1, 1, 1]),
    ],
)  # fmt: skip
def test_rows_are_divided_evenly_and_in_multiples_where_there_are_many(entries: int, num_ranks: int, sizes: list[int]) -> None:
    rows = vocabulary_rows(entries, num_ranks)
    assert [row for part in rows for row in part] == [*range(entries)]
    assert [len(part) for part in rows] == sizes


def test_a_vocabulary_smaller_than_the_ranks_is_refused() -> None:
    with pytest.raises(ArgumentError, match="on divides a vocabulary of 3 entries on each tensor-parallel rank"):
        vocabulary_rows(3, 4)
