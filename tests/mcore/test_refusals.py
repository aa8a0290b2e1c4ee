"""Flags that `--epp` cannot honour are refused from them alone, by name, with numbers and what to do instead; so are models.

A row of `REFUSED` is flags and what their refusal must hold; words between may change. `test_mistakes.py` has other doors.
"""

import argparse
import functools
import re
import shlex
import subprocess
import sys

import pytest
import torch
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.training.arguments import add_megatron_arguments

from megatron_epp.losses import Average
from megatron_epp.mcore.arguments import ArgumentError
from megatron_epp.mcore.arguments.consequences import EOD, IDLE, IMPLIED, prepare_epp_args
from megatron_epp.mcore.arguments.layout import BETWEEN_STAGES, token_multiple
from megatron_epp.mcore.arguments.parser import add_epp_args
from megatron_epp.mcore.arguments.refusals import OF_DOCUMENTS
from megatron_epp.mcore.arguments.rule import BOTH
from megatron_epp.mcore.arguments.setting_checks import REFUSED_LAYERS, pattern_problem
from megatron_epp.mcore.model.adopt import check_adopted
from megatron_epp.mcore.model.adopt_built import refusal
from megatron_epp.mcore.model.core_attention import RelayAttention
from megatron_epp.mcore.model.kinds import KINDS
from megatron_epp.mcore.patches import install, patching
from megatron_epp.mcore.training import caps
from megatron_epp.plan import EppError
from megatron_epp.tools.formulas.huggingface import flags_of_config
from tests.pure.test_cost_files import DENSE, GATED_DELTA, LATENT, NARROW, STATES
from tests.support.mcore.launch import REPOSITORY

MODEL = ["--num-layers", "8", "--hidden-size", "32", "--num-attention-heads", "4", "--attention-dropout", "0", "--epp"]
SIZES = "--num-attention-heads 8 --seq-length 64 --max-position-embeddings 64 --global-batch-size 48 --hidden-dropout 0"

