"""Advice as text with reasons, as JSON, as flags to paste, and as a recipe for ``megatron-epp train -c``."""

from __future__ import annotations

import math
import shlex
import textwrap
from dataclasses import asdict, fields
from typing import Any

from megatron_epp.cost.casts import recipe_of
from megatron_epp.cost.optimizer import FLAGS as OPTIMIZER_FLAGS
from megatron_epp.plan import is_unlimited
from megatron_epp.plan.flags import flag_words
from megatron_epp.plan.units import format_bytes, format_gib
from megatron_epp.planner.baselines.whole import MLP_AGAIN, UniformDecisions, rows_together
from megatron_epp.tools.advice.configuration_search import CLOSE, TIE, Advice
from megatron_epp.tools.advice.judge import Baseline, Judged, Parts
from megatron_epp.tools.advice.question import COUNTED_FOR_EACH, Configuration, Question
from megatron_epp.tools.report.text import format_us, table

_KINDS = ("tensor_model", "context", "pipeline_model", "expert_model", "expert_tensor")
_SIZES = ("sequence_parallel", *(f"{kind}_parallel_size" for kind in _KINDS))
_OF_FP8 = ("fp8_format", "fp8_recipe")
_EXAMPLES = {"train_iters": 1000, "lr": 1e-4, "min_lr": 1e-5, "lr_decay_style": "cosine", "clip_grad": 1.0, "eval_iters": 0}
_FLAGS_WIDTH = 113  # characters of a line of flags
_OURS_TO_SAY = """\
# Sizes are those that `megatron-epp advise` found best for {lengths}, in batches of {batch}.
# Learning rate, iterations and folders are examples: set your own.{defaults}
"""
SHARES = """\
Prefixes are shared by samples (--epp-samples: JSONL or Parquet, a row with `tokens` and `trained` for each) and conversations
(`megatron-epp prepare --chat`), where they are not trained; documents without masks share none. A run draws samples one by one:
those that begin alike are in one batch if a batch is the whole file, or a loss over groups (--epp-loss) keeps them together.
`megatron_epp.wrap_samples` takes the batches of a loop of your own.
"""
_DEFAULTS = " The model has Megatron's defaults where nothing is said."
_NOTICED = 0.005  # share of the best step's time that a part must take longer to be named as the reason
_WIDTH = 128
_LINES = 6  # number of configurations of a kind that are listed unless all are requested
_USUAL = {"EP": "1", "VPP": "1", "latents": ""}  # columns that are left out where every configuration has this
_READ = (
    "Layers are those of the stages in order: 2x3+4 are two stages of 3 and one of 4. Percentages are of a step. Waiting: a "
    f"replica that has finished its part of the batch waits until the slowest one has. Of those within {CLOSE:.0%} of the "
    "fastest the first has the fewest kinds of parallelism."
)
_REDUCTION = " In the best, {} go to reducing gradients and gathering weights, of which training may hide a part."
_NOT_SUBTRACTED = (
    "Both are {products}, and without what --epp refuses: FP4, --tp-comm-overlap. What these are "
    "worth to a training that has them is not subtracted."
)


def megatron_settings(question: Question, config: Configuration) -> dict[str, Any]:
    """Megatron's flags for the configuration, the optimizer and the batch, with underscores."""
    names, context = (*OPTIMIZER_FLAGS, *_OF_FP8), question.context
    optimizer = {name: question.flags[name] for name in names if name in question.flags}
    batch = {"micro_batch_size": 1, "global_batch_size": len(question.lengths)}
    return config.settings(question.flags) | optimizer | batch | {"seq_length": context, "max_position_embeddings": context}


def epp_settings(question: Question, config: Configuration) -> dict[str, Any]:
    """This package's flags for the configuration, without the prefix."""
    latents = config.latents or question.flags.get("epp_latents", "auto")
    settings = {
        "memory_cap_gb": None if is_unlimited(question.cap_bytes) else round(question.cap_bytes / 2**30, 2),
        "placement": "v" if config.virtual > 1 and config.placement == "v" else None,
        "vocab_parallel": "on" if config.shards_vocabulary else None,
        "documents": question.documents if question.documents != "split" else None,
        "latents": latents if question.flags.get("multi_latent_attention") else None,
        "offload": "on" if question.options.offload else "off",
        "split_weight_gradient": question.options.split_weight or None,
        "share_prefixes": "auto" if question.borrowed else None,
        "costs": question.costs_files.get(config.sharing),
    }
    return {name: value for name, value in settings.items() if value is not None}


