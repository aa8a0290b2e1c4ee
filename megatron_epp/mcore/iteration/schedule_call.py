"""A call of Megatron's pipeline schedules: its arguments, the check of what a loss returns, and calls that run again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu, rerun_state_machine
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.rerun_state_machine import RerunState
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_epp.plan import EppError
from megatron_epp.plan.attributes import having


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleCall:
    """Arguments of a call, with the names and defaults of Megatron's pipeline schedules. Lengths and `micro_batch_size` are not
    used: shapes of messages follow from the plan.
    """

    forward_step_func: Callable[..., Any]
    data_iterator: Any
    model: Any
    num_microbatches: int
    seq_length: int
    micro_batch_size: int
    decoder_seq_length: int | None = None
    forward_only: bool = False
    collect_non_loss_data: bool = False
    first_val_step: bool | None = None
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None
    p2p_communicator: Any = None
    pg_collection: Any = None
    force_all_reduce: bool | None = False

    @property
    def models(self) -> list[torch.nn.Module]:
        return self.model if isinstance(self.model, list) else [self.model]

    @property
    def iterators(self) -> list[Any]:
        return self.data_iterator if isinstance(self.data_iterator, list) else [self.data_iterator]

    @property
    def config(self) -> Any:
        return get_model_config(self.models[0])

    @property
    def context_ranks(self) -> int:
        """Number of context-parallel ranks, by which two-part losses are multiplied."""
        size: int = mpu.get_context_parallel_world_size() if self.pg_collection is None else self.pg_collection.cp.size()
        return size

    def check_messages(self) -> None:
        """Raise `EppError` for arguments that would send other messages than the plan's, or over another pipeline than that of
        Megatron's parallel state, whose own communicator is not used.
        """
        communicator, obstacle = self.p2p_communicator, ""
        if self.adjust_tensor_shapes_fn is not None:
            obstacle = "adjust_tensor_shapes_fn: messages follow the plan"
        elif communicator is not None and type(communicator) is not P2PCommunicator:
            obstacle = f"a p2p_communicator of type {type(communicator).__name__}: messages follow the plan"
        else:
            groups = {"p2p_communicator": (communicator, "pp_group"), "pg_collection": (self.pg_collection, "pp")}
            for name, (value, attribute) in groups.items():
                group = getattr(value, attribute, None)
                if value is not None and (group is None or not _is_own_pipeline(group)):
                    obstacle = f"{name}: its pipeline is not the one of megatron.core.parallel_state"
        if obstacle:
            raise EppError(f"a plan cannot honour {obstacle}. Leave it out, or use Megatron's own schedule")


def _is_own_pipeline(group: Any) -> bool:
    return dist.get_process_group_ranks(group) == dist.get_process_group_ranks(mpu.get_pipeline_model_parallel_group())


def checked_step(call: ScheduleCall, index: int) -> Callable[..., Any]:
    """Return the forward step of microbatch `index`, whose loss raises `EppError` for what Megatron cannot use: it takes a loss
    with its report, and a number of tokens between them where one is given.
    """

    def step(*args: Any, **kwargs: Any) -> Any:
        output, loss_function = call.forward_step_func(*args, **kwargs)
        if loss_function is None or call.collect_non_loss_data:
            return output, loss_function
        return output, partial(_checked_loss, call, index, loss_function)

    return step


def _checked_loss(call: ScheduleCall, index: int, loss_function: Callable[..., Any], output: Any) -> Any:
    returned = loss_function(output)
    if not isinstance(returned, (tuple, list)) or len(returned) not in (2, 3):
        got = f"{len(returned)} values" if isinstance(returned, (tuple, list)) else f"a {type(returned).__name__}"
        raise EppError(
            f"the loss function of microbatch {index} returned {got}: a plan needs (loss, report) or (loss, num_tokens, report)"
        )
    loss = returned[0]
    if not call.forward_only and not (isinstance(loss, Tensor) and loss.numel() == 1):
        got = f"of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"of type {type(loss).__name__}"
        raise EppError(f"the loss of microbatch {index} is {got}, not a tensor of one number, so there is no gradient of it")
    return returned


# ---- Megatron's rerun machine: iterations that run again must run alike, and results are compared by microbatch ---------

_MOST_CALLS = 1000
"""Most results with one message that a microbatch may have validated: the distance between two microbatches' numbers."""


def is_replay() -> bool:
    """Return True if the iteration runs again to compare results; Megatron's iterators then replay their items."""
    machine = _machine()
    return machine is not None and machine.state not in (RerunState.NOT_RUNNING_YET, RerunState.INITIAL_RUN)


def numbered_by(index: int) -> AbstractContextManager[None]:
    """Number the results that are validated in the body by microbatch `index`: Megatron's machine knows a result by its number
    in the iteration, and after a restart the order of microbatches may be another.
    """
    machine = _machine()
    if machine is None:
        return nullcontext()
    # Megatron counts results per message since the beginning of the iteration; here each microbatch has a range of numbers.
    return having(machine, validation_counts=defaultdict(lambda: index * _MOST_CALLS))


def _machine() -> Any:
    """Return Megatron's machine; None where nothing has made one, which a call of its own function would do."""
    return rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
