"""Arguments that `--epp` cannot honour are refused from them alone, by name, with numbers and with what to do instead."""

import argparse
import functools
import re

import pytest
import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.training.arguments import add_megatron_arguments

from megatron_epp.mcore.arguments import ArgumentError
from megatron_epp.mcore.arguments.consequences import prepare_epp_args
from megatron_epp.mcore.arguments.parser import add_epp_args
from megatron_epp.mcore.arguments.refusals import OF_DOCUMENTS
from megatron_epp.mcore.model.adopt import check_adopted
from megatron_epp.mcore.model.core_attention import RelayAttention
from megatron_epp.mcore.patches import install, patching
from megatron_epp.plan import EppError

MODEL = ["--num-layers", "8", "--hidden-size", "32", "--num-attention-heads", "4", "--attention-dropout", "0", "--epp"]


@functools.cache
def parser():
    return add_epp_args(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))


def arguments(*flags, processes=8, **values):
    """Megatron's own arguments for these flags, as they are before it validates them."""
    parsed = parser().parse_args([*MODEL, *map(str, flags)])
    parsed.rank, parsed.world_size = 0, processes
    return argparse.Namespace(**vars(parsed) | values)


def test_a_plain_model_is_taken():
    prepare_epp_args(arguments("--pipeline-model-parallel-size", 4, "--global-batch-size", 16))


WRONG = {
    "--disable-mamba-mem-eff-path": False,
    "--micro-batch-size": 4,
    "--eval-micro-batch-size": 4,
    "--attention-dropout": 0.1,
    "--cp-comm-type": ["allgather"],
    "--cuda-graph-impl": "local",
    "--dataloader-type": "cyclic",
    "--iterations-to-skip": [3],
    "--position-embedding-type": "mrope",
    "--cpu-offloading-num-layers": 2,
    "--num-distributed-optimizer-instances": 2,
}


@pytest.mark.parametrize("conflict", OF_DOCUMENTS, ids=lambda conflict: conflict.flag)
def test_every_flag_that_plans_cannot_honour_is_named_with_its_value_and_what_to_do(conflict):
    value = WRONG.get(conflict.flag, True)
    with pytest.raises(ArgumentError) as refusal:
        prepare_epp_args(arguments(**{conflict.attribute: value}))
    assert f"{conflict.flag} {value} ({conflict.advice})" in str(refusal.value)


@pytest.fixture
def command_line(monkeypatch):
    """Sets it for Megatron's parser, with this package's flags."""
    from megatron.training import arguments as megatron

    for name, patch in (("add_megatron_arguments", install._add_flags), ("parse_args", install._read_yaml)):
        monkeypatch.setattr(megatron, name, patching.around(getattr(megatron, name), patch))
    return lambda *flags: monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *flags])


def test_a_script_that_would_restart_in_its_process_is_refused_before_it_is_wrapped(command_line):
    """A refusal inside what is wrapped would be one more failure to restart after. Megatron's scripts begin like this."""
    from megatron.training.inprocess_restart import maybe_wrap_for_inprocess_restart as maybe_wrap

    command_line(*MODEL, "--inprocess-restart")
    with pytest.raises(ArgumentError, match=re.escape("--inprocess-restart True (leave it out: the watchdog of the run")):
        maybe_wrap(len)
    command_line(*MODEL)
    assert maybe_wrap(len) == (len, None)


def test_a_model_that_megatron_cannot_save_is_refused_before_it_trains():
    flags = ["--mtp-num-layers", 1, "--pipeline-model-parallel-size", 2, "--save", "somewhere"]
    with pytest.raises(ArgumentError, match="model that Megatron cannot save: add --untie"):
        prepare_epp_args(arguments(*flags, processes=2))
    prepare_epp_args(arguments(*flags, "--untie-embeddings-and-output-weights", processes=2))