PP, TP, CP = "--pipeline-model-parallel-size", "--tensor-model-parallel-size", "--context-parallel-size"
PER_STAGE, PER_RANK = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
LAYOUT, PATTERN = "--pipeline-model-parallel-layout", "--hybrid-layer-pattern"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
BALANCING, DISPATCHER = "--moe-router-load-balancing-type", "--moe-token-dispatcher-type"
BACKEND = "--moe-flex-dispatcher-backend"
EP = "--expert-model-parallel-size"
EXPERTS = f"--num-experts 8 {EP} 4 {DISPATCHER} alltoall {BALANCING} aux_loss"
FLEX = f"{EXPERTS} {DISPATCHER} flex"
CAPACITY = f"--num-experts 4 {DISPATCHER} alltoall --moe-pad-expert-input-to-capacity"
PADDING = (f"{CP} 2", f"{TP} 2 --sequence-parallel", "--epp-schedule packed")
OVERLAP = f"--epp-overlap-exchanges {TP} 2"
TOKENS, STREAM = "--epp-batch-tokens 64", "--epp-documents stream"
COUNTING_SAMPLES = ("--lr-decay-samples", "--lr-warmup-samples", "--override-ckpt-iteration")
PARTING = ("--reset-position-ids", "--reset-attention-mask", "--dataloader-inter-document-masking")
SAMPLES = "--epp-samples a --epp-loss tests.support.mcore.own_losses"
HELIX = "--epp-planner helixpipe"
REFUSED = [
    # planning
    (HELIX, "--epp-planner helixpipe needs two ranks or more", "--num-layers 8"),
    (f"{HELIX} {PP} 2", "has a layer on each stage", f"add {PER_RANK} 4"),
    (f"{HELIX} {PP} 2 {PER_RANK} 4 --num-experts 4", "--num-experts 4 does not go with --epp-planner helixpipe", BOTH),
    (f"{HELIX} {PP} 8 --epp-costs learn", "--epp-costs learn does not go with --epp-planner helixpipe", "use analytic"),
    (f"{HELIX} {PP} 8 --save a --ckpt-format torch", "--save a by --ckpt-format torch does not go with", HELIX),
    (f"{HELIX} {PP} 8 --epp-offload", "--epp-planner helixpipe", "--epp-offload", "--epp-planner greedy"),
    (f"--epp-planner flexsp {CP} 6", "--epp-planner flexsp", "2, 4, 8, ... context-parallel ranks", f"{CP} is 6"),
    (f"--epp-planner flexsp {CP} 4 --epp-costs learn", "--epp-planner flexsp", "--epp-costs learn", "use analytic"),
    (f"--epp-planner flexsp {CP} 4 --num-experts 8", "--epp-planner flexsp", "go with --num-experts", "among all ranks"),
    ("--epp-offload --epp-planner 1f1b", "--epp-planner 1f1b", "--epp-offload", "--epp-planner greedy"),
    ("--epp-offload on --epp-recompute 1", "--epp-offload", "--epp-recompute 1", "leave it at auto"),
    ("--epp-offload --epp-planner mine:own --epp-recompute 1", "--epp-offload", "--epp-recompute 1", "leave it at auto"),
    ("--epp-host-memory-gb 4 --epp-recompute 1", "--epp-host-memory-gb", "--epp-recompute 1", "leave it at auto"),
    ("--epp-host-memory-gb 4 --epp-planner 1f1b", "--epp-host-memory-gb", "--epp-planner greedy"),
    ("--epp-offload --epp-host-memory-gb 0", "--epp-host-memory-gb is 0.0", "a positive number up to 1,000,000,000"),
    ("--epp-order given", "--epp-order given", "--epp-microbatches user"),
    ("--epp-costs measure", "--epp-costs measure", "use learn"),
    ("--epp-fragmentation-share 5", "--epp-fragmentation-share is 5.0", "a share, 0 to 1"),
    ("--epp-loss-block-tokens some", "--epp-loss-block-tokens is 'some'", "auto or a number of tokens"),
    ("--epp-loss-block-tokens -1", "--epp-loss-block-tokens is", "auto or a number"),
    ("--epp-recompute ²", "--epp-recompute is", "auto or a number"),
    ("--epp-recompute nan", "--epp-recompute is", "auto or a number"),
    (f"--epp-recompute {'9' * 5000}", "--epp-recompute is", "auto or a number"),
    ("--epp-overlap-exchanges", "--epp-overlap-exchanges", f"{TP} 1", "no exchange"),
    (f"{OVERLAP} --epp-planner stp", "--epp-overlap-exchanges", "--epp-planner greedy, not stp", "leave one of them out"),
    (f"{OVERLAP} --hidden-dropout 0.25", "--epp-overlap-exchanges", "--hidden-dropout 0.25"),
    (f"{OVERLAP} --tp-comm-overlap", "--epp-overlap-exchanges", "--tp-comm-overlap"),
    (f"{OVERLAP} --timing-log-level 2", "--epp-overlap-exchanges", "--timing-log-level 2"),
    (f"{OVERLAP} --nvtx-ranges", "--epp-overlap-exchanges", "--nvtx-ranges"),
    ("--transformer-impl transformer_engine --delay-wgrad-compute", "--delay-wgrad-compute", "--epp-split-weight", "leave it"),
    # experts
    (f"{EP} 4", f"{EP} 4", "a model with --num-experts"),
    (f"{EXPERTS} --num-experts 6", "--num-experts 6", f"{EP} 4", "multiple of 4"),
    (f"{FLEX} {BACKEND} ncclep", f"{BACKEND} ncclep", "a fixed number of tokens"),
    (f"{FLEX} {BACKEND} hybridep --moe-expert-rank-capacity-factor 2", "--moe-expert-rank-capacity-factor 2.0 drops tokens"),
    (f"{FLEX} {BACKEND} hybridep --moe-pad-expert-input-to-capacity", "--moe-pad-expert-input-to-capacity", BACKEND),
    (f"{FLEX} {BACKEND} deepep {EP} 1", "flex by deepep needs several ranks", "all experts are on each"),
    (f"{EXPERTS} {DISPATCHER} allgather", f"{DISPATCHER} allgather", "equally many tokens"),
    (f"{EXPERTS} --moe-pad-expert-input-to-capacity", "--moe-pad-expert-input-to-capacity", "equally many tokens"),
    *((f"{CAPACITY} {flags}", "counts all tokens of a chunk, and its padding", flags.split()[-1]) for flags in PADDING),
    (f"{EXPERTS} {BALANCING} global_aux_loss", f"{BALANCING} global_aux_loss"),
    (f"{EXPERTS} {BALANCING} aux_loss quantile_balancing", f"{BALANCING} quantile_balancing"),
    (f"{EXPERTS} --epp-schedule packed", "--epp-schedule packed", "use padded"),
    (f"{EXPERTS} --epp-planner stp", "replicas are planned together", "--epp-planner greedy"),
    # stages
    (f"{PP} 2 {PER_RANK} 3 --epp-planner 1f1b", "--num-layers 8", f"{PP} 2", "multiple"),
    (f"{PP} 2 {PER_RANK} 0", f"{PER_RANK} 0", "1 or more"),
    (f"{PP} 2 --epp-placement v --epp-planner 1f1b", "v needs several stages", f"{PER_RANK} 2"),
    (f"{PP} 2 {PER_RANK} 2 --epp-schedule stock --epp-placement v", "--epp-placement v is for --epp-schedule elastic", "leave"),
    (f"{PP} 2 {PER_RANK} 2 --epp-schedule packed", "packed", "another number of microbatches"),
    (f"{PP} 2 {PER_RANK} 2 --epp-schedule stock --global-batch-size 24", "--global-batch-size 24", "a multiple of 48"),
    # attention and layers
    (f"{CP} 2 --cp-comm-type allgather", "--cp-comm-type ['allgather']"),
    (f"{CP} 2 --epp-schedule stock", "--epp-schedule stock", "--epp-schedule whole"),
    (f"{TP} 2 {CP} 4 --sequence-parallel --epp-slices 10", "--seq-length 64", "10 slices of at least 8", "raise it to 80"),
    (f"--mtp-num-layers 1 {PP} 2 --save somewhere", "Megatron cannot save", "add --untie-embeddings-and-output-weights"),
    (f"{PATTERN} GMD-*E", f"{PATTERN} GMD-*E", "sparse attention (DSA) (D)"),
    ("--hybrid-override-pattern GMD-*E", "sparse attention (DSA) (D)"),
    # batches and losses of one's own
    *((f"{TOKENS} {flag} 80", f"{flag} 80") for flag in COUNTING_SAMPLES),
    (f"{TOKENS} --rampup-batch-size 2 2 80", "--epp cannot honour --rampup-batch-size"),
    (f"{TOKENS} --epp-schedule stock", "--epp-batch-tokens 64 is for --epp-schedule elastic, not --epp-schedule stock"),
    (f"{TOKENS} --epp-documents stream", "--epp-batch-tokens 64 is not for --epp-documents stream"),
    *((f"{STREAM} {flag}", f"{flag} True does not go with {STREAM}", "leave it out") for flag in PARTING),
    ("--epp-samples a b c", "--epp-samples", "a file for training and one for evaluation"),
    ("--epp-samples a --epp-schedule stock", "is for --epp-schedule elastic, not --epp-schedule stock"),
    (f"{SAMPLES}:GRPO {PP} 2 --epp-vocab-parallel on", "--epp-loss", "does not go with --epp-vocab-parallel on", "leave it"),
    (f"{SAMPLES}:GRPO --mtp-num-layers 1", "trains no multi-token prediction"),
    (f"{SAMPLES}:VALUES", "reads values", "in the place of the output layer: pass --untie-embeddings-and-output-weights"),
    (f"{SAMPLES}:GRPO --num-experts 4 --moe-aux-loss-coeff 0.01", "routers are divided by tokens", "--moe-aux-loss-coeff 0"),
    # others
    ("--epp-latents on", "--epp-latents on", "--multi-latent-attention", "leave it out"),
    ("--eval-micro-batch-size 4", "--eval-micro-batch-size 4"),
    ("--dataloader-type cyclic", "--dataloader-type cyclic"),
    ("--iterations-to-skip 3", "--iterations-to-skip [3]"),
    ("--num-distributed-optimizer-instances 2", "--num-distributed-optimizer-instances 2"),
    ("--inprocess-restart", "--inprocess-restart True", "leave it out", "watchdog"),
]
TAKEN = [
    f"{PP} 4 --global-batch-size 96", "--epp-loss-block-tokens 0", "--epp-offload off --epp-planner zb-v",
    "--epp-offload --epp-planner sppo", "--epp-recompute 1 --epp-planner 1f1b",
    "--epp-offload --epp-host-memory-gb 4 --epp-recompute-modes full", f"{OVERLAP} --timing-log-level 1", EXPERTS,
    f"{FLEX} {BACKEND} deepep", f"{FLEX} {BACKEND} hybridep", f"{FLEX} {BACKEND} deepep {EP} 1 {TP} 2 --sequence-parallel",
    f"{EXPERTS} {BALANCING} aux_loss seq_aux_loss", f"{EXPERTS} --epp-schedule stock --epp-planner stp",
    f"--num-experts 3 {DISPATCHER} allgather", f"{PP} 2 {PER_STAGE} 2", f"{PP} 2 {PER_RANK} 4", f"{PP} 2 {PER_RANK} 1",
    f"{PP} 2 {LAYOUT} 'Ett|t|tt|tttL'", f"{PP} 2 {LAYOUT} 'E|t*8||L'", f"{PP} 4 {LAYOUT} 'E(t|)*7tL'", f"{PP} 2 {FIRST} 2",
    f"{PP} 2 {FIRST} 2 {LAST} 6 {PER_RANK} 2", f"{PP} 4 --num-layers 11 {FIRST} 2",
    f"{PP} 2 --num-layers 6 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split {PER_RANK} 2",
    f"{PP} 2 {PER_RANK} 2 --epp-placement looped", f"{PP} 2 {PER_RANK} 2 --epp-placement v",
    f"{PP} 2 {PER_RANK} 2 --epp-schedule stock", f"{CP} 3", f"{TP} 2 {CP} 8 --cp-comm-type p2p",
    f"{TP} 8 {CP} 2 --cp-comm-type a2a", f"--mtp-num-layers 1 {PP} 2 --save somewhere --untie-embeddings-and-output-weights",
    f"{HELIX} {PP} 2 {PER_RANK} 4", f"{HELIX} {PP} 8", f"{PATTERN} *-|*-", f"{TOKENS} --lr-warmup-samples 0", CAPACITY, STREAM,
    f"{SAMPLES}:dapo --num-experts 4 --moe-aux-loss-coeff 0.01",
]  # fmt: skip


