"""A program with a loop of its own trains samples in slices, and its model is as before outside of them."""

import re
from pathlib import Path

import pytest

from megatron_epp import wrap_samples
from megatron_epp.plan import EppError
from tests.support.mcore.forked import job, launch, of_ranks
from tests.support.mcore.jobs.samples import LENGTHS

TOLERANCE = 1e-5
SLOW = pytest.mark.slow
# Keys and values of one size, which Megatron's own attention in torch can run. By the two scales scores have another factor
# than that of their channels.
LATENT = {
    "multi_latent_attention": True,
    "rope_type": "rope",
    "apply_rope_fusion": False,
    "rotary_scaling_factor": 4.0,
    "mscale_all_dim": 1.0,
    "q_lora_rank": 6,
    "kv_lora_rank": 8,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 2,
    "v_head_dim": 8,
}
DELTA = {
    "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 3,
}  # fmt: skip
FLEX = {
    "replicas": 2, "expert_parallel": 2, "num_experts": 4, "moe_router_topk": 2, "add_bias_linear": False,
    "moe_token_dispatcher_type": "flex",
}  # fmt: skip
MAMBA = {"pattern": "M*|M-", "mamba_num_heads": 4, "mamba_head_dim": 4, "mamba_num_groups": 2, "mamba_state_dim": 6}
LAYOUTS = [
    pytest.param(4, {"replicas": 2, "per_token": False}, id="replicas", marks=SLOW),  # by default with experts
    pytest.param(4, {"replicas": 2}, id="replicas, losses per token", marks=SLOW),
    pytest.param(4, {"tensor_parallel": 2, "sequence_parallel": True}, id="tensor and sequence parallel"),
    pytest.param(2, LATENT, id="latent attention"),
    pytest.param(2, DELTA, id="gated delta nets", marks=SLOW),  # states are handed on as those of Mamba-2
    pytest.param(2, MAMBA, id="Mamba-2"),
    pytest.param(2, {"window_size": (9, 0), "window_attn_skip_freq": 2, "softmax_type": "learnable"}, id="sinks", marks=SLOW),
    pytest.param(4, FLEX | {"per_token": False}, id="experts of replicas by DeepEP"),
    pytest.param(4, FLEX, id="experts by DeepEP, losses per token", marks=SLOW),
]


@pytest.mark.parametrize(("num_ranks", "layout"), LAYOUTS)
def test_slices_have_the_gradients_of_whole_samples_under_megatrons_schedule(num_ranks, layout):
    found = of_ranks(job(num_ranks, "samples:grpo", **layout))
    assert len(found) == num_ranks
    expected = [loss for one in found for loss in one["expected"]]
    for one in found:
        assert one["worst"] <= TOLERANCE
        assert one["afterwards"] == 0.0  # Megatron's schedule runs the adopted model as it did before
        assert one["names"]
        assert one["chunks"] > len(LENGTHS) // layout.get("replicas", 1)
        assert one["divisor"] == len(LENGTHS)
        assert one["splits"] == [layout.get("tensor_parallel", 1) == 1]
        assert one["ahead"] == [1, 0]  # the call took its own, and closing dropped the other's
        assert one["losses"] == pytest.approx(3 * [sum(expected) / len(expected) * _scale(layout)], rel=TOLERANCE)
        assert max(one["logprobs"], default=0.0) <= TOLERANCE
        assert one["evaluated"] <= TOLERANCE
    assert any(one["logprobs"] for one in found)


