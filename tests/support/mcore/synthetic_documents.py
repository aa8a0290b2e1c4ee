"""Documents of very different lengths, and Megatron's own builder to write them, for tests."""

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder


def long_tailed_lengths(count, longest, seed=0):
    """Lengths from 2 to `longest`, log-normal like those of real text: most short, a few near the longest."""
    lengths = np.random.RandomState(seed).lognormal(mean=np.log(longest) / 2, sigma=np.log(longest) / 6, size=count)
    return np.clip(lengths, 2, longest).astype(int).tolist()


def documents_of(lengths, seed=0, vocab_size=257):
    random = np.random.RandomState(seed)
    return [random.randint(0, vocab_size, size=length) for length in lengths]


def write_pair(prefix, documents, num_sentences=1, dtype=np.uint16):
    """Write documents as `prefix`.bin and .idx, each in up to `num_sentences` sentences (an empty document has none)."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        sentences = [len(part) for part in np.array_split(document, num_sentences) if len(part)]
        builder.add_document(np.asarray(document), sentences)
    builder.finalize(f"{prefix}.idx")
    return str(prefix)
