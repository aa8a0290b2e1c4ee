"""Samples in Megatron's loop, in slices: losses in every layout, and routes that a rollout chose, as by Megatron's replay."""

import json
import re
import shlex
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_epp.losses import NextToken, Rows, load_loss
from megatron_epp.losses.loss import checked_loss
from megatron_epp.plan import EppError
from scripts.parity.cells import CONTEXT, LENGTHS, MODELS, VOCABULARY, Cell, common_flags
from scripts.parity.runs import compare
from tests.support.mcore import matrix
from tests.support.mcore.forked import job, launch, of_ranks
from tests.support.mcore.jobs import sample_routes as made
from tests.support.mcore.parity_figures import check_closeness

OWN = "tests.support.mcore.own_losses"
BATCH, ITERATIONS = 4, 2
CELLS = {
    "pipeline": (Cell(pp=2), "--epp-slices 3"),
    "there and back, weights apart": (Cell(pp=2, virtual=2, placement="v", split=True), "--epp-slices 4"),
    "recompute, loss by blocks": (Cell(pp=2), "--epp-slices 7 --epp-recompute 1 --epp-loss-block-tokens 5"),
    "tensor and sequence parallel": (Cell(tp=2, sp=True), "--epp-slices 3"),
    "context parallel": (Cell(cp=2), "--epp-slices 3"),
    "context parallel in a pipeline": (Cell(cp=2, pp=2), "--epp-slices 3"),
    "replicas": (Cell(dp=2), "--epp-slices 2 --use-distributed-optimizer"),
    "experts": (Cell(pp=2, dp=2, experts=4, ep=2), "--epp-slices 3"),
}
LOSSES = {
    "over tokens": f"{OWN}:GRPO", "over sequences": f"{OWN}:GSPO", "with entropy": f"{OWN}:PPO",
    "of a teacher": f"{OWN}:DISTILLATION", "of values": f"{OWN}:VALUES", "over pairs": f"{OWN}:DPO",
    "of rewards": f"{OWN}:REWARD",
}  # fmt: skip
BY_DEFAULT = {
    ("of values", "context parallel in a pipeline"), ("over sequences", "recompute, loss by blocks"),
    ("with entropy", "tensor and sequence parallel"), ("of a teacher", "tensor and sequence parallel"),
    ("over pairs", "replicas"), ("over tokens", "experts"), ("of rewards", "there and back, weights apart"),
}  # fmt: skip
"""Every loss, every layout that no other contains, and what is of the whole vocabulary on ranks that share it."""
ROWS = [
    pytest.param(loss, cell, id=f"{loss}: {cell}", marks=[pytest.mark.slow] * ((loss, cell) not in BY_DEFAULT))
    for cell in sorted(CELLS, key=lambda name: CELLS[name][0].num_processes)
    for loss in LOSSES
]
WITHOUT_ROUTERS = "--moe-aux-loss-coeff 0 --moe-router-load-balancing-type none"


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """A file of samples, of which some train nothing, and one for evaluation."""
    folder, random = tmp_path_factory.mktemp("samples"), np.random.RandomState(3)
    paths = []
    for name, count in (("train", len(LENGTHS)), ("valid", BATCH)):
        lines = []
        for number, length in enumerate(min(length, CONTEXT - 1) for length in LENGTHS[:count]):
            tokens = length + 1
            values = {
                "tokens": random.randint(0, VOCABULARY - 1, tokens).tolist(),
                "trained": ((random.rand(tokens) < 0.6) & (number % 7 != 5)).astype(int).tolist(),
                "old_logprobs": (-4.5 + 0.3 * random.randn(tokens)).tolist(),
                "reference_logprobs": (-4.5 + 0.3 * random.randn(tokens)).tolist(),
                "importance": (0.5 + random.rand(tokens)).tolist(),
                "advantages": random.randn() if number % 2 else random.randn(tokens).tolist(),
                "teacher_tokens": random.randint(0, VOCABULARY - 1, (tokens, 3)).tolist(),
                "teacher_logprobs": (-1.5 - random.rand(tokens, 3)).tolist(),
                "old_values": (0.1 * random.randn(tokens)).tolist(),
                "returns": random.randn(tokens).tolist(),
                "group": f"pair {number // 2}",
                "preferred": number % 2,
            }
            lines.append(json.dumps(values))
        paths.append(folder / f"{name}.jsonl")
        paths[-1].write_text("\n".join(lines) + "\n")
    return paths


@pytest.fixture(scope="module")
def whole(samples, tmp_path_factory):
    """Trainings on whole sequences on one stage, by loss and cell: each with the checkpoint that it began from."""

    @cache
    def run(loss, cell):
        folder = tmp_path_factory.mktemp("whole")
        return matrix.train(cell.num_processes, flags(samples, loss, cell, "--epp-slices 1"), folder, limit_s=300), folder

    return run


def flags(samples, loss, cell, plan):
    common = common_flags(ITERATIONS, CONTEXT, BATCH, validates=True)
    del common[common.index("--epp-documents") : common.index("--epp-documents") + 2]
    more = f"{MODELS['llama']} {plan} {WITHOUT_ROUTERS if cell.experts else ''}"
    return [*common, *shlex.split(more), *cell.flags, "--epp-samples", *map(str, samples), "--epp-loss", loss]


