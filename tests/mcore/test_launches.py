"""Measured times of launching: of the host alone, ahead of an idle device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_epp.cost import H100_NODE, ModelShape, analytic_costs
from megatron_epp.cost.fit import Point
from megatron_epp.mcore.costs import launches
from megatron_epp.mcore.costs.launches import Launches, measure_launches, of_device, with_launches
from megatron_epp.mcore.costs.probe import Case

SHAPE = ModelShape(num_layers=5, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4, vocab_size=256, gated_mlp=True)
FORMULA = analytic_costs(SHAPE, H100_NODE, [2.5, 2.5]).stages[0]
HOST_US, DEVICE_US = {"forward": 30.0, "backward": 50.0, "weight": 20.0}, 7000.0


class Device:
    """Stage and clock of a device that takes long for what the host launches in no time."""

    def __init__(self, runs_ahead: bool = True, splits: bool = True) -> None:
        self.host, self.done, self.runs_ahead = 0.0, 0.0, runs_ahead
        self.weights = object() if splits else None

    def launch(self, name: str) -> None:
        self.host += HOST_US[name]
        self.done = max(self.done, self.host) + DEVICE_US

    def forward(self, context: None, hidden: None) -> None:
        self.launch("forward")

    def now_us(self) -> float:
        self.host = max(self.host, self.done)
        return self.host

    def host_us(self) -> float:
        return self.host


@pytest.fixture(autouse=True)
def _passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_weights(stage: Any) -> Any:
        stage.launch("weight")
        yield

    monkeypatch.setattr(launches, "enter", lambda stage, chunk: (None, None))
    monkeypatch.setattr(launches, "backward", lambda stage, *_, **__: stage.launch("backward"))
    monkeypatch.setattr(launches, "run_weights", run_weights)


def measured(device: Device) -> Launches:
    return measure_launches(device, Case(64), device)  # type: ignore[arg-type]


def test_only_the_hosts_time_counts_and_a_backward_contains_its_weight_gradients():
    assert measured(Device()) == Launches(30.0, 70.0, 20.0)
    assert measured(Device(splits=False)) == Launches(30.0, 50.0, 0.0)


def test_a_host_that_computes_itself_launches_nothing():
    assert measured(Device(runs_ahead=False)) == Launches()


def test_layers_share_the_time_of_launching_their_stage():
    found = with_launches(FORMULA, Launches(250.0, 500.0, 100.0), FORMULA)
    assert [line.launch_us for line in (found.stage_forward, found.stage_backward, found.stage_weight)] == [250.0, 500.0, 100.0]
    assert found.forward.launch_us == 100.0
    assert found.half.forward.launch_us == 50.0
    full, mlp = (found.mode(name) for name in ("full", "mlp"))
    assert full is not None
    assert mlp is not None
    assert 0 < mlp.again.launch_us < full.again.launch_us == 100.0


def test_where_the_host_computes_no_time_of_launching_stays():
    found = with_launches(FORMULA, Launches(), FORMULA)
    lines = found.forward, found.backward, found.weight, found.half.forward, found.extra_forward
    assert all(line.launch_us == 0.0 for line in lines)
    assert replace(found.forward, launch_us=FORMULA.forward.launch_us) == FORMULA.forward


def test_points_that_the_host_bounds_say_nothing_of_the_device():
    points = [Point(n, 0, max(100.0, 1.0 * n)) for n in (10, 50, 200, 300, 400, 500)]
    assert of_device(points, 100.0) == points[2:]
    assert of_device(points, 450.0) == points  # too few would be left
    assert of_device(points, 0.0) == points
