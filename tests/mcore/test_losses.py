"""Losses under plans: sums over unmasked tokens, and a NaN that ends the run as Megatron's own does."""

from __future__ import annotations

import pytest
import torch

from megatron_epp.mcore.model import losses


class Machine:
    """Stand-in for Megatron's rerun machine: keeps what it is asked to validate."""

    def __init__(self) -> None:
        self.asked: list[dict[str, object]] = []

    def validate_result(self, **asked: object) -> None:
        self.asked.append(asked)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(losses, "get_rerun_state_machine", lambda: machine)
    monkeypatch.setattr(losses.features, "checks_losses", lambda: True)
    return machine


def test_masked_tokens_do_not_count() -> None:
    loss, num_tokens, report = losses.summed_loss(torch.tensor([1, 0, 1]), torch.tensor([[2.0, 9.0, 4.0]]))
    assert (float(loss), int(num_tokens), report.tolist()) == (6.0, 2, [6.0, 2.0])
    assert num_tokens.dtype == torch.int32


def test_a_loss_that_is_nan_or_infinite_ends_the_run(machine: Machine) -> None:
    losses.check_loss(torch.tensor(float("nan")), "this microbatch")
    assert [asked["fatal"] for asked in machine.asked] == [True, True]
    assert [str(asked["message"]) for asked in machine.asked] == [
        "found NaN in the loss of this microbatch",
        "found Inf in the loss of this microbatch",
    ]
    for asked, value in zip(machine.asked, ("nan", "inf"), strict=True):
        reject = asked["rejection_func"]
        assert callable(reject)
        assert bool(reject(torch.tensor(float(value))))
        assert not bool(reject(torch.tensor(1.0)))


def test_without_the_check_the_host_does_not_wait_for_the_loss(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    monkeypatch.setattr(losses.features, "checks_losses", lambda: False)
    losses.check_loss(torch.tensor(float("nan")), "this microbatch")
    assert machine.asked == []
