"""Shipped recipes have plans for batches like those they are for, and the parallel sizes that `advise` finds best."""

import re
import shlex
from pathlib import Path

import pytest

from megatron_epp.cost.optimizer import OptimizerBytes
from megatron_epp.launch.yaml_settings import load_settings
from megatron_epp.mcore.arguments.layout import world_of
from megatron_epp.plan.layout import even_layers
from megatron_epp.plan.proof import check
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem, plan
from megatron_epp.tools.advice.configuration_search import advise
from megatron_epp.tools.cli import main as cli
from megatron_epp.tools.cli.advise import question_of
from megatron_epp.tools.formulas import analytic_profile
from megatron_epp.tools.formulas.library import load_cluster, shape_of
from tests.support.plan.planner_cases import web_lengths

RECIPES = sorted((Path(__file__).resolve().parents[2] / "configs" / "recipes").glob("*.yaml"))
ADVISED = [recipe for recipe in RECIPES if recipe.stem != "tiny-cpu"]
"""It says of itself why it is not advised."""
GPUS_PER_NODE = 8
CLOSE = 1.02
"""Largest time of a step over that of the best configuration."""


def advice_of(recipe: Path):
    (command,) = re.findall(r"^#   megatron-epp (advise .*)$", recipe.read_text(), re.MULTILINE)
    return cli._parser().parse(shlex.split(command))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_plans(recipe: Path):
    settings = load_settings([recipe])
    flags, launch, cluster = settings.megatron, settings.launch, load_cluster(settings.cluster)
    shape, stages, context = shape_of(flags), flags["pipeline_model_parallel_size"], flags["seq_length"]
    ranks = world_of(flags)
    processes = launch.nodes * GPUS_PER_NODE if flags.get("distributed_backend") != "gloo" else ranks
    assert processes % ranks == 0, "replicas divide over the machine"
    replicas = processes // ranks
    assert flags["global_batch_size"] % replicas == 0
    profile = analytic_profile(shape, cluster.rates)
    layers = even_layers(shape.num_layers, stages)
    run = {"use_distributed_optimizer": False} | flags | {"data_parallel_size": replicas}
    costs = profile.costs(layers, optimizer=OptimizerBytes.of_flags(run))
    cap_gb = settings.epp.get("memory_cap_gb")
    cap = UNLIMITED_BYTES if cap_gb is None else int(cap_gb * 2**30)
    assert cap_gb is None or cluster.device_memory_gb is None or cap_gb < cluster.device_memory_gb
    for longest in (web_lengths(1, 0, context)[0], context):
        lengths = (longest, *web_lengths(flags["global_batch_size"] // replicas - 1, 1, context))
        made = plan(Problem(lengths, tuple(range(stages)), (cap,) * stages, shape.ranks), costs, Options())
        assert not check(made)


@pytest.mark.parametrize("recipe", ADVISED, ids=lambda path: path.stem)
def test_a_recipe_names_the_advice_that_it_follows_for_its_own_model_machine_and_batch(recipe: Path):
    settings, asked = load_settings([recipe]), advice_of(recipe)
    flags, launch = settings.megatron, settings.launch
    (included,) = re.findall(r"^include: \[(.*)\]$", recipe.read_text(), re.MULTILINE)
    assert asked.model in [Path(name).name for name in included.split(", ")]
    assert asked.cluster == settings.cluster
    assert asked.devices == launch.nodes * GPUS_PER_NODE
    assert asked.memory_cap_gb == settings.epp["memory_cap_gb"]
    assert (asked.context, asked.global_batch_size) == (flags["seq_length"], flags["global_batch_size"])


@pytest.mark.slow  # a whole search of sizes for each
@pytest.mark.parametrize("recipe", ADVISED, ids=lambda path: path.stem)
def test_a_recipe_is_as_fast_as_the_advice_that_it_follows(recipe: Path):
    flags, question = load_settings([recipe]).megatron, question_of(advice_of(recipe))
    sizes = [flags.get(f"{name}_parallel_size", 1) for name in ("tensor_model", "context", "pipeline_model")]
    found = advise(question)
    of_recipe = [
        entry.parts.step_us
        for entry in (*found.best, *found.slower)
        if [entry.config.tensor, entry.config.context, entry.config.pipeline] == sizes
        and entry.config.virtual == 1
        and [*entry.config.layers] == [*even_layers(int(sum(entry.config.layers)), len(entry.config.layers))]
    ]
    assert of_recipe
    assert min(of_recipe) <= CLOSE * found.best[0].parts.step_us
