"""The MLP of a layer, or as a layer of a hybrid model."""

from __future__ import annotations

from megatron_epp.mcore.model.kinds.kind import LayerKind

MLP = LayerKind(name="an MLP", symbol="-")
"""Tokens do not meet there, so it runs as it is."""
