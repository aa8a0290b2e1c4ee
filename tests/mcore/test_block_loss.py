"""Which models' losses go by blocks, and what is said where they cannot. That they train alike is in `test_matrix.py`."""

import functools
import logging
import re
import sys
import types
import typing

import pytest
import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear

from megatron_epp.cost.work import LinearTime
from megatron_epp.mcore.costs.sources import _by_blocks
from megatron_epp.mcore.model import block_loss as module
from megatron_epp.mcore.model.block_loss import BlockLoss, FusedLoss, block_loss, loss_obstacle, shard_logits
from megatron_epp.mcore.model.trained_rows import trained_rows
from megatron_epp.plan import EppError
from megatron_epp.tools.formulas import H100, analytic_profile
from megatron_epp.tools.formulas.library import load_flags, shape_of


class Group:
    def __init__(self, size):
        self.size = lambda: size


class Model(torch.nn.Module):
    """A model as far as its loss goes. `changes` are made to its output layer."""

    def __init__(self, layer_type=ColumnParallelLinear, autocast=False, fused=None, **changes):
        super().__init__()
        if fused is not None:
            self.fuse_linear_cross_entropy = fused
        self.output_layer = layer_type.__new__(layer_type)
        torch.nn.Module.__init__(self.output_layer)
        self.config = types.SimpleNamespace(enable_autocast=autocast, params_dtype=torch.bfloat16)
        usual = {"gather_output": False, "bias": None, "output_size_per_partition": 128, "input_size": 16, "tp_group": Group(1)}
        for name, value in (usual | {"gradient_accumulation_fusion": False} | changes).items():
            setattr(self.output_layer, name, value)


class OtherOutput(ColumnParallelLinear):
    """Somebody's own."""


def arguments(tokens="auto", seq_length=2**20):
    return types.SimpleNamespace(
        epp_loss_block_tokens=tokens,
        epp_chunk_tokens=None,
        seq_length=seq_length,
        padded_vocab_size=1024,
        tensor_model_parallel_size=2,
        context_parallel_size=1,
    )


def test_a_model_gets_the_blocks_that_the_flag_asks_for_and_their_workspace():
    assert block_loss(arguments(0), Model()) is None
    assert block_loss(arguments(100), Model()).block_tokens == 100
    assert block_loss(arguments(seq_length=2**20), Model()) is None
    assert block_loss(arguments(seq_length=2**20 + 1), Model()).block_tokens == 2**19
    sums, adds = (block_loss(arguments(100), Model(gradient_accumulation_fusion=fused)) for fused in (False, True))
    assert sums.workspace_bytes == 128 * (100 * (4 + 2) + 16 * (4 + 2))
    assert adds.workspace_bytes == 128 * (100 * (4 + 2) + 16 * 2)


def test_the_workspace_is_smaller_where_a_kernel_makes_gradients_in_the_place_of_logits(monkeypatch):
    kernel = types.SimpleNamespace(name="played")
    monkeypatch.setattr(module, "explain", lambda case: (None, "played") if case.is_shared else (kernel, ""))
    alone, shared = (block_loss(arguments(100), Model(tp_group=Group(size))) for size in (1, 2))
    assert (alone.kernel, shared.kernel) == (kernel, None)
    assert alone.workspace_bytes == 2 * 100 * (128 + 16) + 128 * 16 * (4 + 2)
    assert shared.workspace_bytes == 128 * (100 * (4 + 2) + 16 * (4 + 2))


def test_the_log_says_which_kernel_the_loss_is_by_and_why_not_another(caplog, monkeypatch):
    with caplog.at_level(logging.INFO):
        block_loss(arguments(100), Model())
        monkeypatch.setattr(module, "explain", lambda case: (types.SimpleNamespace(name="the best"), ""))
        block_loss(arguments(100), Model())
    assert [record.getMessage() for record in caplog.records] == [
        "loss by blocks of 100 tokens: in plain torch, not Liger's cross entropy: it runs on GPUs",
        "loss by blocks of 100 tokens: by the best",
    ]