@functools.cache
def parser():
    return add_epp_args(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))


def arguments(*flags, processes=8, **values):
    """Megatron's own arguments for these flags, as they are before it validates them."""
    parsed = parser().parse_args([*MODEL, *map(str, flags)])
    parsed.rank, parsed.world_size = 0, processes
    return argparse.Namespace(**vars(parsed) | values)


def of(flags, **values):
    return arguments(*shlex.split(SIZES), *shlex.split(flags), processes=48, **values)


@pytest.mark.parametrize(("flags", "facts"), [(flags, facts) for flags, *facts in REFUSED])
def test_what_plans_cannot_honour_is_refused_with_its_name_its_number_and_what_to_do(flags, facts):
    with pytest.raises(EppError) as refused:
        prepare_epp_args(of(flags))
    assert [fact for fact in facts if fact not in str(refused.value)] == [], refused.value


@pytest.mark.parametrize("flags", TAKEN)
def test_what_plans_can_honour_is_taken(flags):
    prepare_epp_args(of(flags))


def test_flags_and_defaults_are_megatrons():
    """What Megatron has where no flag is given is refused nowhere, and told nowhere."""
    defaults = {option: (action.dest, action.default) for action in parser()._actions for option in action.option_strings}
    for row in (*OF_DOCUMENTS, *IMPLIED, *IDLE, EOD):
        if row.flag not in ("--attention-dropout", "--micro-batch-size"):  # which a run has to give
            dest, default = defaults.get(row.flag, (row.attribute, row.allowed[0]))  # some releases lack it
            assert dest == row.attribute
            assert default in row.allowed, row.flag


