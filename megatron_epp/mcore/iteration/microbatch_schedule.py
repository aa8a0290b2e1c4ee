"""Schedule that runs a script's own microbatches by a plan, in place of Megatron's pipeline schedules."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.utils import get_model_config

from megatron_epp.cost.kept import KeptCosts, from_state, to_state
from megatron_epp.mcore.arguments.flag import GIVEN
from megatron_epp.mcore.iteration.microbatch_agreement import installed
from megatron_epp.mcore.iteration.microbatch_run import MicrobatchRun
from megatron_epp.mcore.iteration.microbatch_shapes import Microbatch, Microbatches, shape_of, take
from megatron_epp.mcore.iteration.report import NOTHING, IterationReport
from megatron_epp.mcore.iteration.schedule_call import ScheduleCall, is_replay
from megatron_epp.mcore.model.stage import timed
from megatron_epp.mcore.releases import training_args
from megatron_epp.plan import EppError, Remedy
from megatron_epp.plan.errors import reason_of


class Schedule:
    """Schedule function for a script's own microbatches, called as Megatron's pipeline schedules are.

    Args:
        arguments: returns Megatron's arguments, or what stands for them, given the rank's model chunks.
        shape_of: finds the shape of a microbatch: a `Microbatch`, or the lengths of its sequences if they are packed.
        looks_ahead: Megatron's own loop calls the schedule, and takes all microbatches from one iterator, so ranks agree on the
            next iteration and plan it while the present one runs.
        unread_of: as `wrap` takes it.
    """

    def __init__(
        self,
        arguments: Callable[[list[torch.nn.Module]], argparse.Namespace],
        shape_of: Callable[[Any], Microbatch | Sequence[int]] = shape_of,
        looks_ahead: bool = False,
        unread_of: Callable[[Any], Sequence[int] | None] | None = None,
    ) -> None:
        self._arguments, self._shape_of, self._looks_ahead = arguments, shape_of, looks_ahead
        self._unread_of = unread_of
        self._runs: list[MicrobatchRun] = []
        self._loaded: tuple[KeptCosts, ...] = ()

    def __call__(self, **arguments: Any) -> list[Any]:
        """Run a call of the schedule by a plan, with the arguments (`ScheduleCall`) and results of Megatron's own.

        Raises `EppError` for arguments that cannot be honoured, and microbatches that are missing, unequal or without lengths.
        """
        call = ScheduleCall(**arguments)
        call.check_messages()
        models, iterators, forward_only, count = call.models, call.iterators, call.forward_only, call.num_microbatches
        run, config = self._run_of(models), call.config
        with timed(config.timers, "forward-backward", log_level=1, barrier=config.barrier_with_L1_time):
            start_s = time.perf_counter()
            with run.telling_others():
                in_turn = self._looks_ahead and not forward_only and not is_replay() and run.can_look_ahead(iterators)
                ahead = (installed(iterators) or []) if in_turn else []
                agreed = run.ahead.take(ahead, count) if in_turn else None
            with run.telling_others(unless=run.raised_by_all if agreed is None else ()):
                sources, shapes, problem = self._taken(iterators, count, len(models))
                if agreed is None:
                    held, items = sum(source.num_bytes(run.device) for source in sources), [source.items for source in sources]
                    agreed = run.agreed(shapes, problem, held, items)
                elif problem:
                    raise EppError(problem)
                planned = run.plan_of_call(agreed, forward_only)
                run.plan_wait_us = (time.perf_counter() - start_s) * 1e6
            with run.telling_others():
                report = IterationReport.begin(run, planned or NOTHING, forward_only)
                results, num_tokens = run.run_microbatches(call, sources, agreed, planned, report)
                # Behind the run, which the host has launched: it reads data while the device works. Not while costs are learnt:
                # the next plan needs what this run measures.
                if in_turn and run.learning.is_done:
                    with run.watching("waits for others' microbatches"):
                        run.ahead.begin(ahead, count, lambda items: tuple(map(self._shape, items)))
                for source in sources:
                    source.finish()
                if not forward_only:
                    run.finish_gradients(models, num_tokens, call.pg_collection, call.force_all_reduce)
                report.log_previous_and_begin(None)
        return results

    def state_dict(self) -> dict[str, Any]:
        """Return learnt costs, and loaded ones while some are learnt, for a checkpoint: for JSON, and equal on all ranks."""
        learnt = [run.learning.saved for run in self._runs if run.learning.saved is not None]
        is_complete = bool(learnt) and len(learnt) == len(self._runs)
        return to_state(learnt if is_complete else [*learnt, *(costs for costs in self._loaded if costs not in learnt)])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the costs that `state_dict` returned in an earlier run, on every rank and before the schedule's first call.

        If model, parallel layout or machine differ, costs are learnt again, and a warning says why. Raises `EppError` if the
        state is something else, or the schedule has been called.
        """
        if self._runs:
            raise EppError("learnt costs are loaded before the first call of the schedule, which has been made")
        self._loaded = from_state(state)

    def _run_of(self, models: list[torch.nn.Module]) -> MicrobatchRun:
        for run in self._runs:
            if run.models == models:
                return run
        run = MicrobatchRun(self._arguments(models), models, self._loaded)
        with run.telling_others():
            refuse_router_replay(models, run.args.epp_order)
            if len(models) > 1:
                refuse_other_turns(get_model_config(models[0]), run.placement.num_ranks, run.args.epp_order)
        self._runs.append(run)
        return run

    def close(self) -> None:
        for run in self._runs:
            run.close()
        self._runs.clear()

    def _taken(
        self, iterators: list[Any], count: int, num_chunks: int
    ) -> tuple[list[Microbatches], tuple[Microbatch, ...] | None, str]:
        """Take the microbatches of every chunk; return them, their shapes if a chunk has some, and an error instead of raising,
        which would leave other ranks waiting for this one's shapes.
        """
        sources: list[Microbatches] = []
        if len(iterators) != num_chunks:
            problem = f"there are {len(iterators)} data iterators for {num_chunks} model chunks: give a list of as many"
            return sources, None, problem
        try:
            sources = [take(iterator, count, self._shape) for iterator in iterators]
            known = [shapes for source in sources if (shapes := source.shapes()) is not None]
        except Exception as error:
            return sources, None, reason_of(error)
        if any(shapes != known[0] for shapes in known):
            return sources, None, "the iterators of this rank's model chunks yield different microbatches"
        return sources, known[0] if known else None if count else (), ""

    def _shape(self, item: Any) -> Microbatch:
        refuse_group_sizes(item)
        shape = self._shape_of(item)
        shape = shape if isinstance(shape, Microbatch) else Microbatch(tuple(filter(None, map(int, shape))))
        unread = None if self._unread_of is None else self._unread_of(item)
        return shape if unread is None else shape._replace(unread=tuple(unread))


