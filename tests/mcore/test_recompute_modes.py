"""Gradients do not depend on what recomputes or is away, to the bit, on every kind of layer and way to share it out."""

import functools

import pytest

from tests.support.mcore.forked import job, returned
from tests.support.mcore.jobs.recompute_modes import KV_OFFLOAD, OFFLOADS, RECOMPUTE_MODES, RUNS
from tests.support.seeds import some_by_default

BY_DEFAULT = ("grouped, weights apart", "experts shared by replicas", "hybrid")
OTHERS = tuple(name for name in RUNS if name not in BY_DEFAULT)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Train on every rank; list by level the gradients that differ from those without recompute."""

    @functools.cache
    def run(names):
        return returned(job(1, "recompute_modes", folder=tmp_path_factory.mktemp("levels"), names=names, timeout_s=400))

    return lambda name: run(BY_DEFAULT if name in BY_DEFAULT else OTHERS)[name]


NOT_SPLIT = some_by_default("name", [*BY_DEFAULT[1:], *OTHERS], len(BY_DEFAULT) - 1)
"""Where weight gradients are split, what they need is held anyway, and may be the most."""
EACH = some_by_default("name", [*BY_DEFAULT, *OTHERS], len(BY_DEFAULT))


@EACH
def test_gradients_are_those_without_recompute_and_offload(runs, name):
    assert "error" not in runs(name), runs(name)
    assert len(runs(name)) == RUNS[name][1]
    for facts in runs(name):
        assert facts["differ"] == {variant: [] for variant in ("", *RECOMPUTE_MODES, *OFFLOADS, *KV_OFFLOAD)}
        assert len(facts["zeros"]) < facts["num_gradients"] / 2
        assert set(facts["hooks"]) == {1}
        assert facts["slices"]


@some_by_default("name", [BY_DEFAULT[1], "experts"], 1)
def test_what_routers_count_is_what_they_count_without_recompute(runs, name):
    """Tokens per expert, and sums of losses by layer, which are added in another order."""
    for facts in runs(name):
        assert facts["miscounted"] == {variant: [] for variant in ("", *RECOMPUTE_MODES, *OFFLOADS, *KV_OFFLOAD)}
        assert facts["counted"] > 2  # tokens of every layer with experts, and two kinds of losses


@EACH
def test_only_whole_layers_run_attention_again(runs, name):
    for facts in runs(name):
        calls = facts["kernels"]
        assert calls["whole"] == 2 * calls[""]
        assert calls["linear"] == calls["mlp"] == calls["two"] == calls[""]
        assert calls[""] < calls["each"] < calls["whole"] <= 2 * calls[""]


@NOT_SPLIT
def test_the_more_recomputes_or_is_away_the_less_is_held_on_the_device(runs, name):
    """Keys and values that attention reads are on the device, all others of hosted slices are not."""
    for facts in runs(name):
        peaks, away = facts["peaks"], facts["away"]
        assert peaks["whole"] < peaks["linear"] < peaks["mlp"] < peaks[""]
        assert 0 < away["0.3 away"] < away["1.0 away"]
        assert away["hosted"] > 0
        assert max(peaks["1.0 away"], peaks["hosted"]) < peaks[""]
