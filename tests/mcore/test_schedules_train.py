"""Schedules of other papers train through Megatron's loop as its own schedule does: losses, gradients, weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_epp.cost import CPU, analytic_profile
from megatron_epp.cost.library import shape_of
from megatron_epp.planner.registry import PLANNERS
from tests.support.mcore.parity_figures import Figures, check_closeness, parity_of

ITERATIONS = 2
BY_DEFAULT = ("kfkb", "breadth-first", "zb-h2", "stp", "sppo", "infinipipe")
"""One of each kind: one stage per rank, several, with separate weight gradients, in a V with steps of two actions, which take
turns at the exchanges of tensor parallelism, with copies of its own, and with its own rules for chunks. The others are slow."""
WHOLE = ("1f1b-padded", "1f1b-packed")
"""Planners that cut no sequence."""
OF_ONE_SIZE = ("seq1f1b", "chunkflow")
"""Planners whose chunks have one size, which is given here: of their own choice it is the longest of these short documents."""


def case_of(name: str) -> dict[str, Any]:
    schedule = PLANNERS.entries()[name]
    cell: dict[str, Any] = {"pp": 2}
    if schedule.fixed is not None and (count := schedule.fixed.chunks_per_rank or 2) > 1:
        cell |= {"virtual": count, "placement": schedule.fixed.kind}
    if name == "stp":
        cell["tp"] = 2
    if schedule.splits_weight:
        cell["split"] = True
    offload = " --epp-offload" if schedule.offloads else ""
    cut = "--epp-chunk-tokens 16" if name in OF_ONE_SIZE else "--epp-slices 3"
    return {"cell": cell, "model": "llama", "plan": f"{cut} --epp-planner {name}{offload}"}


OURS = ("greedy", "1f1b", "milp")
"""Planners that other tests train with."""
OVERLAPPED = "greedy, exchanges overlapped"


def overlapped_case(folder: Path) -> dict[str, Any]:
    """Return a case of the greedy planner with costs by which exchanges take long, as on CPUs they do not."""
    shape = shape_of(
        {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 95} | {"tensor_model_parallel_size": 2}
    )
    profile = folder / "slow_exchanges.json"
    profile.write_text(analytic_profile(shape, replace(CPU, exchange_bytes=1e6)).to_json())
    plan = f"--epp-slices 3 --epp-overlap-exchanges --epp-costs {profile}"
    return {"cell": {"pp": 2, "tp": 2, "split": True}, "model": "llama", "plan": plan}


NAMES = [name for name, entry in PLANNERS.entries().items() if name not in OURS and not entry.lacks]


@pytest.fixture(scope="module")
def figures_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], dict[str, Figures]]:
    """Return the figures of all cases that are run by default, or of the others."""

    @functools.cache
    def run(by_default: bool) -> dict[str, Figures]:
        cases = {name: case_of(name) for name in NAMES if (name in BY_DEFAULT) == by_default}
        folder = tmp_path_factory.mktemp("schedules")
        cases |= {OVERLAPPED: overlapped_case(folder)} if by_default else {}
        return parity_of(folder, cases, ITERATIONS, timeout_s=600)

    return run


def test_greedy_plans_with_steps_of_two_actions_train_as_the_stock_schedule_does(
    figures_of: Callable[[bool], dict[str, Figures]],
) -> None:
    figures = figures_of(True)[OVERLAPPED]
    check_closeness(figures)
    assert all(plan["joined"] > 0 for replica in figures["plans"] for plan in replica)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in NAMES])
def test_it_trains_as_the_stock_schedule_does(figures_of: Callable[[bool], dict[str, Figures]], name: str) -> None:
    figures = figures_of(name in BY_DEFAULT)[name]
    check_closeness(figures)
    assert figures["num_losses"] == [ITERATIONS, 1]
    plans = [plan for replica in figures["plans"] for plan in replica]
    assert any("split" in plan["kinds"] or "hybrid" in plan["kinds"] for plan in plans) == (name not in WHOLE)
    assert any(plan["weights"] > 0 for plan in plans) == PLANNERS.entries()[name].splits_weight
    assert any(plan["copies"] > 0 for plan in plans) == PLANNERS.entries()[name].offloads


@pytest.mark.parametrize("name", ["stp", OVERLAPPED])
def test_the_two_actions_of_a_step_take_turns_in_the_midst_of_their_layers(
    figures_of: Callable[[bool], dict[str, Figures]], name: str
) -> None:
    figures = figures_of(True)[name]
    joined = sum(plan["joined"] for replica in figures["plans"] for plan in replica)
    assert joined > 0
    assert figures["turns"] > 2 * 2 * joined  # two on each tensor-parallel rank, if the second ran when the first had ended
