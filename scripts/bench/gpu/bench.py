"""Measures this package on one GPU, through its own training: speed, memory and numbers, each compared with Megatron's own.

Parts (`--only`):

parity      losses and gradients in bf16, sliced: no further from Megatron's in fp32 than its own in bf16 are
slices      a long sequence in slices against the same unsliced, same kernel and recompute: tokens per second
long        a sequence that does not fit unsliced; what the unsliced run says is reported as it is
peaks       planned against measured peak of device memory, without a cap and under one that asks for recompute
copies      activations offloaded: how much of the copies is overlapped with compute, and what the iteration takes longer
race        documents of 120 to 32,768 tokens under a cap, one stage: plans against packed rows with every layer recomputed, and
            with as few layers recomputed as fit below the cap
ranks-1     small trainings in slices against whole sequences on one rank, in fp32 and bf16: the largest difference of a loss;
ranks-2     the same on two ranks over NCCL, which can share a GPU from 2.30 on: stages, a V, tensor, context and data parallel
ranks-4     on four ranks
loops       a loop of its own on two and on four ranks: gradients by `wrap` and `wrap_samples` against Megatron's own schedule

Us and the baseline are measured in the same call. `--small` takes minutes; all its parts but `long` run then.
`--reduced` runs all of it tiny, on a CPU too, to show that the script works: its figures say nothing.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from megatron_epp.plan import Op
from megatron_epp.plan.measured import Measured
from megatron_epp.tools.cli.first_run.training import deviation, figures_of
from megatron_epp.tools.launch.runs import TrainingError
from scripts.bench.frame import RUNS, Bench
from scripts.bench.gpu.loop import on_ranks
from scripts.bench.gpu.ranks import ROWS, compare
from scripts.bench.gpu.report import GOALS, text
from scripts.bench.gpu.runs import Launched, Launches, OutOfMemory, Settings, Sizes

_CAP_SHARE = 0.6
"""Share of the bytes that an iteration without recompute holds besides weights and optimizer."""

Part = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Parts:
    """State shared by the parts."""

    sizes: Sizes
    launches: Launches

    def sliced(self, context: int, **changes: Any) -> Settings:
        """Flags of a sequence in slices of one size, which a planner of one size makes; ours makes slices of one time."""
        return self.sizes.settings(context, epp_planner="seq1f1b", epp_chunk_tokens=self.sizes.slice_tokens, **changes)

    def mixed(self, lengths: tuple[int, ...]) -> Settings:
        """Flags of batches of documents of these lengths, the longest in slices, every iteration traced."""
        traced = {"epp_trace": list(range(1, self.sizes.iterations + 1)), "epp_measure_memory": not torch.cuda.is_available()}
        return self.sizes.settings(max(lengths), epp_slices=4, **traced)

    def parity(self) -> Part:
        lengths = self.sizes.short
        stock = self.sizes.settings(max(lengths), epp_schedule="stock")
        exact = self.launches.run("stock in fp32", stock | {"bf16": False}, lengths)
        theirs = self.launches.run("stock in bf16", stock, lengths)
        ours = self.launches.run("sliced in bf16", self.mixed(lengths), lengths)
        rows = {
            "loss": deviation(exact.run.losses, theirs.run.losses, ours.run.losses, GOALS["loss_floor"]),
            "norm of the gradients": deviation(exact.grad_norms, theirs.grad_norms, ours.grad_norms, GOALS["norm_floor"]),
        }
        met = all(row.holds for row in rows.values())
        return {"iterations": len(exact.run.losses), "rows": {name: asdict(row) for name, row in rows.items()}, "met": met}

    def slices(self) -> Part:
        context, every_layer = self.sizes.context, {"epp_recompute": self.sizes.layers}
        whole = self.sizes.settings(context, epp_schedule="whole", **every_layer)
        runs = {
            "unsliced": self.launches.run("unsliced", whole, (context,)),
            "sliced": self.launches.run("sliced", self.sliced(context, **every_layer), (context,)),
        }
        figures = {"context": context, "slice_tokens": self.sizes.slice_tokens} | _speeds(runs)
        ratio = runs["sliced"].run.tokens_per_second / runs["unsliced"].run.tokens_per_second
        return figures | {"sliced_over_unsliced": ratio, "met": ratio >= GOALS["speed"]}

    def long(self) -> Part:
        context = self.sizes.long_context
        shorter = {"num_layers": self.sizes.long_layers, "train_iters": self.sizes.long_iterations}
        every_layer = shorter | {"epp_recompute": self.sizes.long_layers}
        figures: Part = {"context": context, "slice_tokens": self.sizes.slice_tokens}
        runs = {"sliced": self.launches.run("long sliced", self.sliced(context, **every_layer), (context,))}
        try:
            whole = self.sizes.settings(context, epp_schedule="whole", **every_layer)
            runs["unsliced"] = self.launches.run("long unsliced", whole, (context,))
        except OutOfMemory as error:
            figures["unsliced"] = str(error)
        return figures | _speeds(runs) | {"met": True}

    def peaks(self) -> Part:
        free, capped = self._free_and_capped()
        rows = {"without a cap": _peak(free), "under a cap": _peak(capped)}
        return {"rows": rows, "met": all(abs(row["error"]) <= GOALS["peak"] for row in rows.values())}

    def copies(self) -> Part:
        free, moved = self._free_and_capped(epp_offload="on")
        share = max(line["offload_share"] for line in moved.run.lines)
        slower = free.run.tokens_per_second / moved.run.tokens_per_second
        hidden = hidden_copies([measured for _, measured in moved.traces()])
        return {"offload_share": share, **hidden, "times_as_long": slower, "met": share > 0}

    def _free_and_capped(self, **changes: Any) -> tuple[Launched, Launched]:
        """The same batches without a cap, and with changes under one."""
        lengths = self.sizes.mixed
        settings = self.mixed(lengths)
        free = self.launches.run("without a cap", settings, lengths)
        plans = [plan for plan, _ in free.traces()]
        static, peak = (
            max(map(max, column)) for column in zip(*((p.static_bytes, p.predicted.peak_bytes) for p in plans), strict=True)
        )
        cap = {"epp_memory_cap_gb": (static + _CAP_SHARE * (peak - static)) / 2**30}
        return free, self.launches.run(" ".join(["under a cap", *changes]), settings | cap | changes, lengths)

    def race(self) -> Part:
        layers, lengths, cap_gb = self.sizes.raced
        iterations = 10  # costs are learnt in the first ones, and those at the end count
        packed: Settings = {"epp_schedule": "packed", "train_iters": iterations}  # of the same documents as plans
        learnt = {"epp_costs": "learn", "epp_trace": [iterations], "train_iters": iterations}
        runs, failures = dict[str, Launched](), dict[str, str]()

        def run(name: str, changes: Settings) -> Launched | None:
            settings = self.sizes.settings(max(lengths), num_layers=layers, lr_decay_iters=iterations, **changes)
            try:
                runs[name] = self.launches.run(f"race {name}", settings, lengths)
            except (OutOfMemory, TrainingError) as error:  # the others go on
                failures[name] = str(error)
            return runs.get(name)

        every = run("packed, all recomputed", packed | {"epp_recompute": layers})
        run("plans", learnt | {"epp_memory_cap_gb": cap_gb})
        # As little recompute as fits, by what half of the layers take: a baseline that is tuned as well as it can be. The first
        # layers that are kept may take nothing, where the peak is at the output layer.
        half = layers // 2
        half_kept = run(f"packed, {half} layers kept", packed | {"epp_recompute": layers - half})
        if every and half_kept and every.device_peak_bytes and half_kept.device_peak_bytes:
            per_layer = max(1, (half_kept.device_peak_bytes - every.device_peak_bytes) / half)
            num_kept_layers = min(layers, half + int((cap_gb * 2**30 - half_kept.device_peak_bytes) // per_layer))
            if num_kept_layers > 0 and num_kept_layers != half:
                run(f"packed, {num_kept_layers} layers kept", packed | {"epp_recompute": layers - num_kept_layers})
        speeds = {name: figures_of(launched.run)["tokens_per_second"] for name, launched in runs.items()}
        figures = {"cap_gb": cap_gb, "layers": layers, "failures": failures, "met": "plans" in runs}
        return figures | _speeds(runs) | {"tokens_per_second": speeds}

    def ranks(self, num_ranks: int) -> Part:
        rows = compare(self.launches, self.sizes, {name: row for name, row in ROWS.items() if row.ranks == num_ranks})
        return {"rows": rows, "met": all(row.get("holds", False) for row in rows.values())}

    def loops(self) -> Part:
        folder, limit_s = self.launches.folder, self.launches.limit_s
        rows = {f"{ranks} ranks": on_ranks(folder / f"loop-{ranks}", ranks, limit_s) for ranks in (2, 4)}
        return {"rows": rows, "met": all(row["met"] for row in rows.values())}


def hidden_copies(iterations: Sequence[Measured]) -> Part:
    """Total time of the copies, and the share of it in which their rank computed too."""
    copying = hidden_us = 0.0
    for events in (events for measured in iterations for events in measured.ranks):
        compute = [e for e in events if e.action.op in (Op.F, Op.B, Op.W)]
        for copy in (e for e in events if e.action.op in (Op.O, Op.L)):
            copying += copy.took_us
            hidden_us += sum(max(0.0, min(copy.end_us, e.end_us) - max(copy.start_us, e.start_us)) for e in compute)
    return {"copies_us": copying, "hidden_share": hidden_us / copying if copying else None}


def _speeds(runs: dict[str, Launched]) -> Part:
    return {
        "tokens_per_second": {name: launched.run.tokens_per_second for name, launched in runs.items()},
        "device_peak_bytes": {name: run.device_peak_bytes for name, run in runs.items()},
        "losses": {name: launched.run.losses for name, launched in runs.items()},
    }


def _peak(run: Launched) -> Part:
    """On a GPU everything that its allocator has given; elsewhere what autograd keeps."""
    planned, measured = run.planned_activation_bytes, run.activation_peak_bytes
    if (device := run.device_peak_bytes) is not None:
        planned, measured = planned + max(max(plan.static_bytes) for plan, _ in run.traces()), device
    assert measured  # one of them counts
    recompute = max(line["recompute_share"] for line in run.run.lines)
    error = planned / measured - 1
    return {"planned_bytes": planned, "measured_bytes": measured, "error": error, "recompute_share": recompute}


PARTS: dict[str, Callable[[Parts], Part]] = {
    "parity": Parts.parity,
    "slices": Parts.slices,
    "long": Parts.long,
    "peaks": Parts.peaks,
    "copies": Parts.copies,
    "race": Parts.race,
    **{f"ranks-{number}": partial(Parts.ranks, num_ranks=number) for number in (1, 2, 4)},
    "loops": Parts.loops,
}


def cases(args: Namespace) -> dict[str, Callable[[], Part]]:
    if not (args.reduced or torch.cuda.is_available()):
        raise SystemExit("there is no GPU here; --reduced shows on a CPU that the script works")
    device_bytes = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
    large = Sizes.small() if args.small else Sizes.full(device_bytes)
    parts = Parts(Sizes.reduced() if args.reduced else large, Launches(args.output, args.limit))
    return {name: partial(part, parts) for name, part in PARTS.items() if not (args.small and name == "long")}


BENCH = Bench(
    about=__doc__,
    cases=cases,
    row=lambda args, part: part(),
    text=text,
    flags={
        "small": {"action": "store_true", "help": "a smaller model and shorter sequences: minutes instead of hours"},
        "limit": {"type": float, "default": 3600, "metavar": "S", "help": "for one launch (default 3600)"},
    },
    reduced="everything tiny, on a CPU too: figures that say nothing",
    goes_on=True,
    folder=RUNS / "bench_gpu",
)
