"""Hooks, parametrizations and functions that a program gives to modules act in slices as in Megatron, or are refused."""

import ast
import json
import shlex
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

import megatron_epp
from megatron_epp.mcore.model.predictions import need_embedding
from megatron_epp.mcore.model.replaced import problems
from tests.mcore.test_samples import DELTA, LATENT, MAMBA
from tests.support.mcore.forked import CHANGED, job, launch, returned, train
from tests.support.mcore.jobs.attachments import OWN_ROTARY
from tests.support.mcore.launch import PLANNED
from tests.support.mcore.synthetic_documents import documents_of, long_tailed_lengths, write_pair
from tests.support.seeds import some_by_default

TOLERANCE = 1e-5
HOOKS = ("forward pre-hook", "forward hook", "backward pre-hook", "backward hook")
ALL = (*HOOKS, "forward")
LAYER = "decoder.layers.1"
MIXER, CORE = f"{LAYER}.self_attention", f"{LAYER}.self_attention.core_attention"
OF_LAYER = "decoder.layers.0.self_attention"
GPT = {
    "embedding.word_embeddings": ("forward pre-hook", "forward hook", "forward"),
    "rotary_pos_emb": ("forward pre-hook", "forward hook", "forward"),
    "decoder": ("forward hook", "backward pre-hook"),  # Megatron passes names to it
    LAYER: ("forward hook", "backward pre-hook", "forward"),
    f"{LAYER}.input_layernorm": (*ALL, "forward hook in place"),
    **dict.fromkeys((MIXER, f"{MIXER}.linear_qkv", CORE, f"{LAYER}.mlp"), ALL),
    "output_layer": ("forward pre-hook", "forward hook", "forward"),  # Megatron's loss takes none in backward
}
"""By module, what is attached. All that is not in `REFUSED` acts."""
REFUSED = {
    "rotary_pos_emb: forward pre-hook": "module.rotary_pos_emb (RotaryEmbedding) has a forward pre-hook <lambda>.<locals>",
    "rotary_pos_emb: forward": "module.rotary_pos_emb (RotaryEmbedding) has another forward than plans need there",
    f"{LAYER}: forward": f"module.{LAYER} (TransformerLayer) has another forward than",
    f"{LAYER}.input_layernorm: forward": f"module.{LAYER}.input_layernorm (LayerNorm) has another forward than",
    f"{CORE}: forward": "core_attention (DotProductAttention) has another forward than",
    "output_layer: forward": "the model has got its own output_layer.forward",
}
BY_BLOCKS = "has a forward hook <lambda>.<locals>.<lambda>, which is of logits, and plans compute the loss by blocks"
MODES = [
    (None, GPT),
    ("mlp", {path: GPT[path] for path in (LAYER, f"{LAYER}.mlp")}),  # all others run as if nothing recomputed
    *((mode, GPT) for mode in ("mlp", "selective", "full")),
]


@some_by_default(("mode", "cases"), MODES, 2)
def test_what_is_attached_between_two_calls_acts_or_is_refused(mode, cases):
    check(returned(job(1, "attachments:between_calls", cases=cases, positions="rope", mode=mode)), cases, REFUSED)


@pytest.mark.parametrize(
    ("cases", "refused", "settings"),
    [
        ({"output_layer": HOOKS[:2]}, {"output_layer: forward hook": BY_BLOCKS}, {"plans": {"loss_block_tokens": 16}}),
        (
            {MIXER: ALL, CORE: ALL, f"{MIXER}.linear_kv_up_proj": ALL, f"{MIXER}.rotary_pos_emb": ("forward hook",)},
            {f"{CORE}: forward": "(DotProductAttention) has another forward than plans need there"},
            LATENT,
        ),
        # With larger weights rounding alone changes gradients by 1e-4.
        ({OF_LAYER: ALL}, {f"{OF_LAYER}: forward": "(GatedDeltaNet) has another forward than"}, DELTA | {"spread": 0.05}),
        (
            {"decoder.layers.0.mixer": ALL},
            {"decoder.layers.0.mixer: forward": "(MambaMixer) has another forward than"},
            MAMBA,
        ),
    ],
    ids=["loss by blocks", "latent attention", "delta nets", "Mamba-2"],
)
def test_what_is_attached_to_other_kinds_of_layers_acts_or_is_refused(cases, refused, settings):
    check(returned(job(1, "attachments:between_calls", cases=cases, **settings)), cases, refused)


def check(found, cases, refused):
    assert found.pop("afterwards") <= TOLERANCE
    assert "has another forward than plans need there" in found.pop("begin")
    assert found.keys() == {f"{path}: {kind}" for path, kinds in cases.items() for kind in kinds}
    assert {case: said for case, said in found.items() if case in refused and refused[case] not in str(said)} == {}
    assert {case: away for case, away in found.items() if case not in refused and not away <= TOLERANCE} == {}


@pytest.mark.parametrize(
    ("cases", "said"),
    [
        ({"": "forward hook"}, "module (Outer) has a forward hook <lambda>.<locals>.<lambda>, which plans would not call"),
        ({CORE: "forward hook", "rotary_pos_emb": "a class of its own", "output_layer": "forward hook"}, ""),
        ({"rotary_pos_emb": "forward", LAYER: "forward", f"{LAYER}.self_attention.linear_qkv": "parametrization"}, ""),
        ({"rotary_pos_emb": "scales by length"}, "embedding Interpolated gives positions other angles in a sequence of"),
        ({"rotary_pos_emb": "learns"}, "the rotary embedding Interpolated has parameters that train"),
        ({CORE: "forward"}, f"{CORE} has a forward that is not Megatron's"),
        ({"output_layer": "parametrization"}, "its output layer is a ParametrizedColumnParallelLinear"),
    ],
)
def test_what_is_there_before_the_first_call_acts_or_is_refused(cases, said):
    inside = "language_model" if "" in cases else None
    found = returned(job(1, "attachments:before_the_first", cases=cases, positions="rope", inside=inside))
    assert said in found if said else found <= TOLERANCE


