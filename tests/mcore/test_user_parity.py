"""Plans for a script's own microbatches leave every gradient and weight as Megatron's own schedules have it, on any model.

Microbatches run in another order than in stock as soon as costs are learnt. Attention over context-parallel ranks, with windows
or with latent keys, and state-space layers are stand-ins in plain torch, of which stock has the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.mcore.tensor_parity import differences

TOLERANCE = 1e-5
"""Largest norm of the difference of a tensor, beside the norm of stock's."""

SGD = "--optimizer sgd --lr 0.02"
ROPE = "--position-embedding-type rope --no-rope-fusion"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 "
    "--moe-token-dispatcher-type alltoall --no-bias-gelu-fusion --disable-bias-linear"
)
LATENT = (
    "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 12 "
    "--normalization RMSNorm " + ROPE
)
REPLICAS = "--global-batch-size 16"
"""Two replicas have four microbatches each."""
SHARDED = (
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --optimizer adam --adam-eps 1e-2 --lr 1e-3 "
    f"--timing-log-level 2 {REPLICAS}"
)
"""It takes no SGD. Its eps keeps Adam from making much of gradients that are zero but for rounding."""
HYBRID = "--spec tests.support.mcore.stand_ins hybrid_spec"


class Model(NamedTuple):
    """Flags of a model.

    Attributes:
        flags: all but the pattern of a hybrid model's layers.
        two, four: patterns of a hybrid model for two and for four stages.
    """

    flags: str
    two: str = ""
    four: str = ""


MODELS = {
    "attention and MLP": Model(ROPE),
    "hybrid": Model(HYBRID, "*-*-|*-*-", "*-|*-|*-|*-"),
    "latent attention, experts, multi-token prediction": Model(
        f"{LATENT} {EXPERTS} --mtp-num-layers 1 --moe-layer-freq [0,1,1,1] --moe-shared-expert-intermediate-size 16 --swiglu"
    ),
    "state-space layers and experts": Model(f"{HYBRID} {EXPERTS}", "M*E-|M*-E", "ME|*E|M-E|*E"),
    "sliding window": Model(f"{ROPE} --window-size 8,0"),
    "sliding window in every second layer, loss per token": Model(
        f"{ROPE} --window-size 5,0 --window-attn-skip-freq 2 --calculate-per-token-loss"
    ),
}
LAYOUTS = {
    "2 stages": (2, "--pipeline-model-parallel-size 2"),
    "4 stages": (4, "--pipeline-model-parallel-size 4"),
    "4 stages on 2 ranks": (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "tensor and sequence parallel": (4, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"),
    "context parallel": (4, "--pipeline-model-parallel-size 2 --context-parallel-size 2"),
    "expert parallel": (4, f"--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 {REPLICAS}"),
    "distributed optimizer": (4, f"--pipeline-model-parallel-size 2 {SHARDED}"),
    "distributed optimizer, 4 stages on 2 ranks": (
        4,
        f"--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 {SHARDED}",
    ),
}
COVERING = {
    ("latent attention, experts, multi-token prediction", "expert parallel"),
    ("state-space layers and experts", "tensor and sequence parallel"),
    ("sliding window", "context parallel"),
    ("attention and MLP", "distributed optimizer, 4 stages on 2 ranks"),
}
"""Every model that needs more than stock's layers, every kind of parallelism, and both schedules of stock, once."""


def cells() -> list[object]:
    """Return model, layout and number of iterations: those of COVERING for 6 iterations, every one for 20, which is slow."""
    found = [
        (model, layout) for model in MODELS for layout in LAYOUTS if "expert" in MODELS[model].flags or "expert" not in layout
    ]
    short = [pytest.param(*cell, 6, id=", ".join(cell)) for cell in found if cell in COVERING]
    slow = pytest.mark.slow  # all of them take ten minutes
    return [*short, *(pytest.param(*cell, 20, id=f"20 iterations, {', '.join(cell)}", marks=slow) for cell in found)]


@pytest.mark.parametrize(("model", "layout", "iterations"), cells())
def test_tensors_are_those_of_stock(tmp_path: Path, model: str, layout: str, iterations: int) -> None:
    processes, sizes = LAYOUTS[layout]
    flags, two, four = MODELS[model]
    if two:
        flags += f" --hybrid-layer-pattern {four if '4 stages' in layout else two}"
        sizes = sizes.replace(" --num-layers-per-virtual-pipeline-stage 1", "")
    found, output = differences(tmp_path, processes, *f"{SGD} {flags} {sizes}".split(), iterations=iterations)
    assert {kind: worst for kind, worst in found.items() if worst > TOLERANCE} == {}
    assert "costs learnt from 3 iterations" in output
