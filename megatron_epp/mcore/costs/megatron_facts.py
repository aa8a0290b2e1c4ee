"""Facts in Megatron's arguments about the model that trains: for formulas, its optimizer, learnt costs and layouts."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import Any, Literal, NamedTuple

import torch

from megatron_epp.cost.optimizer import DTYPE_FLAGS, KINDS, OptimizerBytes
from megatron_epp.mcore.arguments.table import names_of
from megatron_epp.mcore.model.block_loss import block_tokens_of
from megatron_epp.plan.flags import AUTO
from megatron_epp.port.run_facts import AttentionSizes, CostsFile, RunFacts

Ask = Callable[..., Any]
"""Function that asks the planning process by name (`PlanningProcess.call`), for ranks that have one."""
FORMULAS = "megatron_epp.tools.formulas.of_run"
"""Module whose functions the process is asked for."""
_DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.uint8: "fp8"}
"""Values of Megatron's flags by the types that it converts them to."""


def optimizer_bytes(args: argparse.Namespace) -> OptimizerBytes:
    """Return the bytes of weights, gradients and optimizer states, Adam's if it is unknown, from validated arguments."""
    flags = dict(vars(args))
    flags |= {name: _DTYPE_NAMES.get(flags.get(name), flags.get(name)) for name in DTYPE_FLAGS}  # type: ignore[arg-type]
    if (flags.get("optimizer") or "adam") not in KINDS:
        flags["optimizer"] = "adam"
        flags["use_distributed_optimizer"] |= bool(flags.get("use_layer_wise_distributed_optimizer"))
    return OptimizerBytes.of_flags(flags)


type Decides = Literal["costs", "layout", "both"]
"""What depends on a fact: learnt times and bytes, the choice of a layout, or both."""


class _Fact(NamedTuple):
    """An argument of Megatron, or a field of a model's configuration, on which costs or layouts depend."""

    name: str
    decides: Decides
    # Values that are not told, nor is None, so that what was kept before there was the row holds; None tells all
    untold: tuple[object, ...] | None = None
    only_with: str = ""  # argument without which this one says nothing, and is not told
    of_model: bool = False  # it is a field of the model's configuration, which a script may set by itself


def _named(names: str, decides: Decides, of_model: bool = False) -> tuple[_Fact, ...]:
    """Return a row for each of several names, all of whose values are told."""
    return tuple(_Fact(name, decides, of_model=of_model) for name in names.split())


_FACTS = (
    *_named("tensor_model_parallel_size context_parallel_size expert_model_parallel_size data_parallel_size", "both"),
    *_named("epp_offload epp_split_weight_gradient", "both"),
    _Fact("optimizer", "both", untold=("adam",)),
    _Fact("use_precision_aware_optimizer", "both", untold=(False,)),
    *(_Fact(name, "both", untold=(torch.float32, "fp32")) for name in DTYPE_FLAGS),
    _Fact("optimizer_cpu_offload", "both", untold=(False,)),
    _Fact("optimizer_offload_fraction", "both", only_with="optimizer_cpu_offload"),
    # Times of a stage include its messages to neighbours, which depend on the placement.
    *_named("pipeline_model_parallel_size epp_placement sequence_parallel bf16 fp16", "costs"),
    *_named("ffn_hidden_size num_attention_heads num_query_groups kv_channels swiglu", "costs"),
    *_named("num_experts moe_router_topk moe_ffn_hidden_size transformer_impl attention_backend", "costs"),
    _Fact("epp_loss_block_tokens", "both"),
    *_named("epp_vocab_parallel epp_microbatches virtual_pipeline_model_parallel_size use_distributed_optimizer", "costs"),
    _Fact("epp_latents", "costs", untold=("auto", "off")),
    *_named("recompute_granularity recompute_method recompute_num_layers fp8", "costs", of_model=True),
    _Fact("fp8_recipe", "costs", untold=("delayed",), of_model=True),  # which is refused
    *_named("fp4 window_size", "costs", of_model=True),
    _Fact("window_attn_skip_freq", "costs", untold=(), of_model=True),
    _Fact("softmax_type", "costs", untold=("vanilla",), of_model=True),
    _Fact("moe_token_dispatcher_type", "costs", untold=("alltoall", "allgather"), of_model=True),
    _Fact("moe_flex_dispatcher_backend", "costs", untold=("deepep",), of_model=True),
    *_named("epp_layout epp_costs epp_memory_cap_gb epp_documents epp_batch_tokens seq_length global_batch_size", "layout"),
    _Fact("expert_tensor_parallel_size", "layout"),
    _Fact("epp_vocab_parallel", "layout", untold=("off",)),
    _Fact("epp_trained_parameters", "layout", untold=()),
)
"""All that learnt costs and a chosen layout depend on, besides the data, the machine and the shapes of parameters."""


def facts(args: argparse.Namespace, what: Literal["costs", "layout"], config: object = None) -> dict[str, Any]:
    """Return what costs or a layout depend on, by name, as values that JSON gives back as they were."""
    values = {}
    for name, decides, untold, only_with, of_model in _FACTS:
        value = getattr(config if of_model else args, name, None)
        is_told = (untold is None or value not in (None, *untold)) and (not only_with or getattr(args, only_with, False))
        if decides in (what, "both") and is_told:
            value = value.name if isinstance(value, Enum) else value
            values[name] = value if value is None or isinstance(value, bool | int | float | str) else str(value)
    return values


def trained_share(stage: Any) -> float | None:
    """Return the share of a stage's parameters that train; None if no backward of it computes gradients."""
    counts = [(weight.numel(), weight.numel() * weight.requires_grad) for weight in stage.model.parameters()]
    held, trained = (sum(column) for column in zip(*counts, strict=True)) if counts else (1, 1)
    return trained / held if stage.has_gradient else None


def run_facts(args: argparse.Namespace, ask: Ask) -> RunFacts:
    flags = {name: value for name, value in vars(args).items() if _is_plain(value)}
    blocks = block_tokens_of(args) if getattr(args, "seq_length", None) else 0  # a program's microbatches may have any length
    facts = RunFacts(flags, optimizer_bytes(args), blocks, None)
    if not torch.cuda.is_initialized():
        return facts
    return replace(facts, kernel=kernel_of(args, ask(f"{FORMULAS}:attention_sizes", facts)))


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def costs_file(args: argparse.Namespace) -> CostsFile | None:
    """Return the file or shipped profile that `--epp-costs` names; None if it names none."""
    return None if args.epp_costs in ("analytic", "learn") else CostsFile(args.epp_costs, names_of(args)["costs"])


def kernel_of(args: argparse.Namespace, sizes: AttentionSizes) -> str:
    """Return the name of the attention kernel that the run will take; empty for one without published rates."""
    from megatron_epp.runtime.attention import kernels  # whose libraries no run without formulas needs

    width = sizes.value_head_width if sizes.value_head_width != sizes.head_width else 0
    heads = sizes.heads_on_rank, sizes.kv_heads_on_rank
    case = kernels.AttentionCase("cuda", args.params_dtype, sizes.head_width, *heads, width)
    chosen, _ = kernels.explain(case, getattr(args.attention_backend, "name", args.attention_backend) or AUTO)
    return "" if chosen is None else chosen.rates
