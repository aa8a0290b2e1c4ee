"""Losses that train in slices: what a loss is given, and losses that ship."""

from megatron_epp.losses.loss import Average, Loss, Rows, Scope, load_loss
from megatron_epp.losses.next_token import NextToken
from megatron_epp.losses.policy import ClippedRatio, SequenceRatio

__all__ = ["Average", "ClippedRatio", "Loss", "NextToken", "Rows", "Scope", "SequenceRatio", "load_loss"]
