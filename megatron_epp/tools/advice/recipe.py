"""A configuration as flags to paste, and as a recipe for ``megatron-epp train -c``."""

from __future__ import annotations

import math
import shlex
import textwrap
from typing import Any

from megatron_epp.cost.optimizer import FLAGS as OPTIMIZER_FLAGS
from megatron_epp.plan import is_unlimited
from megatron_epp.plan.flags import flag_words
from megatron_epp.planner.baselines.whole import MLP_AGAIN, UniformDecisions, rows_together
from megatron_epp.tools.advice.judge import Baseline
from megatron_epp.tools.advice.question import Configuration, Question

_KINDS = ("tensor_model", "context", "pipeline_model", "expert_model", "expert_tensor")
_SIZES = ("sequence_parallel", *(f"{kind}_parallel_size" for kind in _KINDS))
_OF_FP8 = ("fp8_format", "fp8_recipe")
_EXAMPLES = {"train_iters": 1000, "lr": 1e-4, "min_lr": 1e-5, "lr_decay_style": "cosine", "clip_grad": 1.0, "eval_iters": 0}
_WIDTH = 113  # characters of a line of flags
_OURS_TO_SAY = """\
# Sizes are those that `megatron-epp advise` found best for {lengths}, in batches of {batch}.
# Learning rate, iterations and folders are examples: set your own.{defaults}
"""
_DEFAULTS = " The model has Megatron's defaults where nothing is said."


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
    lines = textwrap.wrap(" ".join(filter(None, flags)), _WIDTH, break_long_words=False, break_on_hyphens=False)
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
    if math.isinf(question.cluster.rates.exchange_bytes):  # no links between devices: ranks are processes of one host
        body["megatron"]["distributed_backend"] = "gloo"
    rows = question.flags.get("padded_vocab_size", question.flags["vocab_size"])
    if not has_tokenizer and rows % config.tensor == 0:  # otherwise rows are the tokenizer's entries, and padding
        body["megatron"]["padded_vocab_size"] = rows
    body["megatron"] |= megatron_settings(question, config)
    batch = f"{len(question.lengths)} sequences of up to {question.context:,} tokens"
    text: str = yaml.safe_dump(body, sort_keys=False, allow_unicode=True)
    return _OURS_TO_SAY.format(lengths=lengths, batch=batch, defaults="" if model is not None else _DEFAULTS) + text


def without_sizes(flags: dict[str, Any]) -> dict[str, Any]:
    """A model's flags without the parallel sizes, and without this package's."""
    return {name: value for name, value in flags.items() if name not in _SIZES and not name.startswith("epp_")}
