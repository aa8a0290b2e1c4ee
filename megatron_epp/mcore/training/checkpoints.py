"""Check of a checkpoint before Megatron loads it: a damaged one is named, or set aside for the one before. A refusal to load
optimizer state in another layout says what to do, and saving has a time limit.

Damage is found without reading tensors: files are missing or shorter than the checkpoint's own index says, or archives have no
end. A flipped bit is found by Megatron, when it reads the tensor.
"""

from __future__ import annotations

import logging
import re
import zipfile
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from pathlib import Path

import torch.distributed
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron_epp.mcore.arguments.start import TRACKER, newest_checkpoint
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.reading import parse_json, read_text
from megatron_epp.plan.writing import write_text
from megatron_epp.runtime.links.objects import made_by_first
from megatron_epp.runtime.watchdog import Watchdog

logger = logging.getLogger(__name__)

_MOST_DIGITS = 19
"""Number of digits from which on a number in a tracker file is not read as an iteration."""
INDEX = ".metadata"
"""File of a distributed checkpoint that says in which file, and where in it, each tensor is."""
_EMBEDDING = "embedding.word_embeddings.weight"
_ITERATION = re.compile(r"iter_(\d{7,})")
_OF_LAYOUT = re.compile(r"not supported for DistributedOptimizer with sharding type|optimizer\.distributed\.dp_group_idx_")
"""Pattern of errors about optimizer state saved in its layout's gradient buckets: the sharding type, or a tensor's name."""


def watched_save(args: Namespace) -> AbstractContextManager[None]:
    """Watch the saving of a checkpoint, or the wait for other processes that save: the run ends if it exceeds its limit."""
    limit_s, rank = args.epp_save_limit_seconds, torch.distributed.get_rank()
    return _watchdog(limit_s).watch(
        lambda: f"rank {rank} has not saved a checkpoint to {args.save} in {limit_s:g} s (--epp-save-limit-seconds)"
    )


_watchdog = cache(partial(Watchdog, limit_name="--epp-save-limit-seconds"))


def settle(args: Namespace) -> None:
    """Make sure that `--load` names a whole checkpoint, before any rank reads it. A collective call.

    Raises `EppError` if it is damaged, and there is none before it or `--epp-checkpoint-fallback` is not given.
    """
    if args.load is None or args.ckpt_step is not None or args.non_persistent_ckpt_type == "local":
        return
    # On one rank, since it may rename folders; the others wait, so none reads a checkpoint before.
    made_by_first(partial(settle_folder, Path(args.load), falls_back=args.epp_checkpoint_fallback))


@contextmanager
def telling_layout(args: Namespace) -> Iterator[None]:
    """Say in an `EppError` what to do if optimizer state does not load in this layout; Megatron advises a useless flag."""
    try:
        yield
    except BaseException as error:  # torch's error of a load on several ranks is no `Exception`
        if not _OF_LAYOUT.search(str(error)):
            raise
        raise EppError(
            f"the optimizer state in {args.load} was saved for another tensor- or pipeline-parallel layout, the only one in "
            "which it loads: resume there once and save with --dist-ckpt-optim-fully-reshardable, which keeps it for every "
            f"layout, or begin it anew with --no-load-optim (Megatron: {' '.join(str(error).split())[:300]})"
        ) from error


def settle_rows(args: Namespace, entries: int) -> None:
    """Make sure that the checkpoint to load has an embedding of as many rows as the model. A collective call.

    Megatron cuts it, or leaves new rows as initialised, without a word, and all count in the loss. So `EppError` is raised;
    where the model cannot have the checkpoint's rows, there is a warning. `entries` are of the tokenizer, 0 without one.
    """
    folders = [Path(folder) for folder in (args.load, args.pretrained_checkpoint) if folder is not None]
    if folders:
        made_by_first(partial(_check_rows, folders, args.padded_vocab_size, entries, args.tensor_model_parallel_size))


def _check_rows(folders: Sequence[Path], model_rows: int, entries: int, tensor_ranks: int) -> None:
    folder = next((folder for folder in folders if (folder / TRACKER).is_file()), None)
    rows = None if folder is None else embedding_rows(folder)
    if rows is None or rows == model_rows:
        return
    fault = (
        f"the embedding in {folder} has {rows} rows and this model {model_rows}: Megatron cuts it, or adds rows that "
        "were never trained and count in the loss"
    )
    if rows >= entries and rows % tensor_ranks == 0:
        raise EppError(f"{fault}; set --padded-vocab-size {rows}, which keeps the checkpoint's")
    reason = (
        f"the tokenizer has {entries}"
        if rows < entries
        else f"--tensor-model-parallel-size {tensor_ranks} does not divide them"
    )
    logger.warning("%s; the model cannot have the checkpoint's rows, since %s", fault, reason)


