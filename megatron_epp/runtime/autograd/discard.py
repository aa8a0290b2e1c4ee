"""A tensor whose memory is given back behind its last use in forward and filled again ahead of its first use in backward.

For what is cheap to make and large to keep, such as a norm's output, which the linear layer behind it saves. The memory is
taken out from under the saved tensor and put back there, so the graph stays as it is, and its gradients to the bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_epp.runtime.autograd.hold import Hold
from megatron_epp.runtime.autograd.saved import resize


class Discarded:
    """What `run` made of an input.

    Args:
        run: makes the output of the input, the same whenever it runs.
        x: the input; it is kept.
        output: in memory of its own, which only saved tensors may need once `until` is called.
    """

    def __init__(self, run: Callable[[Tensor], Tensor], x: Tensor, output: Tensor) -> None:
        self._run, self._input = run, Hold(x)
        self._memory = output.untyped_storage()

    def until(self, result: Tensor) -> None:
        """Give the memory back until there is a gradient of `result`, which was made from the output."""
        resize(self._memory, 0)
        result.register_hook(self._fill)

    def _fill(self, _: Tensor) -> None:
        (x,) = self._input.take()
        with torch.no_grad():
            made = self._run(x)
        resize(self._memory, made.untyped_storage().nbytes())
        torch.empty(0, dtype=made.dtype, device=made.device).set_(self._memory, 0, made.shape, made.stride()).copy_(made)
