"""Training with plans gives what Megatron's own schedule gives on the same documents fed whole: fp32, on CPU, over gloo.

"Stock" is Megatron's schedule function and Megatron's attention, one document per microbatch. Each test is one comparison and
prints its figures (``pytest -s``).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launch import launch
from parity_cases import CUTS, ITERATIONS, LAYOUTS, LENGTHS, VOCABULARY
from synthetic_documents import documents_of, write_pair

TOLERANCE = 1e-5
TENSORS = ("gradients", "last_gradients", "parameters")
WORKER = Path(__file__).with_name("parity_worker.py")
CASES = [
    pytest.param(name, f"{model}, {cut}", cut, id=f"{name}: {model}, {cut}")
    for name, layout in LAYOUTS.items()
    for model, cuts in layout.cases.items()
    for cut in cuts
]

Figures = list[dict[str, Any]]


@pytest.fixture(scope="module")
def figures_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Figures]]:
    """Per layout, the figures of all its cases, one entry per rank.

    Layouts of the same parallel sizes share a launch, made when one of them is first asked for.
    """
    folder = tmp_path_factory.mktemp("parity")
    data = write_pair(folder / "documents", documents_of([n + 1 for n in LENGTHS], vocab_size=VOCABULARY))
    outputs: dict[tuple[int, str], str] = {}

    def figures(name: str) -> dict[str, Figures]:
        sizes = LAYOUTS[name].num_processes, LAYOUTS[name].sizes
        if sizes not in outputs:
            alike = [other for other, layout in LAYOUTS.items() if (layout.num_processes, layout.sizes) == sizes]
            environment = {"PARITY_DATA": data, "PARITY_REPORTS": str(folder), "PARITY_LAYOUTS": json.dumps(alike)}
            outputs[sizes] = launch(sizes[0], WORKER, env=environment, timeout_s=900).output
        report = folder / f"{name}.json"
        assert report.exists(), outputs[sizes][-5000:]
        return json.loads(report.read_text())

    return figures


@pytest.mark.parametrize(("name", "case", "cut"), CASES)
def test_plans_train_as_the_stock_schedule_does(
    figures_of: Callable[[str], dict[str, Figures]], name: str, case: str, cut: str
) -> None:
    ranks = figures_of(name)[case]
    check_the_case(name, CUTS[cut], ranks)
    worst = {
        key: max(ranks, key=lambda rank: rank[key]["relative"])[key] for key in ("gradients", "last_gradients", "parameters")
    }
    loss, validation = (max(rank[key] for rank in ranks) for key in ("loss", "validation"))
    print(
        f"\n{name}: {case}: losses {loss:.1e}, validation {validation:.1e}, "
        + ", ".join(f"{key.replace('_', ' ')} {w['relative']:.1e} ({w['tensor']})" for key, w in worst.items())
        + f", parameters absolute {max(rank['parameters']['absolute'] for rank in ranks):.1e}"
    )
    assert loss <= TOLERANCE
    assert validation <= TOLERANCE
    for key, tensor in worst.items():
        assert tensor["relative"] <= TOLERANCE, (key, tensor)


def check_the_case(name: str, cut: Any, ranks: Figures) -> None:
    """The two runs were what the case says they were."""
    assert all(rank["attention"] == ["DotProductAttention", "RelayAttention"] for rank in ranks)
    assert any(rank["num_losses"] == [ITERATIONS, 1] for rank in ranks)
    assert all(rank["learned"] > 0.1 for rank in ranks if rank["learned"] is not None)
    assert all(len(rank["plans"]) == ITERATIONS for rank in ranks)
    plans = [plan for rank in ranks for plan in rank["plans"]]
    assert all(plan["slices"] == min(cut.slices, plan["longest"]) for plan in plans)
    assert any(plan["slices"] == cut.slices for plan in plans)
    assert any(cut.has in rank["plans"][i]["kinds"] for rank in ranks for i in (0, -1))
    assert sorted({share for plan in plans for share in plan["recompute"]}) == list(cut.recompute)
    assert any(plan["weights"] > 0 for plan in plans) == cut.splits
    shares_tokens = "--sequence-parallel" in LAYOUTS[name].flags or bool(LAYOUTS[name].context)
    assert any(plan["padding"] > 0 for plan in plans) == shares_tokens
