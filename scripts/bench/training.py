"""Measures training speed against Megatron's own 1F1B schedule on this machine, and prints ratios.

Three questions. On sequences of one length: do elastic plans cost anything? On skewed lengths, with the same bound on
activation memory: what do they win over whole sequences, padded and packed? And are plans by learnt costs faster than those by
formulas, and nearer to what is measured? All runs use the same attention kernel, model, documents and token-weighted loss;
every schedule is launched several times in turn, and medians over all its iterations are compared.
"""

from __future__ import annotations

import json
import statistics
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from megatron_epp.contrib.demos.rounds import Occupancy, OthersMeter, turns
from megatron_epp.data.sequence_lengths import code, wikipedia
from megatron_epp.tools.launch.runs import AS_MEGATRON, RecordedRun, learnt_costs, tiny_gpt, train
from scripts.bench.frame import RUNS, Bench, Figures
from scripts.random_documents import write_documents
from scripts.tables import table

FOLDER = RUNS / "bench_training"
RANKS, ITERATIONS = 2, 8
LONGER, UNLEARNT = 26, 10
"""Iterations where costs are learnt, and those that are not counted there: plans made ahead do not know them yet."""
UNIFORM_TOKENS, CONTEXT, DOCUMENTS, CAP_SHARE = 1024, 8192, 16, 0.5
"""Tokens of every document of one length; context and documents of a batch of skewed ones, and the cap there, as a share of
packed 1F1B's peak."""


def write_corpus(name: str, lengths: np.ndarray) -> str:
    """Documents of random bytes with the given token counts; returns the prefix for --data-path."""
    return write_documents(FOLDER / "corpus" / name, lengths.tolist())


def speeds(name: str, variants: dict[str, dict[str, Any]], rounds: int) -> tuple[dict[str, float], Occupancy]:
    """Return milliseconds per real token of each variant, and what other programs took of the cores meanwhile."""
    runs, others = launches(name, variants, rounds)
    return {variant: median_ms_per_token(of_variant) for variant, of_variant in runs.items()}, others


def launches(name: str, variants: dict[str, dict[str, Any]], rounds: int) -> tuple[dict[str, list[RecordedRun]], Occupancy]:
    """Launch every variant once per round, in turn, so that drift of the machine's speed hits all alike."""
    runs: dict[str, list[RecordedRun]] = {variant: [] for variant in variants}
    others = OthersMeter()
    for order in turns(tuple(variants), rounds):
        for variant in order:
            with others.measured():
                runs[variant].append(train(FOLDER / name / variant, RANKS, variants[variant]))
    return runs, others.occupancy(RANKS)


def median_ms_per_token(runs: list[RecordedRun], first: int = 1) -> float:
    """Median over iterations (from number `first` of each launch on, from 0) of milliseconds per real token."""
    return statistics.median(
        ms / line["tokens"] for run in runs for line, ms in list(zip(run.lines, run.iteration_ms, strict=True))[first:]
    )


def settings_of(prefix: str, context: int, **more: Any) -> dict[str, Any]:
    """Return the flags of a training on documents of up to so many tokens."""
    sizes = {"seq_length": context, "max_position_embeddings": context, "pipeline_model_parallel_size": RANKS}
    return tiny_gpt(data_path=prefix, train_iters=ITERATIONS, **sizes, **more)


def uniform(args: Namespace) -> Figures:
    """Every document is of one length."""
    base = settings_of(write_corpus("uniform", np.full(64, UNIFORM_TOKENS)), UNIFORM_TOKENS)
    elastic = base | {"epp_costs": learnt_costs(FOLDER / "uniform" / "costs", RANKS, base)}
    variants = {"1f1b": base | {"epp_schedule": "padded"}, "elastic": elastic}
    return figures_of(*speeds("uniform", variants, args.rounds))


def figures_of(speed: dict[str, float], others: Occupancy) -> Figures:
    return {
        "others": str(others),
        "is_busy": others.is_busy,
        "tokens_per_second": {name: 1e3 / ms for name, ms in speed.items()},
        "elastic_over": {name: ms / speed["elastic"] for name, ms in speed.items() if name != "elastic"},
    }


def fitting_recompute(settings: dict[str, Any], cap_bytes: int, layers: int) -> tuple[int, int]:
    """Fewest layers per stage that must recompute for the measured peak to stay under the cap: ``(layers, peak bytes)``."""
    peak = 0
    for recompute in range(layers + 1):
        short = settings | {"epp_recompute": recompute, "train_iters": 3, "epp_measure_memory": True}
        peak = max(train(FOLDER / "fit", RANKS, short).peak_activation_bytes)
        if peak <= cap_bytes:
            return recompute, peak
    raise SystemExit(f"even with all {layers} layers recomputing, the peak of {peak:,} bytes is above the cap of {cap_bytes:,}")


