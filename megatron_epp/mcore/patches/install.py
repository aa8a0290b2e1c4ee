"""Table of all functions of Megatron that `--epp` patches, in every training. `environment` has the patches for machines."""

from __future__ import annotations

import argparse
import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from megatron_epp.launch.script_flags import TrainingParser
from megatron_epp.mcore.arguments.layout import SEARCHED
from megatron_epp.mcore.patches import stock_functions
from megatron_epp.mcore.patches.patching import Patch, when, wrapping
from megatron_epp.mcore.patches.running_chunk import keep_chunk, runs_chunk
from megatron_epp.mcore.releases import bound, described, document_args, epp_args, has_user_microbatches, takes
from megatron_epp.plan.attributes import having
from megatron_epp.plan.errors import NothingLeftError

logger = logging.getLogger(__name__)

_WARM_UP_TOKENS = 2048
"""Tokens per rank on which compiled functions are warmed up with `--epp`.

Megatron warms them up on tensors of --seq-length tokens. With a million tokens and an MLP of 14,336 in bf16, these take 28 GiB
each before there is a model, and no chunk is that long. The number itself was not measured.
"""


def _add_flags(original: Callable[..., Any], parser: Any) -> Any:
    """Add the --epp flags. If --epp is given, a flag that does not exist is refused in a line, with the nearest one."""
    from megatron_epp.mcore.arguments.parser import add_epp_args

    # Megatron makes the parser itself, so only its class can be changed. Our own entry point makes a `TrainingParser`.
    if "--epp" in sys.argv and type(parser) is argparse.ArgumentParser:
        parser.__class__ = TrainingParser
    return add_epp_args(original(parser))


