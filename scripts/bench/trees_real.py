"""Trains samples that share prompts in trees and each by itself, in turn: the ratio of their times, planned and measured.

    taskset -c 0,1 python -m scripts.bench.trees_real

Two ranks run a small GPT of Megatron's on a core of their own each, both schedules in the same processes. Costs are learnt.
Times are of whole iterations, without planning, and the median of all rounds counts.
"""

from __future__ import annotations

import json
import logging
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_epp.contrib.demos.rounds import turns
from megatron_epp.mcore.pinned import pin
from megatron_epp.runtime.links.processes import run_ranks
from scripts.bench.frame import Bench, Figures
from scripts.tables import table
from scripts.tiny_stage import config_of, stage_of

Groups = list[tuple[int, list[int]]]
"""Tokens of each prompt, and of its responses."""
HIDDEN, HEADS, LAYERS, VOCABULARY = 192, 4, 8, 512
KINDS = "planned", "measured"
SCHEDULES = {"separate": False, "trees": True}
LEARNING = 6
"""Calls of each schedule before the first that counts, from which it learns costs."""


def groups(count: int, size: int, prompt: int, response: float) -> Groups:
    """Draw responses, log-normal; seed and spread are fixed."""
    random = Random(0)
    return [(prompt, [max(8, int(response * random.lognormvariate(-0.08, 0.4))) for _ in range(size)]) for _ in range(count)]


CASES = {"GRPO, 8 groups of 8": groups(8, 8, 96, 192), "DPO, 32 pairs": groups(32, 2, 96, 32)}


def run(rank: int, batch: Groups, rounds: int, folder: str) -> dict[str, list[dict[str, float]]]:
    """Train a batch by each schedule, `rounds` times after those that learn costs; return the planned and the measured makespan
    of each on the first rank. The folder is for reports.
    """
    pin(rank)
    import megatron_epp
    from megatron_epp.losses import ClippedRatio

    model, samples = _stage(), _samples(batch)
    schedules = {
        name: megatron_epp.wrap_samples(
            loss=ClippedRatio(), share_prefixes=shares, costs="learn", report_dir=f"{folder}/{name}"
        )
        for name, shares in SCHEDULES.items()
    }

    def train(name: str) -> None:
        model.zero_grad()
        dist.barrier()
        schedules[name](model=model, samples=samples)

    for _ in range(LEARNING):
        for name in schedules:
            train(name)
    for order in turns(tuple(schedules), rounds):
        for name in order:
            train(name)
    for schedule in schedules.values():
        schedule.close()
    return {name: _makespans(Path(folder) / name, rounds) for name in schedules} if rank == 0 else {}


def _stage() -> Any:
    from megatron_epp.mcore import entry

    entry.prepare()
    logging.getLogger("megatron_epp").setLevel(logging.WARNING)
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(1)
    return stage_of(config_of(LAYERS, HIDDEN, HEADS), get_gpt_layer_local_spec(), VOCABULARY, 4096)


def _samples(batch: Groups) -> list[dict[str, Any]]:
    draw, samples = np.random.default_rng(3), list[dict[str, Any]]()
    for prompt, responses in batch:
        first = draw.integers(VOCABULARY, size=prompt)
        for size in responses:
            tokens = np.concatenate([first, draw.integers(VOCABULARY, size=size)])
            trained = (np.arange(len(tokens)) >= prompt).astype(np.int64)
            old = np.full(len(tokens), -6.0, dtype=np.float32)
            samples.append({"tokens": tokens, "trained": trained, "advantages": float(draw.normal()), "old_logprobs": old})
    return samples


def _makespans(folder: Path, count: int) -> list[dict[str, float]]:
    lines = (folder / "iterations.jsonl").read_text().splitlines()[-count:]
    return [json.loads(line)["makespan_us"] for line in lines]


def row(args: Namespace, batch: Groups) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        makespans: dict[str, list[dict[str, float]]] = run_ranks(run, 2, batch, args.rounds, folder)[0]
    medians = {name: {kind: median(each[kind] for each in own) for kind in own[0]} for name, own in makespans.items()}
    ratios = {kind: own / medians["trees"][kind] for kind, own in medians["separate"].items()}
    return {"medians": medians, "ratios": ratios}


def text(args: Namespace, rows: Sequence[Figures]) -> str:
    def ms(row: Figures, name: str) -> str:
        return f"{row['medians'][name]['measured'] / 1e3:.0f} ms"

    lines = (
        [row["case"], *(ms(row, name) for name in SCHEDULES), *(f"{row['ratios'][kind]:.2f}x" for kind in KINDS)]
        for row in rows
    )
    return table(["batch", *SCHEDULES, *KINDS], lines)


BENCH = Bench(
    about=__doc__,
    cases=lambda args: CASES,
    row=row,
    text=text,
    flags={"rounds": {"type": int, "default": 9, "help": "calls of each schedule that count (default: 9)"}},
)

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
