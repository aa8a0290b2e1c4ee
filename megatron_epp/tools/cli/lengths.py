"""Lengths of batches from the command line: numbers, text files, or Megatron's index files."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np

from megatron_epp.data import sequence_lengths
from megatron_epp.data.indexed_documents import cut_documents, document_tokens, stream_lengths
from megatron_epp.mcore.arguments.flag import COUNT, MOST_SEQUENCES, SEQUENCES
from megatron_epp.mcore.arguments.parser import add
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.problem import Lengths
from megatron_epp.plan.reading import MOST_BYTES, MOST_SIZE, brief, naming_file, nearest, nearest_number, read_text
from megatron_epp.tools.cli.terminal import PROGRAM, tell

LIKE = {name: getattr(sequence_lengths, name) for name in ("wikipedia", "code", "chat", "agents")}
"""Length distributions to draw from when no file is given, by name."""
_DRAWN = 512
_SAMPLE = 65536  # smallest number of documents of a distribution of which a batch is drawn
SOURCES = (
    "tokens of every document: a file of numbers, a Megatron .idx file or its prefix, - for stdin, the numbers themselves, or "
    f"{', '.join(LIKE)} for lengths drawn like those. 5500@0:2000, in a file also "
    '{"tokens": 5500, "parent": 0, "shared": 2000}, is a sequence whose first 2,000 tokens are those of the first, sequence 0'
)
"""Help text for the sources that `read_lengths` accepts."""
PARENTS = "megatron_epp.features.trees.parents:"  # functions for lengths, some of which may have parents


def add_batch(parser: argparse.ArgumentParser, several: bool) -> None:
    """Add the flags that name the batch, or with `several` the batches."""
    batch = parser.add_argument_group("batches" if several else "batch")
    action, sources = "append" if several else "store", f"{SOURCES} ({_DRAWN} without --batch-size)"
    names, sources = ("--lengths", "--lengths-file"), sources + "; repeat it for more batches" * several
    batch.add_argument(*names, action=action, required=True, metavar="FILE|N,N,...", help=sources)
    add(batch, "context", "documents")
    size = "a batch is this many sequences, from the file's first on" + ", --batches times" * several + " (default: all)"
    of_size = batch.add_argument("--batch-size", type=SEQUENCES, metavar="N", help=size)
    of_size.setting = "global_batch_size"  # type: ignore[attr-defined]
    if several:
        count = "batches per file with --batch-size (default: 1)"
        batch.add_argument("--batches", type=COUNT, default=1, metavar="K", help=count)
    add(batch, "forward_only")


def lengths_of(args: argparse.Namespace) -> Lengths:
    return _batches_of(args.lengths, args, 1)[0][1]


def batches_of(args: argparse.Namespace) -> list[tuple[str, Lengths]]:
    return [batch for source in args.lengths for batch in _batches_of(source, args, args.batches)]


def _batches_of(source: str, args: argparse.Namespace, most: int) -> list[tuple[str, Lengths]]:
    size = args.batch_size
    count = _DRAWN if size is None else size * most
    batch = sampled(source, args, count)
    if is_distribution(source):
        batch = drawn(batch, count, args.seed)
    if size is None:
        return [(source, batch)]
    if (has := len(batch.lengths)) < count:
        tell(f"{PROGRAM}: warning: --lengths {brief(source)} has {has:,} sequences, and {count:,} are asked for")
    ends = [(start, min(start + size, has)) for start in range(0, min(count, has), size)]
    return [(f"{source}[{start}:{end}]", of_parents("part", batch, start, end)) for start, end in ends]


def of_parents(name: str, *arguments: Any) -> Lengths:
    batch: Lengths = resolve_name(f"{PARENTS}{name}")(*arguments)
    return batch


def is_distribution(source: str) -> bool:
    """True if ``--lengths`` names a distribution to draw from, and no file."""
    return source in LIKE and not Path(source).is_file()


def sampled(source: str, args: argparse.Namespace, size: int = 0) -> Lengths:
    """Return the lengths of a source; from a distribution, by ``--seed``, enough for `drawn`. Raises `EppError`."""
    count, seed = (max(_SAMPLE, size), args.seed) if is_distribution(source) else (None, 0)
    return limited(read_lengths(source, count, seed), args, source)


def drawn(batch: Lengths, size: int, seed: int) -> Lengths:
    """Draw a batch without replacement, sequences of a tree together; when all are used up, begin again."""
    if batch.borrowed:
        return of_parents("drawn", batch, size, seed)
    order = np.random.RandomState(seed).permutation(len(batch.lengths)).tolist()
    return Lengths(tuple(batch.lengths[order[at % len(order)]] for at in range(size)))


def read_lengths(source: str, count: int | None = None, seed: int = 0) -> Lengths:
    """Lengths of a file, stdin (-), numbers, or so many of a name in `LIKE`; a file of that name wins. Raises `EppError`."""
    if is_distribution(source):
        return Lengths(tuple(LIKE[source](min(count or _DRAWN, MOST_SEQUENCES), seed).tolist()))
    if re.fullmatch(r"[\d,\s@:]+", source):
        with naming_file(f"--lengths {brief(source)}"):
            return of_parents("read", source)
    if source == "-":
        with naming_file("--lengths -"):
            if len(text := sys.stdin.read(MOST_BYTES + 1)) > MOST_BYTES:
                raise EppError(f"more than {MOST_BYTES:,} characters, the most that are read")
            return of_parents("read", text, True)
    path, todo = Path(source), "give a file of lengths, or an .idx that `megatron-epp prepare` makes of it"
    if not path.is_file() and Path(f"{source}.idx").is_file():  # the prefix of a .bin/.idx pair
        return _index(Path(f"{source}.idx"))
    if path.is_dir():
        raise EppError(f"--lengths {source} is a folder: {todo}")
    if not path.is_file():
        words = source.replace(",", " ").split()
        wrong = next(word for word in words if not (word.isdecimal() and len(word) < 11 and 0 < int(word) <= MOST_SIZE))
        known = f"nor one of {', '.join(LIKE)}{nearest_number(wrong) or nearest(source, LIKE)}"
        raise EppError(f"--lengths {source}: there is no such file, and {brief(wrong)} is not a number of tokens, {known}")
    if path.suffix == ".idx":
        return _index(path)
    if path.suffix == ".bin":
        index = path.with_suffix(".idx")
        missing = "" if index.is_file() else "; it is not there"
        raise EppError(f"--lengths {source} holds the tokens of documents, not their lengths: those are in {index}{missing}")
    with naming_file(f"--lengths {source}"):
        return of_parents("read", read_text(path), True)


def _index(path: Path) -> Lengths:
    """Read how many positions each document of a Megatron index trains: its tokens but one. Shorter documents are left out."""
    try:
        positions = document_tokens(str(path)) - 1
    except EppError as error:
        raise EppError(f"--lengths {error}") from None
    lengths = tuple(positions[positions > 0].tolist())
    if not lengths:
        raise EppError(f"--lengths {path}: no document of two tokens or more")
    return Lengths(lengths)


def limited(batch: Lengths, args: argparse.Namespace, source: str = "") -> Lengths:
    """Lengths of the sequences that training makes of documents, by ``--context`` and ``--documents``. Raises `EppError`."""
    if args.context is None:
        if (longest := max(batch.lengths)) > MOST_SIZE:
            has = f"sequence {batch.lengths.index(longest)} has {longest:,} tokens, and {MOST_SIZE:,} are the most"
            raise EppError(f"--lengths {source}: {has}: give the --context at which training cuts it")
        return batch
    if batch.borrowed:
        return of_parents("whole", batch, args.context, args.documents)
    tokens = np.asarray(batch.lengths, dtype=np.int64) + 1
    if args.documents == "stream":
        return Lengths(tuple(stream_lengths(tokens, args.context).tolist()))
    return Lengths(tuple(cut_documents(tokens, args.context, args.documents).lengths.tolist()))