def stock_settings(question: Question, baseline: Baseline) -> dict[str, Any]:
    """Megatron's flags for its own schedule at its best, with underscores: a sample is a packed row."""
    config, stock, ranks = baseline.config, baseline.stock, baseline.config.pipeline
    rows, most = len(stock.decisions.chunks), max(map(max, stock.decisions.recompute_steps))
    settings = megatron_settings(question, config) | {"global_batch_size": rows * config.data}
    settings |= dict.fromkeys(("seq_length", "max_position_embeddings"), stock.row_tokens)
    if config.virtual > 1 and rows % ranks:
        settings["microbatch_group_size_per_virtual_pipeline_stage"] = rows_together(rows, ranks)
    if stock.decisions.modes == MLP_AGAIN:
        modules = ["layernorm", "mlp", *["moe"] * bool(question.flags.get("num_experts"))]
        return settings | {"recompute_granularity": "selective", "recompute_modules": modules}
    if most:
        groups = stock.decisions if isinstance(stock.decisions, UniformDecisions) else None
        method, count = ("uniform", groups.group) if groups else ("block", most)
        return settings | {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": count}
    return settings


def flags_text(question: Question, config: Configuration) -> str:
    settings = {f"epp_{name}": value for name, value in epp_settings(question, config).items()}
    return command_text(megatron_settings(question, config) | {"epp": True} | settings)


def command_text(settings: dict[str, Any]) -> str:
    """Format flags, whose names have underscores, for a command line, over several lines."""
    flags = (shlex.join(flag_words({name: value})).replace(" ", "\xa0") for name, value in settings.items())
    lines = textwrap.wrap(" ".join(filter(None, flags)), _FLAGS_WIDTH, break_long_words=False, break_on_hyphens=False)
    return " \\\n".join(lines).replace("\xa0", " ")


def recipe_text(question: Question, config: Configuration, model: str | None, lengths: str) -> str:
    """Format a recipe in YAML. `model`: the name of a shipped model; None writes the model's flags instead."""
    import yaml  # type: ignore[import-untyped,unused-ignore]

    node = question.cluster.devices_per_node
    nodes, has_tokenizer = max(1, question.devices // node), "tokenizer_type" in question.flags
    launch = {"name": f"advised-{question.devices}", "nodes": f"${{oc.env:NNODES,{nodes}}}"}
    body: dict[str, Any] = {
        "include": ["base", *([] if model is None else [f"models/{model}"]), *([] if has_tokenizer else ["data/documents"])],
        "cluster": question.cluster.name,
        "launch": launch | {"processes_per_node": min(node, question.devices)},
        "megatron": _EXAMPLES | ({} if model is not None else without_sizes(question.flags)),
        "epp": epp_settings(question, config),
    }
    if nodes > 1:
        body["launch"]["master_port"] = "${oc.env:MASTER_PORT,29500}"
    if has_tokenizer:
        body["megatron"]["data_path"] = "${oc.env:DATA_PATH,documents/text}"
    if question.borrowed:
        body["megatron"]["data_path"], body["epp"]["samples"] = None, "${oc.env:SAMPLES,samples.jsonl}"
    if math.isinf(question.cluster.rates.exchange_bytes):  # no links between devices: ranks are processes of one host
        body["megatron"]["distributed_backend"] = "gloo"
    rows = question.flags.get("padded_vocab_size", question.flags["vocab_size"])
    if not has_tokenizer and rows % config.tensor == 0:  # otherwise rows are the tokenizer's entries, and padding
        body["megatron"]["padded_vocab_size"] = rows
    body["megatron"] |= megatron_settings(question, config)
    batch = f"{len(question.lengths)} sequences of up to {question.context:,} tokens"
    text: str = yaml.safe_dump(body, sort_keys=False, allow_unicode=True)
    head = _OURS_TO_SAY.format(lengths=lengths, batch=batch, defaults="" if model is not None else _DEFAULTS)
    return head + textwrap.indent(SHARES, "# ") * bool(question.borrowed) + text


def without_sizes(flags: dict[str, Any]) -> dict[str, Any]:
    """A model's flags without the parallel sizes, and without this package's."""
    return {name: value for name, value in flags.items() if name not in _SIZES and not name.startswith("epp_")}


def as_text(advice: Advice, show: int, everything: bool) -> str:
    best, question = advice.best[0], advice.question
    node, lengths = question.cluster.devices_per_node, question.lengths
    cap = "no memory cap" if is_unlimited(question.cap_bytes) else f"at most {format_gib(question.cap_bytes)} each"
    nodes = f", nodes of {node}" if question.devices > node else ""
    devices = f"{question.devices} devices of {question.cluster.name}{nodes}, {cap}"
    batch = f"A batch of {len(lengths):,} sequences, {question.tokens_text}, of up to {max(lengths):,} tokens"
    products = f"in FP8 ({name})" if (name := recipe_of(question.flags)) else "in the type of the weights, not in FP8"
    others = [(entry.config.name, why_slower(question, entry, best)) for entry in (*advice.best[1:], *advice.slower)]
    unfit = [(misfit.name, misfit.why) for misfit in advice.refused if misfit.config is not None]
    ruled_out = [(misfit.name, misfit.why) for misfit in advice.refused if misfit.config is None]
    parts = [
        _wrapped(f"{devices}. {batch}; one of {question.context:,} fits too."),
        f"Configurations that fit: {1 + len(others)} (planned as in training: {len(advice.best)}); that do not: {len(unfit)}.",
        "\n".join(_table(advice, show)),
        _wrapped(_READ + _REDUCTION.format(format_us(best.parts.reduction_us)) * (best.parts.reduction_us > 0)),
        *[COUNTED_FOR_EACH] * bool(question.borrowed),
        _wrapped(_plain_text(advice)),
        "\n".join(advice.gain.lines()),
        _wrapped(_NOT_SUBTRACTED.format(products=products)),
    ]
    for title, lines in (("Others:", others), ("Do not fit, the nearest first:", unfit), ("Ruled out:", ruled_out)):
        shown = lines if everything else lines[:_LINES]
        more = [f"  and {len(lines) - len(shown)} more (--all lists them)"] * (len(lines) > len(shown))
        parts += ["\n".join([title, *(f"  {name}: {why}" for name, why in shown), *more])] * bool(lines)
    return "\n\n".join(parts)


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, _WIDTH, break_on_hyphens=False))


