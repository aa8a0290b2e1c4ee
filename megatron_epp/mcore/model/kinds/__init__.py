"""Kinds of Megatron's layers that run in slices: a file for each, and the table of them. All other layers are refused.

Files of this folder are read where flags are checked, on machines without Megatron too, so they import it in functions only.
"""

from __future__ import annotations

from megatron_epp.mcore.model.kinds.attention import ATTENTION
from megatron_epp.mcore.model.kinds.experts import EXPERTS
from megatron_epp.mcore.model.kinds.kind import LayerKind
from megatron_epp.mcore.model.kinds.latent_attention import LATENT_ATTENTION
from megatron_epp.mcore.model.kinds.mlp import MLP
from megatron_epp.mcore.model.kinds.prediction import PREDICTION

__all__ = ["KINDS", "LayerKind"]

KINDS: tuple[LayerKind, ...] = (ATTENTION, LATENT_ATTENTION, MLP, EXPERTS, PREDICTION)
