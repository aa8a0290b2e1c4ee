"""Every shipped recipe has plans for batches like those it is for, up to a document as long as its context."""

from pathlib import Path

import pytest

from megatron_epp.cost import analytic_profile
from megatron_epp.cost.library import even_layers, load_cluster, shape_of
from megatron_epp.launch.command import Launch, world_of
from megatron_epp.launch.settings import load_settings
from megatron_epp.plan.check import check
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem, plan
from tests.support.plan.planner_cases import web_lengths

RECIPES = sorted((Path(__file__).resolve().parents[2] / "configs" / "recipes").glob("*.yaml"))
GPUS_PER_NODE = 8


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_plans(recipe: Path):
    settings = load_settings([recipe])
    flags, launch, cluster = settings["megatron"], Launch.of(settings), load_cluster(settings["cluster"])
    shape, stages, context = shape_of(flags), flags["pipeline_model_parallel_size"], flags["seq_length"]
    ranks = world_of(flags)
    processes = launch.nodes * GPUS_PER_NODE if flags.get("distributed_backend") != "gloo" else ranks
    assert processes % ranks == 0, "replicas divide over the machine"
    replicas = processes // ranks
    assert flags["global_batch_size"] % replicas == 0
    profile = analytic_profile(shape, cluster.rates)
    layers = even_layers(shape.num_layers, stages)
    shared = replicas if flags.get("use_distributed_optimizer") else 1
    costs = profile.costs(layers, state_bytes_per_parameter=6 + 12 / shared)
    cap_gb = settings["epp"].get("memory_cap_gb")
    cap = UNLIMITED_BYTES if cap_gb is None else int(cap_gb * 2**30)
    assert cap_gb is None or cluster.device_memory_gb is None or cap_gb < cluster.device_memory_gb
    for longest in (web_lengths(1, 0, context)[0], context):
        lengths = (longest, *web_lengths(flags["global_batch_size"] // replicas - 1, 1, context))
        made = plan(Problem(lengths, tuple(range(stages)), (cap,) * stages, shape.ranks), costs, Options())
        assert not check(made)
