"""Plans for frameworks that call Megatron's schedules without Megatron's argument parser."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.utils import get_model_config

from megatron_epp.mcore import releases
from megatron_epp.mcore.arguments.parser import add_epp_args
from megatron_epp.mcore.arguments.refusals import refuse
from megatron_epp.mcore.arguments.rule import Door
from megatron_epp.mcore.arguments.table import TABLE, names_in_loop
from megatron_epp.mcore.iteration.microbatch_schedule import Schedule
from megatron_epp.mcore.iteration.microbatch_shapes import Microbatch, shape_of
from megatron_epp.mcore.model.language_model import language_model_of
from megatron_epp.mcore.patches import patching
from megatron_epp.plan import UNLIMITED_BYTES, EppError
from megatron_epp.plan.flags import AUTO
from megatron_epp.plan.reading import nearest
from megatron_epp.runtime.links.objects import from_each_of_job

OF_LOOP = {"distributed_timeout_minutes": 30, "log_interval": 1}
"""Settings that a program's loop gives in place of Megatron's flags: the time limit of messages, torch's own for gloo, and the
number of training iterations for one line in the log."""


def wrap(
    *,
    shape_of: Callable[[Any], Microbatch | Sequence[int]] = shape_of,
    unread_of: Callable[[Any], Sequence[int] | None] | None = None,
    **settings: object,
) -> Schedule:
    """Return a function to call in place of Megatron's schedule, with the same arguments: it runs microbatches by a plan.

    Megatron's parallel state is initialised before its first call, and every rank of the job makes that call.

    Args:
        shape_of: returns the lengths of a microbatch's sequences, or a `Microbatch` where its rows are not packed; by default
            they are read from columns that frameworks use (`microbatch_shapes.shape_of`).
        unread_of: returns for every sequence of a packed microbatch how many of its first tokens have logits that neither the
            forward step nor its loss reads, as all but the last of a prompt; None where all are read, as by default. Where such
            tokens have run for another sequence, their logits are zeros, and take no time.
        settings: flags of training by their names behind ``--epp-``, with underscores: ``memory_cap_gb=60``,
            ``order="given"``; and Megatron's ``distributed_timeout_minutes`` (30) and ``log_interval`` (1), in iterations.

    Raises:
        EppError: there is no such setting or value, or it needs this package's own data or layers; or a function of the
            installed Megatron takes other arguments. A release that is not tested causes a warning.
    """
    flags = flags_of("wrap", settings)
    refuse(argparse.Namespace(**flags), Door.WRAP)
    return Schedule(lambda models: arguments_of(models, flags | {"epp_microbatches": "user"}), shape_of, unread_of=unread_of)


NO_LOOP = {"iteration": 0, "train_iters": UNLIMITED_BYTES}
"""Values for the state of Megatron's loop, where a program has its own."""


