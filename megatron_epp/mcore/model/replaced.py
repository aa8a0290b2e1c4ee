"""Functions of a model's modules in whose place plans put others, and what programs have attached to these modules.

Torch's hooks around a module's `forward` act as without plans where the function in its place takes and returns the same
tensors. All else that is attached or assigned is refused by name (`problems`), also between two calls. Every replacement is
made by `put`, or told by `mark`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils import parametrize

from megatron_epp.plan import EppError

BEFORE, AFTER, BACKWARD, WEIGHTS = "forward pre-hook", "forward hook", "backward hook", "parametrization"
ALL = frozenset((BEFORE, AFTER, BACKWARD, WEIGHTS))
HOOKS = ALL - {WEIGHTS}
_IN_TORCH = {
    "_forward_pre_hooks": BEFORE,
    "_forward_hooks": AFTER,
    "_backward_pre_hooks": BACKWARD,
    "_backward_hooks": BACKWARD,
}
"""Attributes of torch's modules with their hooks, by number."""
_KNOWN = ("megatron.core", "megatron.training", "transformer_engine", "megatron_epp")
"""Packages whose hooks are known: they wait for weights, reduce gradients, or are this package's own."""
MARK = "replaced_by_plans"


@dataclass(frozen=True, slots=True)
class Replaced:
    """Functions of a module that plans have replaced, by name, and the kinds of attachments that act there as without plans."""

    acting: frozenset[str]
    functions: dict[str, Callable[..., Any]]


NOTHING = Replaced(ALL, {})


def put(module: Any, name: str, function: Callable[..., Any], acting: Iterable[str] = ALL, *, wraps: bool = True) -> None:
    """Put a function in the place of a module's own, on the object.

    `acting` are kinds of what may be attached to the module; with `wraps` the function calls what was there before. Raises
    `EppError` if it does not, and a program has assigned one.
    """
    if not wraps and name in assigned(module, (name,)):
        raise EppError(f"{type(module).__name__} has a {name} that is not Megatron's, whose place plans would take: remove it")
    setattr(module, name, function)
    mark(module, acting, **{name: function})


def mark(module: Any, acting: Iterable[str], **functions: Callable[..., Any]) -> None:
    """Tell what may be attached to a module which plans replace, or call in another way, and what functions they need there."""
    before = vars(module).get(MARK, NOTHING)
    vars(module)[MARK] = Replaced(before.acting & frozenset(acting), before.functions | functions)


def marked(model: torch.nn.Module) -> frozenset[str]:
    """Return the names of the modules of which plans have replaced something."""
    return frozenset(name for name, module in model.named_modules() if MARK in vars(module))


def assigned(module: torch.nn.Module, names: Iterable[str]) -> list[str]:
    """Return which functions a program has assigned to a module's object."""
    ours = vars(module)[MARK].functions if MARK in vars(module) else {}
    return [name for name in names if name in vars(module) and vars(module)[name] is not ours.get(name)]


def attached(module: torch.nn.Module, kinds: Iterable[str] = HOOKS) -> Iterator[str]:
    """Yield what a program has attached to a module, of some kinds, with its name: ``forward hook capped``."""
    for attribute, kind in _IN_TORCH.items():
        for hook in (vars(module).get(attribute) or {}).values() if kind in kinds else ():
            function = _function_of(hook)
            if not str(getattr(function, "__module__", "")).startswith(_KNOWN):
                yield f"{kind} {getattr(function, '__qualname__', type(function).__qualname__)}"
    if WEIGHTS in kinds and parametrize.is_parametrized(module):
        yield f"{WEIGHTS} of {', '.join(module.parametrizations)}"  # type: ignore[arg-type]


def _function_of(hook: Any) -> Any:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, "__func__", hook)


def problems(model: torch.nn.Module, names: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield what of a model's modules would not act as without plans. `names` are replaced ones, as `marked` returned them."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if (replaced := vars(module).get(MARK)) is None:
            continue
        of = f"{name or 'the model'} ({type(module).__name__})"
        for function, own in replaced.functions.items():
            if vars(module).get(function, getattr(type(module), function, None)) is not own:
                yield (
                    f"{of} has another {function} than plans need there: take it away, or assign it before the first "
                    "call, where plans call what they find"
                )
        for what in attached(module, ALL - replaced.acting):
            yield f"{of} has a {what}, which plans would not call, or with other tensors than Megatron: remove it"
    for name in sorted(names - {name for name, module in modules.items() if MARK in vars(module)}):
        yield f"{name} is another module than the one that plans run: put it there before the first call"
