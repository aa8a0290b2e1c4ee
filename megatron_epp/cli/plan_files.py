"""Plan files that commands read: plans, plans that are sound enough to be shown, and tables of other systems."""

from __future__ import annotations

from collections.abc import Iterator
from pkgutil import resolve_name
from typing import NamedTuple

from megatron_epp.cli.terminal import PROGRAM, Parser, tell
from megatron_epp.plan.check import check
from megatron_epp.plan.check.actions import check_presence
from megatron_epp.plan.check.tables import check_kv_offload, check_tables, check_tokens
from megatron_epp.plan.check.violation import Violation
from megatron_epp.plan.columns import columns_of, listed
from megatron_epp.plan.errors import PlanError
from megatron_epp.plan.launches import Rows
from megatron_epp.plan.plan import Plan
from megatron_epp.plan.reading import naming_file, read_text
from megatron_epp.plan.serialize import from_json, load
from megatron_epp.plan.simulate import simulate


def add_plan_file(parser: Parser) -> None:
    """Add the plan file that a command reads."""
    parser.add_argument("plan", metavar="PLAN.json", help="what `megatron-epp plan -o` or a training run wrote")


READERS = {name: f"megatron_epp.contrib.foreign:{name}" for name in ("is_table", "from_table", "launches_of")}
"""Functions that read tables that other systems print, imported for a file that is no JSON."""


class Proven(NamedTuple):
    """Contents of a file to prove.

    Attributes:
        plan: of the file, or as which a table is read.
        launches: that a table has itself; None if lowering adds them.
        is_table: the file is a table of another system.
    """

    plan: Plan
    launches: Rows | None = None
    is_table: bool = False


def read(path: str) -> Proven:
    """Load a plan, or a table of another system as one."""
    with naming_file(path, PlanError):
        text = read_text(path)
        if text[:1] == "{":  # most plans are large
            return Proven(from_json(text))
        is_table, from_table, launches_of = (resolve_name(where) for where in READERS.values())
        if is_table(path, text):
            return Proven(from_table(text), launches_of(text), is_table=True)
        if text.strip() and text.lstrip()[0] not in "{[" and not path.endswith(".json"):
            raise PlanError(
                "neither a plan, which is JSON, nor a table: no line is a row of rank 0, such as `f0 b0`, `F0.1 BW0.1` or "
                "`Rank 0: (F|0|0)`, and a table with a row of cells such as 0F0,0B0 for each rank is a .csv"
            )
        return Proven(from_json(text))


def load_sound(path: str) -> Plan:
    """Load a plan. Refuse one that deadlocks or contradicts itself in tables, chunks and actions; warn of other violations."""
    plan = load(path)
    if fault := next(_contradictions(plan), None):
        raise PlanError(f"{path}: {fault}; see: {PROGRAM} check {path}")
    if violations := check(plan):
        with naming_file(path, PlanError):
            simulate(plan)
        tell(f"{PROGRAM}: warning: {len(violations)} violation(s), see: {PROGRAM} check {path}")
    return plan


def _contradictions(plan: Plan) -> Iterator[Violation]:
    columns = columns_of(plan)
    yield from check_tables(plan, columns)
    yield from check_tokens(plan)
    yield from check_presence(plan, columns, listed(plan, columns))
    yield from check_kv_offload(plan)