def embedding_rows(folder: Path) -> int | None:
    """Return the rows of the embedding in a folder's newest distributed checkpoint; None where its index does not tell."""
    try:
        tensors = FileSystemReader(newest_checkpoint(folder)).read_metadata().state_dict_metadata
    except Exception:  # a damaged checkpoint, or one of another format, is Megatron's to refuse
        return None
    embeddings = (tensor for key, tensor in tensors.items() if key.endswith(_EMBEDDING))
    return next((tensor.size[0] for tensor in embeddings if hasattr(tensor, "size")), None)


def settle_folder(folder: Path, *, falls_back: bool) -> None:
    """Refuse a damaged newest checkpoint by an `EppError`, or set it aside and name the one before in the tracker file.

    A folder without a tracker file has no checkpoints, and is left as it is.
    """
    try:
        named = (folder / TRACKER).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return
    if named == "release":
        return
    newest = folder / f"iter_{int(named):07d}" if named.isdecimal() and len(named) < _MOST_DIGITS else None
    fault = f"{folder / TRACKER} has {named[:40]!r} and no iteration" if newest is None else fault_of(newest)
    if fault is None:
        return
    if newest is not None and not newest.exists():
        fault = f"{fault}, which {folder / TRACKER} names"
    sound = _sound_before(folder, newest)
    if sound is None:
        raise EppError(f"{fault}, and no other checkpoint in {folder} is whole: give --load another folder, or leave it out")
    iteration, number = sound.name, int(sound.name.removeprefix("iter_"))
    if not falls_back:
        raise EppError(f"{fault}; --epp-checkpoint-fallback sets it aside and goes on from {iteration}")
    try:
        if newest is not None and newest.exists():
            newest.rename(aside := _free(newest.with_name(f"damaged_{newest.name}")))
            logger.warning("%s; it is now %s, and training goes on from %s", fault, aside.name, iteration)
        else:
            logger.warning("%s; training goes on from %s", fault, iteration)
        write_text(folder / TRACKER, str(number))
    except OSError as error:
        raise EppError(f"{fault}, and it cannot be set aside: {error.filename}: {error.strerror}") from None


def fault_of(checkpoint: Path) -> str | None:
    if not checkpoint.is_dir():
        return f"there is no checkpoint {checkpoint}"
    return next(_faults(checkpoint), None)


def _faults(checkpoint: Path) -> Iterator[str]:
    if (about := checkpoint / "metadata.json").exists():  # formats of torch itself have none
        try:
            parse_json(read_text(about), "the text")["sharded_backend"]
        except (EppError, OSError, UnicodeDecodeError, KeyError, TypeError) as error:
            yield f"{about} cannot be read ({type(error).__name__}: {error})"
    if (checkpoint / INDEX).exists() or any(checkpoint.glob("*.distcp")):
        yield from _short_files(checkpoint)
    archives = [*checkpoint.glob("*.pt"), *checkpoint.glob("mp_rank_*/*.pt")]
    for path in archives:
        if not zipfile.is_zipfile(path):
            yield f"{path} is damaged: {path.stat().st_size:,} bytes, and no end of an archive"
    if not archives and not any(checkpoint.iterdir()):
        yield f"{checkpoint} is empty"


def _short_files(checkpoint: Path) -> Iterator[str]:
    """Yield the files of a distributed checkpoint that are shorter than its index says."""
    try:
        entries = FileSystemReader(checkpoint).read_metadata().storage_data.values()
    except Exception as error:
        yield f"{checkpoint / INDEX} cannot be read ({type(error).__name__}: {error})"
        return
    needed: dict[str, int] = defaultdict(int)
    for entry in entries:
        needed[entry.relative_path] = max(needed[entry.relative_path], entry.offset + entry.length)
    for name, num_bytes in sorted(needed.items()):
        path = checkpoint / name
        size = path.stat().st_size if path.exists() else 0
        if size < num_bytes:
            yield f"{path} is damaged: {size:,} bytes of {num_bytes:,}"


def _sound_before(folder: Path, newest: Path | None) -> Path | None:
    """Return the newest whole checkpoint before one, or of all where there is none."""
    iterations = sorted((int(match[1]), path) for path in folder.iterdir() if (match := _ITERATION.fullmatch(path.name)))
    earlier = (path for _, path in reversed(iterations) if newest is None or int(path.name[5:]) < int(newest.name[5:]))
    return next((path for path in earlier if fault_of(path) is None), None)


def _free(path: Path) -> Path:
    """Return a path that does not exist: this one, or with a number behind it."""
    numbered = (path, *(path.with_name(f"{path.name}_{number}") for number in range(2, 1000)))
    return next(path for path in numbered if not path.exists())