NUMBERS = [action for action in add_epp_args(argparse.ArgumentParser())._actions if action.type in (int, float)]


@pytest.mark.parametrize("flag", NUMBERS, ids=lambda action: action.dest)
def test_no_flag_takes_what_is_no_finite_number(flag):
    """Nor one below zero, or so large that it means none."""
    needed = {"epp_host_memory_gb": "--epp-offload", "epp_trace": "--epp-report-dir reports"}.get(flag.dest, "")
    for value in ["nan", "inf", "-1", "1e300"] if flag.type is float else ["-1", "0", "9" * 30]:
        with pytest.raises(ArgumentError, match=f"{flag.option_strings[0]} is .*; it must be"):
            prepare_epp_args(of(f"{needed} {flag.option_strings[0]}={value}"))


@pytest.mark.parametrize("body", [DENSE, LATENT, NARROW, GATED_DELTA, STATES], ids=lambda body: body["model_type"])
def test_every_flag_of_a_hugging_face_config_is_one_of_megatrons(body):
    known = {option[2:].replace("-", "_") for action in parser()._actions for option in action.option_strings}
    assert flags_of_config(body).keys() <= known


def test_a_script_that_would_restart_in_its_process_is_refused_before_it_is_wrapped(monkeypatch):
    """A refusal inside what is wrapped would be one more failure to restart after. Megatron's scripts begin like this."""
    from megatron.training import arguments as megatron
    from megatron.training.inprocess_restart import maybe_wrap_for_inprocess_restart as maybe_wrap

    for name, patch in (("add_megatron_arguments", install._add_flags), ("parse_args", install._read_yaml)):
        monkeypatch.setattr(megatron, name, patching.around(getattr(megatron, name), patch))
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *MODEL, "--inprocess-restart"])
    with pytest.raises(ArgumentError, match="--inprocess-restart True"):
        maybe_wrap(len)
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *MODEL])
    assert maybe_wrap(len) == (len, None)


