"""Changes that `--epp` makes to Megatron: a few flags, a schedule of the same signature, our attention in any layer spec."""

import argparse
import functools
import inspect

import pytest
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.training import global_vars

from megatron_epp.mcore.arguments.parser import add_epp_args
from megatron_epp.mcore.iteration.schedule_call import ScheduleCall
from megatron_epp.mcore.model.adopt import relayed
from megatron_epp.mcore.model.core_attention import RelayAttention
from megatron_epp.mcore.patches import install
from megatron_epp.mcore.start import sliced_start
from megatron_epp.plan import EppError


def core_attention(spec):
    return spec.submodules.self_attention.submodules.core_attention


def test_the_schedule_takes_exactly_what_megatron_passes():
    ours = inspect.signature(ScheduleCall).parameters
    stock = inspect.signature(schedules.forward_backward_pipelining_without_interleaving).parameters
    assert list(ours) == list(stock)
    for name, parameter in stock.items():
        assert ours[name].kind is parameter.kind
        assert ours[name].default == parameter.default


def test_every_flag_is_added_once_and_has_help():
    parser = add_epp_args(add_epp_args(argparse.ArgumentParser()))
    ours = [action for action in parser._actions if any(o.startswith("--epp") for o in action.option_strings)]
    assert len(ours) == len({action.dest for action in ours}) > 10
    assert all(action.help for action in ours)


@pytest.mark.parametrize(("epp", "expected"), [(True, 4096), (False, 1 << 20)])
def test_compiled_functions_are_warmed_up_on_a_chunk_and_not_on_the_context(monkeypatch, epp, expected):
    sizes = {"seq_length": 1 << 20, "context_parallel_size": 2, "tensor_model_parallel_size": 1}
    args, seen, prepared = argparse.Namespace(epp=epp, **sizes), [], []
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)
    monkeypatch.setattr(sliced_start, "prepare", prepared.append)
    install._warm_up_on_a_chunk(lambda tp_size=None: seen.append(args.seq_length), tp_size=1)
    assert seen == [expected]
    assert prepared == ([args] if epp else [])
    assert args.seq_length == 1 << 20


def test_layer_specs_get_our_attention_and_the_originals_keep_their_own():
    specs = [get_gpt_layer_local_spec(normalization="RMSNorm"), get_gpt_layer_local_spec(qk_layernorm=True)]
    assert [core_attention(spec) for spec in relayed(specs)] == [RelayAttention] * 2
    assert [core_attention(spec) for spec in specs] == [DotProductAttention] * 2


class OwnAttention(DotProductAttention):
    """Somebody's own."""


def test_a_core_attention_that_is_not_megatrons_is_refused_by_name():
    specs = ModuleSpec(OwnAttention), ModuleSpec((__name__, "OwnAttention"))
    for attention in (OwnAttention, functools.partial(OwnAttention), *specs):
        spec = get_gpt_layer_local_spec()
        spec.submodules.self_attention.submodules.core_attention = attention
        with pytest.raises(EppError, match="in the place of OwnAttention, which is not Megatron's"):
            relayed(spec)
