"""Checks of flags with `--epp-microbatches user`: what a plan for a script's own microbatches cannot honour."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Set

from megatron_epp.mcore.arguments import ArgumentError
from megatron_epp.mcore.arguments.consequences import (
    IN_ORDER,
    TWICE_REDUCED,
    check_conflicts,
    check_weight_shards,
    refusal,
)
from megatron_epp.mcore.arguments.flag import GIVEN, MegatronFlag
from megatron_epp.mcore.arguments.parser import add_epp_args
from megatron_epp.mcore.arguments.table import ROWS, TABLE, TRAINING, called
from megatron_epp.mcore.features import check_calls
from megatron_epp.plan import EppError
from megatron_epp.plan.errors import Names, as_setting

_ORDER = "leave it out: it belongs to Megatron's own schedules"
_FIRST = "leave it out: its layers take the first forward of an iteration to have the first backward"
_REPLICAS = "leave it out: its collectives join replicas, which have plans of their own"
_SHAPES = "leave it out: graphs are recorded for the order of Megatron's own schedules"
CONFLICTS = (
    MegatronFlag("--overlap-moe-expert-parallel-comm", advice=_ORDER),
    MegatronFlag("--delay-wgrad-compute", advice=_ORDER),
    MegatronFlag("--defer-embedding-wgrad-compute", advice=_ORDER),
    MegatronFlag("--num-microbatches-with-partial-activation-checkpoints", advice=_ORDER),
    MegatronFlag("--fine-grained-activation-offloading", advice=_ORDER),
    MegatronFlag("--moe-paged-stash", advice=_ORDER),
    MegatronFlag("--cuda-graph-impl", ("none", None), _SHAPES),
    MegatronFlag("--enable-cuda-graph", advice=_SHAPES),
    MegatronFlag("--external-cuda-graph", advice=_SHAPES),
    MegatronFlag("--enable-mhc-connections", advice="leave it out: messages of plans have --hidden-size values a token"),
    MegatronFlag("--fp8-format", advice=_FIRST, dest="fp8"),
    MegatronFlag("--fp4-format", advice=_FIRST, dest="fp4"),
    TWICE_REDUCED,
    *IN_ORDER,
    MegatronFlag("--dsa-indexer-topk-freq", (None, 1), "set it to 1: a layer that runs again would find another microbatch's"),
    MegatronFlag("--use-megatron-fsdp"),
    MegatronFlag("--use-torch-fsdp2"),
    MegatronFlag("--hybrid-context-parallel", advice=_REPLICAS),
    MegatronFlag("--dynamic-context-parallel", advice=_REPLICAS),
)
_QUEUES = (
    f"microbatches must run in their own order: add --epp-order {GIVEN}, or order={GIVEN!r} where megatron_epp.wrap is called"
)
REPLAYS = tuple(
    MegatronFlag(flag, advice=_QUEUES)
    for flag in (
        "--moe-enable-routing-replay",  # Megatron's, in ms-swift, NeMo-RL and recent verl
        "--enable-routing-replay",  # a field that verl adds to the model's configuration
        "--use-routing-replay",  # slime's
        "--use-rollout-routing-replay",
    )
)
"""Router replay, which takes the routes of microbatches from queues, in the order in which these run."""
_REPLAY_VARIABLE = "ENABLE_ROUTING_REPLAY"
"""Environment variable that slime sets to 1 in the processes whose routers replay."""
_OF_REPLICAS = "global_aux_loss"
_HONOURED = {
    "epp",
    "epp_microbatches",
    "epp_order",
    "epp_memory_cap_gb",
    "epp_split_weight_gradient",
    "epp_offload",
    "epp_host_memory_gb",
    "epp_wait_limit_seconds",
    "epp_report_dir",
    "epp_trace",
    "epp_allow_unknown_megatron",
}
"""Our own flags that apply to a script's microbatches; all others need this package's data, layers or planners."""
_HONOURED_BY_MEGATRON = {"epp_save_limit_seconds", "epp_checkpoint_fallback"}
"""Flags that apply where Megatron's own functions save and load checkpoints, which `wrap` does not see."""