@pytest.mark.parametrize("settings", [{"positions": "rope"}, LATENT, MAMBA | {"pattern": "M*M-"}], ids=["GPT", "MLA", "SSM"])
def test_all_that_plans_replace_is_told(settings):
    """Otherwise what a program attaches there would be lost without a word: use `replaced.put`, or `replaced.mark`."""
    found = returned(job(1, "attachments:replaced", plans={"loss_block_tokens": 16}, **settings))
    assert found["untold"] == []
    assert found["told"] >= 8
    assert found["while it runs"] == [["", "compute_language_model_loss"], ["output_layer", "forward"]]  # `OfRows.obstacle`


def test_layers_of_microbatches_call_hooks_and_other_functions_than_plans_put_there_are_refused():
    away, said = returned(job(1, "attachments:of_microbatches"))
    assert away <= TOLERANCE
    assert "decoder.layers.1 (TransformerLayer) has another forward than plans need there" in said


def test_a_hang_of_replicas_with_unequal_numbers_of_chunks_is_said_to_be_one():
    finished = job(2, "attachments:collective_in_a_hook")
    assert finished.returncode != 0
    assert "Replicas run unequal numbers of chunks (here " in finished.output
    assert "in the model configuration's finalize_model_grads_func or a pre-hook of the optimizer's step" in finished.output


def test_a_layer_of_multi_token_prediction_that_embeds_by_itself_is_refused():
    class OwnLayer(MultiTokenPredictionLayer):
        def _get_embeddings(self, *args, **named): ...

    model = torch.nn.ModuleList([bare(MultiTokenPredictionLayer), bare(OwnLayer)])
    need_embedding(model)
    assert [said.partition(" than ")[0] for said in problems(model)] == ["1 (OwnLayer) has another _get_embeddings"]


def bare(kind):
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    return module


def test_functions_of_modules_are_replaced_by_the_one_helper():
    """Functions of a chunk's forward are `OfRows`', which says what it would lose; core attention has its own."""
    trees = [(path.name, ast.parse(path.read_text())) for path in Path(megatron_epp.__file__).parent.rglob("*.py")]
    calls = [node for _, tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    puts = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "put" and len(call.args) > 2]
    names = {call.args[1].value for call in puts} | {"forward"}
    assert len(names) >= 6
    parts = [(file, node) for file, tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    found = {file for file, node in parts if isinstance(node.ctx, ast.Store) and node.attr in names}
    assert found == {"block_loss.py", "core_attention.py", "trained_rows.py", "cut_layers.py"}  # the last of a stage, no module


LATENTS = "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 32 --qk-pos-emb-head-dim 4 "
LATENTS += "--v-head-dim 32 --no-rope-fusion --epp-latents on"
SPLIT = "--epp-split-weight-gradient --no-gradient-accumulation-fusion"
SHARDS = "--epp-vocab-parallel on --untie-embeddings-and-output-weights"
ROTARY, KEYS, UP = {"rotary_pos_emb": OWN_ROTARY}, f"{OF_LAYER}.core_attention", f"{OF_LAYER}.linear_kv_up_proj"
PARTS = {f"{OF_LAYER}.linear_qkv": "backward hook", f"{OF_LAYER}.linear_proj": "forward hook"}
TRAININGS = {
    "rotary, weights apart": (SPLIT, ROTARY | PARTS, ""),
    "latents": (LATENTS, {UP: "forward pre-hook", KEYS: "forward hook"}, ""),
    "latents for keys": (LATENTS, {KEYS: "forward pre-hook"}, f"{KEYS} (RelayAttention) has a forward pre-hook"),
    "latents for their products": (LATENTS, {UP: "forward hook"}, f"{UP} (ColumnParallelLinear) has a forward hook"),
    "shards": (SHARDS, {"output_layer": "forward hook"}, "output_layer (VocabularyShard) has a forward hook"),
}


@pytest.mark.parametrize("case", TRAININGS)
def test_a_training_by_flags_runs_what_is_attached_or_refuses_it(tmp_path, case):
    flags, cases, said = TRAININGS[case]
    data = write_pair(tmp_path / "documents", documents_of(long_tailed_lengths(60, 32), vocab_size=127))
    own = f"--pipeline-model-parallel-size 2 --position-embedding-type rope {flags} --data-path {data}"
    common, env = [*PLANNED, *shlex.split(own)], {"ATTACH": json.dumps(cases)}
    if said:
        finished = launch(2, CHANGED, "attached", *common, "--train-iters", 1, env=env)
        assert finished.returncode != 0
        assert said in finished.output
        return
    plain, stock, planned = (
        train(tmp_path / "run", 2, *schedule, iterations=2, change=change, tiny=common, env=env).steps
        for change, schedule in (
            ("", ["--epp-slices", 2]),
            # Megatron's attention in torch has no such sizes as keys of latents have.
            ("attached", ["--epp-latents", "off"] if "latents" in case else ["--epp-schedule", "stock"]),
            ("attached", ["--epp-slices", 2]),
        )
    )
    for iteration, step in planned.items():
        assert step["loss"] == pytest.approx(stock[iteration]["loss"], rel=TOLERANCE)
        assert step["grad_norm"] == pytest.approx(stock[iteration]["grad_norm"], rel=TOLERANCE)
        assert step["grad_norm"] != pytest.approx(plain[iteration]["grad_norm"], rel=1e-3)
