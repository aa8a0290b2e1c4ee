"""Operations and actions, the elements of a plan.

An action prints as ``2F5`` (stage 2, forward, chunk 5), the form `torch.distributed.pipelining` uses, and parses back.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from megatron_epp.plan.errors import PlanError
from megatron_epp.plan.reading import shown


class Op(StrEnum):
    """Operation of an action. A new one needs one member here, one rule in `deps` and one handler in the runtime."""

    F = "F"
    """Forward of a chunk through a stage."""
    B = "B"
    """Backward: the input gradient, and the weight gradient too unless the plan has a `W` for the same stage and chunk."""
    W = "W"
    """Weight gradient, split off its backward."""
    R = "R"
    """Recompute as a separate action, before the backward that needs it."""
    O = "O"  # noqa: E741 - the letter is the field's name for offload
    """Offload of a chunk's activations to host memory, on the copy stream."""
    L = "L"
    """Load of the activations that `O` moved, on the copy stream."""
    FREE = "FREE"
    """Release of the device memory of the activations that `O` has moved. Added by lowering, as are the five below."""
    SEND_F = "SEND_F"
    """Send the activation to the next stage."""
    RECV_F = "RECV_F"
    """Receive the activation from the previous stage."""
    SEND_B = "SEND_B"
    """Send the gradient to the previous stage."""
    RECV_B = "RECV_B"
    """Receive the gradient from the next stage."""
    REDUCE = "REDUCE"
    """Start the reduction of a stage's gradients over the data-parallel replicas; `chunk` is that of the last gradient."""


COMPUTE_OPS = frozenset({Op.F, Op.B, Op.W, Op.R})
COPY_OPS = frozenset({Op.O, Op.L})
COMM_OPS = frozenset({Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B})
LOWERED_OPS = COMM_OPS | {Op.FREE, Op.REDUCE}
"""Operations that only lowering adds."""

_TEXT = re.compile(r"(\d{1,9})(SEND_F|RECV_F|SEND_B|RECV_B|FREE|REDUCE|[A-Z])(\d{1,9})", re.ASCII)


class Action(NamedTuple):
    """One operation of one stage on one chunk."""

    op: Op
    stage: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{self.chunk}"

    @staticmethod
    def parse(text: str) -> Action:
        """Read ``2F5``, numbers of up to nine digits. Raises `PlanError` on anything else."""
        match = _TEXT.fullmatch(text)
        if match is None or match[2] not in Op.__members__:
            expected = f"<stage><op><chunk> such as '2F5', op one of {', '.join(Op)}"
            raise PlanError(f"{shown(text)} is not an action; expected {expected}")
        return Action(Op(match[2]), int(match[1]), int(match[3]))
