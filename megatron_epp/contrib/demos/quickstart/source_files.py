"""Documents of the demonstration: beginnings of the Python standard library's source files, as long as Wikipedia's articles."""

from __future__ import annotations

import itertools
import json
import sysconfig
import warnings
from collections.abc import Sequence
from pathlib import Path

from megatron_epp.data.sequence_lengths import wikipedia
from megatron_epp.mcore.data.prepare import prepare
from megatron_epp.plan.errors import EppError

SEED = 0


def source_files() -> list[Path]:
    """List the source files of the standard library, which every machine with Python has."""
    source = Path(sysconfig.get_path("stdlib"))
    return sorted(f for f in source.rglob("*.py") if "site-packages" not in f.parts and "test" not in f.parts)


def skewed(count: int, context: int) -> tuple[int, ...]:
    """Draw lengths from the quantiles of Wikipedia's articles, cut to the context."""
    return tuple(wikipedia(count, SEED).clip(max=context).tolist())


def one_long(count: int, context: int) -> tuple[int, ...]:
    """Return the lengths of a document as long as the context and of others of at most a sixteenth of it, `count` in all."""
    return (context, *skewed(count - 1, context // 16))


def write(folder: Path, name: str, lengths: Sequence[int]) -> str:
    """Write documents that train so many tokens each, a byte a token; return the prefix for --data-path.

    Every document is the beginning of another file, as long as there are files of that length.

    Raises:
        EppError: no file is as long as a document.
    """
    texts = [file.read_bytes().decode("ascii", "ignore") for file in source_files()]
    longest = max(map(len, texts), default=0)
    if longest < max(lengths):
        raise EppError(f"the longest source file has {longest:,} characters, a document {max(lengths):,}: lower --context")
    folder.mkdir(parents=True, exist_ok=True)
    files, path = itertools.cycle(texts), folder / f"{name}.jsonl"
    with open(path, "w", encoding="utf-8") as lines:
        for length in lengths:
            text = next(text for text in files if len(text) >= length)
            lines.write(json.dumps({"text": text[:length]}) + "\n")
    with warnings.catch_warnings():  # of Megatron's, about packages that this needs not
        warnings.simplefilter("ignore")
        prepare([path], folder / name)
    return str(folder / name)
