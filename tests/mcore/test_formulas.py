"""What a training's formulas take from Megatron's arguments."""

from argparse import Namespace

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from megatron_epp.cost import ModelShape
from megatron_epp.cost.attention import CUDNN, FLASH_2, FLASH_3
from megatron_epp.mcore.costs import shape as shapes
from megatron_epp.mcore.iteration import wrap
from megatron_epp.runtime.attention import kernels
from tests.mcore.test_refusals import arguments

EXPERTS = ("--num-experts", 8, "--tensor-model-parallel-size", 4, "--expert-model-parallel-size", 2)


def arguments_of(*flags, **values):
    return arguments(*flags, padded_vocab_size=1024, params_dtype=torch.bfloat16, **values)


def test_experts_are_divided_as_megatron_divides_them():
    divided, whole = (shapes.model_shape(arguments_of(*EXPERTS, expert_tensor_parallel_size=ranks)) for ranks in (4, 1))
    assert (divided.ranks_of_an_expert, whole.ranks_of_an_expert) == (4, 1)
    assert whole.expert_parameters_on_rank == 4 * divided.expert_parameters_on_rank


@pytest.mark.parametrize(
    ("chosen", "name"),
    [
        (kernels.TRANSFORMER_ENGINE, CUDNN),
        (kernels.FLASH_ATTN_3, FLASH_3),
        (kernels.FLASH_ATTN, FLASH_2),
        (kernels.TORCH_FLASH, FLASH_2),
        (kernels.EXACT_ATTENTION, ""),
        (None, ""),
    ],
)
def test_times_are_of_the_attention_kernel_that_the_run_takes(monkeypatch, chosen, name):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(kernels, "explain", lambda case, preference: asked.append((case, preference)) or (chosen, []))
    args = arguments_of("--attention-backend", "flash")
    shape = shapes.model_shape(args)
    assert shapes._rates(args, shape).attention_kernel == name
    ((case, preference),) = asked
    assert preference == "flash"
    assert (case.channels, case.query_heads, case.kv_heads) == (shape.head_width, shape.num_attention_heads, 4)


def test_a_loop_of_ones_own_tells_what_an_attention_kernel_is_chosen_by(monkeypatch):
    config = TransformerConfig(num_layers=2, hidden_size=512, num_attention_heads=4, bf16=True, params_dtype=torch.bfloat16)
    args = Namespace(**{name: getattr(config, name, None) for name in wrap._OF_MODEL})
    shape = ModelShape(num_layers=2, hidden_size=512, ffn_hidden_size=1024, num_attention_heads=4, vocab_size=128)
    asked = []
    monkeypatch.setattr(
        kernels, "explain", lambda case, preference: asked.append((case, preference)) or (kernels.TORCH_FLASH, [])
    )
    assert shapes._kernel(args, shape)
    ((case, preference),) = asked
    assert (case.dtype, preference) == (torch.bfloat16, "auto")
