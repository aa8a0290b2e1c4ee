"""Losses that a script brings, for `--epp-loss`."""

from megatron_epp.losses import Average, ClippedRatio, ClippedValue, Distillation, Preference, Reward, SequenceRatio

GRPO = ClippedRatio(average=Average.SEQUENCE_MEANS, kl="k3", kl_weight=0.1)
GSPO = SequenceRatio(clip_low=0.3, clip_high=0.3)
PPO = ClippedRatio(entropy_weight=0.05, temperature=0.8)
DISTILLATION = Distillation(top_k=3, temperature=0.8)
VALUES = ClippedValue(average=Average.SEQUENCE_MEANS)
DPO = Preference(beta=0.5)
REWARD = Reward(centre=0.01)


def dapo():
    return ClippedRatio(clip_high=0.28, has_importance=True)


class NoLoss:
    """Has no attribute of a loss."""
