"""Layer specs with the relay's attention: of any model that is built from specs, local or Transformer Engine."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable
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


def relayed_spec_provider(spec: Any, default: Callable[..., Any]) -> Callable[..., Any]:
    """What to put into a model config as its layer spec: builds the spec it would have used, then relays it.

    Args:
        spec: the config's own spec: a spec, a function that makes one, or None.
        default: makes the spec when there is none.
    """

    def provide(config: Any, vp_stage: int | None = None) -> Any:
        source = default if spec is None else spec
        if not callable(source) or hasattr(source, "submodules"):
            return relayed(source)
        takes_stage = "vp_stage" in inspect.signature(source).parameters
        return relayed(source(config, vp_stage=vp_stage) if takes_stage else source(config))

    return provide