@pytest.mark.parametrize("has_gpu", [True, False])
def test_offload_is_left_to_plans_that_may_have_copies_on_gpus_and_with_host_memory(has_gpu, monkeypatch):
    monkeypatch.setattr(caps.torch.cuda, "is_available", lambda: has_gpu)
    assert caps.offloads(of("")) == has_gpu
    assert caps.offloads(of("--epp-host-memory-gb 4"))
    assert caps.offloads(of("--epp-offload"))
    for no_copies in ("--epp-offload off", "--epp-planner 1f1b", "--epp-recompute 1", "--epp-order given"):
        assert not caps.offloads(of(no_copies))


def test_transformer_engines_layers_put_off_weight_gradients_where_plans_split_them():
    def delays(flags):
        prepare_epp_args(args := of(flags))
        return args.delay_wgrad_compute

    split, engine = "--epp-split-weight-gradient", "--transformer-impl transformer_engine"
    assert delays(f"{split} {engine}")
    assert not any(map(delays, (engine, f"{split} --transformer-impl local", f"{split} --epp-schedule whole {engine}")))


def test_chunks_are_padded_to_what_the_ranks_that_share_tokens_divide():
    assert token_multiple(of(f"{TP} 2 {CP} 4")) == 4
    assert token_multiple(of(f"{TP} 2 {CP} 4 --sequence-parallel")) == 8


