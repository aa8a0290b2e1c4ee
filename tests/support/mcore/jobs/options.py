"""Trains with options that people use, in forked worlds as `scripts/parity` does; returns what `test_options.py` looks at."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

ITERATIONS, SAVED = 3, 1
ELASTIC = "--epp-slices 3"
DROPOUT = "--hidden-dropout 0.1 --epp-planner seq1f1b --epp-chunk-tokens 16"  # the same order whatever is recomputed
FP32_KV = f"--bf16 {ELASTIC} --epp-fp32-kv-gradients"
LOADED = {
    "elastic on 4": (4, f"{ELASTIC} --epp-recompute 1"),
    "stock on 1": (1, "--epp-schedule stock"),
}

# By name: pipeline stages (of a process each) and flags.
RUNS = {
    "stock": (2, "--epp-schedule stock"),
    "elastic": (2, ELASTIC),
    "dropout": (2, f"{DROPOUT} --epp-recompute 0"),
    "dropout, recompute": (2, f"{DROPOUT} --epp-recompute 2"),
    "clipped stock": (2, "--epp-schedule stock --clip-grad 0.02"),
    "clipped elastic": (2, f"{ELASTIC} --clip-grad 0.02"),
    "bf16 stock": (2, "--epp-schedule stock --bf16"),
    "bf16 elastic": (2, f"{ELASTIC} --bf16 --epp-loss-block-tokens 7"),
    "bf16 elastic, fp32 gradients of keys": (2, FP32_KV),
    "fp16 stock": (2, "--epp-schedule stock --fp16 --loss-scale 128"),
    "fp16 elastic": (2, f"{ELASTIC} --fp16 --loss-scale 128 --epp-loss-block-tokens 7"),
}


def run(folder: Path) -> dict[str, Any]:
    """Run all `RUNS` and `LOADED`."""
    from scripts.parity.cells import LENGTHS, MODELS, VOCABULARY, common_flags
    from scripts.parity.runs import Run, contents
    from scripts.parity.worlds import Training, load_megatron, train_all
    from scripts.random_documents import write_documents

    load_megatron()
    common = [
        *common_flags(ITERATIONS, 64, 4, validates=False),
        "--data-path",
        write_documents(folder / "documents", LENGTHS, VOCABULARY),
    ]
    common += shlex.split(MODELS["llama"])

    def training(stages: int, flags: str) -> Training:
        return Training(stages, (*common, "--pipeline-model-parallel-size", str(stages), *shlex.split(flags)))

    saving = f"--train-iters {SAVED} --save {folder / 'saved'} --save-interval {SAVED} --ckpt-format torch_dist"
    runs = {name: training(*run) for name, run in RUNS.items()} | {"saving": training(2, f"{ELASTIC} {saving}")}
    loading = f"--load {folder / 'saved'} --ckpt-format torch_dist --override-opt_param-scheduler"
    loads = {f"loaded, {name}": training(stages, f"{flags} {loading}") for name, (stages, flags) in LOADED.items()}
    done: dict[Training, list[Run] | str] = {}
    for part in (runs, loads):
        (world := folder / f"worlds{len(part)}").mkdir()
        done |= train_all(part.values(), world, limit_s=240)
    return {name: figures(done[one], contents) for name, one in (runs | loads).items()}


def figures(ranks, contents):
    """Record of a run: losses, weights, the norm of the last iteration's gradients, and what the plans were."""
    if isinstance(ranks, str):
        return {"error": ranks}
    plans = ranks[0].plans
    return {
        "losses": next(run.losses for run in ranks if run.losses),
        "weights": {
            re.sub(r"^(module\.)+", "", name): tensor.double().flatten().tolist()
            for run in ranks
            for name, tensor in run.final.items()
        },
        "gradient_dtypes": sorted({str(tensor.dtype) for run in ranks for tensor in run.gradients[-1].values()}),
        "gradient_norm": sum(float(t.double().norm()) ** 2 for run in ranks for t in run.gradients[-1].values()) ** 0.5,
        "plans": [contents(plan) for plan in plans],
        "forwards": [
            [[str(a) for a in plan.actions(rank) if str(a.op) == "F"] for rank in range(plan.num_ranks)] for plan in plans
        ],
        "chunks": [repr(plan.chunks) for plan in plans],
    }
