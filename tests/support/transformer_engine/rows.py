"""Rows of the matrix whose layers are Transformer Engine's, in the run with plans and in that of Megatron's schedule."""

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.support.mcore.matrix import Row, case
from tests.support.mcore.parity_figures import SMALL_BATCH, Figures
from tests.support.mcore.rows import LATENT, OVERLAPPED, kinds_of, plans_of, splits_weights
from tests.support.mcore.script_rows import LAYOUTS, ROPE, ScriptRow

ENGINE = "--transformer-impl transformer_engine --attention-backend unfused"
FP8 = "--fp8-format hybrid --fp8-recipe"
GROUPED = "--moe-grouped-gemm"
CAPPED = "--epp-slices 3 --epp-memory-cap-gb 0.0006"
BACK, SHARED, EXPERTS = "pp2 v2", "tp2 sp pp2", "dp2 pp2 experts4 ep2"
DELTA = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 2 "
    "--linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8 --linear-conv-kernel-dim 4"
)
LONG = "--seq-length 128 --max-position-embeddings 128 --epp-documents stream"
"""Longer slices: of three tokens a state is a third, and one that a backward has freed counts until its end."""
ADAM = "--optimizer adam --adam-eps 1e-2 --lr 1e-3"
WINDOWS = "--window-size 9,0 --window-attn-skip-freq"
BY_DEFAULT = {
    "slices, some recompute": case("pp2", "--epp-slices 3 --epp-recompute 1"),
    "weights apart, uneven layers": case("pp2 split", "--epp-slices 3 --epp-layout 1,3", "grouped"),
    "tensor and sequence parallel": case(SHARED, "--epp-slices 3", "gpt2"),
    "experts with grouped products": case(EXPERTS, "--epp-slices 3", both=GROUPED, optimizer=OVERLAPPED),
    "latents, offload, weights apart": case("pp2 split", f"{CAPPED} --epp-offload --epp-latents on", both=LATENT),
    "windows and sinks, looped, some recompute": case(
        "pp2 looped2", "--epp-slices 5 --epp-recompute 1", both=f"{WINDOWS} 2 --softmax-type learnable"
    ),
}
MORE = {
    "packs": case("pp2", "--epp-slices 1", "gpt2"),  # slices share chunks with whole documents, too
    "slices": case("pp2", "--epp-slices 7", "gpt2"),
    "all recompute": case("pp2", "--epp-slices 3 --epp-recompute 2"),
    "parts of layers recompute": case("pp2", f"{CAPPED} --epp-recompute-modes all"),
    "weights apart, replicas": case("dp2 pp2 split", "--epp-slices 3", optimizer=OVERLAPPED),
    "weights apart, experts": case("pp2 split experts4", "--epp-slices 3", both=GROUPED),
    "there and back": case(BACK, "--epp-slices 3 --epp-recompute 1"),
    "there and back, weights apart": case(f"{BACK} split", "--epp-slices 4"),
    "looped": case("pp2 looped2", "--epp-slices 3"),
    "tensor parallel": case("tp2 pp2", "--epp-slices 3"),
    "sequence parallel, weights apart": case(f"{SHARED} split", "--epp-slices 3"),
    "context parallel": case("cp2", "--epp-slices 3"),
    "context parallel in a pipeline": case("cp2 pp2", "--epp-slices 3", "gpt2"),
    "replicas, distributed optimizer": case("dp2 pp2", "--epp-slices 3", optimizer=OVERLAPPED),
    "experts": case("experts4", "--epp-slices 3 --epp-recompute 1", "grouped"),
    "latent experts, weights apart": case(
        "pp2 split experts4", "--epp-slices 3 --epp-recompute 1", both=f"{GROUPED} --moe-latent-size 16"
    ),
    "latent experts, multi-token prediction": case(
        f"{SHARED} experts4",
        "--epp-slices 3",
        both=f"{GROUPED} --moe-latent-size 16 --mtp-num-layers 1 --moe-shared-expert-intermediate-size 32",
    ),
    "latent attention": case("pp2", "--epp-slices 3 --epp-recompute 1", both=LATENT),
    "multi-token prediction": case("pp2", "--epp-slices 3", both="--mtp-num-layers 1"),
    "adapters on frozen layers": case(
        "pp2", "--epp-slices 3 --epp-recompute 1", both="--spec tests.support.mcore.adapters engine_adapters"
    ),
    "layers train, their ends do not": case(
        "pp2 split", "--epp-slices 3", both="--spec tests.support.mcore.adapters engine_layers"
    ),
    "gated delta nets": case("pp2", "--epp-slices 3 --epp-recompute 1", both=DELTA),
    "gated delta nets there and back, weights apart": case(f"{BACK} split", "--epp-slices 4", both=f"{DELTA} {LONG}"),
    "gated delta nets, looped": case("pp2 looped2", "--epp-slices 5 --epp-recompute 1", both=DELTA),
    "gated delta nets and experts, tensor and sequence parallel": case(
        f"{SHARED} experts4", "--epp-slices 3 --epp-recompute 1", both=f"{DELTA} {GROUPED} --attention-output-gate"
    ),
    "windows and sinks there and back, weights apart": case(
        f"{BACK} split", "--epp-slices 4", "grouped", both=f"{WINDOWS} 3 --softmax-type learnable"
    ),
    "windows and sinks, tensor and sequence parallel": case(
        SHARED, "--epp-slices 7", both=f"{WINDOWS} [0,1,1,0] --softmax-type learnable"
    ),
    "windows and sinks, experts": case(
        EXPERTS, "--epp-slices 3", both=f"{WINDOWS} 2 --softmax-type off-by-one {GROUPED}", optimizer=OVERLAPPED
    ),
    "windows and sinks, context parallel": case("cp2", "--epp-slices 3", both=f"{WINDOWS} 2 --softmax-type learnable"),
    "attention on other ranks": case("pp2 looped2", "--epp-slices 1 --epp-recompute 1 --epp-planner helixpipe", "gpt2"),
    "a vocabulary in shards": case("pp2", "--epp-slices 3 --epp-vocab-parallel on"),
}
"""In the set `slow`, by themselves."""
OF_EIGHT = {
    "latents, offload, weights apart",
    "parts of layers recompute",
    "weights apart, replicas",
    "gated delta nets there and back, weights apart",
}
"""Rows with eight documents in a batch."""


