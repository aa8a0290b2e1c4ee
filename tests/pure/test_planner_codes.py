"""An order as numbers is the order of the actions that they stand for."""

from __future__ import annotations

import pickle

from megatron_epp.plan import Action, Op
from megatron_epp.planner.kernels.codes import CodedOrder, coded, decode, encode
from megatron_epp.planner.orders.vocabulary_order import SHARD_KINDS

ORDER = (
    (Action(Op.F, 0, 0), Action(Op.F, 0, 1), Action(Op.B, 0, 1), Action(Op.B, 0, 0), Action(Op.W, 0, 0)),
    (Action(Op.F, 1, 0), Action(Op.F, 1, 1), Action(Op.B, 1, 1), Action(Op.B, 1, 0)),
)


def test_an_order_as_numbers_reads_like_its_actions() -> None:
    order = coded(ORDER, 2)
    assert isinstance(order, CodedOrder)
    assert len(order) == 2
    assert (order[1], order[:1], list(order)) == (ORDER[1], ORDER[:1], list(ORDER))
    assert repr(order) == repr(ORDER)
    assert coded(order, 2) is order


def test_an_order_goes_to_another_process_as_actions_for_its_numbers_may_be_of_another_type_there() -> None:
    received = pickle.loads(pickle.dumps(coded(ORDER, 2)))
    assert (type(received), received) == (tuple, ORDER)


def test_an_order_as_numbers_equals_any_order_of_the_same_actions() -> None:
    actions, order, other = ORDER, coded(ORDER, 2), coded((ORDER[0][:4], ORDER[1]), 2)
    assert order == actions
    assert actions == order
    assert order == coded(ORDER, 2)
    assert order != other
    assert actions != other
    assert (order.key == coded(ORDER, 2).key, order.key == other.key) == (True, False)
    assert order == CodedOrder(encode(order, 2, SHARD_KINDS), 2), "kinds that no action has make no difference"


def test_encoding_is_undone_by_decoding() -> None:
    codes = encode(ORDER, 2, SHARD_KINDS)
    assert codes.num_ranks == 2
    assert list(codes.starts) == [0, 5, 9]
    assert decode(codes, 2) == ORDER