TREES = [
    pytest.param(2, {}, {}, id="two stages"),
    pytest.param(4, {"tensor_parallel": 2, "sequence_parallel": True}, {}, id="tensor and sequence parallel"),
    pytest.param(4, {"replicas": 2}, {}, id="replicas"),
    pytest.param(4, {"context_parallel": 2}, {}, id="context parallel"),
    pytest.param(2, {}, {"recompute": 1}, id="recompute", marks=SLOW),  # by default with windows
    pytest.param(2, {}, {"offload": True, "memory_cap_gb": 0.00023}, id="offload"),
    pytest.param(2, {}, {"split_weight_gradient": "on"}, id="split weight gradients"),
    pytest.param(2, {}, {"share_prefixes": False}, id="alone"),
    pytest.param(2, {"window_size": (9, 0), "softmax_type": "learnable"}, {}, id="windows, sinks", marks=SLOW),
    pytest.param(2, {"window_size": (20, 0), "window_attn_skip_freq": 2}, {"recompute": 1}, id="windows, recompute"),
    pytest.param(2, LATENT, {}, id="latent attention"),
    pytest.param(2, MAMBA, {}, id="Mamba-2 and attention", marks=SLOW),
    pytest.param(2, MAMBA, {"recompute": 1}, id="Mamba-2, recompute"),
    pytest.param(2, DELTA, {}, id="gated delta nets", marks=SLOW),  # states are handed on as those of Mamba-2
]


@pytest.mark.parametrize(("num_ranks", "layout", "plans"), TREES)
def test_samples_that_share_a_prompt_run_it_once_with_the_gradients_of_whole_samples(num_ranks, layout, plans):
    plans = {"share_prefixes": True} | plans
    found = of_ranks(job(num_ranks, "samples:grpo", prompt=36, plans=plans, **layout))
    expected = [loss for one in found for loss in one["expected"]]
    for one in found:
        assert one["worst"] <= TOLERANCE
        assert one["losses"] == pytest.approx(3 * [sum(expected) / len(expected)], rel=TOLERANCE)
        assert max(one["logprobs"], default=0.0) <= TOLERANCE
    assert max(one["shared"] for one in found) == 35 * bool(plans["share_prefixes"])  # of the replica that has the two


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [
        (2, {}),
        pytest.param(4, {"context_parallel": 2}, marks=SLOW),
        pytest.param(4, {"tensor_parallel": 2, "sequence_parallel": True}, marks=SLOW),
    ],
)
def test_many_samples_of_a_prompt_read_its_rows_at_once_with_the_gradients_of_whole_samples(num_ranks, layout):
    for one in of_ranks(job(num_ranks, "samples:siblings", **layout)):
        assert max(one["worst"], *one["logprobs"], one["evaluated"]) <= TOLERANCE
        assert one["shared"] == 4 * 35
        assert one["at_once"] > 0


@pytest.mark.parametrize(("ranks", "layout"), [(2, {}), (2, {"stages": 4}), pytest.param(4, {}, marks=SLOW)])
def test_twenty_steps_with_a_shared_prompt_end_at_the_weights_of_whole_samples(ranks, layout):
    found = of_ranks(job(ranks, "samples:steps", prompt=36, **layout))
    own = [losses for one in found for losses in one["expected"] if losses]
    for one in found:
        assert one["stages"] == layout.get("stages", ranks) // ranks
        assert one["worst"] <= TOLERANCE < one["moved"]
        means = [sum(losses) / len(losses) for losses in own[:20]]
        assert [loss for (loss,) in one["losses"]] == pytest.approx(means, rel=TOLERANCE)


UNSHARED = {
    "experts, whose losses and capacity count a token once for every sample": {"num_experts": 4, "add_bias_linear": False},
}


@pytest.mark.parametrize(("reason", "settings"), UNSHARED.items(), ids=UNSHARED)
def test_models_whose_tokens_in_common_are_not_the_same_are_refused_on_all_ranks(reason, settings):
    for one in of_ranks(job(2, "samples:unshared", **settings)):
        assert one["said"] == f"share_prefixes does not go with {reason}: leave it out"


def _scale(layout):
    """Megatron divides what a loss function returns by the number of microbatches, unless losses are per token."""
    return 1 if layout.get("per_token", True) else len(LENGTHS) // layout.get("replicas", 1)


BY_REPLICA, SHARED = {"replicas": 2, "per_token": False}, {"tensor_parallel": 2, "sequence_parallel": True}
PAIRS = [
    pytest.param(BY_REPLICA, id="replicas"),
    pytest.param(SHARED, marks=SLOW, id="tensor and sequence"),
    pytest.param({"prompt": 36}, id="a prompt of two pairs"),
]


