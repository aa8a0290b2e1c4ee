"""Ranks hold the bytes that plans predict, to three in a hundred: random batches, every recompute mode, offload, and
KV offload.

Measured is what autograd keeps on the device, each storage once, and the KV relay's buffers; in host memory, what is away.
"""

import pytest

from megatron_epp.plan.recompute import MODES
from tests.support.mcore.batches_worker import RUNS
from tests.support.mcore.forked import launch

SCALARS_BYTES = 64
"""Bytes of the loss, which no cost per token has."""
WORKER = "tests.support.mcore.batches_worker"


@pytest.fixture(scope="module", params=[2, pytest.param(9, marks=pytest.mark.slow)])
def batches(request):
    return request.param


@pytest.fixture(scope="module")
def runs(batches, tmp_path_factory):
    """By training and rank: a line for every plan that ran."""
    finished = launch(1, "-m", WORKER, tmp_path_factory.mktemp("batches"), batches, timeout_s=400)
    assert finished.returncode == 0, finished.output[-5000:]
    (found,) = finished.figures
    assert not [ranks for ranks in found.values() if "error" in ranks], found
    return found


@pytest.mark.parametrize("name", RUNS)
def test_no_plan_holds_more_than_it_says_nor_less_by_three_in_a_hundred(runs, batches, name):
    for lines in runs[name]:
        ratios = [line["measured"] / line["planned"] for line in lines]
        print(f"\n{name}, {len(lines)} plans: measured over planned {min(ratios):.4f} to {max(ratios):.4f}")
        assert len(lines) > 5 * batches
        assert max(line["measured"] - line["planned"] for line in lines) <= SCALARS_BYTES
        assert min(ratios) >= 0.97


@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_left_on_the_device_or_at_the_host(runs, name):
    assert {line["left"] for lines in runs[name] for line in lines} == {0}


@pytest.mark.parametrize("name", RUNS)
def test_the_host_has_what_was_planned_to_three_in_a_hundred(runs, name):
    ratios = [line["host"] / line["planned_host"] for lines in runs[name] for line in lines if line["planned_host"]]
    print(f"\n{name}, {len(ratios)} plans with copies: in host memory over planned {min(ratios):.4f} to {max(ratios):.4f}")
    assert min(ratios) >= 0.97
    assert max(ratios) <= 1.03


@pytest.mark.parametrize("name", RUNS)
def test_the_plans_had_every_level_alone_and_beside_others_and_copies(runs, batches, name):
    seen = {again for lines in runs[name] for line in lines for again in line["recompute"]}
    assert any({f"{layers} {mode.name}" for mode in MODES.values()} <= seen for layers in (2, 4))
    assert any("+" in again for again in seen)
    assert {0, 1} <= {line["hosted"] for lines in runs[name] for line in lines}
    assert len({line["share"] for lines in runs[name] for line in lines}) > batches


@pytest.mark.parametrize("name", RUNS)
def test_nobody_but_autograd_holds_what_chunks_keep(runs, name):
    assert {line["offloadable"] for lines in runs[name] for line in lines} == {1}