def _table(advice: Advice, show: int) -> list[str]:
    rows = []
    for entry in advice.best[:show]:
        config, parts = entry.config, entry.parts
        rate = advice.tokens_per_s(parts.step_us)
        shares = {"bubble": parts.bubble_us, "recompute": parts.recompute_us, "exchange": parts.exchange_us}
        shares |= {"waiting": parts.waiting_us, "reduce": parts.reduction_us}
        rows.append(
            {"TP": str(config.tensor), "CP": str(config.context), "PP": str(config.pipeline), "DP": str(config.data)}
            | {"EP": str(config.expert), "VPP": f"{config.virtual} {config.placement}" if config.virtual > 1 else "1"}
            | {"latents": config.latents, "layers": config.layers_text}
            | {"tokens/s": f"{rate:,.0f}", "per device": f"{rate / config.devices:,.0f}", "step": format_us(parts.step_us)}
            | {name: f"{share_us / parts.step_us:.1%}" for name, share_us in shares.items()}
            | {"peak memory": format_bytes(entry.peak_bytes)}
        )
    header = [name for name in rows[0] if any(row[name] != _USUAL.get(name) for row in rows)]
    return table(header, [[row[name] for name in header] for row in rows], left=())


def _plain_text(advice: Advice) -> str:
    if advice.plain is None:
        return "Megatron's own 1F1B fits at none of the sizes that were tried, with any layers, virtual stages or recompute."
    plain, best_us = advice.plain, advice.best[0].parts.step_us
    head = "Elastic plans pay"
    if advice.plain_is_as_good:
        is_faster = best_us > (1 + TIE) * plain.stock.step_us
        head = f"Megatron's own schedule is {'faster' if is_faster else f'as good (within {TIE:.0%})'}"
    config, stock = plain.config, plain.stock
    shared = " Its replicas are taken not to wait for each other where they share experts, as those of plans do."
    kind, rows = "interleaved" if config.virtual > 1 else "plain", f"rows of up to {stock.row_tokens:,} tokens"
    speed = f"{advice.tokens_per_s(stock.step_us):,.0f} tokens/s, {best_us / stock.step_us:.0%} of the best above."
    text = f"{head}: {kind} 1F1B at its best has {config.name}, {rows} and {stock.recompute}: {speed}"
    return text + shared * (len(config.lockstep_groups[0]) > 1)


