"""State that an iteration changes comes back: random states, buffers, sums of routers; and gradients go to zero."""

import torch

from megatron_epp.mcore.model import stage
from megatron_epp.mcore.model.stage import Snapshot


class Wrapped(torch.nn.Module):
    """A model as Megatron's data parallelism wraps it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tokens_per_expert", torch.tensor([1.0, 2.0]))
        self.main_grad = torch.ones(2)

    def zero_grad_buffer(self) -> None:
        self.main_grad.zero_()


def test_everything_comes_back(monkeypatch) -> None:
    logged = {"load_balancing_loss": torch.tensor([3.0])}
    monkeypatch.setattr(stage, "logged_router_losses", lambda: logged)
    model = Wrapped()
    before = Snapshot([model])
    drawn = torch.rand(3)
    model.tokens_per_expert += 5
    logged["load_balancing_loss"] += 1
    logged["z_loss"] = torch.tensor([7.0])  # first seen in the iteration
    before.restore()
    assert torch.equal(torch.rand(3), drawn)
    assert model.tokens_per_expert.tolist() == [1.0, 2.0]
    assert {name: values.tolist() for name, values in logged.items()} == {"load_balancing_loss": [3.0], "z_loss": [0.0]}
    assert model.main_grad.tolist() == [0.0, 0.0]
