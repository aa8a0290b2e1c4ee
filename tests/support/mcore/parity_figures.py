"""Runs `scripts/parity` and judges what it reports."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.parity.cells import LENGTHS, VOCABULARY
from scripts.parity.compare import BATCH, TOLERANCE
from scripts.random_documents import write_documents
from tests.support.mcore.forked import launch

Figures = dict[str, Any]
SMALL_BATCH = 4
"""Documents of a batch where few are enough: two for each of two replicas."""


def parity_of(folder: Path, cases: Mapping[str, Any], iterations: int) -> dict[str, Figures]:
    path = folder / "cases.json"
    path.write_text(json.dumps(cases))
    flags = "--cases", path, "--iterations", iterations, "--batch", BATCH, "--json"
    finished = launch(1, "-m", "scripts.parity", *flags, timeout_s=300)
    last = finished.output.splitlines()[-1]
    assert last.startswith("{"), finished.output[-5000:]
    return json.loads(last)["cases"]


def masked_documents(prefix: Path, masks: Sequence[np.ndarray]) -> str:
    """Write documents of the lengths of parity runs, with a mask of trained tokens each. Returns their path."""
    written = write_documents(prefix, LENGTHS, VOCABULARY)
    np.concatenate(masks).astype(np.uint8).tofile(f"{written}.mask")
    return written


def answers_only() -> list[np.ndarray]:
    """Masks of documents that end in an answer, which alone is trained."""
    return [np.arange(length + 1) > 0.7 * length for length in LENGTHS]


def check_closeness(figures: Figures, stock_attention: str = "DotProductAttention", unused: int = 0) -> None:
    """Nothing is further apart than rounding makes it, and nothing was left out but tensors that Megatron does not use."""
    assert "error" not in figures, figures["error"]
    assert figures["attention"] == [f"{stock_attention}, RelayAttention"]
    assert figures["losses"] <= TOLERANCE
    assert figures["predictions"] is None or figures["predictions"] <= TOLERANCE
    assert figures["validation"] <= TOLERANCE
    for key in ("gradients", "last_gradients", "parameters"):
        assert figures[key]["relative"] <= TOLERANCE, (key, figures[key])
        assert figures[key]["num_tensors"] > 0
        assert figures[key]["zeros"] == (0 if key == "parameters" else unused)
