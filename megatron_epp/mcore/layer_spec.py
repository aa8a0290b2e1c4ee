"""Layer specs with the relay's attention: of any model that is built from specs, local or Transformer Engine."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from megatron_epp.mcore.core_attention import RelayAttention


def relayed(spec: Any) -> Any:
    """A copy of a layer, block or stack spec in which every core attention is `RelayAttention`.

    Works on the structure, not on the model's kind: wherever a dataclass of submodules has a `core_attention`, it is replaced.
    """
    if isinstance(spec, (list, tuple)):
        return type(spec)(map(relayed, spec))
    if not dataclasses.is_dataclass(spec) or isinstance(spec, type):
        return spec
    copied = copy.copy(spec)
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        is_attention = field.name == "core_attention" and value is not None
        setattr(copied, field.name, RelayAttention if is_attention else relayed(value))
    return copied
