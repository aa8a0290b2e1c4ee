"""Losses that train in slices: what a loss is given, and losses that ship."""

from megatron_epp.losses.distillation import Distillation
from megatron_epp.losses.loss import Average, Loss, NextToken, Rows, Scope, load_loss
from megatron_epp.losses.policy import ClippedRatio, ClippedValue, SequenceRatio
from megatron_epp.losses.preference import Preference, Reward

__all__ = ["Average", "ClippedRatio", "ClippedValue", "Distillation", "Loss", "NextToken", "Preference", "Reward", "Rows"]
__all__ += ["Scope", "SequenceRatio", "load_loss"]
