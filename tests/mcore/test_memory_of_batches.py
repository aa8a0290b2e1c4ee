"""Ranks hold the bytes that plans predict, to three in a hundred: random batches, every recompute mode, offload, and
KV offload.

Measured is what autograd keeps on the device, each storage once, and the KV relay's buffers; in host memory, what is away.
"""

import functools

import pytest

from megatron_epp.plan.recompute import MODES
from tests.support.mcore.forked import job, returned
from tests.support.mcore.jobs.batches import RUNS

SCALARS_BYTES = 64
"""Bytes of the loss, which no cost per token has."""


FEW, MANY = 2, 9
BY_DEFAULT = ("grouped, with dropout", "weights apart, there and back")
EACH = pytest.mark.parametrize(
    ("batches", "name"),
    [*((FEW, name) for name in BY_DEFAULT), *(pytest.param(MANY, name, marks=pytest.mark.slow) for name in RUNS)],
)


@pytest.fixture(scope="module")
def lines_of(tmp_path_factory):
    """By rank: a line for every plan that a training ran. Trainings on as many batches share a launch."""

    @functools.cache
    def runs(batches):
        names = BY_DEFAULT if batches == FEW else ()
        folder = tmp_path_factory.mktemp("batches")
        found = returned(job(1, "batches", folder=folder, batches=batches, names=names, timeout_s=400))
        assert not [ranks for ranks in found.values() if "error" in ranks], found
        return found

    return lambda batches, name: runs(batches)[name]


@EACH
def test_no_plan_holds_more_than_it_says_nor_less_by_three_in_a_hundred(lines_of, batches, name):
    for lines in lines_of(batches, name):
        ratios = [line["measured"] / line["planned"] for line in lines]
        print(f"\n{name}, {len(lines)} plans: measured over planned {min(ratios):.4f} to {max(ratios):.4f}")
        assert len(lines) > 5 * batches
        assert max(line["measured"] - line["planned"] for line in lines) <= SCALARS_BYTES
        assert min(ratios) >= 0.97


@EACH
def test_nothing_is_left_on_the_device_or_at_the_host(lines_of, batches, name):
    assert {line["left"] for lines in lines_of(batches, name) for line in lines} == {0}


@EACH
def test_the_host_has_what_was_planned_to_three_in_a_hundred(lines_of, batches, name):
    ratios = [
        line["host"] / line["planned_host"] for lines in lines_of(batches, name) for line in lines if line["planned_host"]
    ]
    print(f"\n{name}, {len(ratios)} plans with copies: in host memory over planned {min(ratios):.4f} to {max(ratios):.4f}")
    assert min(ratios) >= 0.97
    assert max(ratios) <= 1.03


@EACH
def test_the_plans_had_every_level_alone_and_beside_others_and_copies(lines_of, batches, name):
    seen = {again for lines in lines_of(batches, name) for line in lines for again in line["recompute"]}
    assert any({f"{layers} {mode.name}" for mode in MODES.values()} <= seen for layers in (2, 4))
    assert any("+" in again for again in seen)
    assert {0, 1} <= {line["hosted"] for lines in lines_of(batches, name) for line in lines}
    assert len({line["share"] for lines in lines_of(batches, name) for line in lines}) > batches


@EACH
def test_nobody_but_autograd_holds_what_chunks_keep(lines_of, batches, name):
    assert {line["offloadable"] for lines in lines_of(batches, name) for line in lines} == {1}