# ---- features of a framework that only its model or its microbatches show ----------------------------------------------

_REPLAYS = ("router_replay", "routing_replay")
"""Attributes of a router that hold its queue of routes: of Megatron's and verl's, and of slime's."""


def refuse_router_replay(models: Sequence[torch.nn.Module], order: str) -> None:
    """Raise `EppError` for routers that take routes from a queue, unless microbatches run in their own order."""
    if order == GIVEN:
        return
    for name, module in (named for model in models for named in model.named_modules()):
        for replay in _REPLAYS:
            if getattr(module, replay, None) is not None:
                raise EppError(
                    f"{name}.{replay} hands out the routes of microbatches in the order in which these run: leave "
                    "router replay out",
                    Remedy("set", "order", GIVEN),
                )


def refuse_other_turns(config: Any, num_ranks: int, order: str) -> None:
    """Raise `EppError` where a rank's several model chunks would take turns in another order than in Megatron's schedule."""
    size = getattr(config, "microbatch_group_size_per_vp_stage", None)
    if order == GIVEN and size not in (None, num_ranks):
        raise EppError(
            f"order={GIVEN!r} runs {num_ranks} microbatches, one for each pipeline rank, on a model chunk before the next: set "
            f"microbatch_group_size_per_vp_stage to {num_ranks}; it is {size}"
        )


def refuse_group_sizes(item: Any) -> None:
    """Raise `EppError` for a microbatch that ranks of several replicas share (dynamic context parallelism).

    Only ``local_cp_size`` in the microbatch tells, the number of these ranks: verl leaves Megatron's own setting off.
    """
    for part in item if isinstance(item, (tuple, list)) else (item,):
        for holder in (part, _value(part, "packed_seq_params")):
            if _value(holder, "local_cp_size") is not None:
                raise EppError(
                    "microbatches are shared by replicas, as by dynamic context parallelism (they have local_cp_size): these "
                    "would wait for each other in their models, but each has a plan of its own; set dynamic_context_parallel "
                    "to False"
                )


def _value(holder: Any, name: str) -> Any:
    return holder.get(name, None) if isinstance(holder, Mapping) else getattr(holder, name, None)


forward_backward_user = Schedule(lambda models: training_args(), looks_ahead=True)
"""Schedule of a training with `--epp-microbatches user`."""