OBSTACLES = {
    "the output layer is a OtherOutput": {"layer_type": OtherOutput},
    "the output layer has a bias": {"bias": torch.nn.Parameter(torch.zeros(1))},
    "autocast chooses the type of the logits": {"autocast": True},
    "ranks share the output layer's weight and gather it": {"gtp_remat_size": 2},
}


@pytest.mark.parametrize("reason", OBSTACLES)
def test_where_it_is_not_possible_it_is_refused_or_left_to_megatron_with_the_reason(reason, caplog):
    model = Model(**OBSTACLES[reason])
    with pytest.raises(EppError, match=f"--epp-loss-block-tokens 100 is not possible: {reason}; leave it out, or give 0"):
        block_loss(arguments(100), model)
    with caplog.at_level(logging.WARNING):
        assert block_loss(arguments(seq_length=2**22), model) is None
    assert reason in caplog.text


class OwnLoss(Model):
    def compute_language_model_loss(self, labels, logits):
        return -7 * logits


class MegatronsLoss(Model):
    forward, _postprocess = GPTModel.forward, GPTModel._postprocess
    compute_language_model_loss = GPTModel.compute_language_model_loss


class OwnForward(MegatronsLoss):
    def forward(self, *args):
        return super().forward(*args)


def test_functions_that_a_script_assigns_to_its_model_are_not_left_out():
    """A replacement would be called instead of them, and end with the class's own function."""
    loss, layer = MegatronsLoss(), MegatronsLoss()
    assert loss_obstacle(MegatronsLoss()) == ""
    loss.compute_language_model_loss = types.MethodType(OwnLoss.compute_language_model_loss, loss)
    layer.output_layer.forward = functools.partial(len)
    for model, name in ((loss, "compute_language_model_loss"), (layer, "output_layer.forward")):
        assert loss_obstacle(model) == f"MegatronsLoss has its own {name}"
        assert trained_rows(model) is None
    assert trained_rows(MegatronsLoss()) is not None
    assert trained_rows(OwnLoss()) is trained_rows(types.SimpleNamespace()) is None


GATHERS = {"gather_output": True, "tp_group": Group(2)}


def test_megatrons_loss_gets_shards_of_logits_and_a_loss_of_ones_own_what_it_was_written_for():
    for model, gathers in ((MegatronsLoss(**GATHERS), False), (OwnLoss(**GATHERS), True), (Model(gather_output=True), True)):
        shard_logits(model)
        assert model.output_layer.gather_output is gathers
    assert block_loss(arguments(100), MegatronsLoss(**GATHERS)).block_tokens == 100  # which gathers nothing


def test_whole_logits_of_unknown_origin_are_refused_where_megatrons_loss_takes_a_shard():
    says = r"gathers its logits \(parallel_output=False; {}\), and Megatron's loss .* a shard of 2 tensor-parallel ranks"
    with pytest.raises(EppError, match=says.format("OwnForward has its own forward")):
        shard_logits(OwnForward(**GATHERS))
    with pytest.raises(EppError, match=says.format("a OtherOutput")):
        shard_logits(MegatronsLoss(OtherOutput, **GATHERS))


@pytest.fixture
def fused_kernel(monkeypatch):
    """A Megatron as its development branch is, where an output layer can be fused with the loss; on a GPU that can or not."""

    def play(failure):
        def platform():
            if failure:
                raise ValueError(failure)

        layers, kernels = (types.ModuleType(name) for name in ("linear_cross_entropy", "fused_linear_cross_entropy"))
        layers.LinearCrossEntropyModule, kernels.Platform = LinearCrossEntropyModule, platform
        monkeypatch.setitem(sys.modules, "megatron.core.transformer.linear_cross_entropy", layers)
        monkeypatch.setitem(sys.modules, "megatron.core.fusions.fused_linear_cross_entropy", kernels)

    return play


class LinearCrossEntropyModule(ColumnParallelLinear):
    """A product, or, asked for it, that and the loss."""


def test_an_output_layer_that_could_be_fused_with_the_loss_goes_by_blocks_as_any_other(fused_kernel):
    fused_kernel("")
    assert isinstance(block_loss(arguments(100), Model(LinearCrossEntropyModule, fused=False)), BlockLoss)
    assert block_loss(arguments(seq_length=8), Model(LinearCrossEntropyModule, fused=False)) is None


