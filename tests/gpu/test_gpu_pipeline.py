"""Slices on ranks that exchange messages over NCCL train as whole sequences do, in all ways to share a model."""

import pytest
import torch

from scripts.bench.gpu.loop import on_ranks
from scripts.bench.gpu.ranks import ROWS, compare
from scripts.bench.gpu.runs import Launches, Sizes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    return Launches(tmp_path_factory.mktemp("runs"), 300)


@pytest.mark.parametrize("name", ROWS)
def test_slices_over_nccl_have_the_losses_of_whole_sequences(launches, need_room, name):
    need_room(ROWS[name].ranks)
    row = compare(launches, Sizes.small(), {name: ROWS[name]})[name]
    assert row.get("holds"), row


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_loop_of_its_own_has_the_gradients_of_megatrons_schedule(tmp_path, need_room, ranks):
    need_room(ranks)
    found = on_ranks(tmp_path, ranks, 300)
    assert found["met"], found