def why_slower(question: Question, entry: Judged, best: Judged) -> str:
    """Describe the part of a step that contributes most to a configuration's extra time over the best one."""
    slower = entry.parts.step_us / best.parts.step_us
    if slower <= 1 + CLOSE:
        return f"as good within {CLOSE:.0%} ({slower - 1:+.1%})"
    excess_us = {part.name: getattr(entry.parts, part.name) - getattr(best.parts, part.name) for part in fields(Parts)}
    name = max(excess_us, key=lambda name: excess_us[name])
    head = f"{'' if entry.is_exact else 'about '}{slower:.2f}x the time"
    if excess_us[name] <= _NOTICED * best.parts.step_us:
        return head
    share, of_best = (f"{getattr(judged.parts, name) / judged.parts.step_us:.0%}" for judged in (entry, best))
    words, cause = _reason(question, entry, name)
    return f"{head}: {words} {share} of a step (best: {of_best}){cause}"


def _reason(question: Question, entry: Judged, name: str) -> tuple[str, str]:
    """Words for a part of a configuration's step, before its share of the step and after it."""
    config, plan = entry.config, entry.plan
    sizes = (("TP", config.tensor), ("CP", config.context), ("EP", config.expert), ("ETP", config.expert_tensor))
    sharing = " x ".join(f"{label} {size}" for label, size in sizes if size > 1)
    crosses = " across nodes" * (question.shape(config).neighbours > question.cluster.devices_per_node)
    tokens, count = plan.num_tokens, len(plan.chunks)
    each = f", {tokens // count // config.ranks:,} on each of the {config.ranks} devices that share it (TP x CP)"
    chunks = f"its {count} chunks have {tokens // count:,} tokens on average{each * (config.ranks > 1)}"
    room_bytes = min(cap - static for cap, static in zip(plan.cap_bytes, plan.static_bytes, strict=True))
    longest = f": the longest document has {max(question.lengths):,} tokens, where a fair share has "
    waited = ", on which sequences that begin alike stay together", f"{longest}{question.tokens // config.data:,}"
    return {
        "compute_us": ("computing takes", f": {chunks}, and kernels are slower per token the fewer they are"),
        "exchange_us": (f"exchange within {sharing}{crosses} takes", ""),
        "recompute_us": ("recompute takes", f", as weights and optimizer leave {format_bytes(room_bytes)} for activations"),
        "bubble_us": (f"the bubble of a pipeline of {config.pipeline} is", f", with {tokens:,} tokens for each replica"),
        "waiting_us": (f"{config.data} replicas wait for the slowest for", waited[not question.borrowed]),
        "reduction_us": (f"reducing gradients over {config.context * config.data} ranks takes", ""),
    }[name]


def as_json(advice: Advice) -> dict[str, Any]:
    best, question, plain = advice.best[0], advice.question, advice.plain

    def timed(config: Configuration, step_us: float) -> dict[str, Any]:
        return {"layout": asdict(config), "step_us": step_us, "tokens_per_s": advice.tokens_per_s(step_us)}

    def row(entry: Judged) -> dict[str, Any]:
        why = "" if entry is best else why_slower(question, entry, best)
        figures = {"is_exact": entry.is_exact, "parts": asdict(entry.parts), "peak_bytes": entry.peak_bytes, "why": why}
        return timed(entry.config, entry.parts.step_us) | figures

    return {
        "devices": question.devices,
        "cluster": question.cluster.name,
        "cap_bytes": question.cap_bytes,
        "offload": question.options.offload,
        "context": question.context,
        "sequences": len(question.lengths),
        "tokens": question.tokens,
        "shared_tokens": question.shared_tokens,
        "best": [*map(row, advice.best)],
        "slower": [*map(row, advice.slower)],
        "refused": [{"name": misfit.name, "why": misfit.why, "needed_bytes": misfit.needed_bytes} for misfit in advice.refused],
        "plain_1f1b": plain
        and timed(plain.config, plain.stock.step_us)
        | {"row_tokens": plain.stock.row_tokens, "recompute": plain.stock.recompute, "is_as_good": advice.plain_is_as_good},
        "gain": advice.gain.as_json(),
    }
