"""Megatron's data flags that `--epp` accepts but that have no effect: `--epp` implies them, or makes no use of them."""

from __future__ import annotations

import argparse
import logging
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)


class _Flag(NamedTuple):
    """A flag and its default, at which it is not reported."""

    flag: str
    default: Any = False
    dest: str = ""

    def is_given(self, args: argparse.Namespace) -> bool:
        return getattr(args, self.dest or self.flag[2:].replace("-", "_"), self.default) != self.default


_IMPLIED = (
    _Flag("--reset-position-ids"),
    _Flag("--reset-attention-mask"),
    _Flag("--dataloader-inter-document-masking"),
    _Flag("--no-create-attention-mask-in-dataloader", True, "create_attention_mask_in_dataloader"),
)
_IDLE = (
    _Flag("--data-cache-path", None),
    _Flag("--num-dataset-builder-threads", 1),
    _Flag("--num-workers", 2),
    _Flag("--mid-level-dataset-surplus", 0.005),
    _Flag("--per-dataset-sequences-path", None),
    _Flag("--dataloader-fast-cache-load"),
    _Flag("--dataloader-defer-npy-index-mmap"),
    _Flag("--exit-signal-handler-for-dataloader"),
    _Flag("--object-storage-cache-path", None),
    _Flag("--allow-ambiguous-pad-tokens"),
)
_EOD = _Flag("--eod-mask-loss")


def tell_data_flags(args: argparse.Namespace) -> None:
    """Log once which of the given data flags have no effect, and why.

    Args:
        args: Megatron's arguments, before Megatron completes them.
    """
    if args.rank != 0:
        return
    if implied := _given(_IMPLIED, args):
        logger.warning(
            "--epp implies %s: documents are sequences by themselves, attend to no other, and have positions from 0", implied
        )
    if idle := _given(_IDLE, args):
        logger.warning(
            "--epp makes no use of %s: documents are read from their files as they are, without caches, loader processes or "
            "padding",
            idle,
        )
    if _EOD.is_given(args):
        logger.warning(
            "--eod-mask-loss masks the loss behind end-of-document tokens, as in Megatron, and --epp predicts nothing behind a "
            "document's last token: only those inside of documents are masked"
        )


def _given(flags: tuple[_Flag, ...], args: argparse.Namespace) -> str:
    return ", ".join(one.flag for one in flags if one.is_given(args))
