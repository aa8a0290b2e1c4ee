"""Measures what one GPU shows with torch alone, without Megatron: numbers, copies, and memory of the runtime's own executor.

Parts (`--only`):

kernels     every attention kernel that runs here, in every type, against torch's own attention in fp64
executor    gradients of a plan in slices against those of whole sequences, in fp32 and in bf16
copies      activations and caches copied to the host and back: gradients stay, and how much compute hides
memory      peaks of plans of chunks of several sizes: planned (what autograd and caches keep, and the working memory of one
            chunk, measured alone) against what torch's allocator has given; what it keeps for itself, and its retries

One stage of plain layers runs plans written by hand, twice before it is measured. `--reduced` runs all of it tiny, on a CPU
too, to show that the script works: its figures say nothing.
"""

from __future__ import annotations

import gc
import json
import os
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from megatron_epp.features.offload.activations import ActivationOffload
from megatron_epp.features.offload.copy_handlers import offload_handlers
from megatron_epp.features.offload.host import HostMemory
from megatron_epp.launch.machine import allocator_setting
from megatron_epp.plan import Plan
from megatron_epp.runtime.lowered import executor_of
from scripts.bench.frame import RUNS, Bench
from tests.support.gpu_stage import DEVICE, GpuStage, relative_difference, run
from tests.support.runtime.kernel_proofs import prove
from tests.support.runtime.runtime_plans import by_hand, offloading, offloading_kv

GOALS = {"fp32": 1e-4, "bf16": 1.5, "copies": 1e-5, "peak": 0.05}
"""Most relative difference of gradients in fp32; most times as far from fp32 as whole sequences in bf16 are; most difference
that copies make, for kernels may add in another order; most relative error of a planned peak."""
_SHARE = 0.7
"""Of every chunk's activations, that is copied to the host and back."""
_HOST_BYTES = 1 << 32

Part = dict[str, Any]
MOVES: dict[str, Callable[[Plan], Plan]] = {
    "in place": lambda plan: plan,
    "activations on the host": lambda plan: offloading(plan, _SHARE),
    "caches on the host": offloading_kv,
}


def plans(unit: int, recompute_layers: int) -> tuple[Plan, Plan]:
    """The same three sequences in slices, the last of which shares its chunk, and whole; `unit` is the tokens of a slice."""
    cut, rest = 2 * unit + unit // 2, unit // 3
    chunks = [(0, 0, unit)], [(0, unit, 2 * unit)], [(0, 2 * unit, cut), (1, 0, rest)], [(2, 0, unit)], [(2, unit, unit + rest)]
    sliced = by_hand(["0F0 0F1 0F2 0F3 0F4 0B4 0B3 0B2 0B1 0B0"], chunks, num_layers=4, recompute_layers=recompute_layers)
    return sliced, by_hand(["0F0 0B0 0F1 0B1 0F2 0B2"], ([(0, 0, cut)], [(1, 0, rest)], [(2, 0, unit + rest)]), num_layers=4)


def kernels(unit: int) -> Part:
    proofs = list(prove(DEVICE.type, 128, 8, 2, unit))
    wrong = [proof.kernel for proof in proofs if proof.is_chosen and not proof.holds]
    return {"proofs": [asdict(proof) for proof in proofs], "met": not wrong}


def executor(unit: int) -> Part:
    sliced, whole = plans(unit, 0)
    expected = run(whole)[0]
    figures: Part = {"slices in fp32": relative_difference(run(sliced)[0], expected)}
    figures["whole in bf16"] = relative_difference(run(whole, torch.bfloat16, "auto")[0], expected)
    figures["slices in bf16"] = relative_difference(run(sliced, torch.bfloat16, "auto")[0], expected)
    return figures | {
        "met": figures["slices in fp32"] <= GOALS["fp32"]
        and figures["slices in bf16"] <= GOALS["bf16"] * figures["whole in bf16"]
    }


def copies(unit: int) -> Part:
    rows: dict[str, Part] = {}
    for recompute_layers in (0, 2):
        plan, _ = plans(unit, recompute_layers)
        stays = run(plan)[0]
        for name, move in MOVES.items():
            grads, recorder = run(move(plan), times=3)
            events = [event[:3] for event in recorder.events()]
            rows[f"{name}, {recompute_layers} layers recomputed"] = {
                "difference": relative_difference(grads, stays),
                **_hidden(events),
            }
    return {"rows": rows, "met": all(row["difference"] <= GOALS["copies"] for row in rows.values())}


