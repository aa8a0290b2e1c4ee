"""An output layer divided over the pipeline ranks trains as a whole one: parity, checkpoints, resumed runs, what is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_epp.cost import CPU, ModelShape, analytic_profile
from megatron_epp.mcore.arguments import ArgumentError
from megatron_epp.mcore.arguments.consequences import prepare_epp_args
from megatron_epp.mcore.arguments.vocabulary import settle_vocabulary, shards_vocabulary, vocabulary_rows, vocabulary_shares
from megatron_epp.mcore.costs.vocabulary import with_shard_bytes
from megatron_epp.runtime.loss.shards import Shard, logits_pass
from scripts.parity.cells import LENGTHS
from tests.support.mcore.forked import launch
from tests.support.mcore.megatron_flags import arguments
from tests.support.mcore.parity_figures import SMALL_BATCH, Figures, check_closeness, masked_documents, parity_of

SHORT, LONG = 2, 20
PLAN = "--epp-vocab-parallel on --epp-slices 3"
OVERLAPPED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
UNEVEN = "--vocab-size 97 --make-vocab-size-divisible-by 1"
CASES: dict[str, dict[str, Any]] = {
    "four ranks, tied, uneven": {"cell": {"pp": 4}, "model": "gpt2", "both": f"{UNEVEN} --clip-grad 0.05"},
    "tied, by blocks": {"cell": {"pp": 2}, "model": "gpt2", "plan": f"{PLAN} --epp-loss-block-tokens 5"},
    "there and back, tied": {"cell": {"pp": 2, "virtual": 2, "placement": "v"}, "model": "gpt2"},
    "sequence parallel": {"cell": {"pp": 2, "tp": 2, "sp": True}, "model": "llama"},
    "context parallel, tied": {"cell": {"pp": 2, "cp": 2}, "model": "gpt2"},
    "replicas, tied": {"cell": {"pp": 2, "dp": 2}, "model": "gpt2", "optimizer": OVERLAPPED},
    "masked": {"cell": {"pp": 2}, "model": "llama", "both": "MASKED"},
}
MORE_CASES: dict[str, dict[str, Any]] = CASES | {
    "two ranks": {"cell": {"pp": 2}, "model": "llama"},
    "tied": {"cell": {"pp": 2}, "model": "grouped"},
    "by blocks": {"cell": {"pp": 2}, "model": "llama", "plan": f"{PLAN} --epp-loss-block-tokens 5"},
    "looped": {"cell": {"pp": 2, "virtual": 2}, "model": "llama"},
    "looped, tied": {"cell": {"pp": 2, "virtual": 2}, "model": "gpt2"},
    "there and back": {"cell": {"pp": 2, "virtual": 2, "placement": "v"}, "model": "llama"},
    "tensor parallel": {"cell": {"pp": 2, "tp": 2}, "model": "llama"},
    "tensor parallel, tied": {"cell": {"pp": 2, "tp": 2}, "model": "gpt2"},
    "sequence parallel, tied, by blocks": {
        "cell": {"pp": 2, "tp": 2, "sp": True},
        "model": "grouped",
        "plan": f"{PLAN} --epp-loss-block-tokens 5",
    },
    "sequence parallel, masked": {"cell": {"pp": 2, "tp": 2, "sp": True}, "model": "llama", "both": "MASKED"},
    "context parallel, masked": {"cell": {"pp": 2, "cp": 2}, "model": "llama", "both": "MASKED"},
    "four ranks": {"cell": {"pp": 4}, "model": "llama"},
    "four ranks, uneven": {"cell": {"pp": 4}, "model": "learned", "both": UNEVEN},
    "replicas": {"cell": {"pp": 2, "dp": 2}, "model": "llama", "optimizer": OVERLAPPED},
    "experts": {"cell": {"pp": 2, "dp": 2, "experts": 4, "ep": 2}, "model": "llama", "optimizer": OVERLAPPED},
    "cut layers": {"cell": {"pp": 2}, "model": "llama", "plan": f"{PLAN} --epp-layout 2.5,1.5 --epp-recompute 1"},
    "weights apart": {"cell": {"pp": 2, "split": True}, "model": "llama"},
    "weights apart, looped, tied": {"cell": {"pp": 2, "virtual": 2, "split": True}, "model": "gpt2"},
    "offload": {"cell": {"pp": 2}, "model": "llama", "plan": f"{PLAN} --epp-memory-cap-gb 0.0006 --epp-offload"},
    "capped": {"cell": {"pp": 2}, "model": "llama", "plan": f"{PLAN} --epp-memory-cap-gb 0.0006"},
    "another planner": {"cell": {"pp": 2}, "model": "llama", "plan": "--epp-vocab-parallel on --epp-planner chunkflow"},
    "SlimPipe": {
        "cell": {"pp": 2, "virtual": 2},
        "model": "llama",
        "plan": "--epp-vocab-parallel on --epp-planner slimpipe --epp-slices 4",
    },
    "chosen by the run": {
        "cell": {"pp": 2},
        "model": "llama",
        "plan": "--epp-slices 3 --epp-vocab-parallel auto",
        "both": "--vocab-size 4000",
    },
    "chosen with the layout": {
        "cell": {"pp": 2},
        "model": "gpt2",
        "plan": "--epp-slices 3 --epp-vocab-parallel auto --epp-layout auto",
        "both": "--vocab-size 4000",
    },
    "muP": {"cell": {"pp": 2}, "model": "llama", "both": "--use-mup --mup-base-hidden-size 16"},
    "muP, tied": {"cell": {"pp": 2}, "model": "grouped", "both": "--use-mup --mup-base-hidden-size 16"},
    "decoupled rate, clipped": {
        "cell": {"pp": 2},
        "model": "llama",
        "both": "--decoupled-lr 1e-3 --clip-grad 0.05 --log-num-zeros-in-grad",
    },
    "learnt costs": {"cell": {"pp": 2}, "model": "llama", "plan": f"{PLAN} --epp-costs learn"},
    "fused loss of the stock schedule": {
        "cell": {"pp": 2},
        "model": "llama",
        "plan": f"{PLAN} --cross-entropy-loss-fusion --cross-entropy-fusion-impl native",
    },
}
CASES_OF = {SHORT: CASES, LONG: MORE_CASES}


def masks() -> list[np.ndarray]:
    """Masks of documents: some train nothing, others only their end, so that chunks are masked whole."""
    return [np.arange(length + 1) > (length if number % 3 == 0 else 0.7 * length) for number, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def figures_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Figures]]:
    @functools.cache
    def figures(iterations: int) -> dict[str, Figures]:
        folder = tmp_path_factory.mktemp("parity")
        masked = f"--data-path {masked_documents(folder / 'data', masks())}"
        cases = {name: {"plan": PLAN} | case for name, case in CASES_OF[iterations].items()}
        for case in cases.values():
            case |= {"both": case.get("both", "").replace("MASKED", masked)}
        if iterations == SHORT:
            return parity_of(folder, cases, iterations, 500, SMALL_BATCH)
        return parity_of(folder, cases, iterations, 2400)

    return figures


@pytest.mark.parametrize(
    ("iterations", "name"),
    [
        pytest.param(iterations, name, id=f"{name}, {iterations}", marks=marks)
        for iterations, marks in ((SHORT, ()), (LONG, pytest.mark.slow))  # more cases, for longer
        for name in CASES_OF[iterations]
    ],
)
def test_it_trains_as_the_stock_schedule_does(
    figures_of: Callable[[int], dict[str, Figures]], iterations: int, name: str
) -> None:
    figures, case = figures_of(iterations)[name], CASES_OF[iterations][name]
    check_closeness(figures)
    assert figures["num_losses"] == [iterations, 1]
    plans = [plan for replica in figures["plans"] for plan in replica]
    assert all(plan["shards"] > 0 for plan in plans) or "--epp-layout auto" in case.get("plan", "")
    assert any("hybrid" in plan["kinds"] or "split" in plan["kinds"] for plan in plans) or "planner" in case.get("plan", "")
    assert any(plan["weights"] > 0 for plan in plans) == bool(case["cell"].get("split"))


KEYS = {
    "untied": {"embedding.word_embeddings.weight", "output_layer.weight"},
    "tied": {"embedding.word_embeddings.weight"},
}


@pytest.mark.parametrize(
    "name",
    [
        "untied",
        "tied",
        pytest.param("uneven, plain optimizer", marks=pytest.mark.slow),  # the same with other divisions
        pytest.param("tied, uneven", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_of_shards_is_one_of_a_whole_output_layer(name: str, tmp_path: Path) -> None:
    finished = launch(1, "-m", "tests.support.mcore.vocabulary_worker", tmp_path, name, timeout_s=300)
    assert finished.returncode == 0, finished.output[-5000:]
    (found,) = finished.figures
    entries = 97 if "uneven" in name else 96
    assert found["names"] > found["of the optimizer"] > 0
    assert found["missing"] == []
    assert found["apart"] == []
    weights = {key: shape for key, shape in found["shapes"].items() if "embeddings" in key or "output" in key}
    words = {key: shape for key, shape in weights.items() if "optimizer" not in key and "position" not in key}
    assert words == {key: [entries, 32] for key in KEYS["tied" if name.startswith("tied") else "untied"]}


@pytest.mark.parametrize("model", ["tied", pytest.param("untied", marks=pytest.mark.slow)])
def test_a_resumed_run_goes_on_bitwise(model: str, tmp_path: Path) -> None:
    finished = launch(1, "-m", "tests.support.mcore.vocabulary_worker", tmp_path, f"resumed {model}", timeout_s=300)
    assert finished.returncode == 0, finished.output[-5000:]
    (found,) = finished.figures
    assert len(found["losses"]) == 2
    assert found["losses"] == found["resumed"]
    assert found["apart"] == []


@pytest.mark.parametrize("part", ["bf16", pytest.param("bf16, tied", marks=pytest.mark.slow)])  # the same model otherwise
def test_the_reduction_is_in_fp32_for_weights_in_bf16(part: str, tmp_path: Path) -> None:
    finished = launch(1, "-m", "tests.support.mcore.vocabulary_worker", tmp_path, part, timeout_s=300)
    assert finished.returncode == 0, finished.output[-5000:]
    (found,) = finished.figures
    assert found["broadcast"] == ["torch.bfloat16"]
    assert found["reduced"] == ["torch.float32"]
    assert found["losses"] == pytest.approx(found["stock"], rel=5e-3)


RANKS = {"pipeline_model_parallel_size": 4}
ON = "--epp-vocab-parallel on"


@pytest.mark.parametrize(
    ("flags", "megatron", "says"),
    [
        (ON, {"pipeline_model_parallel_size": 1}, "on divides the output layer over --pipeline-model-parallel-size 1 ranks"),
        (f"{ON} --epp-schedule whole", {}, "on is for --epp-schedule elastic, not whole: leave one of them out"),
        (ON, {"vocab_size": 3}, "on divides a vocabulary of 3 entries over 1 x 4 ranks, some of which would have none"),
        (ON, {"save": "x", "ckpt_format": "zarr"}, "on with --save needs --ckpt-format torch_dist, not zarr"),
        (ON, {"load": "x", "ckpt_format": "torch"}, "on with --load needs --ckpt-format torch_dist, not torch"),
        (ON, {"fp16": True}, "on does not go with --fp16 True"),
        (ON, {"label_smoothing": 0.1}, "on does not go with --label-smoothing 0.1"),
        (ON, {"hybrid_layer_pattern": "*-|*-|*-|*-"}, "on does not go with --hybrid-layer-pattern"),
        (ON, {"init_model_with_meta_device": True}, "on does not go with --init-model-with-meta-device"),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_a_line(flags: str, megatron: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=f"--epp-vocab-parallel {says}") as refusal:
        prepare_epp_args(arguments(*flags.split(), **RANKS | megatron))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("flags", "megatron", "settled"),
    [
        ("", {}, "off"),
        (ON, {}, "on"),
        ("--epp-vocab-parallel auto", {}, "auto"),
        ("--epp-vocab-parallel auto", {"fp16": True}, "off"),
        ("--epp-vocab-parallel auto", {"pipeline_model_parallel_size": 1}, "off"),
    ],
)
def test_auto_is_off_where_on_would_be_refused(flags: str, megatron: dict[str, Any], settled: str) -> None:
    args = arguments(*flags.split(), **RANKS | megatron)
    prepare_epp_args(args)
    assert args.epp_vocab_parallel == settled
    assert shards_vocabulary(args) is (settled == "on")
    settle_vocabulary(args, shards=True)
    assert shards_vocabulary(args) is (settled != "off")


@pytest.mark.parametrize("block_tokens", [0, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_plans_count_the_bytes_that_a_shard_holds(dtype: torch.dtype, block_tokens: int) -> None:
    tokens, width, entries = 24, 8, 96
    sizes = {"hidden_size": width, "padded_vocab_size": entries, "bf16": dtype == torch.bfloat16, "fp16": False}
    args = arguments(*ON.split(), "--epp-loss-block-tokens", str(block_tokens), **RANKS | sizes)
    shape = ModelShape(num_layers=4, hidden_size=width, ffn_hidden_size=16, num_attention_heads=2, vocab_size=entries)
    costs = with_shard_bytes(args, analytic_profile(shape, CPU).costs([1] * 4, vocabulary_shares=vocabulary_shares(args)))
    assert costs.vocabulary is not None
    planned = costs.vocabulary.kept_bytes(1, np.array([tokens], dtype=np.float64), 0.0)
    weight, x = torch.randn(entries, width).to(dtype), torch.randn(tokens, width).to(dtype)
    rows = vocabulary_rows(entries, 4)[1]
    shard = Shard(weight[rows.start : rows.stop], rows.start, block_tokens)
    found = logits_pass(x, torch.randint(entries, (tokens,)), shard, needs_gradient=True)
    held = [x, *(one for one in (found.part, found.kept) if one is not None)]
    assert sum(one.nbytes for one in held) == int(planned[0])


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
