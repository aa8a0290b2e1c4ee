"""Memory that runs out at one buffer: the n-th tensor that modules of the package make finds none."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

MAKERS = ((torch, "empty"), (torch, "empty_like"), (torch, "zeros"), (Tensor, "new_empty"), (Tensor, "new_zeros"))
MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB."


@contextmanager
def failing(at: int, *packages: str) -> Iterator[list[str]]:
    """Let the n-th of these calls in modules of the packages (default: ours) fail; the list has the modules that made them."""
    made: list[str] = []

    def of(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(*args: object, **named: object) -> Tensor:
            tensor, module = call(*args, **named), sys._getframe(1).f_globals["__name__"]
            if tensor.numel() and module.startswith(packages or ("megatron_epp.",)):
                made.append(module)
                if len(made) == at:
                    raise torch.OutOfMemoryError(MESSAGE)
            return tensor

        return make

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in MAKERS:
            patch.setattr(owner, name, of(getattr(owner, name)))
        yield made
