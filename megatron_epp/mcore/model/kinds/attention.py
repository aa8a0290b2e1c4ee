"""Multi-head and grouped-query attention."""

from __future__ import annotations

from megatron_epp.mcore.arguments.flag import MegatronFlag
from megatron_epp.mcore.model.kinds.kind import LayerKind

ATTENTION = LayerKind(
    name="attention",
    carries="keys and values",
    symbol="*",
    flags=(
        MegatronFlag("--attention-dropout", (0.0,), "set it to 0"),
        MegatronFlag("--softmax-type", ("vanilla",)),
        MegatronFlag("--window-size"),
        MegatronFlag("--experimental-attention-variant"),
        MegatronFlag("--qk-clip"),
        MegatronFlag("--log-max-attention-logit"),
        MegatronFlag(
            "--position-embedding-type", (None, "learned_absolute", "rope", "yarn", "none"), "use rope: angles are by position"
        ),
    ),
)
"""Core attention is `core_attention.RelayAttention`, which `adopt` puts into every layer's spec."""