def test_every_layer_that_megatron_has_is_in_the_table_of_kinds_or_refused_by_name():
    symbols = {value for name, value in vars(Symbols).items() if name.isupper() and isinstance(value, str)}
    run = {kind.symbol for kind in KINDS if kind.symbol}
    assert symbols == {*run, *REFUSED_LAYERS, BETWEEN_STAGES}
    for symbol in symbols - {*run, BETWEEN_STAGES}:
        assert f"{REFUSED_LAYERS[symbol]} ({symbol})" in pattern_problem(f"*-{symbol}")
    assert [pattern_problem(f"*-|{symbol}-") for symbol in run] == [""] * len(run)
    assert "unknown (Z)" in pattern_problem("*Z-"), "a layer of a later Megatron"


def test_the_table_of_kinds_is_read_without_megatron_and_torch():
    """Commands on other machines check flags by it."""
    code = "import sys; from megatron_epp.mcore.model.kinds import KINDS; assert len(KINDS) > 3; "
    code += "sys.exit(bool({'torch', 'megatron.core'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0


OF_SAMPLES = {
    "allgather": (
        {"moe_token_dispatcher_type": "allgather", "expert_model_parallel_size": 2},
        "moe_token_dispatcher_type='allgather' needs equally many tokens on all of expert_model_parallel_size=2 ranks",
    ),
    "balancing": (
        {"moe_router_load_balancing_type": ["aux_loss", "quantile_balancing"]},
        "a plan cannot honour moe_router_load_balancing_type='quantile_balancing'; there are aux_loss, none",
    ),
    "hybridep": ({"moe_flex_dispatcher_backend": "hybridep"}, "hybridep' needs equally many tokens"),
    "ncclep": ({"moe_flex_dispatcher_backend": "ncclep"}, "moe_flex_dispatcher_backend='ncclep' has buffers for"),
    "deepep": ({}, ""),
    "dropout": ({"attention_dropout": 0.1, "qk_clip": True}, "attention_dropout=0.1 (set it to 0); qk_clip=True (leave"),
    "recompute": ({"recompute_granularity": "full"}, "recompute_granularity='full': leave it out"),
    "router losses": ({"moe_aux_loss_coeff": 1e-2}, "losses of routers are divided by microbatches: give moe_aux_loss_coeff=0"),
    "router losses beside a loss by sequences": (
        {"moe_z_loss_coeff": 1e-2, "calculate_per_token_loss": True},
        "divided by tokens, the loss by sequences: give moe_z_loss_coeff=0, or a loss with Average.TOKENS",
    ),
    "no balancing": ({"moe_aux_loss_coeff": 1e-2, "moe_router_load_balancing_type": "none"}, ""),
}


@pytest.mark.parametrize(("settings", "says"), OF_SAMPLES.values(), ids=OF_SAMPLES)
def test_a_model_of_samples_is_refused_by_the_names_of_its_configuration(settings, says):
    plain = {"multi_latent_attention": False, "recompute_granularity": None, "num_moe_experts": 4, "attention_dropout": 0.0}
    plain |= {"moe_token_dispatcher_type": "flex", "moe_enable_deepep": False, "moe_flex_dispatcher_backend": "deepep"}
    plain |= {"moe_aux_loss_coeff": 0.0, "moe_pad_expert_input_to_capacity": False}
    plain |= {"moe_router_load_balancing_type": "aux_loss", "expert_model_parallel_size": 1, "calculate_per_token_loss": False}
    model = torch.nn.Module()
    model.config, model.decoder = argparse.Namespace(**plain | settings), torch.nn.Module()
    model.decoder.layers = torch.nn.ModuleList()
    problem = refusal(model, Average.SEQUENCES)
    assert says in problem
    assert bool(says) == bool(problem)
    model.attention = torch.nn.Module()
    model.attention.core_attention, model.attention.attn_mask_type = torch.nn.Module(), AttnMaskType.no_mask
    assert says or "attention attends by AttnMaskType.no_mask" in refusal(model, Average.SEQUENCES)


