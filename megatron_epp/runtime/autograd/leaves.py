"""Parameters that autograd keeps under hooks, given back to Python's autograd functions as the objects they are.

Torch gives a function's backward the very tensor that its forward has saved, but under hooks on saved tensors a copy that
shares its memory, whatever a hook returns (`SavedVariable::unpack`). What Megatron and Transformer Engine read from a weight in
backward (`main_grad`), or set on it (`grad_added_to_main_grad`), is an attribute of the object, which a copy does not have. The
copy of a leaf has the leaf's gradient accumulator, though, which refers to the leaf.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn import Parameter


class HeldParameter:
    """A saved parameter. Autograd would keep it as well without hooks.

    Attributes:
        parameter: itself.
    """

    __slots__ = ("_accumulator", "parameter")

    def __init__(self, parameter: Parameter) -> None:
        self.parameter = parameter
        # Parameters refer to theirs weakly, and a function need not be given what it saves.
        self._accumulator: Node | None = get_gradient_edge(parameter).node if parameter.requires_grad else None


def give_back_leaves() -> None:
    """Make `saved_tensors` of Python's autograd functions return leaves themselves, as without hooks on saved tensors."""
    BackwardCFunction.saved_tensors = property(_saved_tensors)


def _saved_tensors(context: Any) -> tuple[Tensor | None, ...]:
    saved: tuple[Tensor | None, ...] = torch._C._FunctionBase.saved_tensors.__get__(context)
    return tuple(map(_itself, saved))


def _itself(tensor: Tensor | None) -> Tensor | None:
    """Return the leaf that a tensor is a copy of; other tensors unchanged."""
    if tensor is None or not tensor.is_leaf or not tensor.requires_grad:
        return tensor
    accumulator: Any = get_gradient_edge(tensor).node
    leaf: Tensor = accumulator.variable
    return leaf
