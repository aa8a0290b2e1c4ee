"""Megatron's flags that a plan cannot honour, and its data flags that have no effect with `--epp`."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

from megatron_epp.mcore.arguments import ArgumentError

logger = logging.getLogger(__name__)


class MegatronFlag(NamedTuple):
    """A flag of Megatron that a plan cannot honour, or that has no effect; and the values at which it asks for nothing."""

    flag: str
    allowed: tuple[Any, ...] = (None, False)
    advice: str = "leave it out"
    dest: str = ""

    @property
    def attribute(self) -> str:
        return self.dest or self.flag[2:].replace("-", "_")

    def is_given(self, args: argparse.Namespace) -> bool:
        """Return True if this Megatron has the flag and its value asks for something."""
        return hasattr(args, self.attribute) and getattr(args, self.attribute) not in self.allowed


NO_RESTART = MegatronFlag(
    "--inprocess-restart", advice="leave it out: the watchdog of the run that failed goes on, and would end the restarted one"
)
_NEVER = """
    --experimental-attention-variant --log-max-attention-logit --window-size --qk-clip --sft --fim-data
    --use-varlen-dataset --use-legacy-models --sequence-packing-scheduler --use-megatron-fsdp --use-torch-fsdp2
    --hybrid-context-parallel --fine-grained-activation-offloading --defer-embedding-wgrad-compute
    --overlap-moe-expert-parallel-comm --overlap-param-gather-with-optimizer-step --enable-cuda-graph
    --external-cuda-graph --heterogeneous-layers-config-path --heterogeneous-layers-config-encoded-json
    --rampup-batch-size --step-batch-size-schedule --phase-transition-iterations --full-validation
    --multiple-validation-sets --logits-load-dir --perform-rl-step
"""
"""Flags that plans cannot honour with any value."""
CONFLICTS = (
    NO_RESTART,
    MegatronFlag("--attention-dropout", (0.0,), "set it to 0"),
    MegatronFlag("--cp-comm-type", (None, ["p2p"], ["a2a"]), "leave it out: heads are exchanged for tokens, as a2a does"),
    MegatronFlag("--hierarchical-context-parallel-sizes"),
    MegatronFlag("--micro-batch-size", (None, 1), "set it to 1: a microbatch is one sequence"),
    MegatronFlag("--eval-micro-batch-size", (None, 1), "set it to 1: a microbatch is one sequence"),
    MegatronFlag("--mock-data", advice="give real documents with --data-path"),
    MegatronFlag("--moe-token-dispatcher-type", (None, "allgather", "alltoall"), "use alltoall"),
    MegatronFlag("--recompute-granularity", advice="use --epp-recompute"),
    MegatronFlag("--recompute-activations", advice="use --epp-recompute"),
    MegatronFlag("--cuda-graph-impl", ("none", None), "set it to none: shapes change every iteration"),
    MegatronFlag("--dataloader-type", (None, "external"), "leave it out: documents are sampled by this package"),
    MegatronFlag("--softmax-type", ("vanilla",)),
    MegatronFlag("--fp8-format", dest="fp8"),
    MegatronFlag("--fp4-format", dest="fp4"),
    MegatronFlag("--check-for-spiky-loss", advice="leave it out: a chunk's loss is as large as the chunk"),
    MegatronFlag("--iterations-to-skip", ([], None)),
    MegatronFlag("--cpu-offloading-num-layers", (0, None)),
    MegatronFlag("--tp-comm-overlap", advice="leave it out: its buffers have one size, chunks have many"),
    MegatronFlag("--multi-latent-attention", advice="use grouped queries: slices hand on keys and values, not latents"),
    MegatronFlag("--mtp-num-layers", advice="leave it out: a slice's last tokens would need the next slice's first ones"),
    MegatronFlag(
        "--position-embedding-type", (None, "learned_absolute", "rope", "yarn", "none"), "use rope: angles are by position"
    ),
    *map(MegatronFlag, _NEVER.split()),
)


def check_conflicts(args: argparse.Namespace, conflicts: Iterable[MegatronFlag] = CONFLICTS) -> None:
    """Raise `ArgumentError` that names all given flags that cannot be honoured, with advice for each."""
    clashes = [f"{one.flag} {getattr(args, one.attribute)} ({one.advice})" for one in conflicts if one.is_given(args)]
    if clashes:
        raise ArgumentError("--epp cannot honour " + "; ".join(clashes))


IMPLIED = (
    MegatronFlag("--reset-position-ids"),
    MegatronFlag("--reset-attention-mask"),
    MegatronFlag("--dataloader-inter-document-masking"),
    MegatronFlag("--no-create-attention-mask-in-dataloader", (True,), dest="create_attention_mask_in_dataloader"),
)
IDLE = (
    MegatronFlag("--data-cache-path"),
    MegatronFlag("--num-dataset-builder-threads", (1,)),
    MegatronFlag("--num-workers", (2,)),
    MegatronFlag("--mid-level-dataset-surplus", (0.005,)),
    MegatronFlag("--per-dataset-sequences-path"),
    MegatronFlag("--dataloader-fast-cache-load"),
    MegatronFlag("--dataloader-defer-npy-index-mmap"),
    MegatronFlag("--exit-signal-handler-for-dataloader"),
    MegatronFlag("--object-storage-cache-path"),
    MegatronFlag("--allow-ambiguous-pad-tokens"),
)
EOD = MegatronFlag("--eod-mask-loss")


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


def _given(flags: tuple[MegatronFlag, ...], args: argparse.Namespace) -> str:
    return ", ".join(one.flag for one in flags if one.is_given(args))
