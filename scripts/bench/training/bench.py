"""Measures training speed against Megatron's own 1F1B schedule on this machine, and prints ratios.

Two questions. On sequences of one length: do elastic plans cost anything? On skewed lengths, with the same bound on activation
memory: what do they win over whole sequences, padded and packed? All runs use the same attention kernel, model, documents and
token-weighted loss; every schedule is launched several times in turn, and medians over all its iterations are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from megatron_epp.data.sequence_lengths import wikipedia
from megatron_epp.launch.machine import machine
from megatron_epp.launch.runs import RecordedRun, learnt_costs, pipeline_size, tiny_gpt, train
from scripts.random_documents import write_documents

FOLDER = Path(__file__).resolve().parents[3] / "runs" / "bench_training"


def write_corpus(name: str, lengths: np.ndarray) -> str:
    """Documents of random bytes with the given token counts; returns the prefix for --data-path."""
    return write_documents(FOLDER / "corpus" / name, lengths.tolist())


def in_turn(name: str, ranks: int, variants: dict[str, dict[str, Any]], rounds: int) -> dict[str, list[RecordedRun]]:
    """Launch every variant once per round, so that drift of the machine's speed hits all alike."""
    runs: dict[str, list[RecordedRun]] = {variant: [] for variant in variants}
    for number in range(rounds):
        for variant, settings in variants.items():
            print(f"  {name}: round {number + 1} of {rounds}, {variant}", flush=True)
            runs[variant].append(train(FOLDER / name / variant, ranks, settings))
    return runs


def median_ms_per_token(runs: list[RecordedRun]) -> float:
    """Median over iterations (the first of each launch apart) of milliseconds per real token."""
    return statistics.median(
        ms / line["tokens"] for run in runs for line, ms in list(zip(run.lines, run.iteration_ms, strict=True))[1:]
    )


def bench_uniform(ranks: int, seq_length: int, iterations: int, rounds: int) -> dict[str, Any]:
    """Every document is `seq_length` long."""
    prefix = write_corpus("uniform", np.full(64, seq_length))
    base = tiny_gpt(
        data_path=prefix,
        seq_length=seq_length,
        max_position_embeddings=seq_length,
        train_iters=iterations,
        pipeline_model_parallel_size=ranks,
    )
    elastic = base | {"epp_costs": learnt_costs(FOLDER / "uniform" / "costs", ranks, base)}
    runs = in_turn("uniform", ranks, {"1f1b": base | {"epp_schedule": "padded"}, "elastic": elastic}, rounds)
    speed = {variant: median_ms_per_token(r) for variant, r in runs.items()}
    return {"elastic_over_1f1b": speed["1f1b"] / speed["elastic"]}


def fitting_recompute(ranks: int, settings: dict[str, Any], cap_bytes: int, layers: int) -> tuple[int, int]:
    """Fewest layers per stage that must recompute for the measured peak to stay under the cap: ``(layers, peak bytes)``."""
    peak = 0
    for recompute in range(layers + 1):
        short = settings | {"epp_recompute": recompute, "train_iters": 3, "epp_measure_memory": True}
        peak = max(train(FOLDER / "fit", ranks, short).peak_activation_bytes)
        if peak <= cap_bytes:
            return recompute, peak
    raise SystemExit(f"even with all {layers} layers recomputing, the peak of {peak:,} bytes is above the cap of {cap_bytes:,}")


def bench_skewed(ranks: int, seq_length: int, batch: int, iterations: int, rounds: int, share: float) -> dict[str, Any]:
    """Skewed documents under a cap of `share` of what whole sequences without recompute take."""
    base = tiny_gpt(
        data_path=write_corpus("skewed", wikipedia(4096, seed=1)),
        seq_length=seq_length,
        max_position_embeddings=seq_length,
        epp_documents="truncate",
        global_batch_size=batch,
        train_iters=iterations,
        pipeline_model_parallel_size=ranks,
    )
    layers = base["num_layers"] // ranks
    probe = train(FOLDER / "probe", ranks, base | {"epp_schedule": "packed", "train_iters": 3, "epp_measure_memory": True})
    cap_bytes = int(share * max(probe.peak_activation_bytes))
    traced = train(FOLDER / "probe", ranks, base | {"train_iters": 3, "epp_trace": 1})
    del traced
    static_bytes = max(json.loads((FOLDER / "probe" / "plan.json").read_text())["static_bytes"])
    variants, peaks = {}, {}
    for schedule in ("padded", "packed"):
        settings = base | {"epp_schedule": schedule}
        recompute, peaks[schedule] = fitting_recompute(ranks, settings, cap_bytes, layers)
        variants[f"1f1b {schedule}"] = settings | {"epp_recompute": recompute}
    capped = base | {"epp_memory_cap_gb": (cap_bytes + static_bytes) / 2**30}
    elastic = capped | {"epp_costs": learnt_costs(FOLDER / "skewed" / "costs", ranks, capped)}
    variants["elastic"] = elastic
    check = train(FOLDER / "probe", ranks, elastic | {"train_iters": 3, "epp_measure_memory": True})
    peaks["elastic"] = max(check.peak_activation_bytes)
    runs = in_turn("skewed", ranks, variants, rounds)
    speed = {variant: median_ms_per_token(r) for variant, r in runs.items()}
    return {
        "activation_cap_mib": cap_bytes / 2**20,
        "peak_activation_mib": {name: peak / 2**20 for name, peak in peaks.items()},
        "recompute_layers": {name: s.get("epp_recompute", "planned") for name, s in variants.items()},
        "tokens_per_second": {name: 1e3 / ms for name, ms in speed.items()},
        "elastic_over_1f1b_padded": speed["1f1b padded"] / speed["elastic"],
        "elastic_over_1f1b_packed": speed["1f1b packed"] / speed["elastic"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.training", description=__doc__)
    parser.add_argument("--pipeline", type=int, default=2, help="pipeline size (default 2)")
    parser.add_argument("--rounds", type=int, default=3, help="launches of every schedule (default 3)")
    parser.add_argument("--iterations", type=int, default=8, help="iterations per launch (default 8)")
    parser.add_argument("--uniform-length", type=int, default=1024, help="tokens of every document, first part (default 1024)")
    parser.add_argument("--context", type=int, default=8192, help="context limit, second part (default 8192)")
    parser.add_argument("--batch", type=int, default=16, help="documents per iteration, second part (default 16)")
    parser.add_argument("--cap-share", type=float, default=0.5, help="the cap, as a share of packed 1F1B's peak (default 0.5)")
    a = parser.parse_args()
    ranks = pipeline_size(a.pipeline)
    report = {
        "machine": machine(),
        "pipeline": ranks,
        "uniform": bench_uniform(ranks, a.uniform_length, a.iterations, a.rounds),
        "skewed": bench_skewed(ranks, a.context, a.batch, a.iterations, a.rounds, a.cap_share),
    }
    text = json.dumps(report, indent=2)
    Path(FOLDER / "report.json").write_text(text + "\n")
    print(text)
