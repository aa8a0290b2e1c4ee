"""Table of the kinds of Megatron's layers that run in slices, with a file for each that needs code. All others are refused.

Files of this folder are read where flags are checked, on machines without Megatron too, so they import it in functions only.
"""

from __future__ import annotations

from megatron_epp.mcore.model.kinds.experts import EXPERTS
from megatron_epp.mcore.model.kinds.gated_delta import GATED_DELTA
from megatron_epp.mcore.model.kinds.kind import ATTENTION, MLP, PREDICTION, LayerKind
from megatron_epp.mcore.model.kinds.latent_attention import LATENT_ATTENTION
from megatron_epp.mcore.model.kinds.state_space import STATE_SPACE

__all__ = ["KINDS", "LayerKind"]

KINDS: tuple[LayerKind, ...] = (ATTENTION, LATENT_ATTENTION, GATED_DELTA, STATE_SPACE, MLP, EXPERTS, PREDICTION)
