"""Schedules of other papers train through Megatron's loop as its own schedule does: losses, gradients, weights."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_epp.plan.planners import PLANNERS
from megatron_epp.tools.formulas import CPU, analytic_profile
from megatron_epp.tools.formulas.library import shape_of
from scripts.parity.cells import OPTIMIZERS, Case
from scripts.parity.compare import BATCH
from tests.support.mcore.matrix import FOLDER, Matrix, Row, case, parameters
from tests.support.mcore.parity_figures import Figures
from tests.support.mcore.rows import kinds_of, plans_of, splits_weights

BY_DEFAULT = ("zb-h2", "stp", "sppo", "infinipipe", "helixpipe")
"""One of each kind: with separate weight gradients, in a V with steps of two actions, which take turns at the exchanges of
tensor parallelism, with copies of its own, with its own rules for chunks, and with attention on other ranks. The others are
slow."""
WHOLE = ("1f1b-padded", "1f1b-packed", "helixpipe")
"""Planners that cut no sequence."""
OF_ONE_SIZE = ("seq1f1b", "chunkflow")
"""Planners whose chunks have one size, which is given here: of their own choice it is the longest of these short documents."""


def case_of(name: str) -> Case:
    schedule = PLANNERS.entries()[name]
    cell = "tp2 pp2" if name == "stp" else "pp2"
    if schedule.fixed is not None and (count := schedule.fixed.chunks_per_rank or 2) > 1:
        cell += f" {schedule.fixed.kind}{count}"
    cell += " split" * schedule.splits_weight
    offload = " --epp-offload" if schedule.offloads else ""
    cut = "--epp-chunk-tokens 16" if name in OF_ONE_SIZE else "--epp-slices 1" if name in WHOLE else "--epp-slices 3"
    return case(cell, f"{cut} --epp-planner {name}{offload}")


def check_schedule(name: str, figures: Figures, _: Path) -> None:
    assert bool(kinds_of(figures) & {"split", "hybrid"}) == (name not in WHOLE)
    assert splits_weights(figures) == PLANNERS.entries()[name].splits_weight
    assert any(plan["copies"] > 0 for plan in plans_of(figures)) == PLANNERS.entries()[name].offloads
    if name == "stp":
        check_turns(figures)


def check_turns(figures: Figures) -> None:
    joined = sum(plan["joined"] for plan in plans_of(figures))
    assert joined > 0
    assert figures["turns"] > 2 * 2 * joined  # two on each tensor-parallel rank, if the second ran when the first had ended


def check_overlapped(figures: Figures, _: Path) -> None:
    assert all(plan["joined"] > 0 for plan in plans_of(figures))
    check_turns(figures)


def write_slow_exchanges(folder: Path) -> None:
    """Write costs by which exchanges take long, as on CPUs they do not."""
    shape = shape_of(
        {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 95} | {"tensor_model_parallel_size": 2}
    )
    (folder / "costs.json").write_text(analytic_profile(shape, replace(CPU, exchange_bytes=1e6)).to_json())


OURS = ("greedy", "1f1b", "milp")
"""Planners that other tests train with, and one that training refuses."""
NAMES = [name for name, entry in PLANNERS.entries().items() if name not in OURS and (entry.fixed or not entry.problems)]
OVERLAPPED = Row(
    name="greedy, exchanges overlapped",
    case=case("tp2 pp2 split", f"--epp-slices 3 --epp-overlap-exchanges --epp-costs {FOLDER}/costs.json"),
    check=check_overlapped,
    batch=BATCH,
    prepare=write_slow_exchanges,
)
_HELIX = "--epp-planner helixpipe --epp-slices 1"
HELIX = {
    "four ranks, tied, all recompute": case("pp4", f"{_HELIX} --epp-recompute 1", "gpt2"),
    "tensor and sequence parallel, some recompute": case(
        "tp2 sp pp2 looped2", f"{_HELIX} --epp-memory-cap-gb 0.0005", "grouped"
    ),
    "context parallel": case("cp2 pp2 looped2", _HELIX),
    "replicas": case("dp2 pp2 looped2", _HELIX, "learned", optimizer=OPTIMIZERS["overlapped"]),
}
"""The first is in the default set."""


def check_helix(name: str, figures: Figures, folder: Path) -> None:
    check_schedule("helixpipe", figures, folder)
    modes = set().union(*(plan["modes"] for plan in plans_of(figures)))
    assert modes == ({"full"} if "all recompute" in name else {"mlp"} if "some recompute" in name else set())


ROWS = [
    OVERLAPPED,
    *(
        Row(
            name=f"helixpipe: {name}",
            case=own,
            check=functools.partial(check_helix, name),
            batch=BATCH,
            is_slow=number > 0,
        )
        for number, (name, own) in enumerate(HELIX.items())
    ),
    *(
        Row(
            name=name,
            case=case_of(name),
            check=functools.partial(check_schedule, name),
            batch=BATCH,
            is_slow=name not in BY_DEFAULT,
        )
        for name in NAMES
    ),
]


@pytest.mark.parametrize("row", parameters(ROWS))
def test_it_trains_as_the_stock_schedule_does(matrix: Matrix, row: Row) -> None:
    matrix.check(row)
