"""Samples with routes: slices replay the experts that a rollout chose, as whole samples do by Megatron's own replay."""

import json

import numpy as np
import pytest

from scripts.parity.cells import CONTEXT, Cell
from scripts.parity.runs import compare
from tests.mcore.test_losses_in_training import BATCH, LENGTHS, VOCABULARY, flags
from tests.support.mcore import matrix
from tests.support.mcore.forked import job, of_ranks
from tests.support.mcore.jobs import sample_routes as made
from tests.support.mcore.parity_figures import check_closeness

TOLERANCE = 1e-5
HYBRID = {"pattern": "ME|-E", "mamba_num_heads": 4, "mamba_head_dim": 4, "mamba_num_groups": 2, "mamba_state_dim": 6}
BIAS = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory):
    """A file with the gradients of whole samples on one rank, of which Megatron replays the routes."""
    path = tmp_path_factory.mktemp("routes") / "whole.pt"
    assert_equal(1, {"written": path})
    return path


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [
        pytest.param(2, {"plans": {"recompute": 1}}, id="pipeline, recompute of a layer"),
        pytest.param(4, {"context_parallel": 2, "plans": {"recompute": 2}}, id="context parallel, recompute of all layers"),
        pytest.param(2, {"stages": 4}, id="several stages on a rank"),
    ],
)
def test_slices_have_the_gradients_of_megatrons_replay_on_one_rank(on_one_rank, num_ranks, layout):
    assert_equal(num_ranks, {"read": on_one_rank, **layout})


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [
        pytest.param(4, {"replicas": 2, "expert_parallel": 2}, id="expert parallel"),
        pytest.param(4, {"tensor_parallel": 2, "sequence_parallel": True}, id="tensor and sequence parallel"),
        pytest.param(2, {"num_layers_in_first_pipeline_stage": 3, **BIAS}, id="uneven stages, expert bias"),
        pytest.param(2, HYBRID, id="layers without experts"),
        pytest.param(2, {**HYBRID, "all_layers": True}, id="routes of all layers", marks=SLOW),
        pytest.param(2, {"moe_router_num_groups": 4, "moe_router_group_topk": 2}, id="groups of experts", marks=SLOW),
        pytest.param(2, {"moe_z_loss_coeff": 0.1}, id="z loss", marks=SLOW),
    ],
)
def test_slices_have_the_gradients_of_megatrons_replay_in_the_same_layout(num_ranks, layout):
    assert_equal(num_ranks, layout)


def assert_equal(num_ranks, layout):
    ranks = of_ranks(job(num_ranks, "sample_routes:replayed", **layout))
    assert len(ranks) == num_ranks
    for rank in ranks:
        assert rank["worst"] <= TOLERANCE
        assert rank["biases"] <= TOLERANCE
        assert (rank["num_biases"] > 0) == ("moe_router_enable_expert_bias" in layout)
        assert rank["chosen"] > 0.1  # experts that routers choose by themselves give other gradients
        assert rank["chunks"] > len(made.LENGTHS) // layout.get("replicas", 1) - ("expert_parallel" in layout)
        assert (rank["again"] > 0) == ("plans" in layout)
    expected = {rank["replica"] * ("read" not in layout): rank["expected"] for rank in ranks if rank["expected"]}
    assert ranks[0]["losses"] == pytest.approx(2 * [sum(expected.values())], rel=TOLERANCE)


TOLD = {
    "missing in one": "sample 5 has no routes, and others have: give them to all samples, or to none",
    "too few layers": "sample 0: routes is 41 x 3 x 2; it must be 41 tokens x 4 layers with experts x 2 experts of a token",
    "one expert of a token": "sample 0: routes is 41 x 4 x 1; it must be 41 tokens x 4 layers",
    "too few tokens": "sample 0: routes is 30 x 4 x 2; it must be 41 tokens x 4 layers",
    "no such expert": "sample 0: routes has expert 8 for token ",
    "an expert twice": "sample 0: routes has expert 0 twice for token 0 in layer 0 (both from 0)",
    "no numbers": "sample 0: routes must be numbers of experts",
    "one rank's": "rank 1 has other samples than rank 0",
    "right": "trains",
    "without the last token's": "trains",
    "recorded by Megatron": "layers.0.mlp.router.router_replay would record or hand out routes in the order in which chunks",
    "sinkhorn": "sample 0 has routes, and routers choose by themselves with moe_router_load_balancing_type='sinkhorn'",
}


def test_routes_that_cannot_be_replayed_are_told():
    for said in of_ranks(job(2, "sample_routes:refusals")):
        assert said.keys() == TOLD.keys()
        assert {name: text for name, text in said.items() if TOLD[name] not in text} == {}


def test_samples_of_megatrons_loop_have_routes_and_layers_without_experts_have_none(tmp_path):
    random, paths = np.random.RandomState(3), [tmp_path / "train.jsonl", tmp_path / "valid.jsonl"]
    for path, count in zip(paths, (len(LENGTHS), BATCH), strict=True):
        lines = []
        for length in (min(length, CONTEXT - 1) + 1 for length in LENGTHS[:count]):
            routes = random.rand(length, 3, 4).argsort(axis=2)[..., :2].tolist()
            lines.append(json.dumps({"tokens": random.randint(0, VOCABULARY - 1, length).tolist(), "routes": routes}))
        path.write_text("\n".join(lines))
    whole, sliced = Cell(experts=4), Cell(pp=2, virtual=2, placement="v", experts=4)
    of = ["--moe-layer-freq", "[0,1,1,1]"]
    loss = "megatron_epp.losses:NextToken"
    checkpoint = tmp_path / "whole"
    expected = matrix.train(1, [*flags(paths, loss, whole, "--epp-slices 1"), *of], checkpoint, limit_s=300)
    load = [*of, "--load", str(checkpoint), "--finetune"]
    found = matrix.train(2, [*flags(paths, loss, sliced, "--epp-slices 4 --epp-recompute 1"), *load], limit_s=300)
    check_closeness(compare(expected, found), "RelayAttention")
    for path in paths:
        samples = map(json.loads, path.read_text().splitlines())
        path.write_text("\n".join(json.dumps({"tokens": sample["tokens"]}) for sample in samples))
    chosen = matrix.train(2, [*flags(paths, loss, sliced, "--epp-slices 4"), *load], limit_s=300)
    assert compare(found, chosen)["gradients"]["relative"] > 0.1
