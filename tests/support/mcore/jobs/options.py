"""Trains with options that people use, in forked worlds as `scripts/parity` does; returns what `test_options.py` looks at."""

import re
import shlex
from pathlib import Path
from typing import Any

from tests.support.mcore.jobs.common import LIMIT_S, flags_of

ITERATIONS = 3
ELASTIC = "--epp-slices 3"
DROPOUT = "--hidden-dropout 0.1 --epp-planner seq1f1b --epp-chunk-tokens 16"  # the same order whatever is recomputed
FP32_KV = f"--bf16 {ELASTIC} --epp-fp32-kv-gradients"
RUNS = {
    "stock": "--epp-schedule stock",
    "elastic": ELASTIC,
    "dropout": f"{DROPOUT} --epp-recompute 0",
    "dropout, recompute": f"{DROPOUT} --epp-recompute 2",
    "bf16 stock": "--epp-schedule stock --bf16",
    "bf16 elastic": f"{ELASTIC} --bf16 --epp-loss-block-tokens 7",
    "bf16 elastic, fp32 gradients of keys": FP32_KV,
    "fp16 stock": "--epp-schedule stock --fp16 --loss-scale 128",
    "fp16 elastic": f"{ELASTIC} --fp16 --loss-scale 128 --epp-loss-block-tokens 7",
}


def run(folder: Path) -> dict[str, Any]:
    common = flags_of(folder, ITERATIONS, 64, 4)
    from scripts.parity.cells import MODELS
    from scripts.parity.runs import contents
    from scripts.parity.worlds import Training, train_all

    common += shlex.split(f"{MODELS['llama']} --pipeline-model-parallel-size 2")
    runs = {name: Training(2, (*common, *shlex.split(flags))) for name, flags in RUNS.items()}
    done = train_all(runs.values(), folder, LIMIT_S)
    return {name: figures(done[one], contents) for name, one in runs.items()}


def figures(ranks, contents):
    if isinstance(ranks, str):
        return {"error": ranks}
    plans = ranks[0].plans
    final = [(re.sub(r"^(module\.)+", "", name), tensor) for run in ranks for name, tensor in run.final.items()]
    return {
        "losses": next(run.losses for run in ranks if run.losses),
        "weights": {name: tensor.double().flatten().tolist() for name, tensor in final},
        "gradient_dtypes": sorted({str(tensor.dtype) for run in ranks for tensor in run.gradients[-1].values()}),
        "plans": [contents(plan) for plan in plans],
        "forwards": [[[str(a) for a in plan.actions(r) if str(a.op) == "F"] for r in range(plan.num_ranks)] for plan in plans],
        "chunks": [repr(plan.chunks) for plan in plans],
    }
