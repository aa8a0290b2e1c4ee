"""The table of refusals: what settings cannot be, or not together, and what to do instead.

The launcher, the training script and `megatron_epp.wrap` ask `refuse` before plans run a model. What concerns one subject is a
function; `RULES` has these in the order in which problems are told, and says where they apply. Flags that are refused whatever
else is given are rows of `CONFLICTS`.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from pkgutil import resolve_name
from typing import Any, NamedTuple

from megatron_epp.cost.output_layer import AUTO
from megatron_epp.mcore.arguments import ArgumentError, fp8
from megatron_epp.mcore.arguments.conflicts import (
    COUNTING,
    OF_MODELS,
    OF_VOCABULARY,
    PARTING,
    QUEUES,
    REPLAYS,
    Door,
    MegatronFlag,
    given_flags,
)
from megatron_epp.mcore.arguments.flag import GIVEN, Number
from megatron_epp.mcore.arguments.layout import BETWEEN_STAGES, hybrid_pattern, layout_problems
from megatron_epp.mcore.arguments.sizes import replicas_of, shares, stages
from megatron_epp.mcore.arguments.table import ROWS, TABLE
from megatron_epp.mcore.arguments.vocabulary import VOCABULARY_FLAG, shards_vocabulary
from megatron_epp.mcore.model.kinds import KINDS
from megatron_epp.mcore.model.kinds.experts import chunk_problems, router_problems
from megatron_epp.plan import EppError
from megatron_epp.plan.errors import Names
from megatron_epp.plan.flags import flag_of
from megatron_epp.plan.planners import PLANNERS, begins_with_greedy
from megatron_epp.plan.reading import brief


def _forgotten(args: Namespace, _: Door) -> Iterator[str]:
    """Yield flags of ours without `--epp`, which would train Megatron's samples by its own schedule without a word."""
    words = {word.partition("=")[0] for word in sys.argv}  # a flag may be given its default, which the namespace does not show
    ours = (row for row in TABLE if row.is_ours and row.setting not in ("epp", "allow_unknown_megatron"))
    idle = [
        row.training for row in ours if row.training in words or getattr(args, row.dest, None) not in (None, False, row.default)
    ]
    if idle:
        verb, them = ("do", "them") if len(idle) > 1 else ("does", "it")
        yield f"{', '.join(idle)} {verb} nothing without --epp: add it, or leave {them} out"


# ---- a script's own microbatches, with flags or `megatron_epp.wrap` --------------------------------------------------

_REPLAY_VARIABLE = "ENABLE_ROUTING_REPLAY"
"""Environment variable that slime sets to 1 in the processes whose routers replay."""
_OF_REPLICAS = "global_aux_loss"


def _replay(settings: Any, door: Door) -> Iterator[str]:
    """Yield what takes the routes of microbatches from queues, unless these run in their own order.

    Samples have routes of their own. Megatron's replay may be switched on there, without an action (`acting_replay`).
    """
    if getattr(settings, "epp_order", GIVEN) == GIVEN:
        return
    advice = f"use --epp-order {GIVEN}" if door.has_flags else f"use megatron_epp.wrap(order={GIVEN!r})"
    _, *others = REPLAYS  # behind Megatron's own
    if of_samples := getattr(settings, "epp_microbatches", "user") != "user":
        advice = "leave it out, and give samples a column routes"
    if replays := [row for row in (others if of_samples else REPLAYS) if row.is_given(settings)]:
        yield f"{door.cannot} {'; '.join(row.text(settings, door) for row in replays)}: {advice}"
    if os.environ.get(_REPLAY_VARIABLE) == "1":
        yield f"{door.cannot} {_REPLAY_VARIABLE}=1 in the environment ({QUEUES}): {advice}"


def _balancing(settings: Any, door: Door) -> Iterator[str]:
    """Yield a loss of routers that look at tokens of all replicas: then all would need to run the same plan."""
    balancing = getattr(settings, "moe_router_load_balancing_type", None) or ()
    if _OF_REPLICAS in ((balancing,) if isinstance(balancing, str) else balancing):
        refused = door.with_value("moe_router_load_balancing_type", _OF_REPLICAS)
        yield (
            f"{door.cannot} {refused}: replicas have plans of their own, and their routers would wait for each other; use "
            "aux_loss or seq_aux_loss"
        )


def _weight_shards(settings: Any, door: Door) -> Iterator[str]:
    """Yield weights that ranks share beyond tensor parallelism, which 0.19 and later can."""
    tensor_ranks = getattr(settings, "tensor_model_parallel_size", 1)
    for prefix in ("", "expert_"):
        ranks = getattr(settings, f"{prefix}tensor_parallel_size", None) or tensor_ranks
        shards = getattr(settings, f"{prefix}tensor_parallel_num_weight_shards", None) or ranks
        shards = max(shards, ranks * getattr(settings, f"{prefix}gtp_weight_remat_size", 1))
        if shards > ranks:
            refused = door.with_value(f"{prefix}tensor_parallel_num_weight_shards", shards)
            yield (
                f"{door.cannot} {refused} on {ranks} tensor-parallel ranks: weights are gathered ahead in the order of the "
                "first iteration, which recompute changes; leave it out"
            )


