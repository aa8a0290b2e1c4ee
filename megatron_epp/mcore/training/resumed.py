"""Check that a resumed run draws its sequences in the order of the run that saved the checkpoint."""

from __future__ import annotations

import argparse
import logging

from megatron_epp.plan.errors import EppError

logger = logging.getLogger(__name__)

_DOCUMENTS = "epp_documents"
_BEFORE_THE_FLAG = "truncate"
"""Value of `--epp-documents` for checkpoints of runs before that flag existed, which do not record it."""


def check_order(then: argparse.Namespace, now: argparse.Namespace) -> None:
    """Compare the arguments that determine the order of sequences, unless the checkpoint is of a run without `--epp`.

    Changes that only reorder the sequences cause a warning.

    Args:
        then: the arguments in the checkpoint.
        now: the run's arguments.

    Raises:
        EppError: the sequences differ, so that the checkpoint's count of sequences trained on has no meaning in this run.
    """
    if not getattr(then, "epp", False):
        return
    before = getattr(then, _DOCUMENTS, _BEFORE_THE_FLAG)
    if before != now.epp_documents:
        raise EppError(
            f"--epp-documents was {before} in the run that saved this checkpoint, and is {now.epp_documents}: its count of "
            f"sequences is of others. Pass --epp-documents {before} to go on exactly, or --finetune to begin the data anew"
        )
    names = ["seed", "split", *(["seq_length"] if before == "split" else [])]
    changed = [
        f"--{name.replace('_', '-')} was {getattr(then, name)} and is {getattr(now, name)}"
        for name in names
        if hasattr(then, name) and getattr(then, name) != getattr(now, name)
    ]
    if changed and now.rank == 0:
        logger.warning(
            "%s: sequences come in another order than in the run that saved this checkpoint, so until the epoch ends some come "
            "again and others do not",
            ", ".join(changed),
        )