def _hidden(events: Sequence[tuple[str, float, float]]) -> Part:
    """Total time of copies of activations, and the share of it in which an action computed."""
    compute = [(start, end) for name, start, end in events if "F" in name or "B" in name]
    moved = [(start, end) for name, start, end in events if "O" in name or "L" in name]
    total = sum(end - start for start, end in moved)
    hidden = sum(max(0.0, min(end, e) - max(start, s)) for start, end in moved for s, e in compute)
    return {"copies_us": total, "hidden_by_compute": hidden / total if total else None}


def memory(unit: int) -> Part:
    rows: dict[str, Part] = {}
    for recompute_layers in (0, 2):
        alone = peaks(by_hand(["0F0 0B0"], ([(0, 0, unit)],), num_layers=4, recompute_layers=recompute_layers))
        for name, move in MOVES.items():
            row = peaks(move(plans(unit, recompute_layers)[0]))
            if row["given"] is not None:
                row["planned"] = row["counted"] + alone["given"] - alone["counted"]
                row["error"] = row["planned"] / row["given"] - 1
            rows[f"{name}, {recompute_layers} layers recomputed"] = row
    return {
        "allocator": allocator_setting(os.environ, torch.__version__),
        "rows": rows,
        "met": all(abs(row.get("error", 0.0)) <= GOALS["peak"] for row in rows.values()),
    }


def peaks(plan: Plan) -> Part:
    """Peaks of a plan, without parameters and gradients, in bytes: what autograd and caches keep, and what the device gave.

    The device's are None on a CPU.
    """
    stage, host = GpuStage(plan, torch.bfloat16), HostMemory(DEVICE, _HOST_BYTES)
    for parameter in stage.parameters:
        parameter.grad = torch.zeros_like(parameter)
    counted = allocated = reserved = None
    for _ in range(3):
        gc.collect()
        before = _begin()
        with (
            ActivationOffload(host, stage.parameters, lambda: stage.kv_cache.num_bytes) as saved,
            offload_handlers(plan, 0, {0: stage}, host, saved) as handlers,
        ):
            executor_of(plan, 0, {0: stage}, handlers=handlers).run()
        counted = saved.peak_bytes
        if DEVICE.type == "cuda":
            allocated, reserved = torch.cuda.max_memory_allocated() - before, torch.cuda.max_memory_reserved()
    retries = torch.cuda.memory_stats()["num_alloc_retries"] if DEVICE.type == "cuda" else None
    return {"counted": counted, "given": allocated, "kept_by_the_allocator": reserved, "alloc_retries": retries}


def _begin() -> int:
    """Empty torch's allocator, as before a first iteration; return the bytes in use."""
    if DEVICE.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.memory_allocated())


PARTS: Mapping[str, Callable[[int], Part]] = {
    "kernels": kernels,
    "executor": executor,
    "copies": copies,
    "memory": memory,
}
_UNITS = {"kernels": 1024, "executor": 2048, "copies": 4096, "memory": 8192}
"""Tokens of a slice."""
_REDUCED_UNIT = 48


def cases(args: Namespace) -> Mapping[str, Callable[[int], Part]]:
    if not (args.reduced or DEVICE.type == "cuda"):
        raise SystemExit("there is no GPU here; --reduced shows on a CPU that the script works")
    torch.set_float32_matmul_precision("highest")  # NVIDIA's containers multiply fp32 matrices in TF32
    return PARTS


def row(args: Namespace, part: Callable[[int], Part]) -> Part:
    return part(_REDUCED_UNIT if args.reduced else _UNITS[part.__name__])


def text(args: Namespace, rows: Sequence[Part]) -> str:
    parts = "\n".join(f"{row['case']}: {row.get('failed') or ('met' if row['met'] else 'missed')}" for row in rows)
    return f"{json.dumps({'goals': GOALS, 'parts': list(rows)}, indent=1)}\n{parts}"


BENCH = Bench(
    about=__doc__,
    cases=cases,
    row=row,
    text=text,
    reduced="everything tiny, on a CPU too: figures that say nothing",
    goes_on=True,
    folder=RUNS / "bench_device",
)

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