def skewed(args: Namespace) -> Figures:
    """Skewed documents under a cap of a share of what whole sequences without recompute take."""
    prefix = write_corpus("skewed", wikipedia(4096, seed=1))
    base = settings_of(prefix, CONTEXT, epp_documents="truncate", global_batch_size=DOCUMENTS)
    layers = base["num_layers"] // RANKS
    probe = train(FOLDER / "probe", RANKS, base | {"epp_schedule": "packed", "train_iters": 3, "epp_measure_memory": True})
    cap_bytes = int(CAP_SHARE * max(probe.peak_activation_bytes))
    train(FOLDER / "probe", RANKS, base | {"train_iters": 3, "epp_trace": 1})
    static_bytes = max(json.loads((FOLDER / "probe" / "plan.json").read_text())["static_bytes"])
    variants, peaks = {}, {}
    for schedule in ("padded", "packed"):
        settings = base | {"epp_schedule": schedule}
        recompute, peaks[schedule] = fitting_recompute(settings, cap_bytes, layers)
        variants[f"1f1b {schedule}"] = settings | {"epp_recompute": recompute}
    capped = base | {"epp_memory_cap_gb": (cap_bytes + static_bytes) / 2**30}
    elastic = capped | {"epp_costs": learnt_costs(FOLDER / "skewed" / "costs", RANKS, capped)}
    variants["elastic"] = elastic
    check = train(FOLDER / "probe", RANKS, elastic | {"train_iters": 3, "epp_measure_memory": True})
    peaks["elastic"] = max(check.peak_activation_bytes)
    return figures_of(*speeds("skewed", variants, args.rounds)) | {
        "activation_cap_mib": cap_bytes / 2**20,
        "peak_activation_mib": {name: peak / 2**20 for name, peak in peaks.items()},
        "recompute_layers": {name: s.get("epp_recompute", "planned") for name, s in variants.items()},
    }


def costs(lengths: np.ndarray, args: Namespace) -> Figures:
    """Plans by formulas and by what the first iterations have learnt."""
    prefix = write_corpus("costs", np.minimum(lengths, CONTEXT))
    base = settings_of(prefix, CONTEXT, global_batch_size=DOCUMENTS) | AS_MEGATRON | {"train_iters": LONGER}
    variants = {"formulas": base, "elastic": base | {"epp_costs": "learn"}}
    runs, others = launches("costs", variants, args.rounds)
    ratios = {
        variant: [
            line["makespan_us"]["planned"] / line["makespan_us"]["measured"] for run in every for line in run.lines[UNLEARNT:]
        ]
        for variant, every in runs.items()
    }
    return figures_of({variant: median_ms_per_token(every, UNLEARNT) for variant, every in runs.items()}, others) | {
        "planned_over_measured": {variant: statistics.median(each) for variant, each in ratios.items()},
        "within_15_percent": {
            variant: sum(abs(ratio - 1) <= 0.15 for ratio in each) / len(each) for variant, each in ratios.items()
        },
    }


def text(args: Namespace, rows: Sequence[Figures]) -> str:
    lines = []
    for row in rows:
        recompute = row.get("recompute_layers", {})
        for name, speed in row["tokens_per_second"].items():
            ratio = row["elastic_over"].get(name, 1)
            lines.append([row["case"], name, f"{speed:,.0f}", f"{ratio:.2f}", recompute.get(name, 0)])
    notes = [
        f"{row['case']}: cap of {row['activation_cap_mib']:.0f} MiB; peaks {row['peak_activation_mib']}"
        for row in rows
        if "activation_cap_mib" in row
    ]
    notes += [
        f"{row['case']}, {name}: planned over measured {ratio:.3f} at the median from iteration {UNLEARNT + 1} on, within 15 % "
        f"in {row['within_15_percent'][name]:.0%} of them"
        for row in rows
        for name, ratio in row.get("planned_over_measured", {}).items()
    ]
    notes += [f"{row['case']}: ratios are worth little: {row['others']}" for row in rows if row["is_busy"]]
    return "\n".join([table(["documents", "schedule", "tokens/s", "elastic / this", "layers recomputed"], lines), *notes])


CASES: dict[str, Callable[[Namespace], Figures]] = {
    "uniform": uniform,
    "skewed": skewed,
    "costs of code": partial(costs, code(4096, seed=2)),
    "costs of Wikipedia": partial(costs, wikipedia(4096, seed=1)),
}
BENCH = Bench(
    about=__doc__,
    cases=lambda args: CASES,
    row=lambda args, case: case(args),
    text=text,
    flags={"rounds": {"type": int, "default": 3, "help": "launches of every schedule (default 3)"}},
)

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
