"""Checks among the rows of `refusals`, which have several lines, or count something: each yields why settings are refused."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from pkgutil import resolve_name
from typing import Any

from megatron_epp.cost.casts import RECIPES
from megatron_epp.mcore.arguments import layout
from megatron_epp.mcore.arguments.flag import GIVEN, Number
from megatron_epp.mcore.arguments.rule import Door, flags
from megatron_epp.mcore.arguments.table import ROWS, TABLE
from megatron_epp.mcore.model.kinds import KINDS, layer_problems, of_experts
from megatron_epp.plan import EppError
from megatron_epp.plan.errors import Names
from megatron_epp.plan.flags import flag_of
from megatron_epp.plan.planners import PLANNERS
from megatron_epp.plan.reading import brief

REPLAYS = flags(
    # Megatron's, in ms-swift, NeMo-RL and recent verl; a field that verl adds to the model's configuration; slime's
    "--moe-enable-routing-replay --enable-routing-replay --use-routing-replay --use-rollout-routing-replay",
    "microbatches must run in their own order",
)
"""Router replay, which takes the routes of microbatches from queues, in the order in which these run."""
_REPLAY_VARIABLE = "ENABLE_ROUTING_REPLAY"  # environment variable that slime sets to 1 in the processes whose routers replay
REFUSED_LAYERS = {"D": "sparse attention (DSA)"}
"""Names of layers that Megatron has and `kinds.KINDS` has not, by their symbol in `--hybrid-layer-pattern`."""


def forgotten(args: Namespace, _: Door) -> Iterator[str]:
    """Yield flags of ours without `--epp`, which would train Megatron's samples by its own schedule without a word."""
    words = {word.partition("=")[0] for word in sys.argv}  # a flag may be given its default, which the namespace does not show
    ours = (row for row in TABLE if row.is_ours and row.setting not in ("epp", "allow_unknown_megatron"))
    set_to = ((row, getattr(args, row.dest, None)) for row in ours)
    if idle := [row.training for row, value in set_to if row.training in words or value not in (None, False, row.default)]:
        verb, them = ("do", "them") if len(idle) > 1 else ("does", "it")
        yield f"{', '.join(idle)} {verb} nothing without --epp: add it, or leave {them} out"


def replay(settings: Any, door: Door) -> Iterator[str]:
    """Yield what takes routes of microbatches from queues, unless these run in their own order (`acting_replay` may be on)."""
    if getattr(settings, "epp_order", GIVEN) == GIVEN:
        return
    advice = f"use --epp-order {GIVEN}" if door.has_flags else f"use megatron_epp.wrap(order={GIVEN!r})"
    rows = REPLAYS
    if getattr(settings, "epp_microbatches", "user") != "user":
        advice, rows = "leave it out, and give samples a column routes", REPLAYS[1:]  # behind Megatron's own
    replays = [row.text(settings, door) for row in rows if row.is_given(settings)]
    if os.environ.get(_REPLAY_VARIABLE) == "1":
        replays.append(f"{_REPLAY_VARIABLE}=1 in the environment ({REPLAYS[0].use})")
    yield from (f"{door.cannot} {replay}: {advice}" for replay in replays)


def weight_shards(settings: Any, door: Door) -> Iterator[str]:
    """Yield weights that ranks share beyond tensor parallelism, which 0.19 and later can."""
    tensor_ranks = getattr(settings, "tensor_model_parallel_size", 1)
    for prefix in ("", "expert_"):
        ranks = getattr(settings, f"{prefix}tensor_parallel_size", None) or tensor_ranks
        shards = getattr(settings, f"{prefix}tensor_parallel_num_weight_shards", None) or ranks
        shards = max(shards, ranks * getattr(settings, f"{prefix}gtp_weight_remat_size", 1))
        if shards > ranks:
            refused = door.with_value(f"{prefix}tensor_parallel_num_weight_shards", shards)
            why = "weights are gathered ahead in the order of the first iteration, which recompute changes"
            yield f"{door.cannot} {refused} on {ranks} tensor-parallel ranks: {why}; leave it out"


def fp8_recipe(settings: object, door: Door) -> Iterator[str]:
    """Yield a recipe whose scales depend on what ran before."""
    name = layout.recipe(settings)
    if name and name not in RECIPES:
        histories = "its amax histories advance with every chunk, and plans choose their order and number"
        reason = histories if name == "delayed" else "what it keeps between chunks is unknown"
        yield f"{door.cannot} {door.with_value('fp8_recipe', name)} ({reason}): use tensorwise, blockwise or mxfp8"


HONOURED = {"epp", "epp_microbatches", "epp_order", "epp_memory_cap_gb", "epp_split_weight_gradient", "epp_offload"}
HONOURED |= {"epp_host_memory_gb", "epp_wait_limit_seconds", "epp_report_dir", "epp_trace", "epp_allow_unknown_megatron"}
HONOURED.add("epp_share_prefixes")
"""Our own flags that apply to a script's microbatches; all others need this package's data, layers or planners."""
HONOURED_BY_MEGATRON = {"epp_save_limit_seconds", "epp_checkpoint_fallback"}
"""Flags that apply where Megatron's own functions save and load checkpoints, which `wrap` does not see."""


def without_effect(settings: Any, door: Door) -> Iterator[str]:
    honoured = HONOURED | (HONOURED_BY_MEGATRON if door.has_flags else set())
    honoured |= {"epp_costs"} if settings.epp_costs == "learn" else set()
    values = [(row, getattr(settings, row.dest)) for row in TABLE if row.is_ours and row.dest not in honoured]
    if clashes := [door.with_value(row.dest, value) for row, value in values if value not in (row.unset, "off", "even")]:
        who = "--epp-microbatches user" if door.has_flags else "a schedule of megatron_epp.wrap"
        yield f"{who} runs the script's own model and data: leave out {', '.join(clashes)}"