def _read_yaml(original: Callable[..., Any], extra: Callable[..., Any] | None = None, *rest: Any, **named: Any) -> Any:
    """Take the values of --yaml-cfg as flags with --epp, and refuse to be restarted in this process."""
    from megatron_epp.mcore.arguments.consequences import refuse_restart
    from megatron_epp.mcore.arguments.yaml_cfg import take_yaml

    extra = named.pop("extra_args_provider", extra)

    def with_defaults(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = parser if extra is None else extra(parser)
        return take_yaml(parser, sys.argv[1:]) if "--epp" in sys.argv else parser

    args = original(with_defaults, *rest, **named)
    refuse_restart(args)
    return args


def _check_flags(original: Callable[..., Any], args: Any, *rest: Any, **named: Any) -> Any:
    """Check the --epp flags, and what Megatron would ask of flags, files and the script when training has begun."""
    if not getattr(args, "epp", False):
        from megatron_epp.mcore.arguments.consequences import prepare_epp_args

        prepare_epp_args(args)
        return original(args, *rest, **named)
    from megatron_epp.mcore.arguments.start import check_start, refusals_of_megatron

    # Before Megatron's own checks, which are assertions and end at the first one.
    stock_functions.check_script(args)
    check_start(args, wants_files=os.environ.get("RANK", "0") == "0")
    if os.environ.get("RANK", "0") == "0":
        logger.info("trains with Megatron %s", described())
    global _flags
    _flags = argparse.Namespace(**vars(args))
    with refusals_of_megatron(args):
        return original(args, *rest, **named)


_flags: argparse.Namespace | None = None
"""The run's flags before Megatron validated them, by which a chosen layout is validated again."""
_provider: Callable[..., Any] | None = None  # the script's function that builds models, where `pretrain` takes one


def _settle_choices(args: argparse.Namespace) -> None:
    """Settle what slices of latent attention hand on, the layout, and where the output layer is. A collective call."""
    if getattr(args, "epp_latents", "off") == "auto" and args.multi_latent_attention:
        from megatron_epp.mcore.training.layout_search import settle_latents

        settle_latents(args)
    choices = (getattr(args, name, None) for name in ("epp_layout", "epp_vocab_parallel", "epp_split_weight_gradient"))
    if any(choice in SEARCHED for choice in choices):  # "auto" is among them
        from megatron_epp.mcore.training.layout_search import settle_choices

        assert _flags is not None  # since the flags were checked
        settle_choices(args, _flags)


def _choose_stages(original: Callable[..., Any], *rest: Any, **named: Any) -> Any:
    """Settle how layers are divided if --epp is given, before there are groups of ranks that depend on it."""
    if (args := document_args()) is None:
        return original(*rest, **named)
    if _provider is not None and not takes(_provider, "vp_stage"):  # it builds one model for a rank
        single = [each for each in args.epp_open_placements if each[1] == 1]
        args.epp_open_placements = single or args.epp_open_placements  # none: several are asked for
    _settle_choices(args)
    call = bound(original, *rest, **named)
    call.arguments["virtual_pipeline_model_parallel_size"] = args.virtual_pipeline_model_parallel_size
    return original(*call.args, **call.kwargs)


def _adopt(original: Callable[..., Any], *rest: Any, **named: Any) -> Any:
    """Build the model with our attention if --epp is given."""
    args = document_args()
    if args is None or args.epp_schedule == "stock":  # the baseline that keeps Megatron's attention, too
        return original(*rest, **named)
    from megatron_epp.mcore.model.adopt import construct

    return construct(args, original, *rest, **named)


def _complete_config(original: Callable[..., Any], self: Any) -> None:
    """Divide layers by --epp-layout and --epp-placement, and let them delay their gradients for --epp-split-weight-gradient."""
    args = epp_args()
    delays = args is not None and self.delay_wgrad_compute
    if delays:  # Megatron asserts overlap_moe_expert_parallel_comm with it, which is an overlap of its own schedules
        self.delay_wgrad_compute = False
    original(self)
    if delays:
        self.delay_wgrad_compute = True
    if args is not None and (args.epp_placement == "v" or args.epp_layout is not None):
        from megatron_epp.mcore.model.model_chunks import assign_stages

        assign_stages(self, args)


def _embedding_ranks(original: Callable[..., list[int]], pp_ranks: list[int], *rest: Any) -> list[int]:
    """Keep the embedding on one rank where --epp-placement puts the first and the last stage on it."""
    if (args := epp_args()) is not None:
        from megatron_epp.mcore.arguments.layout import placement_of

        if placement_of(args).ends_share_rank:
            return pp_ranks[:1]
    return original(pp_ranks, *rest)


def _train_on_documents(original: Callable[..., Any], provider: Any, *rest: Any, **named: Any) -> Any:
    """Build iterators over documents instead of Megatron's datasets if --epp is given."""
    if document_args() is None:  # without it not even the imports may matter
        return original(provider, *rest, **named)
    from megatron_epp.mcore.start.sliced_start import provide_documents

    stock_functions.require_stock({stock_functions.PROVIDER: provider})
    chunk = getattr(provider, "keywords", {}).get("vp_stage")  # Megatron asks once for each of a rank's model chunks
    ours = functools.partial(provide_documents, vp_stage=chunk)
    ours.is_distributed = True  # type: ignore[attr-defined]  # every rank reads lengths, so every rank builds them
    return original(ours, *rest, **named)


def _warm_up_on_a_chunk(original: Callable[..., Any], *rest: Any, **named: Any) -> Any:
    """Warm up compiled functions on a chunk with --epp, not on --seq-length tokens.

    Before that, since there is no model yet, start the planning processes; and settle what a framework that makes its groups of
    ranks by itself has left open.
    """
    if (args := document_args()) is None:
        return original(*rest, **named)
    args.epp_open_placements = []
    _settle_choices(args)
    from megatron_epp.mcore.start.sliced_start import prepare

    prepare(args)
    most = _WARM_UP_TOKENS * args.context_parallel_size * args.tensor_model_parallel_size
    with having(args, seq_length=min(args.seq_length, most)):
        return original(*rest, **named)


def _compare_order(original: Callable[..., None], checkpoint_args: Any, *rest: Any, **named: Any) -> None:
    """Compare the order of sequences with the order in the run that saved a checkpoint, if --epp is given."""
    original(checkpoint_args, *rest, **named)
    if (args := document_args()) is not None:
        from megatron_epp.mcore.data.documents import check_order

        check_order(checkpoint_args, args)


def _load_checkpoint(original: Callable[..., Any], *rest: Any, **named: Any) -> Any:
    """Check a checkpoint's files before they are loaded, if --epp is given; say what to do if it is of another layout."""
    if (args := epp_args()) is None:
        return original(*rest, **named)
    from megatron.training import global_vars

    from megatron_epp.mcore.training.checkpoints import settle, settle_rows, telling_layout

    settle(args)
    settle_rows(args, getattr(global_vars._GLOBAL_TOKENIZER, "vocab_size", 0))
    with telling_layout(args):
        return original(*rest, **named)


def _finish_save(original: Callable[..., Any], *rest: Any, **named: Any) -> Any:
    """End a run whose saving of a checkpoint exceeds its time limit, if --epp is given."""
    if (args := epp_args()) is None:
        return original(*rest, **named)
    from megatron_epp.mcore.training.checkpoints import watched_save

    with watched_save(args):
        return original(*rest, **named)


def _save_checkpoint(original: Callable[..., Any], *rest: Any, **named: Any) -> Any:
    """Save a checkpoint after the reports of its iterations, and within a time limit, if --epp is given."""

    def save() -> Any:
        _complete_reports()
        return original(*rest, **named)

    return _finish_save(save)


def _decide_exit(original: Callable[..., bool], *rest: Any, **named: Any) -> bool:
    """Complete the last report before training ends and its writers are closed, if --epp is given."""
    ends = original(*rest, **named)
    if ends and epp_args() is not None:
        _complete_reports()
    return ends


def _complete_reports() -> None:
    if runs := sys.modules.get("megatron_epp.mcore.iteration.base_run"):  # by name: without --epp there is no such module
        runs.complete_reports()


def _pretrain(original: Callable[..., Any], *rest: Any, **named: Any) -> Any:
    """Refuse functions of the script that --epp would not use, and end planning when training ends."""
    global _provider
    call = bound(original, *rest, **named)
    _provider = call.arguments.get("model_provider")
    if (args := document_args()) is not None:
        stock_functions.check_call(args, call.arguments)
    if (chosen := call.arguments.get("get_embedding_ranks")) is not None:
        call.arguments["get_embedding_ranks"] = functools.partial(_embedding_ranks, chosen)
    try:
        result = original(*call.args, **call.kwargs)
        args = epp_args()
        if args is not None and args.train_iters and not args.skip_train and args.iteration >= args.train_iters:
            has = f"the checkpoint in {args.load} has {args.iteration} iterations, and --train-iters is {args.train_iters}"
            raise NothingLeftError(f"nothing was trained: {has}; raise it to go on")
        return result
    finally:  # by name, of what was imported: a run without --epp has no such module, and needs none
        if runs := sys.modules.get("megatron_epp.mcore.iteration.sliced_run"):
            runs.end()
        if microbatches := sys.modules.get("megatron_epp.mcore.iteration.microbatch_schedule"):
            microbatches.forward_backward_user.close()


def _choose_schedule(original: Callable[..., Any], *rest: Any, **named: Any) -> Any:
    """Return the schedule that runs plans if --epp is given."""
    stock = original(*rest, **named)
    if (args := epp_args()) is None:
        return stock
    if has_user_microbatches(args):
        from megatron_epp.mcore.iteration.microbatch_schedule import forward_backward_user

        return forward_backward_user
    from megatron_epp.mcore.iteration.document_schedule import schedule_for

    return schedule_for(args, stock)


def _run_schedule(original: Callable[..., Any], *rest: Any, **named: Any) -> Any:
    """Run a script's own microbatches by a plan where a framework calls one of Megatron's schedules by its name."""
    args = epp_args()
    if args is None or not has_user_microbatches(args):
        return original(*rest, **named)
    from megatron_epp.mcore.iteration.microbatch_schedule import forward_backward_user

    return forward_backward_user(*rest, **named)


_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_ROUTER = "megatron.core.transformer.moe.router:TopKRouter"
_ROUTING = "megatron.core.transformer.moe.moe_utils"
_AHEAD = "megatron.core.transformer.multi_token_prediction"
_OF_ROUTERS = {
    f"{_ROUTER}.routing": "route",
    f"{_ROUTER}.apply_z_loss": "apply_z_loss",
    f"{_ROUTER}._apply_expert_bias": "count_for_bias",
    f"{_ROUTER}.sinkhorn_load_balancing": "balance",
    f"{_ROUTING}:topk_routing_with_score_function": "replay",  # it gets an object that may choose experts by their scores
    f"{_ROUTING}:apply_router_token_dropping": "drop_tokens",
    f"{_ROUTING}:get_tokens_per_expert_and_token_count": "count_tokens",
}
"""Each adds up or counts over tokens in its own way, and only some of them take a mask of padding."""
_OF_PREDICTION = {
    f"{_AHEAD}:MultiTokenPredictionLayer._get_embeddings": "embed_ahead",
    f"{_AHEAD}:process_mtp_loss": "add_prediction_losses",
}
"""They roll tokens and labels within what they get, which under a plan is a chunk."""


@functools.cache
def patches() -> tuple[Patch, ...]:
    """Return the patches by which `--epp` works, in the order in which they are applied; without it nothing changes."""
    return (
        # `parse_args` makes its parser by it in all releases, so a script needs no `extra_args_provider` of ours.
        wrapping("megatron.training.arguments:add_megatron_arguments", _add_flags),
        # Megatron replaces all flags, ours among them, by the file of --yaml-cfg.
        wrapping("megatron.training.arguments:parse_args", _read_yaml),
        # Called by `parse_and_validate_args`, ahead of `pretrain`; the arguments of a checkpoint (--use-checkpoint-args) have
        # been taken over by then.
        wrapping("megatron.training.arguments:validate_args", _check_flags),
        # The specs of the layers are its arguments: a model that is built has an attention which mixes a chunk's sequences.
        wrapping("megatron.core.models.gpt.gpt_model:GPTModel.__init__", _adopt),
        wrapping("megatron.core.models.hybrid.hybrid_model:HybridModel.__init__", _adopt),
        # Megatron makes a new config from the flags in many places, so a change of one object would not reach the others.
        wrapping("megatron.core.transformer.transformer_config:TransformerConfig.__post_init__", _complete_config),
        # `initialize_megatron` calls it where there are a process group and a tokenizer, and no other group of ranks yet.
        wrapping("megatron.core.parallel_state:initialize_model_parallel", _choose_stages),
        # `initialize_model_parallel` makes the group of embedding ranks by it, before there is a model, if `pretrain` gets no
        # function for that (`_pretrain` wraps one that it gets). Megatron adds up the gradients of embedding and output layer
        # over the group, and of its first and last rank the last one holds neither where both are on the first.
        wrapping("megatron.core.parallel_state:default_embedding_ranks", _embedding_ranks),
        # Called when the checkpoint is loaded, so the consumed samples are known.
        wrapping("megatron.training.training:build_train_valid_test_data_iterators", _train_on_documents),
        # The one call of `pretrain`, in all releases, between the process groups and the model.
        wrapping("megatron.training.initialize:set_jit_fusion_options", _warm_up_on_a_chunk),
        # It gets the script's functions, which would be lost without a word, and its end is that of the planning processes.
        wrapping("megatron.training.training:pretrain", _pretrain),
        # It reads weights and optimizer state; only arguments (--use-checkpoint-args) are read earlier, by another function.
        wrapping("megatron.training.training:load_checkpoint", _load_checkpoint),
        # A thread writes reports, and a run that resumes lacks those not written yet; a save that hangs would hold all ranks.
        wrapping("megatron.training.training:save_checkpoint", _save_checkpoint),
        # With --async-save other processes write; at the end of training it waits for them.
        wrapping("megatron.training.training:maybe_finalize_async_save", _finish_save),
        # On signals and limits of time the loop leaves after it: writers are flushed and W&B is finished, and the process ends.
        wrapping("megatron.training.training:checkpoint_and_decide_exit", _decide_exit),
        # It gets the arguments of the run that saved the checkpoint; with --finetune it is not called.
        wrapping("megatron.training.checkpointing:check_checkpoint_args", _compare_order),
        # `train` asks once for a schedule and `evaluate` every time; frameworks also call the three functions by their names.
        wrapping(f"{_SCHEDULES}:get_forward_backward_func", _choose_schedule),
        wrapping(f"{_SCHEDULES}:forward_backward_no_pipelining", _run_schedule),
        wrapping(f"{_SCHEDULES}:forward_backward_pipelining_with_interleaving", _run_schedule),
        wrapping(f"{_SCHEDULES}:forward_backward_pipelining_without_interleaving", _run_schedule),
        # It calls its function again in the backward, after the forward has left the context of the chunk.
        wrapping("megatron.core.tensor_parallel.random:checkpoint", keep_chunk),
        *(
            when(runs_chunk, target, f"megatron_epp.mcore.patches.routers:{name}", "routers see a chunk without its padding")
            for target, name in _OF_ROUTERS.items()
        ),
        *(
            when(
                lambda: document_args() is not None,
                target,
                f"megatron_epp.mcore.model.predictions:{name}",
                "plans know the tokens ahead of a chunk",
            )
            for target, name in _OF_PREDICTION.items()
        ),
    )