def _check(plan: str, splits: bool, figures: Figures, _: Path) -> None:
    assert kinds_of(figures) & ({"packed"} if "--epp-slices 1" in plan else {"split", "hybrid"})
    assert splits_weights(figures) == splits
    plans = plans_of(figures)
    assert any(one["copies"] for one in plans) == ("--epp-offload" in plan)
    assert any(one["recompute"] != ["none"] for one in plans) or not re.search("recompute-modes|recompute [12]", plan)


def _rows() -> Iterator[Row]:
    for name, own in (BY_DEFAULT | MORE).items():
        check = functools.partial(_check, own.plan, own.cell.split)
        batch = 8 if name in OF_EIGHT else SMALL_BATCH
        yield Row(name=name, case=replace(own, both=f"{ENGINE} {own.both}"), check=check, batch=batch, is_slow=name in MORE)


ROWS = tuple(_rows())
SCRIPT_ROWS = tuple(
    ScriptRow(
        name=name, num_processes=2, flags=f"{ADAM} {ROPE} {ENGINE} {LAYOUTS[layout][1]} {own}", iterations=5, is_slow=number > 0
    )
    for number, (name, (layout, own)) in enumerate(
        {
            "windows and sinks": ("4 stages on 2 ranks", f"{WINDOWS} 2 --softmax-type learnable"),
            "gated delta nets": ("2 stages", f"{DELTA} --swiglu"),
        }.items()
    )
)
"""Of a script's own microbatches."""


def optimizer() -> str:
    from megatron.core import optimizer

    return optimizer.Adam.__name__


def casts_by() -> dict[str, int]:
    """Return the number of casts that this rank has made, by the class of what has cast."""
    from tests.support.transformer_engine import casts

    return dict(casts.casts_by)


def bytes_of_casts(name: str, shape: tuple[int, int]) -> tuple[int, int]:
    """Return the bytes of a weight's casts, and of what a linear layer keeps of an input, in Transformer Engine."""
    from transformer_engine.common import recipe
    from transformer_engine.pytorch.quantization import RecipeState

    of = {"tensorwise": recipe.Float8CurrentScaling, "blockwise": recipe.Float8BlockScaling, "mxfp8": recipe.MXFP8BlockScaling}
    quantizers = RecipeState.create(of[name](), mode="forward", num_quantizers=3).make_quantizers()
    inputs, weight = quantizers[:2]
    inputs.set_usage(rowwise=False, columnwise=True)
    weight.set_usage(rowwise=True, columnwise=True)
    specs = (quantizer.inner_tensor_specs(tuple(shape)).values() for quantizer in (weight, inputs))
    in_weight, in_input = (sum(math.prod(size) * kind.itemsize for size, kind in parts) for parts in specs)
    return in_weight, in_input
