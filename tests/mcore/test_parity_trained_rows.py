"""Training on few tokens: as Megatron's own schedule with the same mask, though only their rows pass the output layer.

The answers are at the end of documents, so some chunks, and some ranks' parts of chunks, have no trained token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.support.mcore.parity_figures import (
    SMALL_BATCH,
    Figures,
    answers_only,
    check_closeness,
    masked_documents,
    parity_of,
)

CASES = {
    "sequence parallel": {"cell": {"tp": 2, "sp": True}, "model": "llama", "plan": "--epp-slices 3"},
    "context parallel by blocks": {"cell": {"cp": 2}, "model": "llama", "plan": "--epp-slices 3 --epp-loss-block-tokens 3"},
    "split": {"cell": {"pp": 2, "split": True}, "model": "llama", "plan": "--epp-slices 3"},
}
MORE_CASES = {
    "sequence parallel by blocks": {
        "cell": {"tp": 2, "sp": True},
        "model": "llama",
        "plan": "--epp-slices 3 --epp-loss-block-tokens 3",
    },
    "context parallel": {"cell": {"cp": 2}, "model": "llama", "plan": "--epp-slices 3"},
    "tensor parallel, tied": {"cell": {"tp": 2}, "model": "gpt2", "plan": "--epp-slices 3"},
    "sequence parallel by blocks, tied": {
        "cell": {"tp": 2, "sp": True},
        "model": "grouped",
        "plan": "--epp-slices 3 --epp-loss-block-tokens 3",
    },
}


@pytest.fixture(scope="module")
def figures_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Figures]:
    """The figures of a case. Those of the default set train together, and so do the others."""

    @functools.cache
    def figures(is_more: bool) -> dict[str, Figures]:
        folder = tmp_path_factory.mktemp("parity")
        documents = {"both": f"--data-path {masked_documents(folder / 'data', answers_only())}"}
        cases = MORE_CASES if is_more else CASES
        return parity_of(folder, {name: case | documents for name, case in cases.items()}, 2, 600, SMALL_BATCH)

    return lambda name: figures(name in MORE_CASES)[name]


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_CASES)])
def test_plans_train_as_the_stock_schedule_does(figures_of: Callable[[str], Figures], name: str) -> None:
    figures = figures_of(name)
    check_closeness(figures)
    assert any(kind in ("split", "hybrid") for plans in figures["plans"] for plan in plans for kind in plan["kinds"])
