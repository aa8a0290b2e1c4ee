"""Documents of given lengths as a Megatron .bin/.idx pair, for benchmarks and parity runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch


def write_documents(prefix: Path, lengths: Iterable[int], vocab_size: int = 256) -> str:
    """Write documents of random tokens that train so many positions each; returns the prefix for --data-path."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    generator = np.random.RandomState(0)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for length in lengths:
        builder.add_document(torch.from_numpy(generator.randint(0, vocab_size, length + 1)), [length + 1])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)
