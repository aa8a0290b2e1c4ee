"""Trains by Megatron's own schedules and by plans, and compares losses, gradients and weights tensor by tensor."""

from pathlib import Path
from typing import Any

import torch

from tests.support.mcore.forked import launch
from tests.support.mcore.launch import TINY

PROGRAM = Path(__file__).with_name("tensors_training.py")
PLANS = ("--epp", "--epp-microbatches", "user")
REVERSED = {"ORDER": "reversed"}


def differences(
    folder: Path, processes: int, *flags: str, iterations: int, timeout_s: float = 300
) -> tuple[dict[str, float], str]:
    """Train twice from equal seeds, and return the largest relative differences and the planned run's output.

    Compares losses, gradients in any iteration and weights after the last: the norm of the difference of each tensor beside
    the norm of stock's. Plans that follow learnt costs run microbatches from the last to the first.
    """
    stock, _ = _train(folder / "stock", processes, flags, iterations, {}, timeout_s)
    planned, output = _train(folder / "planned", processes, (*flags, *PLANS), iterations, REVERSED, timeout_s)
    found = dict.fromkeys(("losses", "gradients", "weights"), 0.0)
    for own, ours in zip(stock, planned, strict=True):
        assert len(own["losses"]) == len(ours["losses"]) == iterations
        for kind in ("losses", "gradients"):
            pairs = zip(own[kind], ours[kind], strict=True)
            found[kind] = max([found[kind], *(_worst(theirs, mine) for theirs, mine in pairs)])
        found["weights"] = max(found["weights"], _worst(own["weights"], ours["weights"]))
    assert any(losses for rank in stock for losses in rank["losses"])
    return found, output


def _worst(own: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> float:
    assert own.keys() == ours.keys()
    return max((_relative(own[name], ours[name]) for name in own), default=0.0)


def _relative(own: torch.Tensor, ours: torch.Tensor) -> float:
    difference = float((ours.double() - own.double()).norm())
    return difference / float(own.double().norm()) if difference else 0.0


def _train(
    folder: Path, processes: int, flags: tuple[str, ...], iterations: int, order: dict[str, str], timeout_s: float
) -> tuple[list[dict[str, Any]], str]:
    folder.mkdir(parents=True)
    arguments = [*TINY, "--train-iters", iterations, *flags]
    environment = {"RECORD_TO": str(folder), **order}
    finished = launch(processes, PROGRAM, *arguments, env=environment, timeout_s=timeout_s)
    assert finished.returncode == 0, finished.output[-5000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(processes)], finished.output