@pytest.mark.parametrize("layout", PAIRS)
def test_preferences_have_the_gradient_that_their_margins_ask_for(layout):
    for one in of_ranks(job(4, "samples:pairs", **layout)):
        assert one["worst"] <= TOLERANCE
        assert one["losses"][0] == pytest.approx(one["losses"][1], rel=TOLERANCE)
        assert one["accuracy"][0] == pytest.approx(one["accuracy"][1])
        assert one["divisor"] == len(LENGTHS) / 2


def test_the_example_of_the_documentation_trains():
    example = Path(__file__).parents[2] / "docs" / "examples" / "grpo.py"
    said = launch(2, "-m", "megatron_epp.run", example, env={"WORLD_SIZE": "2"}).output
    losses = [float(loss) for loss in re.findall(r"step \d: policy loss (-?[\d.]+)", said)]
    assert len(losses) == 8
    assert losses[-1] < losses[1] < losses[0] == 0.0


BAD = {
    "sharing by another planner": "share_prefixes does not go with planner seq1f1b: leave it out",
    "recompute": "recompute_granularity='full': leave it out",
    "no column": "sample 1 has no advantages, which the loss reads",
    "a column of another length": "sample 1: old_logprobs has 3 values for 11 tokens",
    "not finite": "sample 1: old_logprobs is nan for token",
    "no tokens": "sample 1: tokens must be a list of at least 2 integers",
    "no samples": "there are no samples",
    "no group": "sample 0: group must be an integer or a text, the same for samples with one loss; it is None",
    "one of a pair": "group 3 has 1 samples; a preference is of two",
    "unlike": "rank 1 has other samples than rank 0: every rank gives the whole batch",
    "one rank's": "rank 1: sample 0: old_logprobs has 1 values for 41 tokens",
    "another model": "a schedule of samples is of one model",
    "too long for the cap": "no plan fits a memory cap of 0.000168 GiB per rank",
}


def test_what_is_wrong_with_samples_and_models_is_said_on_every_rank_and_the_next_call_trains():
    for one in of_ranks(job(2, "samples:bad")):
        assert one["said"].keys() == BAD.keys()
        assert {name: said for name, said in one["said"].items() if BAD[name] not in said} == {}
        assert one["trains"]
        assert "Raise memory_cap_gb to " in one["said"]["too long for the cap"]
        assert not any("--" in text or "global_batch_size" in text for text in (*one["said"].values(), *one["logged"]))
        for begin in ("no sample of this step has a trained token", "nothing trains: requires_grad is False"):
            assert sum(text.startswith(begin) for text in one["logged"]) == (one["rank"] == 0)


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [
        pytest.param(2, {}, id="pipeline", marks=SLOW),
        pytest.param(4, {"replicas": 2, "per_token": False}, id="replicas", marks=SLOW),
        pytest.param(4, {"replicas": 2, "distributed": True, "overlaps": True}, id="replicas, parts of the optimizer"),
        pytest.param(4, {"replicas": 2, "per_token": False, "distributed": True}, id="by replicas, parts", marks=SLOW),
    ],
)
def test_several_calls_before_a_step_are_one_batch_and_what_would_be_wrong_is_refused(num_ranks, layout):
    for one in of_ranks(job(num_ranks, "samples:calls", **layout)):
        assert len(one["apart"]) == 8
        assert {name: apart for name, apart in one["apart"].items() if apart > TOLERANCE} == {}
        dropout = "rank 0: samples cannot be cut for this GPTModel: a plan cannot honour attention_dropout=0.1 (set it to 0)"
        assert one["said"]["a model"] == dropout
        assert "the model has gradients, which Megatron has reduced and divided" in one["said"]["finished"]
        assert "pass last=False to all calls before an optimizer's step but the last one" in one["said"]["finished"]
        assert "policy loss: the loss of token 17 of sample 2, or its gradient, is not finite" in one["said"]["overflow"]
        assert "old_logprobs -10000, advantages -1). Gradients are zeroed" in one["said"]["overflow"]
        assert one["left"] == 0.0
        if "replicas" in layout:
            assert one["said"]["too few"] == "1 samples cannot be shared by 2 replicas: give at least 2 a call"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"slice": 3}, "wrap_samples has no setting slice; did you mean 'slices'?"),
        ({"offload": "sometimes"}, "offload is 'sometimes'; it must be one of auto, on, off"),
        ({"loss": "megatron_epp.losses:Clipped"}, "there is no loss megatron_epp.losses:Clipped"),
    ],
)
def test_settings_that_are_none_are_refused(setting, said):
    with pytest.raises(EppError, match=re.escape(said)):
        wrap_samples(**setting)


