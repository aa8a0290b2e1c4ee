"""Messages between two ranks arrive in the order they were sent, per direction, whatever the other direction does."""

import pytest
import torch
from link_runs import both_ways, cross_talk, each_way, groups, strided_and_released
from rank_processes import Ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with Ranks(2, tmp_path_factory.mktemp("ranks")) as job:
        yield job


def test_activations_and_gradients_keep_their_order_and_do_not_mix(ranks):
    _, (activations, gradients) = ranks.run(cross_talk)
    assert activations == [[[float(i)] * 3] * 2 for i in range(4)]
    assert gradients == [[10.0 + i] * 5 for i in range(4)]


def test_both_ranks_may_send_before_they_receive(ranks):
    assert ranks.run(both_ways) == [1.0, 0.0]


def test_strides_are_no_matter_and_the_sender_may_drop_its_tensor_at_once(ranks):
    _, (transposed, whole) = ranks.run(strided_and_released)
    assert transposed == torch.arange(6.0).reshape(2, 3).t().tolist()
    assert whole == torch.arange(1000.0).tolist()


def test_every_communicator_spans_the_pipeline(ranks):
    assert ranks.run(groups) == [((0, 1), [[0, 1]] * 4)] * 2


def test_activations_that_travel_both_ways_have_a_communicator_each_way(ranks):
    assert ranks.run(each_way) == [(4, [1.0, 11.0]), (4, [0.0, 10.0])]
