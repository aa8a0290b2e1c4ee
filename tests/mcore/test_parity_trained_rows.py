"""Training on few tokens: as Megatron's own schedule with the same mask, though only their rows pass the output layer.

The answers are at the end of documents, so some chunks, and some ranks' parts of chunks, have no trained token.
"""

from __future__ import annotations

import pytest

from tests.support.mcore.parity_figures import Figures, answers_only, check_closeness, masked_documents, parity_of

CASES = {
    "sequence parallel": {"cell": {"tp": 2, "sp": True}, "model": "llama", "plan": "--epp-slices 3"},
    "tensor parallel, tied": {"cell": {"tp": 2}, "model": "gpt2", "plan": "--epp-slices 3"},
    "sequence parallel by blocks": {
        "cell": {"tp": 2, "sp": True},
        "model": "grouped",
        "plan": "--epp-slices 3 --epp-loss-block-tokens 3",
    },
    "context parallel": {"cell": {"cp": 2}, "model": "llama", "plan": "--epp-slices 3"},
    "split": {"cell": {"pp": 2, "split": True}, "model": "llama", "plan": "--epp-slices 3"},
}


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Figures]:
    folder = tmp_path_factory.mktemp("parity")
    written = masked_documents(folder / "data", answers_only())
    return parity_of(folder, {name: case | {"both": f"--data-path {written}"} for name, case in CASES.items()}, 2, 600)


@pytest.mark.parametrize("name", CASES)
def test_plans_train_as_the_stock_schedule_does(figures: dict[str, Figures], name: str) -> None:
    check_closeness(figures[name])
    assert any(kind in ("split", "hybrid") for plans in figures[name]["plans"] for plan in plans for kind in plan["kinds"])