def flags_of(function: str, settings: Mapping[str, object], names: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the values of all flags, and of Megatron's that a program's own loop stands for, given the settings of a function.

    These are `names` and `OF_LOOP`; by default all that training has. Raises `EppError` for other settings or values, and if
    the installed Megatron's functions take other arguments.
    """
    defaults = vars(add_epp_args(argparse.ArgumentParser()).parse_args([]))
    own = names or [name.removeprefix("epp_") for name in defaults]
    known = [*own, *OF_LOOP]
    if unknown := [name for name in settings if name not in known]:
        listed = ", ".join(f"{name}{nearest(name, known)}" for name in unknown)
        has = "settings have the names of flags behind --epp-" if names is None else f"it has {', '.join(known)}"
        raise EppError(f"{function} has no setting {listed}{':' if names is None else ';'} {has}")
    flags = defaults | {f"epp_{name}": value for name, value in settings.items()} | OF_LOOP
    flags |= {name: settings[name] for name in OF_LOOP if name in settings}
    for row in TABLE:
        if "off" in row.choices and isinstance(switch := flags.get(row.dest), bool):
            flags[row.dest] = "on" if switch else "off"
        if row.is_ours and row.choices and (value := flags.get(row.dest)) not in (*row.choices, row.default):
            raise EppError(f"{row.dest.removeprefix('epp_')} is {value!r}; it must be one of {', '.join(row.choices)}")
    split = flags["epp_split_weight_gradient"]
    flags["epp_split_weight_gradient"] = split if split == AUTO else split == "on"
    releases.check_calls()
    if not flags["epp_allow_unknown_megatron"]:
        releases.tell_untested()
    return flags | NO_LOOP | {"epp": True, "epp_names": names_in_loop(own)}


_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_PIPELINED = ("forward_backward_pipelining_without_interleaving", "forward_backward_pipelining_with_interleaving")
_installed: list[patching.Patch] = []


def install(**settings: Any) -> Schedule:
    """Replace Megatron's pipeline schedules by `wrap`'s function, so that a framework is not changed.

    The functions are replaced in Megatron's module and wherever they have been imported. Without pipeline stages Megatron's own
    schedule runs. `megatron_epp.mcore.iteration.wrap.uninstall` ends it.

    Args:
        settings: as `wrap` takes them, `shape_of` and `unread_of` among them.

    Returns:
        the function, whose learnt costs a checkpoint may keep.

    Raises:
        EppError: as `wrap` does; or plans have been installed already.
    """
    if _installed:
        raise EppError("plans run Megatron's schedules already: call megatron_epp.mcore.iteration.wrap.uninstall first")
    schedule = wrap(**settings)

    def run(original: Callable[..., Any], *rest: Any, **named: Any) -> Any:
        """Run microbatches by a plan."""
        return schedule(**releases.bound(original, *rest, **named).arguments)

    patches = [patching.wrapping(f"{_SCHEDULES}:{name}", run) for name in _PIPELINED]
    patching.apply(patches, allow_unknown=bool(settings.get("allow_unknown_megatron")))
    _installed.extend(patches)
    return schedule


def sharing_ranks() -> tuple[int, int]:
    """Return the numbers of tensor- and of context-parallel ranks, by which frameworks pad sequences."""
    return mpu.get_tensor_model_parallel_world_size(), mpu.get_context_parallel_world_size()


def uninstall() -> None:
    """Put Megatron's own schedules back. Does nothing if plans are not installed."""
    patching.revert(_installed)
    _installed.clear()


_OF_MODEL = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels multi_latent_attention",
    "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim qk_layernorm normalization attention_output_gate",
    "moe_ffn_hidden_size moe_shared_expert_gate moe_shared_expert_intermediate_size moe_aux_loss_coeff moe_router_dtype",
    "moe_router_topk moe_router_group_topk moe_router_num_groups moe_router_load_balancing_type moe_router_score_function",
    "moe_token_dispatcher_type moe_flex_dispatcher_backend params_dtype bf16 fp16 attention_backend sequence_parallel",
)
"""Fields of a model's shape, and of what its kernels are chosen by, that Megatron's flags and its configuration call alike."""


def arguments_of(models: Sequence[torch.nn.Module], flags: dict[str, Any]) -> argparse.Namespace:
    """Make a namespace in place of Megatron's arguments, from `flags_of`, the parallel state and the model. A collective call.

    Raises `EppError` if the model's configuration asks for what a plan cannot honour.
    """
    config = get_model_config(models[0])
    ordered = copy.copy(config)
    ordered.epp_order, ordered.epp_microbatches = flags["epp_order"], flags.get("epp_microbatches", "user")
    of_replicas = [getattr(model, "ddp_config", None) for model in models]
    for settings in (ordered, *of_replicas):
        refuse(settings, Door.MODEL)
    # From all ranks, since a chunk without a language model has no `vocab_size`.
    vocabulary = max(from_each_of_job(max(getattr(language_model_of(model), "vocab_size", 1) for model in models)))
    return argparse.Namespace(
        **flags,
        rank=dist.get_rank(),
        data_parallel_size=mpu.get_data_parallel_world_size(),
        pipeline_model_parallel_size=mpu.get_pipeline_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=len(models) if len(models) > 1 else None,
        tensor_model_parallel_size=mpu.get_tensor_model_parallel_world_size(),
        context_parallel_size=mpu.get_context_parallel_world_size(),
        expert_model_parallel_size=mpu.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=mpu.get_expert_tensor_parallel_world_size(),
        use_distributed_optimizer=any(getattr(each, "use_distributed_optimizer", False) for each in of_replicas),
        nccl_communicator_config_path=None,
        high_priority_stream_groups=None,
        group_query_attention=not config.multi_latent_attention,
        **{name: getattr(config, name, None) for names in _OF_MODEL for name in names.split()},
        swiglu=config.gated_linear_unit,
        num_experts=config.num_moe_experts,
        padded_vocab_size=vocabulary,
    )
