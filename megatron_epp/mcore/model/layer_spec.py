"""Layer specs with `RelayAttention`, for any model that is built from specs, local or Transformer Engine."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec, get_module

from megatron_epp.mcore.model.core_attention import RelayAttention
from megatron_epp.mcore.patches.stock_functions import is_installed
from megatron_epp.plan.errors import EppError


def relayed(spec: Any) -> Any:
    """Return a copy of a layer, block or stack spec in which every core attention is `RelayAttention`.

    It depends on the structure, not on the kind of model: every `core_attention` of a dataclass of submodules is replaced.

    Raises:
        EppError: a core attention is not one of Megatron's.
    """
    if isinstance(spec, (list, tuple)):
        return type(spec)(map(relayed, spec))
    if not dataclasses.is_dataclass(spec) or isinstance(spec, type):
        return spec
    copied = copy.copy(spec)
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        is_attention = field.name == "core_attention" and value is not None
        if is_attention:
            _check_replaceable(value)
        setattr(copied, field.name, RelayAttention if is_attention else relayed(value))
    return copied


def _check_replaceable(attention: Any) -> None:
    if isinstance(attention, ModuleSpec):
        attention = get_module(attention)
    while isinstance(attention, functools.partial):
        attention = attention.func
    if attention is not RelayAttention and not is_installed(attention):
        name = getattr(attention, "__qualname__", type(attention).__qualname__)
        raise EppError(f"--epp puts its own attention in the place of {name}, which is not Megatron's: start without --epp")