VALUE_LAYOUTS = [
    pytest.param(4, {"replicas": 2}, id="replicas", marks=SLOW),
    pytest.param(4, {"tensor_parallel": 2, "sequence_parallel": True}, id="tensor and sequence parallel"),
    pytest.param(2, {"tensor_parallel": 2}, id="tensor parallel", marks=SLOW),
]


@pytest.mark.parametrize(("num_ranks", "layout"), VALUE_LAYOUTS)
def test_a_value_model_has_the_gradients_and_values_of_whole_samples(num_ranks, layout):
    found = of_ranks(job(num_ranks, "samples:values", **layout))
    expected = [loss for one in found for loss in one["expected"]]
    for one in found:
        assert one["worst"] <= TOLERANCE
        assert one["afterwards"] == 0.0
        assert one["chunks"] > len(LENGTHS) // layout.get("replicas", 1)
        assert one["lengths"] == list(LENGTHS)  # every token has a value
        assert (one["logprobs"], one["divisor"]) == (0, len(LENGTHS))
        assert one["loss"] == pytest.approx(sum(expected) / len(expected), rel=TOLERANCE)
        assert max(one["values"], default=0.0) <= TOLERANCE
        assert one["evaluated"] <= TOLERANCE
    assert any(one["values"] for one in found)


def test_a_distillation_has_the_gradients_of_whole_distributions():
    found = of_ranks(job(2, "samples:distillation"))
    expected = [loss for one in found for loss in one["expected"]]
    for one in found:
        assert one["worst"] <= TOLERANCE
        assert one["chunks"] > len(LENGTHS)
        assert one["loss"] == pytest.approx(sum(expected) / len(expected), rel=TOLERANCE)


def test_the_head_of_a_training_on_ranks_that_share_tokens_is_one_on_all_and_one_that_leaves_them_divided_is_refused():
    first, second = of_ranks(job(2, "samples:divided_head"))
    assert first["norm"] == second["norm"] > 0  # they begin with one weight
    for one in (first, second):
        assert one["attribute"]
        assert max(one["values"], one["hidden"], one["weight"]) <= 1e-6
        assert "its head must have one output, and gather the tokens of sequence-parallel ranks" in one["said"]


APART = {
    "a vocabulary": "value loss reads values, and the output layer (ColumnParallelLinear) has 64 outputs: put a layer with one",
    "log-probabilities of values": "value loss reads values of the model: ask for wants_values",
    "values of log-probabilities": "policy loss reads logprobs of the model: ask for wants_logprobs",
    "another width": "sample 0: teacher_tokens is 41 x 2; the loss reads 3 values for each of 41 tokens",
    "no width": "sample 0: teacher_logprobs is one number; the loss reads 3 values for each of 41 tokens",
    "above the vocabulary": "sample 0: teacher_tokens has token 64, and the vocabulary 64 entries",
    "no token": "sample 0: teacher_tokens must be numbers of tokens",
    "token above the vocabulary": "sample 0 has token 100, and the vocabulary 64 entries",
    "no loss": "loss object is no loss: it has no name, scope, average, columns, logged",
    "one output": "policy loss reads log-probabilities, and the output layer (Head) has one output",
    "blocks": "of logits, and value loss reads values: leave it out",
}


def test_losses_and_models_that_do_not_go_together_are_refused_on_every_rank():
    for one in of_ranks(job(2, "samples:value_refusals")):
        assert one.keys() == APART.keys()
        assert {name: said for name, said in one.items() if APART[name] not in said} == {}
