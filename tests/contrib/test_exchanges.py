"""Exchanges of Megatron's layers: when two actions take turns at them, and why not otherwise."""

import logging
from argparse import Namespace
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker, mappings

from megatron_epp.contrib.overlap import exchanges
from megatron_epp.contrib.overlap.turns import PairRunner, Turns
from scripts.bench.orders.unit import Unit

ARGUMENTS = {
    "tensor_model_parallel_size": 2, "num_experts": None, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "tp_comm_overlap": False, "timing_log_level": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def shared_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    exchanges._say.cache_clear()
    monkeypatch.setattr(exchanges.mpu, "get_tensor_model_parallel_group", lambda: "group")
    monkeypatch.setattr(dist, "get_rank", lambda: 0)


def found(name: str = "stp", **changes: Any) -> PairRunner | None:
    run = Namespace(rank=0, args=Namespace(**(ARGUMENTS | changes)))
    with exchanges.Overlap(run).running(Unit(name, 2, 5).plan(), None, None, {}) as handlers:
        return next((handler.__self__._run_pair for handler in handlers.values()), None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tensor_model_parallel_size": 1}, "no exchange"),
        ({"num_experts": 4}, "layers with experts"),
        ({"hidden_dropout": 0.1}, "--hidden-dropout 0.1"),
        ({"attention_dropout": 0.2}, "--attention-dropout 0.2"),
        ({"tp_comm_overlap": True}, "--tp-comm-overlap"),
        ({"timing_log_level": 2}, "--timing-log-level 2"),
        ({"nvtx_ranges": True}, "--nvtx-ranges"),
    ],
)
def test_where_two_actions_cannot_take_turns_the_reason_is_logged_once(
    changes: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert [found(**changes), found(**changes)] == [None, None]
    (record,) = caplog.records
    assert "run one after the other" in record.message
    assert reason in record.message


def test_plans_without_steps_of_two_actions_have_nothing_to_take_turns_at(caplog: pytest.LogCaptureFixture) -> None:
    assert found("zb-v") is None
    assert caplog.records == []


def test_torch_and_megatron_are_as_they_were_after_a_step() -> None:
    runner, before = found(), (dist.all_reduce, mappings.dist_all_gather_func)
    assert isinstance(runner, partial)
    with runner.keywords["exchanges"](Turns()):
        assert dist.all_reduce is not before[0]
        assert mappings.dist_all_gather_func is not before[1]
        with get_cuda_rng_tracker().fork("no such state"):
            pass
    assert (dist.all_reduce, mappings.dist_all_gather_func) == before
    assert "fork" not in vars(get_cuda_rng_tracker())