def advice(error: EppError, names: Names) -> str:
    """Return an error of planning with the remedies that a script's own microbatches leave, by the names of settings."""
    rows = (ROWS[remedy.setting] for remedy in error.remedies if remedy.setting in ROWS)
    return error.without_remedies(*(row.setting for row in rows if row.is_ours and row.dest not in HONOURED)).text(names)


def numbers(args: Namespace, _: Door) -> Iterator[str]:
    for row in TABLE:
        if row.is_ours and isinstance(read := row.read, Number):
            setting = getattr(args, row.dest, None)
            for value in setting if isinstance(setting, list) else [setting]:
                if value is not None and not read.accepts(value):
                    yield f"{row.training} is {brief(value)}; it must be {read.must_be}"


def sizes(args: Namespace, _: Door) -> Iterator[str]:
    """Yield what does not divide over replicas, and is too short for slices. Raises `EppError` for a size that is none."""
    replica, processes, batch = layout.world_of(vars(args)), args.world_size, args.global_batch_size
    if processes % replica:
        names = " x ".join(f"{flag_of(name)} {getattr(args, name)}" for name in layout.REPLICA_SIZES)
        todo = f"start a multiple of {replica}, or lower one of them"
        yield f"the run has {processes} processes, but {names} takes {replica} for each replica: {todo}"
        return
    replicas, ranks = processes // replica, args.pipeline_model_parallel_size
    each = ranks if args.epp_schedule not in ("elastic", "packed") and virtual(args) else 1
    if batch is not None and (batch <= 0 or batch % (each * replicas)):
        why = f", each of which runs an interleaved pipeline by --epp-schedule {args.epp_schedule}" if each > 1 else ""
        yield f"--global-batch-size {batch} is for {replicas} replicas{why}: make it a multiple of {each * replicas}"
    least = (multiple := layout.token_multiple(args)) * (slices := args.epp_slices or 1)
    if args.seq_length is not None and args.seq_length < least:
        what = f"{slices} slices of at least {multiple} tokens"
        yield f"--seq-length {args.seq_length} is too short for {what}: raise it to {least}, or lower --epp-slices"


def virtual(args: Namespace) -> bool:
    ranks, chunks = args.pipeline_model_parallel_size, getattr(args, "num_virtual_stages_per_pipeline_rank", None)
    with suppress(EppError):  # of a layout that is wrong, which `layout_problems` tells
        if (asked := layout.asked_layout(args)) is not None:
            return asked.placement.num_chunks > 1
    if layout.is_open(args) and args.epp_placement == "v":
        return chunks in (None, 2)
    if text := getattr(args, "pipeline_model_parallel_layout", None):
        from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

        return len(PipelineParallelLayerLayout.parse_str_to_list(text)) > ranks
    per_stage = getattr(args, "num_layers_per_virtual_pipeline_stage", None)
    return (args.num_layers or 0) > ranks * per_stage if per_stage else (chunks or 1) > 1


def of_loss(args: Namespace, _: Door) -> Iterator[str]:
    """Yield what does not go with a loss of samples. Raises `EppError` if there is no such loss."""
    if args.epp_samples is None or args.epp_loss is None:
        return
    from megatron_epp.losses import load_loss

    loss = load_loss(args.epp_loss)
    if getattr(loss, "has_values", False) and not args.untie_embeddings_and_output_weights:
        what = f"--epp-loss {args.epp_loss} reads values, of a head in the place of the output layer"
        yield f"{what}: pass --untie-embeddings-and-output-weights"
    for problem in of_experts("router_problems", args, Door.DOCUMENTS, loss.average):
        yield f"--epp-loss {args.epp_loss}: {problem}"


def of_planner(args: Namespace, _: Door) -> Iterator[str]:
    planner = args.epp_planner
    if (entry := PLANNERS.entry(planner)) is not None and entry.lacks:
        yield f"--epp-planner {planner} is planned, not run: training lacks {entry.lacks}; use --epp-planner greedy"
    if entry is not None and entry.problems:
        yield from resolve_name(entry.problems)(args)
    if args.epp_overlap_exchanges:
        yield from resolve_name("megatron_epp.contrib.overlap:problems")(args)


def pattern_problem(pattern: str | None) -> str:
    """Return why a hybrid model with these layers, None for the default ones, cannot run; empty if it can."""
    known = {kind.symbol: kind.name for kind in KINDS if kind.symbol}
    can = ", ".join(f"{name} ({symbol})" for symbol, name in known.items())
    if pattern is None:
        return f"--epp needs --hybrid-layer-pattern to know the layers of a hybrid model; layers of {can} can run"
    others = sorted(set(pattern) - {*known, layout.BETWEEN_STAGES}, key=pattern.index)
    refused = ", ".join(f"{REFUSED_LAYERS.get(symbol, 'unknown')} ({symbol})" for symbol in others)
    return refused and (
        f"--epp cannot run {refused} layers of --hybrid-layer-pattern {pattern}: slices of a sequence hand on keys, values, "
        f"latents and states of gated delta nets and Mamba-2, and no other yet; layers of {can} can run"
    )


def layers(args: Namespace, _: Door) -> Iterator[str]:
    if problem := pattern_problem(layout.hybrid_pattern(args) or ""):
        yield problem
    yield from layer_problems(args)
