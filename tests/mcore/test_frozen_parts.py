"""Where only a part of a model trains, its gradients are those of Megatron's schedule without recompute, at every door.

Trainings with ``--epp`` are rows of the matrix (`rows.FROZEN`).
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.mcore.test_samples import TOLERANCE as OF_SLICES
from tests.mcore.test_user_microbatches import PLANNED, TIMES, TOLERANCE, worst_of
from tests.mcore.test_ways_in import epp_flags
from tests.support.mcore.forked import job, launch, of_ranks, succeeded
from tests.support.mcore.jobs.frameworks import EVEN, UNEVEN
from tests.support.mcore.jobs.samples import LENGTHS

SLOW = pytest.mark.slow
TIGHT: dict[str, Any] = {"memory_cap_gb": 160_000 / 2**30}
"""Room for some of the microbatches that are in flight, unless their layers recompute."""
WIDER: dict[str, Any] = {"memory_cap_gb": 220_000 / 2**30}
"""The same where all layers have gradients and states of an optimizer."""
APART: dict[str, Any] = {"split_weight_gradient": True}


@pytest.mark.parametrize(
    ("part", "ranks", "stages", "settings"),
    [
        pytest.param("adapters", 2, 2, TIGHT, id="adapters in all layers"),
        pytest.param("some", 2, 2, TIGHT, id="adapters in some layers", marks=SLOW),
        pytest.param("layers", 2, 2, WIDER | APART, id="a frozen embedding, weights apart", marks=SLOW),
        pytest.param("adapters", 2, 4, TIGHT, id="two stages per rank", marks=SLOW),
    ],
)
def test_recomputed_layers_give_adapters_their_gradients(part: str, ranks: int, stages: int, settings: dict[str, Any]) -> None:
    given = {"lengths": UNEVEN if ranks == stages else EVEN, "settings": settings, "us_per_token": TIMES, "part": part}
    finished = job(ranks, "frameworks:compared", stages=stages, **given)
    found = of_ranks(finished)
    assert worst_of(found) < TOLERANCE
    assert all(one["num_gradients"] > 0 for one in found)
    _, planned, *_ = [float(figures[0]) for figures in PLANNED.findall(finished.output)]
    assert planned > 0.0


@pytest.mark.parametrize("part", ["adapters", pytest.param("layers", marks=SLOW)])
def test_megatrons_own_recompute_gives_adapters_their_gradients(part: str) -> None:
    found = of_ranks(job(2, "frameworks:compared", stages=2, lengths=UNEVEN, part=part, recomputes=True))
    assert worst_of(found) < TOLERANCE
    assert all(one["num_gradients"] > 0 for one in found)


@pytest.mark.parametrize(
    ("part", "ranks", "frozen", "settings"),
    [
        pytest.param("last", 4, 2, APART, id="adapters on the last two stages"),
        pytest.param("head", 2, 1, TIGHT, id="the output layer alone", marks=SLOW),
        pytest.param("first", 2, 0, TIGHT, id="a stage behind the adapters", marks=SLOW),
    ],
)
def test_stages_of_which_nothing_trains_run(part: str, ranks: int, frozen: int, settings: dict[str, Any]) -> None:
    found = of_ranks(job(ranks, "frameworks:compared", stages=ranks, lengths=UNEVEN, settings=settings, part=part))
    assert worst_of(found) < TOLERANCE
    assert [one["num_gradients"] > 0 for one in found][:frozen] == [False] * frozen
    assert all(run["peak_bytes"] == 0 for one in found[:frozen] for run in one["runs"])  # it keeps nothing for a backward


@pytest.mark.parametrize(
    ("part", "ranks", "plans"),
    [
        pytest.param("adapters", 2, {"recompute": 1}, id="adapters in all layers"),
        pytest.param("last", 4, {}, id="adapters on the last two stages"),
        pytest.param("adapters", 4, {"recompute": 1}, id="adapters under tensor parallelism"),
        pytest.param("some", 2, {}, id="adapters in some layers", marks=SLOW),
        pytest.param("last", 2, {"offload": "on", "memory_cap_gb": 0.0006, "host_memory_gb": 1}, id="offload", marks=SLOW),
        pytest.param("layers", 2, {"recompute": 1}, id="a frozen embedding", marks=SLOW),
    ],
)
def test_slices_of_samples_give_what_trains_its_gradients(part: str, ranks: int, plans: dict[str, Any]) -> None:
    tensor = {"tensor_parallel": 2, "sequence_parallel": True} if ranks == 4 and part == "adapters" else {}
    found = of_ranks(job(ranks, "samples:grpo", part=part, plans=plans, **tensor))
    for one in found:
        assert one["worst"] <= OF_SLICES
        assert one["afterwards"] == 0.0
        assert one["chunks"] > len(LENGTHS)
    assert any(one["num_gradients"] > 0 for one in found)


def test_parameters_that_are_frozen_or_freed_after_the_first_iteration_are_told() -> None:
    finished = job(2, "frameworks:frozen_later", lengths=UNEVEN)
    first, last = sorted(of_ranks(finished), key=lambda one: one["rank"])
    assert finished.output.count("WARNING:megatron_epp.mcore.iteration.base_run:of stage 1 ") == 1
    assert finished.output.count("plans count the time and memory of those; freeze parameters before the first iteration") == 1
    assert first["num_gradients"] == 0 < last["num_gradients"]
    assert "so plans compute no gradients there: let them train from the first iteration on" in first["refused"]


@pytest.mark.parametrize("flags", [[], ["--epp-trained-parameters", "5000"]])
def test_layers_chosen_before_there_is_a_model_ask_how_much_trains(tmp_path: Path, flags: list[str]) -> None:
    part = "--epp-layout", "balanced", "--spec", "tests.support.mcore.adapters", "adapters", "--train-iters", "1"
    finished = succeeded(launch(2, "-m", "megatron_epp.mcore.pretrain_gpt", *epp_flags(tmp_path, 2), *part, *flags))
    told = "--epp-layout balanced chose the layers of stages as if all parameters trained, and some are frozen"
    assert finished.output.count(told) == (not flags)


def test_an_output_layer_in_shards_is_refused_where_parameters_are_frozen(tmp_path: Path) -> None:
    part = "--epp-vocab-parallel", "on", "--spec", "tests.support.mcore.adapters", "adapters"
    finished = launch(2, "-m", "megatron_epp.mcore.pretrain_gpt", *epp_flags(tmp_path, 2), *part)
    assert finished.returncode != 0
    assert "--epp-vocab-parallel on is for models of which everything trains" in finished.output
    assert "Traceback" not in finished.output


def test_a_run_counts_what_trains_in_each_of_its_stages() -> None:
    from megatron_epp.cost.optimizer import OptimizerBytes
    from megatron_epp.mcore.costs.megatron_facts import trained_share
    from megatron_epp.port.run_facts import RunFacts
    from megatron_epp.tools.formulas import of_run

    model = torch.nn.Sequential(torch.nn.Linear(3, 4, bias=False), torch.nn.Linear(4, 9, bias=False))
    model[1].requires_grad_(False)
    shares = [trained_share(Namespace(model=model, has_gradient=has_gradient)) for has_gradient in (False, True)]
    assert shares == [None, 0.25]
    flags = {"num_layers": 6, "hidden_size": 64, "ffn_hidden_size": 256, "num_attention_heads": 8, "padded_vocab_size": 1000}
    facts = RunFacts(flags | {"data_parallel_size": 1}, OptimizerBytes.of_flags({"bf16": True}), 0, "")
    first, second, last = of_run.prior(facts, None, [2, 2, 2], [None, 0.25, 1.0], (), True)[0].stages
    whole = of_run.prior(facts, None, [2, 2, 2], [1.0] * 3, (), True)[0].stages
    assert last == whole[2]
    assert first.static.weights == whole[0].static.weights
    assert first.static.gradients == first.static.optimizer == 0
    assert second.static.optimizer == pytest.approx(0.25 * whole[1].static.optimizer, abs=1)
    assert first.line("backward").per_token_us == 0.0 < second.line("backward").per_token_us
    assert second.line("weight") == whole[1].line("weight").scaled(0.25)


def test_learnt_costs_of_a_model_are_not_those_of_one_that_trains_less_of_it() -> None:
    from megatron_epp.features.learnt_costs.learnt import _digest

    model = torch.nn.Linear(2, 2)
    trained = _digest(model)
    model.bias.requires_grad_(False)
    assert _digest(model) != trained
