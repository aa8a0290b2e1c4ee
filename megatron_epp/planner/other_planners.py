"""Plans by other planners than the default one, the user's among them, whose decisions are looked at first."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from megatron_epp.cost.model import Costs
from megatron_epp.plan import EppError, InfeasibleError, Plan, PlanError, Remedy
from megatron_epp.plan.planners import PLANNERS, Planner, begins_with_greedy
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.plan.reading import brief, nearest
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.message_room import MessageRoomError, planned_with_room, with_room
from megatron_epp.planner.mistakes import refuse_mistakes, whole_layers
from megatron_epp.planner.order import has_groups
from megatron_epp.planner.result import plan_or_refuse
from megatron_epp.planner.validation import validate


def plan_by_name(problem: Problem, costs: Costs, options: Options, names_cap: bool = True) -> Plan:
    """Plan by a planner other than "greedy", as `planner.plan` does."""
    planner = _planner(options.planner)
    validate(problem, costs, options)
    problem = replace(problem, borrowed=())  # their orders know no readers: every sequence runs by itself
    entry = PLANNERS.entry(options.planner)
    if entry is not None and not entry.keeps_groups and has_groups(problem.loss_groups):
        reason = f"planner {options.planner!r} orders each sequence by itself, and the batch has losses over several"
        raise PlanError(reason, Remedy("set", "planner", "greedy"))
    if problem.microbatches and entry is not None and not entry.begins_with_greedy:
        reason = f"planner {options.planner!r} makes chunks of its own, and the batch has microbatches that run whole"
        raise PlanError(reason, Remedy("set", "planner", "greedy"))
    if not begins_with_greedy(options.planner):
        return planned_with_room(problem, costs, options, lambda asked: _built(asked, costs, options, planner))
    try:
        return with_room(problem, lambda asked: _built(asked, costs, options, planner))
    except (InfeasibleError, MessageRoomError):  # what fits, or would, is told without what improves it, which takes long
        return plan_or_refuse((problem,), costs, options)[0]


def plan_of_decisions(problem: Problem, costs: Costs, options: Options, decisions: Decisions) -> Plan:
    """Turn decisions of any planner into a plan, as `build_plan` does. Raises `PlanError`, with the report, for mistakes."""
    if not isinstance(decisions, Decisions):
        raise PlanError(f"planner {options.planner} returned {brief(decisions)}; a planner returns `Decisions`")
    refuse_mistakes(decisions, problem, costs, options.planner)
    tables = decisions.tables(decisions.padded(problem), costs)
    recompute_steps = whole_layers(decisions, problem, costs, tables, options.planner)
    return build_plan(problem, costs, options, replace(decisions, recompute_steps=recompute_steps), tables)


def _built(problem: Problem, costs: Costs, options: Options, planner: Planner) -> Plan:
    if options.planner in PLANNERS:
        return plan_of_decisions(problem, costs, options, planner(problem, costs, options))
    with _of_user(f"planner {options.planner} failed"):
        decisions = planner(problem, costs, options)
    with _of_user(f"planner {options.planner} returned decisions that make no plan"):
        return plan_of_decisions(problem, costs, options, decisions)


def _planner(name: str) -> Planner:
    """Return the planner of a name in `PLANNERS`, or import ``module:function``, which works in every process that finds it.
    Raises `PlanError` if there is no such planner, its module cannot be imported, or it is not callable.
    """
    if name in PLANNERS:
        return PLANNERS[name]
    module, colon, function = name.partition(":")
    if not colon:
        raise PlanError(
            f"no planner {name!r}{nearest(name, PLANNERS)}; there are {', '.join(sorted(PLANNERS))}, or one of your own as "
            "module:function",
            Remedy("change", "planner"),
        )
    try:
        planner: Planner = getattr(importlib.import_module(module), function)
    except (Exception, SystemExit) as error:  # whatever the module raises
        what = f"{type(error).__name__}: {_one_line(error)}"
        raise PlanError(f"planner {name}: {what}; give module:function, the module where PYTHONPATH finds it") from error
    if not callable(planner):
        raise PlanError(f"planner {name} is {brief(planner)}, which is not a function")
    return planner


@contextmanager
def _of_user(failed: str) -> Iterator[None]:
    """Turn an error of a user's planner into a `PlanError` that names its file and line."""
    try:
        yield
    except EppError:
        raise
    except (Exception, SystemExit) as error:
        *_, frame = traceback.extract_tb(error.__traceback__)
        where = f"{frame.filename}:{frame.lineno}"
        raise PlanError(f"{failed} ({where}): {type(error).__name__}: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
