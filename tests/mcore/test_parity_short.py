"""Two short trainings against Megatron's own schedule, for the fast set: see `test_parity.py` for all others."""

from __future__ import annotations

import json

import pytest

from tests.support.mcore.parity_figures import Figures, check_closeness, parity

ITERATIONS = 2
CASES = {
    "one stage": {
        "cell": {},
        "model": "llama",
        "plan": "--epp-slices 3 --epp-recompute 1 --epp-loss-block-tokens 5",
        "optimizer": "--use-distributed-optimizer",
    },
    "two stages": {"cell": {"pp": 2, "split": True}, "model": "gpt2", "plan": "--epp-slices 3"},
}


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Figures]:
    path = tmp_path_factory.mktemp("parity") / "cases.json"
    path.write_text(json.dumps(CASES))
    return parity("--cases", path, "--iterations", ITERATIONS, timeout_s=300)["cases"]


@pytest.mark.parametrize("name", CASES)
def test_plans_train_as_the_stock_schedule_does(figures: dict[str, Figures], name: str) -> None:
    check_closeness(figures[name])
    (plans,) = figures[name]["plans"]
    assert figures[name]["num_losses"] == [ITERATIONS, 1]
    assert any("hybrid" in plan["kinds"] for plan in plans)
    assert any("none" not in plan["recompute"] for plan in plans) == ("recompute" in CASES[name]["plan"])
    assert any(plan["weights"] > 0 for plan in plans) == (name == "two stages")