HONOURED = {
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
HONOURED_BY_MEGATRON = {"epp_save_limit_seconds", "epp_checkpoint_fallback"}
"""Flags that apply where Megatron's own functions save and load checkpoints, which `wrap` does not see."""


def _without_effect(settings: Any, door: Door) -> Iterator[str]:
    """Yield settings of ours that need this package's data, layers or planners, or do not go with the order."""
    honoured = HONOURED | (HONOURED_BY_MEGATRON if door.has_flags else set())
    honoured |= {"epp_costs"} if settings.epp_costs == "learn" else set()
    values = [(row, getattr(settings, row.dest)) for row in TABLE if row.is_ours and row.dest not in honoured]
    if clashes := [door.with_value(row.dest, value) for row, value in values if value not in (row.unset, "off", "even")]:
        who = "--epp-microbatches user" if door.has_flags else "a schedule of megatron_epp.wrap"
        yield f"{who} runs the script's own model and data: leave out {', '.join(clashes)}"
    ways = ("epp_offload", "epp_host_memory_gb", "epp_split_weight_gradient")
    uses = [door.name_of(name) for name in ways if getattr(settings, name) not in (AUTO, None, False, "off")]
    if settings.epp_order == GIVEN and uses:
        yield f"{door.with_value('epp_order', GIVEN)} frees memory by recompute alone: leave out {', '.join(uses)}"


def advice(error: EppError, names: Names) -> str:
    """Return an error of planning with the remedies that a script's own microbatches leave, by the names of settings."""
    rows = (ROWS[remedy.setting] for remedy in error.remedies if remedy.setting in ROWS)
    return error.without_remedies(*(row.setting for row in rows if row.is_ours and row.dest not in HONOURED)).text(names)


# ---- plans of documents ----------------------------------------------------------------------------------------------


def _numbers(args: Namespace, _: Door) -> Iterator[str]:
    """Yield numbers outside their rows' limits."""
    for row in TABLE:
        if row.is_ours and isinstance(read := row.read, Number):
            setting = getattr(args, row.dest, None)
            for value in setting if isinstance(setting, list) else [setting]:
                if value is not None and not read.accepts(value):
                    yield f"{row.training} is {brief(value)}; it must be {read.must_be}"


def _batches(args: Namespace, _: Door) -> Iterator[str]:
    """Yield what does not go with batches of a number of tokens."""
    if args.epp_batch_tokens is None:
        return
    if args.epp_schedule != "elastic":
        yield f"--epp-batch-tokens is for --epp-schedule elastic, not {args.epp_schedule}: leave one of them out"
    if args.epp_documents == "stream":
        yield "--epp-batch-tokens is for sequences of different lengths: with --epp-documents stream use --global-batch-size"
    yield from (f"--epp-batch-tokens does not go with {row.text(args)}" for row in COUNTING if row.is_given(args))


def _samples(args: Namespace, _: Door) -> Iterator[str]:
    """Yield what does not go with `--epp-samples` and `--epp-loss`. Raises `EppError` if there is no such loss."""
    if args.epp_samples is None:
        if args.epp_loss is not None:
            yield "--epp-loss needs the samples that the loss is of: add --epp-samples FILE"
        return
    sources = ("data_path", "train_data_path", "data_args_path", "per_split_data_args_path")
    if source := next((name for name in sources if getattr(args, name, None)), ""):
        yield f"--epp-samples takes the place of {flag_of(source)}: leave one of them out"
    if len(args.epp_samples) > 2:
        yield f"--epp-samples takes a file for training and one for evaluation, not {len(args.epp_samples)}"
    if args.epp_schedule != "elastic":
        yield f"--epp-samples is for --epp-schedule elastic, not {args.epp_schedule}: leave one of them out"
    if args.epp_loss is not None:
        yield from _of_loss(args)


def _of_loss(args: Namespace) -> Iterator[str]:
    from megatron_epp.losses import load_loss

    loss = load_loss(args.epp_loss)
    if getattr(args, "mtp_num_layers", None):
        yield "--epp-loss trains no multi-token prediction: leave out --mtp-num-layers"
    if getattr(loss, "has_values", False) and not args.untie_embeddings_and_output_weights:
        yield (
            f"--epp-loss {args.epp_loss} reads values, of a head in the place of the output layer: pass "
            "--untie-embeddings-and-output-weights"
        )
    yield from (f"--epp-loss {args.epp_loss}: {problem}" for problem in router_problems(args, Door.DOCUMENTS, loss.average))


def _memory(settings: Any, door: Door) -> Iterator[str]:
    """Yield what does not go with offload."""
    host, has_host = door.name_of("epp_host_memory_gb"), settings.epp_host_memory_gb is not None
    if settings.epp_offload == "off" and has_host:
        yield f"{host} needs {door.with_value('epp_offload', 'on')}: add that, or leave this out"
    if door is not Door.DOCUMENTS or not (settings.epp_offload == "on" or (has_host and settings.epp_offload != "off")):
        return
    flag, entry = "--epp-offload" if settings.epp_offload == "on" else host, PLANNERS.entry(settings.epp_planner)
    if entry is not None and not entry.may_offload:
        yield f"{flag} is for --epp-planner greedy and orders of papers, not {settings.epp_planner}; leave one of them out"
    elif settings.epp_recompute != "auto":
        yield f"{flag} is for offload, which takes the place of recompute where it can: leave --epp-recompute at auto"


def _plans(args: Namespace, _: Door) -> Iterator[str]:
    """Yield which of our flags are incompatible with each other, or with Megatron's."""
    planner = args.epp_planner
    if (entry := PLANNERS.entry(planner)) is not None and entry.lacks:
        yield f"--epp-planner {planner} is planned, not run: training lacks {entry.lacks}; use --epp-planner greedy"
    if args.epp_documents == "stream" and (parting := given_flags(PARTING, args)):
        yield f"--epp-documents stream runs samples across documents: leave out {parting}, or use --epp-documents split"
    if args.epp_order == GIVEN:
        yield f"--epp-order {GIVEN} is for --epp-microbatches user: leave it out, documents are cut and packed by the plan"
    if args.epp_costs == "measure":
        yield (
            "--epp-costs measure has gone: use learn, which fits costs to the first iterations of training, or a file that "
            "`megatron-epp profile -o FILE` writes"
        )
    if args.epp_trace is not None and args.epp_report_dir is None:
        yield "--epp-trace needs --epp-report-dir to write to"
    # The flag makes Transformer Engine, and Megatron's data parallelism with it, delay weight gradients, as plans with W need.
    if args.delay_wgrad_compute and not splits_weights(args):
        yield "--epp puts off weight gradients with --epp-split-weight-gradient: leave out --delay-wgrad-compute"


def splits_weights(args: Namespace) -> bool:
    """Return True for a run whose plans compute weight gradients as actions of their own."""
    return args.epp_split_weight_gradient in (True, "on") and args.epp_schedule == "elastic"


def delays_weights(args: Namespace) -> bool:
    """Return True if Transformer Engine's layers, and the hooks of data parallelism, wait for split weight gradients."""
    return splits_weights(args) and args.transformer_impl == "transformer_engine"


def weights_together(args: Namespace) -> Iterator[str]:
    """Yield why weight gradients are computed with their backwards where no flag asks for more."""
    engine = args.transformer_impl == "transformer_engine"
    if args.epp_schedule != "elastic":
        yield f"--epp-schedule {args.epp_schedule} is asked for"
    if not begins_with_greedy(args.epp_planner):
        yield f"--epp-planner {args.epp_planner} is asked for"
    if hybrid_pattern(args):
        yield "the model has a pattern of layers"
    if engine and (args.add_bias_linear or args.add_qkv_bias):
        yield "Transformer Engine's layers have biases, whose gradients come with every weight's"
    if engine and args.moe_grouped_gemm and not args.gradient_accumulation_fusion:
        yield "grouped experts would hold a gradient of all experts for every chunk without --gradient-accumulation-fusion"


OPTIONAL = {"epp_overlap_exchanges": "megatron_epp.contrib.overlap:problems"}
"""Switches of other packages, each with the function that yields what is incompatible with it, imported if it is on."""


def _optional(args: Namespace, _: Door) -> Iterator[str]:
    for attribute, target in OPTIONAL.items():
        if getattr(args, attribute):
            yield from resolve_name(target)(args)


def vocabulary_problems(args: Namespace) -> Iterator[str]:
    """Yield what an output layer that is divided over pipeline ranks does not go with."""
    ranks = args.pipeline_model_parallel_size
    if ranks < 2:
        yield f"{VOCABULARY_FLAG} on divides the output layer over --pipeline-model-parallel-size {ranks} ranks: leave it out"
    if args.epp_schedule != "elastic":
        yield f"{VOCABULARY_FLAG} on is for --epp-schedule elastic, not {args.epp_schedule}: leave one of them out"
    if args.epp_loss is not None:
        yield f"{VOCABULARY_FLAG} on does not go with --epp-loss, which needs the output layer on the last stage: leave it out"
    yield from (f"{VOCABULARY_FLAG} on does not go with {row.text(args)}" for row in OF_VOCABULARY if row.is_given(args))
    entries = getattr(args, "padded_vocab_size", None) or getattr(args, "vocab_size", None)
    if entries is not None and entries // args.tensor_model_parallel_size < ranks:
        yield (
            f"{VOCABULARY_FLAG} on divides a vocabulary of {entries} entries over {args.tensor_model_parallel_size} x {ranks} "
            "ranks, some of which would have none: leave it out"
        )
    kind = getattr(args, "ckpt_format", "torch_dist")
    for flag in ("--save", "--load"):
        if getattr(args, flag[2:], None) and kind != "torch_dist":
            yield (
                f"{VOCABULARY_FLAG} on with {flag} needs --ckpt-format torch_dist, not {kind}, which cannot divide a weight "
                "over stages"
            )


# ---- kinds of layers -------------------------------------------------------------------------------------------------

REFUSED_LAYERS = {
    "D": "sparse attention (DSA)",
}
"""Names of layers that Megatron has and `kinds.KINDS` has not, by their symbol in `--hybrid-layer-pattern`."""


def pattern_problem(pattern: str | None) -> str:
    """Return why a hybrid model with these layers, None for the default ones, cannot run; empty if it can."""
    known = {kind.symbol: kind.name for kind in KINDS if kind.symbol}
    can = ", ".join(f"{name} ({symbol})" for symbol, name in known.items())
    if pattern is None:
        return f"--epp needs --hybrid-layer-pattern to know the layers of a hybrid model; layers of {can} can run"
    others = sorted(set(pattern) - {*known, BETWEEN_STAGES}, key=pattern.index)
    refused = ", ".join(f"{REFUSED_LAYERS.get(symbol, 'unknown')} ({symbol})" for symbol in others)
    return refused and (
        f"--epp cannot run {refused} layers of --hybrid-layer-pattern {pattern}: slices of a sequence hand on keys, values, "
        f"latents and states of gated delta nets and Mamba-2, and no other yet; layers of {can} can run"
    )


def _layers(args: Namespace, _: Door) -> Iterator[str]:
    if problem := pattern_problem(hybrid_pattern(args) or ""):
        yield problem
    for kind in KINDS:
        yield from kind.problems(args)


# ---- the table -------------------------------------------------------------------------------------------------------

CONFLICTS = (*OF_MODELS, *(flag for kind in KINDS for flag in kind.flags))
"""Flags of Megatron that are refused whatever else is given."""
OF_DOCUMENTS = tuple(row for row in CONFLICTS if Door.DOCUMENTS in row.doors)


class Rule(NamedTuple):
    """Function from settings and their source to why they are refused, a line each; and the sources for which it is asked."""

    problems: Callable[[Any, Door], Iterable[str]]
    doors: Door = Door.DOCUMENTS


RULES = (
    Rule(_forgotten, Door.STOCK),
    Rule(_replay, Door.MICROBATCHES),
    Rule(_balancing, Door.MICROBATCHES),
    Rule(_weight_shards, Door.ALL),
    Rule(fp8.problems, Door.ALL),
    Rule(_without_effect, Door.USER | Door.WRAP),
    Rule(replicas_of),
    Rule(_numbers),
    Rule(shares),
    Rule(layout_problems),
    Rule(stages),
    Rule(_batches),
    Rule(_samples),
    Rule(_memory, Door.DOCUMENTS | Door.USER | Door.WRAP),
    Rule(_plans),
    Rule(_optional),
    Rule(lambda args, _: vocabulary_problems(args) if shards_vocabulary(args) else ()),
    Rule(_layers),
    Rule(chunk_problems, Door.SLICED_MODEL),
)


def problems_of(
    settings: object, door: Door, rules: Iterable[Rule] = RULES, conflicts: Iterable[MegatronFlag] = CONFLICTS
) -> Iterator[str]:
    """Yield why settings are refused, a line each; in the first all flags that plans cannot honour.

    Args:
        settings: Megatron's arguments, a model's configuration, or settings of `megatron_epp.wrap` as arguments.

    Raises:
        EppError: a file or a function that a setting names cannot be read, or sizes are no sizes.
    """
    if clashes := [row.text(settings, door) for row in conflicts if door in row.doors and row.is_given(settings)]:
        yield f"{door.cannot} {'; '.join(clashes)}"
    for rule in rules:
        if door in rule.doors:
            yield from rule.problems(settings, door)


def refuse(settings: object, door: Door, rules: Iterable[Rule] = RULES, conflicts: Iterable[MegatronFlag] = CONFLICTS) -> None:
    """Raise `ArgumentError` with a line for each of `problems_of`."""
    if problems := [*problems_of(settings, door, rules, conflicts)]:
        raise ArgumentError("\n".join(problems))