@pytest.mark.parametrize("tokens", ["auto", "0"])
def test_megatrons_fused_kernel_is_left_to_itself_where_it_is_asked_for_and_runs(fused_kernel, tokens):
    fused_kernel("")
    model = Model(LinearCrossEntropyModule, fused=True)
    before = dict(vars(model))
    loss = block_loss(arguments(tokens), model)
    assert isinstance(loss, FusedLoss)
    assert loss.workspace_bytes == 0
    with loss.instead():
        assert vars(model) == before


@pytest.mark.parametrize(
    ("tokens", "failure", "blocks", "why"),
    [
        ("auto", "Unsupported architecture: 9", 2**19, r"it cannot run here \(ValueError: Unsupported architecture: 9\)"),
        (100, "Unsupported architecture: 9", 100, "--epp-loss-block-tokens is given too"),
        (100, "", 100, "--epp-loss-block-tokens is given too"),
    ],
)
def test_where_the_fused_kernel_cannot_run_or_blocks_are_asked_for_they_run(fused_kernel, caplog, tokens, failure, blocks, why):
    """However short sequences are: somebody wants no logits."""
    fused_kernel(failure)
    assert block_loss(arguments(tokens, seq_length=8), Model(LinearCrossEntropyModule, fused=True)).block_tokens == blocks
    assert re.search(why, caplog.text)


def test_where_neither_can_be_both_reasons_are_given(fused_kernel):
    fused_kernel("Unsupported architecture: 9")
    said = "--cross-entropy-fusion-impl linear is not possible: .* architecture: 9.*; nor are blocks of tokens in its place: {}"
    with pytest.raises(EppError, match=said.format("--epp-loss-block-tokens is 0. Leave one of the flags out")):
        block_loss(arguments(0), Model(LinearCrossEntropyModule, fused=True))
    with pytest.raises(EppError, match=said.format("the output layer has a bias")):
        block_loss(arguments(), Model(LinearCrossEntropyModule, fused=True, bias=torch.nn.Parameter(torch.zeros(1))))


def test_by_blocks_a_layer_that_is_asked_for_the_loss_itself_gives_it(fused_kernel, monkeypatch):
    """The model of the development branch asks its output layer for losses, and takes those of others from logits."""
    fused_kernel("Unsupported architecture: 9")
    model = Model(LinearCrossEntropyModule, fused=True, weight=None)
    loss = block_loss(arguments(), model)
    monkeypatch.setattr(loss, "_losses", lambda labels, hidden: (labels, hidden, loss._weight))
    with loss.instead():
        asked = model.output_layer(input_="hidden", weight="weight", output_cross_entropy_loss=True, labels="labels")
        logits, _ = model.output_layer(input_="hidden", weight="weight", runtime_gather_output=None)
        assert asked == model.compute_language_model_loss("labels", logits) == ("labels", "hidden", "weight")


def test_no_supported_release_has_a_choice_of_that_kernel():
    """Were there one, this file's stand-ins would have to give way to it."""
    choices = typing.get_type_hints(ModelParallelConfig)["cross_entropy_fusion_impl"]
    assert "linear" not in typing.get_args(choices)


def test_times_of_an_ordinary_head_become_those_of_one_by_blocks_once():
    flags = load_flags("llama3-8b")
    shapes = [shape_of(flags | {"epp_loss_block_tokens": tokens}) for tokens in (0, 2048)]
    ordinary, by_blocks = (analytic_profile(shape, H100).costs([16, 16]).stages[1] for shape in shapes)
    product = ordinary.line_of_ends("weight")
    for found in (_by_blocks(ordinary, product, 7), _by_blocks(_by_blocks(ordinary, LinearTime(), 5), product, 7)):
        assert found.line_of_ends("backward").per_token_us == pytest.approx(by_blocks.line_of_ends("backward").per_token_us)
        assert found.line_of_ends("backward").fixed_us == pytest.approx(by_blocks.line_of_ends("backward").fixed_us)
        assert found.line_of_ends("weight") == by_blocks.line_of_ends("weight")
        assert found.workspace_bytes == 7
