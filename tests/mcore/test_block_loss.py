"""Which models' losses go by blocks, and what is said where they cannot. That they train alike is in `test_parity.py`."""

import logging
import types

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear

from megatron_epp.cost import H100, analytic_profile
from megatron_epp.cost.library import load_flags, shape_of
from megatron_epp.mcore.block_loss import block_loss
from megatron_epp.mcore.costs import _by_blocks
from megatron_epp.schedule import EppError


class Model(torch.nn.Module):
    """A model as far as its loss goes. `changes` are made to its output layer."""

    def __init__(self, layer_type=ColumnParallelLinear, autocast=False, **changes):
        super().__init__()
        self.output_layer = layer_type.__new__(layer_type)
        torch.nn.Module.__init__(self.output_layer)
        self.config = types.SimpleNamespace(enable_autocast=autocast, params_dtype=torch.bfloat16)
        usual = {"gather_output": False, "bias": None, "output_size_per_partition": 128, "input_size": 16}
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


def test_a_model_gets_the_blocks_that_the_flag_asks_for():
    assert block_loss(arguments(0), Model()) is None
    assert block_loss(arguments(100), Model()).block_tokens == 100
    assert block_loss(arguments(seq_length=2**20), Model()) is None
    assert block_loss(arguments(seq_length=2**20 + 1), Model()).block_tokens == 2**19


def test_the_workspace_is_that_of_the_output_layer():
    sums, adds = (block_loss(arguments(100), Model(gradient_accumulation_fusion=fused)) for fused in (False, True))
    assert sums.workspace_bytes == 128 * (100 * (4 + 2) + 16 * (4 + 2))
    assert adds.workspace_bytes == 128 * (100 * (4 + 2) + 16 * 2)


OBSTACLES = {
    "the output layer is a OtherOutput": {"layer_type": OtherOutput},
    "the output layer has a bias": {"bias": torch.nn.Parameter(torch.zeros(1))},
    "the output layer gathers its logits": {"gather_output": True},
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


def test_times_of_an_ordinary_head_become_those_of_one_by_blocks_once():
    flags = load_flags("llama3-8b")
    ordinary, by_blocks = (
        analytic_profile(shape_of(flags | {"epp_loss_block_tokens": tokens}), H100).costs([16, 16]).stages[1]
        for tokens in (0, 2048)
    )
    for found in (_by_blocks(ordinary, 7), _by_blocks(_by_blocks(ordinary, 5), 7)):
        assert found.extra_backward.per_token_us == pytest.approx(by_blocks.extra_backward.per_token_us)
        assert found.extra_backward.fixed_us == pytest.approx(by_blocks.extra_backward.fixed_us)
        assert found.extra_weight == by_blocks.extra_weight
        assert found.workspace_bytes == 7
