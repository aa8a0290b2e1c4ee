"""Megatron's flags that a plan cannot honour, and its data flags that have no effect with `--epp`."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

from megatron_epp.mcore.arguments import ArgumentError

logger = logging.getLogger(__name__)


class Conflict(NamedTuple):
    """A Megatron flag that a plan cannot honour, or only with certain values."""

    flag: str
    allowed: tuple[Any, ...] = (None, False)
    advice: str = "leave it out"
    dest: str = ""

    @property
    def attribute(self) -> str:
        return self.dest or self.flag[2:].replace("-", "_")


NO_RESTART = Conflict(
    "--inprocess-restart", advice="leave it out: the watchdog of the run that failed goes on, and would end the restarted one"
)
CONFLICTS = (
    NO_RESTART,
    Conflict("--attention-dropout", (0.0,), "set it to 0"),
    Conflict("--cp-comm-type", (None, ["p2p"], ["a2a"]), "leave it out: heads are exchanged for tokens, as a2a does"),
    Conflict("--hierarchical-context-parallel-sizes"),
    Conflict("--micro-batch-size", (None, 1), "set it to 1: a microbatch is one sequence"),
    Conflict("--eval-micro-batch-size", (None, 1), "set it to 1: a microbatch is one sequence"),
    Conflict("--mock-data", advice="give real documents with --data-path"),
    Conflict("--moe-token-dispatcher-type", (None, "allgather", "alltoall"), "use alltoall"),
    Conflict("--recompute-granularity", advice="use --epp-recompute"),
    Conflict("--recompute-activations", advice="use --epp-recompute"),
    Conflict("--cuda-graph-impl", ("none", None), "set it to none: shapes change every iteration"),
    Conflict("--dataloader-type", (None, "external"), "leave it out: documents are sampled by this package"),
    Conflict("--softmax-type", ("vanilla",)),
    Conflict("--fp8-format", dest="fp8"),
    Conflict("--fp4-format", dest="fp4"),
    Conflict("--check-for-spiky-loss", advice="leave it out: a chunk's loss is as large as the chunk"),
    Conflict("--iterations-to-skip", ([], None)),
    Conflict("--cpu-offloading-num-layers", (0, None)),
    Conflict("--tp-comm-overlap", advice="leave it out: its buffers have one size, chunks have many"),
    Conflict("--multi-latent-attention", advice="use grouped queries: slices hand on keys and values, not latents"),
    Conflict("--mtp-num-layers", advice="leave it out: a slice's last tokens would need the next slice's first ones"),
    Conflict(
        "--position-embedding-type", (None, "learned_absolute", "rope", "yarn", "none"), "use rope: angles are by position"
    ),
    *map(
        Conflict,
        (
            "--experimental-attention-variant",
            "--log-max-attention-logit",
            "--window-size",
            "--qk-clip",
            "--sft",
            "--fim-data",
            "--use-varlen-dataset",
            "--use-legacy-models",
            "--sequence-packing-scheduler",
            "--use-megatron-fsdp",
            "--use-torch-fsdp2",
            "--hybrid-context-parallel",
            "--fine-grained-activation-offloading",
            "--defer-embedding-wgrad-compute",
            "--overlap-moe-expert-parallel-comm",
            "--overlap-param-gather-with-optimizer-step",
            "--enable-cuda-graph",
            "--external-cuda-graph",
            "--heterogeneous-layers-config-path",
            "--heterogeneous-layers-config-encoded-json",
            "--rampup-batch-size",
            "--step-batch-size-schedule",
            "--phase-transition-iterations",
            "--full-validation",
            "--multiple-validation-sets",
            "--logits-load-dir",
            "--perform-rl-step",
        ),
    ),
)


def check_conflicts(args: argparse.Namespace, conflicts: Iterable[Conflict] = CONFLICTS) -> None:
    """Raise `ArgumentError` that names all given flags that cannot be honoured, with advice for each."""
    clashes = [
        f"{c.flag} {value} ({c.advice})"
        for c in conflicts
        if hasattr(args, c.attribute) and (value := getattr(args, c.attribute)) not in c.allowed
    ]
    if clashes:
        raise ArgumentError("--epp cannot honour " + "; ".join(clashes))


class DataFlag(NamedTuple):
    """A flag and its default, at which it is not reported."""

    flag: str
    default: Any = False
    dest: str = ""

    def is_given(self, args: argparse.Namespace) -> bool:
        return getattr(args, self.dest or self.flag[2:].replace("-", "_"), self.default) != self.default


IMPLIED = (
    DataFlag("--reset-position-ids"),
    DataFlag("--reset-attention-mask"),
    DataFlag("--dataloader-inter-document-masking"),
    DataFlag("--no-create-attention-mask-in-dataloader", True, "create_attention_mask_in_dataloader"),
)
IDLE = (
    DataFlag("--data-cache-path", None),
    DataFlag("--num-dataset-builder-threads", 1),
    DataFlag("--num-workers", 2),
    DataFlag("--mid-level-dataset-surplus", 0.005),
    DataFlag("--per-dataset-sequences-path", None),
    DataFlag("--dataloader-fast-cache-load"),
    DataFlag("--dataloader-defer-npy-index-mmap"),
    DataFlag("--exit-signal-handler-for-dataloader"),
    DataFlag("--object-storage-cache-path", None),
    DataFlag("--allow-ambiguous-pad-tokens"),
)
EOD = DataFlag("--eod-mask-loss")


def tell_data_flags(args: argparse.Namespace) -> None:
    """Log once which of the given data flags have no effect, and why.

    Args:
        args: Megatron's arguments, before Megatron completes them.
    """
    if args.rank != 0:
        return
    if implied := _given(IMPLIED, args):
        logger.warning(
            "--epp implies %s: documents are sequences by themselves, attend to no other, and have positions from 0", implied
        )
    if idle := _given(IDLE, args):
        logger.warning(
            "--epp makes no use of %s: documents are read from their files as they are, without caches, loader processes or "
            "padding",
            idle,
        )
    if EOD.is_given(args):
        logger.warning(
            "--eod-mask-loss masks the loss behind end-of-document tokens, as in Megatron, and --epp predicts nothing behind a "
            "document's last token: only those inside of documents are masked"
        )


def _given(flags: tuple[DataFlag, ...], args: argparse.Namespace) -> str:
    return ", ".join(one.flag for one in flags if one.is_given(args))
