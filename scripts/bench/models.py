"""Compares elastic plans of the models that people train with 1F1B and Seq1F1B, on paper and at equal memory.

Every planner has the best of its packing sizes, of even and balanced layers, and of latents and keys and values; the cap is the
same. 1F1B runs whole sequences, one for a microbatch, or packed into rows. Prints a table, as in docs/comparison.md.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from megatron_epp.tools.cli.main import main as command
from megatron_epp.tools.formulas.library import load_flags
from scripts.bench.frame import Bench, Figures
from scripts.tables import table

PLANNERS = {"greedy": "elastic", "1f1b": "1F1B, whole", "1f1b-packed": "1F1B, packed", "seq1f1b": "Seq1F1B"}
LENGTHS = ("wikipedia", "code", "agents")


@dataclass(frozen=True, slots=True)
class Model:
    """A model on a cluster, with the flags of `megatron-epp compare` that say its parallel sizes."""

    name: str
    sizes: str


SHARED = "--sequence-parallel --vocab-parallel on"
MODELS = (
    Model("deepseek-v3", "--stages 16 --tensor-parallel 8 --expert-parallel 64 --data-parallel 8"),
    Model("glm-4.5-air", "--stages 8 --tensor-parallel 8 --expert-parallel 8 --data-parallel 4"),
    Model("qwen3-next-80b-a3b", "--stages 8 --tensor-parallel 2 --expert-parallel 16 --data-parallel 8"),
    Model("gpt-oss-120b", "--stages 4 --tensor-parallel 8 --expert-parallel 16 --data-parallel 4"),
)
CLUSTER = "h100x8"
CONTEXT, SEQUENCES = 1 << 17, 64
"""Most tokens of a sequence, and sequences of a replica's batch."""


def row(args: Namespace, case: tuple[Model, str]) -> Figures:
    """Return the best figures of every planner, by its name: those with the least makespan."""
    model, lengths = case
    words = ["compare", "--json", "--model", model.name, "--cluster", CLUSTER, "--lengths", lengths]
    words += [*f"{model.sizes} {SHARED}".split(), "--context", str(CONTEXT), "--batch-size", str(SEQUENCES)]
    words += [word for name in PLANNERS for word in ("--planner", name)]
    rows: list[Figures] = []
    choices = ("off", "on") if load_flags(model.name).get("multi_latent_attention") else ("off",)
    for layout, latents in product(("even", "balanced"), choices):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            if command([*words, "--layout", layout, "--latents", latents]):
                raise SystemExit(f"no comparison of {model.name} on {lengths}")
        rows += json.loads(printed.getvalue())
    rows.sort(key=lambda row: float(row.get("makespan_us", math.inf)), reverse=True)
    return {"model": model.name, "lengths": lengths, "planners": {row["planner"]: row for row in rows}}


def cells_of(row: Figures) -> list[str]:
    """Format a row: the elastic plan's time, and the others' in multiples of it."""
    figures: dict[str, Figures] = row["planners"]
    own = figures["greedy"]
    cells = [row["model"], row["lengths"], f"{own['makespan_us'] / 1e6:.2f} s{', latents' * own['latents']}"]
    for name in PLANNERS:
        if name != "greedy":
            ratio = figures[name].get("makespan_us", math.inf) / own["makespan_us"]
            cells.append("no plan fits" if math.isinf(ratio) else f"{ratio:.2f}x{', latents' * figures[name]['latents']}")
    peaks = [max(of_planner["peak_bytes"]) / 2**30 for of_planner in figures.values() if "peak_bytes" in of_planner]
    return [*cells, f"{min(peaks):.0f} to {max(peaks):.0f} of {own['cap_bytes'][0] / 2**30:.0f} GiB"]


def text(args: Namespace, rows: Sequence[Figures]) -> str:
    return table(["model", "lengths", "elastic", *list(PLANNERS.values())[1:], "peaks"], map(cells_of, rows))


BENCH = Bench(
    about=__doc__,
    cases=lambda args: {f"{model.name}, {lengths}": (model, lengths) for model in MODELS for lengths in LENGTHS},
    row=row,
    text=text,
    takes_jobs=True,
)

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
