"""The table of operations: what can be added to it, and what cannot."""

from dataclasses import replace

import pytest

from megatron_epp.plan import Op, PlanError
from megatron_epp.plan.operations import (
    At,
    Before,
    Collective,
    Need,
    Operation,
    Presence,
    of_ranks,
    operation,
    register,
    unregister,
)

K, SPREAD = Op.define("K"), Op.define("SPREAD_K")
SHARD = Operation(
    op=K,
    text="loss shard",
    presence=Presence.COMPLETE,
    sites=of_ranks,
    needs=(Need(Op.F, At.LAST, carries=Collective(SPREAD)),),
)


def test_an_added_operation_is_known_with_its_collectives_until_it_is_removed():
    try:
        assert register(SHARD) is SHARD
        assert register(SHARD) is SHARD
        assert operation(K) is SHARD
        assert operation(SPREAD).text == f"collective {SPREAD}"
    finally:
        unregister(K)
    for op in (K, SPREAD):
        with pytest.raises(PlanError, match=f"operation {op} has no definition"):
            operation(op)


def test_another_definition_of_a_name_is_refused():
    with pytest.raises(ValueError, match=f"operation {Op.F} is already defined"):
        register(replace(operation(Op.F), text="another"))
    assert operation(Op.F).text != "another"


@pytest.mark.parametrize(
    "changes",
    [{"needs": (Need(SPREAD, At.LAST),)}, {"before": (Before(SPREAD, Need(K, At.EVERY)),)}],
    ids=["needs", "before"],
)
def test_an_operation_that_names_an_unknown_one_is_refused(changes):
    with pytest.raises(ValueError, match=f"operation {K} names {SPREAD}, which is not defined"):
        register(replace(SHARD, **{"needs": (), **changes}))
    with pytest.raises(PlanError):
        operation(K)


def test_what_is_received_has_a_colour_for_each_kind() -> None:
    assert len({operation(op).colour for op in (Op.RECV_F, Op.RECV_B, Op.F, Op.B)}) == 4