@pytest.mark.parametrize(("loss", "name"), ROWS)
def test_slices_train_as_whole_sequences_on_one_stage(samples, whole, loss, name):
    cell, plan = CELLS[name]
    plan = plan.partition(" --epp-loss-block-tokens")[0] if loss in ("of values", "of rewards") else plan  # which are of logits
    sharing = replace(cell, pp=1, virtual=1, placement="looped", split=False, cp=1, dp=cell.ep)
    expected, checkpoint = whole(LOSSES[loss], sharing)
    load = ["--load", str(checkpoint), "--finetune"]
    found = matrix.train(cell.num_processes, [*flags(samples, LOSSES[loss], cell, plan), *load], limit_s=300)
    figures = compare(expected, found)
    check_closeness(figures, "RelayAttention")
    assert any(plan["slices"] > 1 for replica in figures["plans"] for plan in replica)
    assert figures["num_losses"][0] == ITERATIONS


def test_next_tokens_train_as_without_a_loss(samples):
    cell, plan = Cell(pp=2), "--epp-slices 3"
    given = flags(samples, "megatron_epp.losses:NextToken", cell, plan)
    runs = [matrix.train(2, one, limit_s=300) for one in (given[: given.index("--epp-loss")], given)]
    check_closeness(compare(*runs), "RelayAttention")


@pytest.mark.slow
def test_a_value_model_begins_with_the_weights_of_a_language_model(samples, whole):
    cell, plan = CELLS["pipeline"]
    of_language, checkpoint = whole(LOSSES["over tokens"], replace(cell, pp=1))
    load = ["--load", str(checkpoint), "--finetune", "--dist-ckpt-strictness", "log_all"]
    found = matrix.train(2, [*flags(samples, LOSSES["of values"], cell, plan), *load], limit_s=300)
    (expected,), head = of_language, "module.output_layer.weight"
    initial = {name: weight for run in found for name, weight in run.initial.items()}
    assert initial.keys() == expected.initial.keys()
    assert initial[head].shape == (1, expected.initial[head].shape[1])
    assert [name for name in initial if name != head and not torch.equal(initial[name], expected.initial[name])] == []


def test_the_log_has_losses_below_zero_too(samples, tmp_path):
    """Megatron's line leaves out what is not above 0."""
    given = flags(samples, f"{OWN}:GRPO", Cell(pp=2), "--epp-slices 3 --log-interval 1")
    finished = launch(2, "-m", "megatron_epp.mcore.pretrain_gpt", *given, timeout_s=200)
    found = re.findall(r"epp iteration (\d) \| policy loss: (-?[\d.e-]+) \|", finished.output)
    assert [int(number) for number, _ in found] == [1, 2]


def test_a_token_whose_loss_overflows_ends_the_run_before_the_optimizers_step(samples, tmp_path):
    lines = samples[0].read_text().splitlines()
    for number, line in enumerate(lines):
        given = json.loads(line)
        given["reference_logprobs"][1], given["trained"][1] = 1e4, 1
        lines[number] = json.dumps(given)
    stale = tmp_path / "stale.jsonl"
    stale.write_text("\n".join(lines))
    given = flags([stale, samples[1]], f"{OWN}:GRPO", Cell(pp=2), "--epp-slices 3 --log-interval 1")
    finished = launch(2, "-m", "megatron_epp.mcore.pretrain_gpt", *given, timeout_s=200)
    assert finished.returncode != 0
    named = rf"policy loss: the loss of token 1 of {re.escape(str(stale))}:\d+, or its gradient, is not finite"
    assert re.search(named, finished.output), finished.output[-3000:]
    assert "reference_logprobs 10000" in finished.output
    assert "iteration        1/" not in finished.output  # Megatron's line behind a step


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no.such:Loss", "there is no loss no.such:Loss"),
        (f"{OWN}:missing", "there is no loss"),
        (f"{OWN}:NoLoss", "is no loss: it has no name, scope, average, columns, logged"),
        ("math:sqrt", "is called without arguments to make a loss, and cannot be"),
    ],
)
def test_what_is_no_loss_is_refused(text, said):
    with pytest.raises(EppError) as caught:
        load_loss(text)
    assert said in str(caught.value)


class Asking(NextToken):
    """A loss whose optional attributes a case sets."""


TOGETHER = {
    "a width of no column": ({"widths": {"teacher": 2}}, "widths are above 0, and of columns that it reads"),
    "a width of 0": ({"columns": ("teacher",), "widths": {"teacher": 0}}, "has a width of teacher"),
    "candidates without a width": ({"columns": ("teacher",), "candidates": "teacher"}, "has candidates 'teacher'"),
    "values and entropies": ({"has_values": True, "has_entropy": True}, "has values and has_entropy"),
    "values and a temperature": ({"has_values": True, "temperature": 0.5}, "has values and temperature"),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_what_a_loss_asks_for_must_go_together(name):
    attributes, said = TOGETHER[name]
    with pytest.raises(EppError) as caught:
        checked_loss(type("Case", (Asking,), attributes)(), "it")
    assert said in str(caught.value)


def test_the_loss_that_the_documentation_writes_is_one():
    page = (Path(__file__).parents[2] / "docs" / "your-loop.md").read_text()
    found = {}
    exec(re.search(r"```python\n(from dataclasses.*?)```", page, re.DOTALL)[1], found)
    loss = found["WeightedLikelihood"]()
    logprobs, weight = torch.tensor([-1.0, -3.0, -5.0]), {"weight": torch.tensor([2.0, 2.0, 1.0])}
    total, logged = loss(Rows(logprobs, torch.ones(3), weight, None, torch.tensor([0, 0, 1]), 3))
    assert (float(total), float(logged["mean log-probability"])) == (2 * 2 + 5, -2 - 5)


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