def names_of(args: argparse.Namespace) -> Names:
    """Return the names of settings for who started a run: flags, or what `megatron_epp.wrap` is given."""
    names: Names = getattr(args, "epp_names", TRAINING)
    return names


def advice(error: EppError, names: Names) -> str:
    """Return an error of planning with the remedies that a script's own microbatches leave, by the names of settings."""
    rows = (ROWS[remedy.setting] for remedy in error.remedies if remedy.setting in ROWS)
    return error.without_remedies(*(row.setting for row in rows if row.is_ours and row.dest not in _HONOURED)).text(names)


def check_user_microbatches(args: argparse.Namespace) -> None:
    """Raise `ArgumentError` that names all flags that cannot be honoured with a script's own microbatches.

    Raises `EppError` if the installed Megatron cannot run them.
    """
    check_calls()
    check_conflicts(args, CONFLICTS)
    check_order(args, args.epp_order)
    check_routers(args)
    check_weight_shards(args)
    check_settings(vars(args), _HONOURED_BY_MEGATRON)
    # Transformer Engine's layers, and the hooks of Megatron's data parallelism, then wait for W.
    args.delay_wgrad_compute = args.epp_split_weight_gradient and args.transformer_impl == "transformer_engine"


def check_order(settings: object, order: str, names: Names = TRAINING) -> None:
    """Raise `ArgumentError` for router replay unless microbatches run in their own order.

    Args:
        settings, names: as `check_conflicts` takes them.
    """
    if order == GIVEN:
        return
    check_conflicts(settings, REPLAYS, names)
    if os.environ.get(_REPLAY_VARIABLE) == "1":
        raise ArgumentError(f"{refusal(names)} {_REPLAY_VARIABLE}=1 in the environment ({_QUEUES})")


def check_routers(settings: object, names: Names = TRAINING) -> None:
    """Raise `ArgumentError` if routers look at tokens of all replicas: then all would need to run the same plan.

    Args:
        settings, names: as `check_conflicts` takes them.
    """
    balancing = getattr(settings, "moe_router_load_balancing_type", None) or ()
    if _OF_REPLICAS in ((balancing,) if isinstance(balancing, str) else balancing):
        name = called("moe_router_load_balancing_type", names)
        raise ArgumentError(
            f"{refusal(names)} {as_setting(name, _OF_REPLICAS)}: replicas have plans of their own, and their routers would "
            "wait for each other; use aux_loss or seq_aux_loss"
        )


def check_settings(values: Mapping[str, object], more: Set[str] = frozenset(), names: Names = TRAINING) -> None:
    """Raise `ArgumentError` if `--epp-*` flags have no effect."""
    defaults = vars(add_epp_args(argparse.ArgumentParser()).parse_args([]))
    honoured = _HONOURED | more | ({"epp_costs"} if values["epp_costs"] == "learn" else set())
    rows = [row for row in TABLE if row.is_ours and row.dest in defaults and row.dest not in honoured]
    if clashes := [as_setting(names[row.setting], values[row.dest]) for row in rows if values[row.dest] != defaults[row.dest]]:
        who = "--epp-microbatches user" if names is TRAINING else "a schedule of megatron_epp.wrap"
        raise ArgumentError(f"{who} runs the script's own model and data: leave out {', '.join(clashes)}")
    own = (ROWS["offload"], ROWS["host_cap_bytes"], ROWS["split_weight"])
    uses = [names[row.setting] for row in own if values[row.dest] not in (defaults[row.dest], "off")]
    if values["epp_order"] == GIVEN and uses:
        raise ArgumentError(f"{as_setting(names['order'], GIVEN)} frees memory by recompute alone: leave out {', '.join(uses)}")
    if values["epp_host_memory_gb"] is not None and values["epp_offload"] == "off":
        raise ArgumentError(
            f"{names['host_cap_bytes']} needs {as_setting(names['offload'], 'on')}: add that, or leave this out"
        )
