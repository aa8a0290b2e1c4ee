"""Compares elastic plans of the models that people train with 1F1B and Seq1F1B, on paper and at equal memory.

Every planner has the best of its packing sizes, of even and balanced layers, and of latents and keys and values; the cap is the
same. 1F1B runs whole sequences, one for a microbatch, or packed into rows. Prints a table, as in docs/comparison.md.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
from dataclasses import dataclass
from itertools import product
from typing import Any

from megatron_epp.cli.main import main as command
from megatron_epp.cost.library import load_flags
from scripts.bench.planner.report import table

PLANNERS = {"greedy": "elastic", "1f1b": "1F1B, whole", "1f1b-packed": "1F1B, packed", "seq1f1b": "Seq1F1B"}
LENGTHS = ("wikipedia", "code", "chat")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on a cluster.

    Attributes:
        model: name of a shipped file.
        flags: of `megatron-epp compare`: parallel sizes.
        context: most tokens of a sequence.
    """

    model: str
    flags: str
    context: int


CASES = (
    Case(
        model="deepseek-v3",
        flags="--stages 16 --tensor-parallel 8 --sequence-parallel --expert-parallel 64 --data-parallel 8 --vocab-parallel on",
        context=1 << 17,
    ),
    Case(
        model="glm-4.5-air",
        flags="--stages 8 --tensor-parallel 8 --sequence-parallel --expert-parallel 8 --data-parallel 4 --vocab-parallel on",
        context=1 << 17,
    ),
    Case(
        model="qwen3-next-80b-a3b",
        flags="--stages 8 --tensor-parallel 2 --sequence-parallel --expert-parallel 16 --data-parallel 8 --vocab-parallel on",
        context=1 << 17,
    ),
    Case(
        model="gpt-oss-120b",
        flags="--stages 4 --tensor-parallel 8 --sequence-parallel --expert-parallel 16 --data-parallel 4 --vocab-parallel on",
        context=1 << 17,
    ),
)


def compared(case: Case, lengths: str, cluster: str, batch: int) -> dict[str, dict[str, Any]]:
    """Return the best figures of every planner, by its name: those with the least makespan."""
    words = ["compare", "--json", "--model", case.model, "--cluster", cluster, "--lengths", lengths, *case.flags.split()]
    words += ["--context", str(case.context), "--batch-size", str(batch)]
    words += [word for name in PLANNERS for word in ("--planner", name)]
    rows: list[dict[str, Any]] = []
    choices = ("off", "on") if load_flags(case.model).get("multi_latent_attention") else ("off",)
    for layout, latents in product(("even", "balanced"), choices):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            if command([*words, "--layout", layout, "--latents", latents]):
                raise SystemExit(f"no comparison of {case.model} on {lengths}")
        rows += json.loads(printed.getvalue())
    rows.sort(key=lambda row: float(row.get("makespan_us", math.inf)), reverse=True)
    return {row["planner"]: row for row in rows}


def row_of(case: Case, lengths: str, figures: dict[str, dict[str, Any]]) -> list[str]:
    """Format a row: the elastic plan's time, and the others' in multiples of it."""
    own = figures["greedy"]
    cells = [case.model, lengths, f"{own['makespan_us'] / 1e6:.2f} s{', latents' * own['latents']}"]
    for name in PLANNERS:
        if name != "greedy":
            ratio = figures[name].get("makespan_us", math.inf) / own["makespan_us"]
            cells.append("no plan fits" if math.isinf(ratio) else f"{ratio:.2f}x{', latents' * figures[name]['latents']}")
    peaks = [max(own_figures["peak_bytes"]) / 2**30 for own_figures in figures.values() if "peak_bytes" in own_figures]
    return [*cells, f"{min(peaks):.0f} to {max(peaks):.0f} of {own['cap_bytes'][0] / 2**30:.0f} GiB"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.models", description=__doc__)
    parser.add_argument("--cluster", default="h100x8", help="a shipped cluster (default: h100x8)")
    parser.add_argument("--lengths", nargs="+", default=LENGTHS, help="lengths to draw from (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="sequences of a replica's batch (default: 64)")
    a = parser.parse_args()
    rows = [row_of(case, name, compared(case, name, a.cluster, a.batch_size)) for case in CASES for name in a.lengths]
    print(table(["model", "lengths", "elastic", *list(PLANNERS.values())[1:], "peaks"], rows))
