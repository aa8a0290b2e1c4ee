"""A tensor whose memory is freed after its last use in forward and recomputed before its first use in backward.

For tensors that are cheap to compute and large to keep, such as a norm's output, which the linear layer after it saves. The
storage of the saved tensor is resized to zero and filled again, so the graph is unchanged and gradients are bitwise the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_epp.runtime.autograd.hold import Hold
from megatron_epp.runtime.autograd.saved import resize


class Discarded:
    """Output of `run` that is discarded and recomputed from its input.

    Args:
        run: computes the output from the input; deterministic.
        x: the input; it is kept.
        output: the output, with a storage of its own, which only saved tensors may need once `until` is called.
    """

    def __init__(self, run: Callable[[Tensor], Tensor], x: Tensor, output: Tensor) -> None:
        self._run, self._input = run, Hold(x)
        self._memory = output.untyped_storage()

    def until(self, result: Tensor) -> None:
        """Free the memory until the gradient of `result` is computed, which was made from the output."""
        resize(self._memory, 0)
        result.register_hook(self._fill)

    def _fill(self, _: Tensor) -> None:
        (x,) = self._input.take()
        with torch.no_grad():
            made = self._run(x)
        resize(self._memory, made.untyped_storage().nbytes())
        torch.empty(0, dtype=made.dtype, device=made.device).set_(self._memory, 0, made.shape, made.stride()).copy_(made)