def test_a_window_of_all_earlier_tokens_is_none_and_attention_that_is_not_causal_is_refused():
    alone = argparse.Namespace(size=lambda: 1)
    config = argparse.Namespace(kv_channels=8, attention_backend=AttnBackend.auto, softmax_type="vanilla")
    config.window_attn_skip_freq = None
    windows = {(-1, 0): None, (5, 0): 5, None: None}
    for config.window_size, window in windows.items():
        assert RelayAttention(config, 1, pg_collection=argparse.Namespace(cp=alone, tp=alone)).window == window
    with pytest.raises(EppError, match=r"causal attention only; layer 3 asks for AttnMaskType.no_mask"):
        RelayAttention(argparse.Namespace(), 3, AttnMaskType.no_mask)


class Hybrid(torch.nn.Module):
    """A model of Megatron's by its constructor alone."""

    def __init__(self, config, hybrid_stack_spec, hybrid_layer_pattern=None):
        super().__init__()
        self.layers = (hybrid_stack_spec, hybrid_layer_pattern)
        if isinstance(config, torch.nn.Module):
            self.decoder = config


@pytest.fixture
def hybrid(monkeypatch):
    from megatron.training import global_vars

    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", arguments())
    monkeypatch.setattr(Hybrid, "__init__", patching.around(Hybrid.__init__, install._adopt))
    return Hybrid


def test_a_model_that_a_script_builds_without_the_flag_is_looked_at_too(hybrid):
    with pytest.raises(EppError, match=re.escape("sparse attention (DSA) (D)")):
        hybrid(None, "spec", hybrid_layer_pattern="D*")
    with pytest.raises(EppError, match="needs --hybrid-layer-pattern"):
        hybrid(None, "spec")
    with pytest.raises(EppError, match=re.escape("a plan cannot honour attention_dropout=0.1 (set it to 0)")):
        hybrid(argparse.Namespace(attention_dropout=0.1), "spec", hybrid_layer_pattern="*-")
    model = hybrid(None, "spec", hybrid_layer_pattern="*-")
    assert model.layers == ("spec", "*-")
    check_adopted(model)
    with pytest.raises(EppError, match="GPTModel and HybridModel; the script builds a Namespace"):
        check_adopted(argparse.Namespace())


def relay(number):
    module = RelayAttention.__new__(RelayAttention)
    torch.nn.Module.__init__(module)
    module.layer_number = number
    return module


SHARED = relay(2)


def mixers(**named):
    return torch.nn.ModuleList(torch.nn.ModuleDict({name: module}) for name, module in named.items())


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ({"self_attention": torch.nn.Conv1d(1, 1, 4)}, "decoder.0.self_attention (Conv1d)"),
        ({"self_attention": torch.nn.ModuleList([relay(1), torch.nn.Conv1d(1, 1, 4)])}, "decoder.0.self_attention.1 (Conv1d)"),
        ({"self_attention": relay(1), "mixer": torch.nn.Linear(1, 1)}, "decoder.1.mixer (Linear)"),
        ({"self_attention": SHARED, "mixer": SHARED}, "decoder.0.self_attention and decoder.1.mixer are one attention"),
    ],
)
def test_layers_in_which_sequences_or_layers_would_be_mixed_up_are_refused_by_name(hybrid, layers, said):
    with pytest.raises(EppError, match=re.escape(said)):
        hybrid(mixers(**layers), "spec", hybrid_layer_pattern="*-")
    pointwise = torch.nn.ModuleList([relay(2), torch.nn.Conv1d(1, 1, 1)])
    hybrid(mixers(self_attention=pointwise, mixer=relay(1), cross_attention=IdentityOp()), "spec", hybrid_layer_pattern="*-")
