"""The comparison with public measurements and recipes: the plans are of the measured training."""

import json
import math
from dataclasses import replace
from statistics import median

import pytest

from megatron_epp.cost import LinearTime
from megatron_epp.plan.yaml_files import shipped
from scripts.bench.public.gains import BENCH as RECIPES_BENCH
from scripts.bench.public.gains import as_shipped, together
from scripts.bench.public.recipes import RECIPES
from scripts.bench.public.rows import EXPERTS, ROWS
from scripts.bench.public.steps import LARGE, again_line, question_of, rows_of
from scripts.bench.public.steps import compared as step_of
from scripts.bench.public.steps import planned as plan_of
from scripts.bench.rl.rules import decreasing, padded
from tests.support.seeds import some_by_default

MANY_STAGES = {"1", "2", "3"}
"""Rows whose plans of 128 stages take several seconds each."""


def number_of(row):
    return row.number.split(",")[0]


def test_all_rows_have_a_source_and_sizes_that_go_together():
    assert list(dict.fromkeys(map(number_of, ROWS))) == [str(number) for number in range(1, 19)]
    for row in ROWS:
        assert row.source
        assert sum(row.config.layers) == row.flags["num_layers"]
        assert row.sequences % row.config.data == 0


def test_recompute_of_experts_is_their_forward_with_its_exchanges():
    row = next(row for row in ROWS if EXPERTS in row.again)
    asked = question_of(row)
    shape, layer = asked.shape(row.config), asked.profile(row.config).layer
    again, mode = again_line(row, shape, asked.rates), layer.recompute["mlp"].again
    assert again.per_token_us == pytest.approx(mode.per_token_us, rel=0.05)


@pytest.mark.parametrize("number", ["3", "5", "8", "9", "13, 4 slices"])
def test_microbatches_are_those_of_the_measured_run(number):
    row = next(row for row in ROWS if row.number == number)
    made = plan_of(row, question_of(row), LinearTime())
    whole = row.per_chunk if row.slices <= 1 else 1
    assert {len(chunk.segments) for chunk in made.chunks} == {whole}
    assert len(made.chunks) == max(1, row.slices) * row.sequences // (row.config.data * row.per_chunk)


@pytest.fixture(scope="module")
def steps():
    return [step_of(row) for row in ROWS if number_of(row) not in MANY_STAGES]


def test_plans_are_within_a_tenth_of_most_measurements_and_a_large_error_has_its_reason(steps):
    errors = {step.row.number: abs(step.error) for step in steps}
    assert median(errors.values()) <= 0.1, errors
    assert {number.split(",")[0] for number, error in errors.items() if error > LARGE} <= {"16", "17", "18"}, errors
    text = list(rows_of(steps))
    assert len(text) == len(steps) + 2
    for line, step in zip(text[1:], steps, strict=False):
        assert line.startswith(step.row.number)
        assert f"{step.planned_s:.2f} s" in line
        assert ("with a slow host" in line) == (abs(step.error) > LARGE)


@pytest.mark.slow  # plans of 128 stages
def test_plans_of_many_stages_are_within_a_tenth():
    errors = {row.number: step_of(row).error for row in ROWS if number_of(row) in MANY_STAGES}
    assert max(map(abs, errors.values())) <= 0.1, errors


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipe_has_a_source_and_its_sizes_fit_its_model_devices_and_batch(recipe):
    assert [other.name for other in RECIPES].count(recipe.name) == 1
    assert recipe.repository
    assert recipe.file
    assert recipe.commit
    assert recipe.model in shipped("models")
    assert recipe.cluster in shipped("clusters")
    config, flags, lengths = recipe.config, recipe.flags, recipe.lengths.batch(recipe.sequences)
    assert recipe.devices == config.devices
    assert sum(config.layers) == flags["num_layers"]
    assert len(config.layers) == config.num_stages
    assert flags.get("num_experts", config.expert) % config.expert == 0
    assert (config.ranks * config.data) % config.expert == 0
    assert len(lengths) == recipe.sequences >= config.data
    assert max(lengths) <= min(recipe.budget, recipe.lengths.longest)
    assert recipe.lengths.batch(recipe.sequences) == lengths
    assert (recipe.measured_s is None) or recipe.measured
    assert all(hasattr(config, name) and recipe.devices % size == 0 for name, size in recipe.fixed)


def recipe_of(name):
    return next(recipe for recipe in RECIPES if recipe.name == name)


@some_by_default("name", ["dapo-7b", "32b-sft"], 1)
def test_a_recipe_is_planned_as_it_ships_with_megatrons_flags_at_their_best_and_by_plans(name, tmp_path, capsys):
    file = tmp_path / "figures.json"
    assert RECIPES_BENCH.main(["--only", name, "--no-advice", "--json", str(file)]) == 0
    (figures,) = json.loads(file.read_text())["rows"]
    shipped, repacked, stock, same = (figures[way] for way in ("shipped", "repacked", "stock", "same"))
    assert stock["seconds"] <= repacked["seconds"] <= shipped["seconds"]
    assert stock["peak_bytes"] <= figures["cap_bytes"]
    assert same["peak_bytes"] <= figures["cap_bytes"]
    assert same["sizes"].partition(" VPP")[0] == stock["sizes"].partition(" VPP")[0] == shipped["sizes"]
    assert figures["times_same"] == pytest.approx(stock["seconds"] / same["seconds"])
    assert math.prod(figures["causes"][2:]) == pytest.approx(figures["times_same"])
    assert (figures["advised"], figures["causes_advised"]) == (None, [])
    printed = capsys.readouterr().out
    assert f"{same['seconds']:.4g} s" in printed
    assert recipe_of(name).commit in printed


def test_recompute_of_every_layer_takes_a_recipe_longer_and_less_memory():
    recipe = recipe_of("32b-sft")
    every = as_shipped(recipe, recipe.rule, recipe.budget)
    none = as_shipped(replace(recipe, recomputes_all=False), recipe.rule, recipe.budget)
    assert none.seconds < every.seconds
    assert every.peak_bytes < none.peak_bytes


def test_replicas_that_share_experts_wait_for_the_longest_of_their_microbatches():
    assert together([[[8], [1, 1]], [[4, 3], [6], [2]]]) == [[8], [6], [2]]


def test_rules_fill_microbatches_up_to_the_budget_or_pad_every_sequence_to_it():
    assert decreasing([3, 7, 2, 5], 9) == [[7, 2], [5, 3]]
    assert padded([3, 9], 9) == [[3, 6], [9]]
