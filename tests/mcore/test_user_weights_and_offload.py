"""A caller's microbatches with weight gradients of their own and with offload: plans use both, and gradients are stock's."""

import re
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from megatron_epp.plan import EppError
from tests.mcore.test_user_microbatches import PLANS, TOLERANCE, check_equal, worst_of
from tests.support.mcore.forked import job, of_ranks, train
from tests.support.mcore.jobs.frameworks import EVEN, UNEVEN

TIMES = {"forward": 100.0, "backward": 200.0, "weight": 100.0}
"""Times of a layer per token, in us; measured times of such tiny layers are mostly noise."""
PLANNED = re.compile(
    r"planned .* ([\d.]+)% of layers recompute, ([\d.]+)% of activations are offloaded, (\d+) weight gradients are actions "
    r"of their own, microbatches take ([\d.]+) MiB"
)


def planned_by(
    ranks: int, stages: int, lengths: Sequence[int], settings: dict[str, object], times: object = TIMES, **given: object
) -> list[tuple[float, ...]]:
    """Run a loop with settings of `wrap`, check its gradients, and return the figures of each plan in the log."""
    given |= {"stages": stages, "lengths": lengths, "settings": settings, "us_per_token": times}
    finished = job(ranks, "frameworks:compared", **given)
    assert worst_of(of_ranks(finished)) < TOLERANCE
    return [tuple(map(float, found)) for found in PLANNED.findall(finished.output)]


@pytest.mark.parametrize(
    ("stages", "lengths", "settings"),
    [(2, UNEVEN, {"split_weight_gradient": True}), (4, EVEN, {})],
    ids=["one stage per rank", "two stages per rank, by default"],
)
def test_weight_gradients_are_actions_of_their_own(stages: int, lengths: tuple[int, ...], settings: dict[str, object]) -> None:
    learning, planned, evaluation = planned_by(2, stages, lengths, settings)
    assert learning[2] == 6 * stages  # each is measured
    assert 0 < planned[2] <= 6 * stages
    assert evaluation[2] == 0


def test_weight_gradients_wait_in_layers_that_recompute() -> None:
    settings = {"split_weight_gradient": True, "memory_cap_gb": 240_000 / 2**30}
    planned = planned_by(2, 2, EVEN, settings, TIMES | {"forward": 20.0})[1]
    assert planned[0] > 0
    assert planned[2] > 0


def test_memory_of_the_microbatches_themselves_counts_under_the_cap() -> None:
    settings = {"memory_cap_gb": 500_000 / 2**30}
    pixels = 50_000  # in each of six microbatches, which ranks hold throughout the iteration
    small = planned_by(2, 2, EVEN, settings)[1]
    large = planned_by(2, 2, EVEN, settings, pixels=pixels)[1]
    assert large[3] - small[3] == pytest.approx(6 * pixels / 2**20, abs=0.1)
    assert small[0] == 0
    assert large[0] > 0


def test_a_model_without_layers_that_can_delay_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from megatron_epp.features.split_weights import linear_layers

    monkeypatch.setattr(linear_layers, "from_each_of_job", lambda mine: [0, mine])
    args = Namespace(epp_split_weight_gradient=True)
    for num_split, allowed in ((1, nullcontext()), (0, pytest.raises(EppError, match="no layer of this model"))):
        monkeypatch.setattr(linear_layers, "split_where_possible", lambda _, found=num_split: (found, []))
        with allowed:
            linear_layers.split_built([torch.nn.Identity()], args)


def test_activations_are_offloaded_where_recompute_would_take_longer() -> None:
    cap_gb = 160_000 / 2**30  # room for a little more than two of the four microbatches that the first rank has in flight
    settings = {"offload": "on", "host_memory_gb": 1, "memory_cap_gb": cap_gb}
    planned = planned_by(4, 4, [24] * 8, settings, host_link=[0.1, 1e-6])[1]
    assert planned[1] > 0


def test_a_stock_script_trains_as_without_plans(tmp_path: Any) -> None:
    flags = "--pipeline-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 --no-bias-gelu-fusion --disable-bias-linear"
    own = train(tmp_path / "stock", 2, *flags.split(), iterations=6)
    ours = "--epp-split-weight-gradient --epp-offload on --epp-host-memory-gb 1"
    planned = train(tmp_path / "planned", 2, *flags.split(), *PLANS.split(), *ours.split(), iterations=6)
    check_equal(own, planned)
    assert [found for found in PLANNED.findall(planned.output) if float(found[2]) > 0]