def test_layers_shared_unevenly_on_purpose_are_megatrons_own_affair():
    prepare_epp_args(
        arguments("--pipeline-model-parallel-size", 4, "--decoder-first-pipeline-num-layers", 2, processes=4, num_layers=11)
    )


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("GMD-*E", "sparse attention (DSA) (D)"),
        ("*-/*", "multi-token"),
    ],
)
def test_layers_whose_state_slices_cannot_hand_on_are_named(pattern, named):
    with pytest.raises(EppError, match=re.escape(f"--epp cannot run {named}")) as refusal:
        prepare_epp_args(arguments("--hybrid-layer-pattern", pattern))
    assert f"--hybrid-layer-pattern {pattern}" in str(refusal.value)
    with pytest.raises(EppError, match=re.escape(f"--epp cannot run {named}")):
        prepare_epp_args(arguments("--hybrid-override-pattern", pattern))


def test_a_hybrid_model_of_attention_and_mlp_layers_is_taken():
    prepare_epp_args(arguments("--hybrid-layer-pattern", "*-|*-"))


class Hybrid(torch.nn.Module):
    """A model of Megatron's by its constructor alone."""

    def __init__(self, config, hybrid_stack_spec, hybrid_layer_pattern=None):
        super().__init__()
        self.layers = (hybrid_stack_spec, hybrid_layer_pattern)
        if isinstance(config, torch.nn.Module):
            self.decoder = config


def test_a_hybrid_model_that_a_script_builds_without_the_flag_is_looked_at_too(monkeypatch):
    from megatron.training import global_vars

    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", arguments())
    monkeypatch.setattr(Hybrid, "__init__", patching.around(Hybrid.__init__, install._adopt))
    with pytest.raises(EppError, match=re.escape("sparse attention (DSA) (D)")):
        Hybrid(None, "spec", hybrid_layer_pattern="D*")
    with pytest.raises(EppError, match="needs --hybrid-layer-pattern"):
        Hybrid(None, "spec")
    model = Hybrid(None, "spec", hybrid_layer_pattern="*-")
    assert model.layers == ("spec", "*-")
    check_adopted(model)


def relay(number):
    """Our attention of a layer, without what it computes with."""
    module = RelayAttention.__new__(RelayAttention)
    torch.nn.Module.__init__(module)
    module.layer_number = number
    return module


ONE = relay(2)


def mixers(**named):
    return torch.nn.ModuleList(torch.nn.ModuleDict({name: module}) for name, module in named.items())


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ({"self_attention": torch.nn.Conv1d(1, 1, 4)}, "decoder.0.self_attention (Conv1d) mixes tokens without the attention"),
        ({"self_attention": torch.nn.ModuleList([relay(1), torch.nn.Conv1d(1, 1, 4)])}, "decoder.0.self_attention.1 (Conv1d)"),
        ({"self_attention": relay(1), "mixer": torch.nn.Linear(1, 1)}, "decoder.1.mixer (Linear) mixes tokens without the att"),
        ({"self_attention": ONE, "mixer": ONE}, "decoder.0.self_attention and decoder.1.mixer are one attention in two layers"),
    ],
)
def test_layers_in_which_sequences_or_layers_would_be_mixed_up_are_refused_by_name(monkeypatch, layers, said):
    from megatron.training import global_vars

    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", arguments())
    monkeypatch.setattr(Hybrid, "__init__", patching.around(Hybrid.__init__, install._adopt))
    with pytest.raises(EppError, match=re.escape(said)):
        Hybrid(mixers(**layers), "spec", hybrid_layer_pattern="*-")
    pointwise = torch.nn.ModuleList([relay(2), torch.nn.Conv1d(1, 1, 1)])
    Hybrid(mixers(self_attention=pointwise, mixer=relay(1), cross_attention=IdentityOp()), "spec", hybrid_layer_pattern="*-")


def test_a_model_of_another_kind_is_refused_by_name():
    with pytest.raises(EppError, match="--epp trains GPTModel and HybridModel; the script builds a Namespace"):
        check_adopted(argparse.Namespace())
