"""Megatron's own estimate of memory, asked with the flags of a model."""

from __future__ import annotations

import logging

import pytest

from megatron_epp.cost import H100, OptimizerBytes, analytic_profile
from megatron_epp.cost.library import load_flags, shape_of
from megatron_epp.mcore.costs.estimate import estimate
from megatron_epp.mcore.patches import fingerprints
from tests.support.mcore.forked import launch


@pytest.mark.parametrize("context", [1, 4])
@pytest.mark.parametrize(("model", "stages"), [("llama3-8b", 4), ("llama3-70b", 8), ("mixtral-8x7b", 4)])
def test_weights_gradients_and_optimizer_are_as_we_count_them(model: str, stages: int, context: int):
    flags = load_flags(model)
    flags |= {"context_parallel_size": context, "expert_model_parallel_size": 2 if flags.get("num_experts") else 1}
    profile = analytic_profile(shape_of(flags), H100)
    optimizer = OptimizerBytes.of_flags(flags | {"data_parallel_size": 2})
    ours = profile.costs([flags["num_layers"] // stages] * stages, optimizer=optimizer)
    assert estimate(flags, stages, 2, (4096, 100))["state_bytes"] == pytest.approx(ours.stages[0].static_bytes, rel=1e-3)


def test_activations_grow_with_the_longest_sequence_alone():
    flags = load_flags("llama3-8b")
    short, long, more = (estimate(flags, 4, 1, lengths) for lengths in ((1000,) * 4, (2000, 1, 1, 1), (2000,) * 9))
    assert long["activation_bytes"] == pytest.approx(2 * short["activation_bytes"])
    assert more["activation_bytes"] == long["activation_bytes"]
    assert (more["microbatches"], more["tokens"]) == (9, 2000)


def test_an_estimator_that_is_not_the_one_known_here_is_named(caplog, monkeypatch):
    name = next(iter(fingerprints.SHOWN))
    flags = load_flags("llama3-8b")
    with caplog.at_level(logging.WARNING, logger="megatron_epp"):
        estimate(flags, 4, 1, (1000,))
        assert not caplog.records
        monkeypatch.setitem(fingerprints.SHOWN, name, ("0" * 12,))
        estimate(flags, 4, 1, (1000,))
    assert name in caplog.text


def test_the_command_shows_it_beside_the_plan():
    argv = ["--lengths", "900,100", "--model", "tiny-gpt", "--stages", "2", "--quick", "--seconds", "100"]
    finished = launch(1, "-m", "megatron_epp.cli.main", "memory", *argv)  # forks the process that asks Megatron
    assert finished.returncode == 0, finished.output[-5000:]
    assert "Megatron's estimate" in finished.output
    assert "It knows no slices" in finished.output
