"""Models, as Megatron's flags or ``config.json``, and clusters, as `Rates`, in YAML, by path or the name of a shipped file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron_epp.cost.balance import spread_layers
from megatron_epp.cost.casts import casts_of
from megatron_epp.cost.kept import SCHEMA as LEARNT
from megatron_epp.cost.kept import from_state
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.work import tokens_and_pairs
from megatron_epp.plan import EppError, Remedy
from megatron_epp.plan.flags import ALLTOALL, AUTO, DISPATCHERS, GATED_DELTA_NET, KERNELS, MACHINES
from megatron_epp.plan.layer_flags import all_but_every, by_layer, pattern_of
from megatron_epp.plan.layout import even_layers
from megatron_epp.plan.problem import Lengths, Problem
from megatron_epp.plan.reading import MOST_LAYERS, MOST_SIZE, brief, naming_file, nearest, number, parse_json, read_text
from megatron_epp.plan.sizing import loss_block_tokens
from megatron_epp.plan.yaml_files import MOST_YAML_BYTES, find, read_yaml
from megatron_epp.planner.chunks.chunker import own_parts
from megatron_epp.tools.formulas.hardware import CPU, H100_NODE, Rates
from megatron_epp.tools.formulas.layer_sizes import PARTS, DeltaNet, StateSpace
from megatron_epp.tools.formulas.model_shape import ModelShape
from megatron_epp.tools.formulas.profile import FORMAT as PROFILE
from megatron_epp.tools.formulas.profile import Profile

RATES = dict(zip(MACHINES, (H100_NODE, CPU), strict=True))  # rates by name, from which a cluster file starts

_VOCABULARY_MULTIPLE = 128
MOST_GB = 1e9  # largest memory of a device, in 2^30 bytes
MOST_RATE = 1e30  # largest rate, per second
CONFIG = "config.json"  # name of the file that describes a Hugging Face model
DEVICES_PER_NODE = 8  # devices per node if a cluster file does not set them


@dataclass(frozen=True, slots=True)
class Cluster:
    name: str  # of its file
    rates: Rates  # of one device, and of the links between devices
    device_memory_gb: float | None  # memory of one device, in 2^30 bytes; None for no cap
    # Devices that reach each other at `rates.exchange_bytes`; all others do at `rates.message_bytes`
    devices_per_node: int = DEVICES_PER_NODE

    def linked(self, devices: int) -> Rates:
        """Rates with the links between the ranks of a run of so many devices; stages are on different nodes if possible."""
        rates, node = self.rates, self.devices_per_node
        if devices <= node:
            return replace(rates, message_bytes=max(rates.message_bytes, min(rates.exchange_bytes, 1e15)))
        return replace(rates, devices_per_node=node)


def load_flags(name: str) -> dict[str, Any]:
    """Megatron's flags of a shipped model, a YAML file, or a Hugging Face ``config.json`` or its folder. Raises `EppError`."""
    path = _path_of(name)
    if path.suffix == ".json":
        from megatron_epp.tools.formulas.huggingface import flags_of_config  # a training reads none

        with naming_file(path):
            return flags_of_config(parse_json(read_text(path, MOST_YAML_BYTES), "the text"))
    body = read_yaml(path)
    if not isinstance(flags := body.get("megatron"), dict):
        raise EppError(f"{path} has no `megatron:` with Megatron's flags under it{nearest('megatron', body, 'there is {!r}')}")
    if unnamed := [key for key in flags if not isinstance(key, str)]:
        raise EppError(f"{path}: `megatron:` has {brief(unnamed[0])} where the name of a flag should stand")
    return flags


def is_config(name: str) -> bool:
    """Return True if a model is named by a Hugging Face config. Raises `EppError` if there is no such file."""
    return _path_of(name).suffix == ".json"


def _path_of(model: str) -> Path:
    return Path(model) / CONFIG if os.path.isfile(Path(model) / CONFIG) else find("models", model)


def load_cluster(name: str) -> Cluster:
    """Read a cluster file. Raises `EppError` naming the entry that is wrong."""
    path = find("clusters", name)
    entries = read_yaml(path)
    base, memory = entries.pop("rates", "h100"), entries.pop("device_memory_gb", None)
    node, sharing = entries.pop("devices_per_node", DEVICES_PER_NODE), entries.pop("host_sharing", None)
    if not isinstance(base, str) or base not in RATES:
        raise EppError(f"{path}: `rates` is {brief(base)}; it must be one of {', '.join(RATES)}{nearest(str(base), RATES)}")
    sharing, kernel = RATES[base].host_sharing if sharing is None else sharing, entries.pop("attention_kernel", "")
    if kernel and kernel not in KERNELS:
        text = f"{path}: attention_kernel is {brief(kernel)}; it must be one of {', '.join(KERNELS)}"
        raise EppError(text + nearest(str(kernel), KERNELS))
    for key, value in (("devices_per_node", node), ("host_sharing", sharing)):
        if type(value) is not int or not 1 <= value <= MOST_SIZE:
            raise EppError(f"{path}: {key} is {brief(value)}; it must be a whole number from 1 to {MOST_SIZE:,}")
    known = {field.name for field in fields(Rates)} - {"name", "host_sharing", "devices_per_node", "attention_kernel"}
    if unknown := sorted(set(entries) - known):
        there = ("attention_kernel", "device_memory_gb", "devices_per_node", "host_sharing", "rates", *sorted(known))
        names = ", ".join(f"{key}{nearest(key, there)}" for key in unknown)
        raise EppError(f"{path}: unknown {names}; known are {', '.join(there)}")
    numbers = {}
    for key, value in entries.items():
        divides = key.endswith(("_flops", "_bytes", "_speedup")) and key != "host_bytes"  # the link to the host may be absent
        numbers[key] = _number(path, key, value, 1.0 if divides else 0.0, MOST_RATE)
    rates = replace(RATES[base], name=path.stem, host_sharing=sharing, attention_kernel=kernel, **numbers)
    memory_gb = None if memory is None else _number(path, "device_memory_gb", memory, 0.0, MOST_GB)
    return Cluster(path.stem, rates, memory_gb, node)


def load_costs(name: str) -> Profile | PipelineCosts:
    """Read a file of `megatron-epp profile`, or the costs of a whole pipeline, as a training that learnt them has kept them.

    A profile is of layers: its method `costs` makes those of a pipeline, given the layers of every stage. Raises `EppError` if
    there is no such file, it is neither, or has costs learnt from a script's own microbatches, which are never sliced.
    """
    path = find("profiles", name)
    with naming_file(path):
        text = read_text(path)
        if f'"{LEARNT}"' in text:
            pipelines = from_state(parse_json(text, "the text"))
            if len(pipelines) != 1:
                raise EppError(f"the file has learnt costs of {len(pipelines)} pipelines, where costs of one are needed")
            costs = pipelines[0].costs
            if not any(stage.layers.recompute for stage in costs.stages):  # see `of_whole_microbatches`
                raise EppError("its costs were learnt from a script's own microbatches and say nothing of slices of documents")
            return costs
        return Profile.from_json(text) if f'"{PROFILE.schema}"' in text else PipelineCosts.from_json(text)


def shape_of(flags: dict[str, Any]) -> ModelShape:
    """Shape of the model that Megatron's flags describe, with its defaults. Raises `EppError` for a wrong or missing flag."""

    def whole(name: str, default: int | None = None) -> int:
        return _whole(flags, name, default)

    def some(name: str) -> int:
        return whole(name) if flags.get(name) else 0

    experts, expert_ranks = flags.get("num_experts"), whole("expert_model_parallel_size", 1)
    if expert_ranks > 1 and (experts is None or whole("num_experts") % expert_ranks):
        remedies = Remedy("change", "expert_parallel"), Remedy("change", "num_experts")
        raise EppError(f"{expert_ranks} ranks cannot share {experts or 'no'} experts evenly", *remedies)
    of_an_expert = whole("expert_tensor_parallel_size", whole("tensor_model_parallel_size", 1))
    if experts is not None and (passed := whole("moe_router_topk", 2)) > whole("num_experts"):
        raise EppError(f"a token cannot pass {passed} of {experts} experts", Remedy("lower", "experts_per_token"))
    gated, hidden, tensor = bool(flags.get("swiglu")), whole("hidden_size"), whole("tensor_model_parallel_size", 1)
    ffn = whole("ffn_hidden_size", int(8 * hidden / 3 / 64) * 64 if gated else 4 * hidden)
    heads = whole("num_attention_heads")
    groups = whole("num_query_groups", 1) if flags.get("group_query_attention") else None
    latent = _latent(flags) if flags.get("multi_latent_attention") else {"kv_channels": whole("kv_channels", hidden // heads)}
    if latent.get("latent_rank") and groups is not None:
        raise EppError("latent attention makes keys and values for every head: leave group_query_attention out")
    if "latent_rank" not in latent and flags.get("kv_channels") is None and hidden % heads:
        remedies = Remedy("change", "num_attention_heads"), Remedy("change", "hidden_size")
        raise EppError(f"a hidden size of {hidden} is not a multiple of {heads} attention heads", *remedies)
    if groups is not None and heads % groups:
        remedies = Remedy("change", "num_attention_heads"), Remedy("change", "num_query_groups")
        raise EppError(f"{heads} attention heads cannot share {groups} key and value heads evenly", *remedies)
    multiple = whole("make_vocab_size_divisible_by", _VOCABULARY_MULTIPLE) * tensor
    vocabulary, context_ranks = -(-whole("vocab_size") // multiple) * multiple, whole("context_parallel_size", 1)
    longest = whole("seq_length", 1) // context_ranks if flags.get("seq_length") else 0
    pattern = pattern_of(flags)
    routed = ["E" in pattern] if pattern else [True]
    if not pattern and experts is not None:
        routed = by_layer(flags.get("moe_layer_freq") or 1, whole("num_layers"))
    dense = tuple(layer for layer, has_experts in enumerate(routed) if not has_experts)
    if not any(routed):  # no layer has the experts
        experts, dense = None, ()
    return ModelShape(
        num_layers=len(pattern) or whole("num_layers"),
        hidden_size=hidden,
        ffn_hidden_size=ffn if experts is None else whole("moe_ffn_hidden_size", ffn),
        num_attention_heads=heads,
        num_query_groups=groups,
        **latent,
        **_windows(flags),
        mixers=(mixers := mixers_of(flags)),
        is_hybrid=bool(pattern),
        delta=delta_net(flags) if "G" in mixers else None,
        mamba=state_space(flags) if "M" in mixers else None,
        vocab_size=vocabulary,
        gated_mlp=gated,
        rotates=flags.get("position_embedding_type") == "rope" and not _is_on(flags, "apply_rope_fusion", "no_rope_fusion"),
        qk_norm=bool(flags.get("qk_layernorm")),
        norm_statistics=1 if flags.get("normalization") == "RMSNorm" else 2,
        output_gate=bool(flags.get("attention_output_gate")),
        fuses_activation=_is_on(flags, "bias_swiglu_fusion", "no_bias_swiglu_fusion"),
        num_experts=None if experts is None else whole("num_experts"),
        experts_per_token=whole("moe_router_topk", 2) if experts is not None else 1,
        shared_ffn_hidden_size=some("moe_shared_expert_intermediate_size") if experts is not None else 0,
        shared_gate=experts is not None and bool(flags.get("moe_shared_expert_gate")),
        router_value_bytes=_router_value_bytes(flags),
        router_bytes=0.0 if experts is None else _router_bytes(flags, whole("num_experts"), whole("moe_router_topk", 2)),
        dense_layers=dense,
        dense_ffn_hidden_size=ffn if dense or "-" in pattern else 0,
        predictions=some("mtp_num_layers"),
        bytes_per_value=2 if flags.get("bf16") or flags.get("fp16") else 4,
        casts=casts_of(flags),
        tensor_parallel=tensor,
        sequence_parallel=bool(flags.get("sequence_parallel")),
        context_parallel=context_ranks,
        expert_parallel=expert_ranks,
        expert_tensor_parallel=None if experts is None else of_an_expert,
        expert_dispatcher=_dispatcher(flags),
        expert_groups=some("moe_router_num_groups") or 1,
        chosen_groups=some("moe_router_group_topk") or some("moe_router_num_groups") or 1,
        loss_block_tokens=loss_block_tokens(_blocks(flags.get("epp_loss_block_tokens", AUTO)), vocabulary // tensor, longest),
    )


def _is_on(flags: dict[str, Any], name: str, switch: str) -> bool:
    """Return whether a kernel is fused: Megatron's parsed arguments have its name, a file has the switch that turns it off."""
    return flags.get(name) is not False and not flags.get(switch)


def _router_bytes(flags: dict[str, Any], experts: int, chosen: int) -> float:
    """Bytes of a token for scores in fp32, positions in 8 bytes and its copies' permutation, and for a balancing loss."""
    is_sigmoid = flags.get("moe_router_score_function") == "sigmoid"
    scored = 4 * experts + 4 * (chosen > 1) if is_sigmoid else 0
    num_bytes = 12 * chosen + scored
    balancing, coefficient = flags.get("moe_router_load_balancing_type", "aux_loss"), flags.get("moe_aux_loss_coeff") or 0
    if balancing != "none" and (coefficient if isinstance(coefficient, int | float) else any(coefficient)):
        num_bytes += 8 * chosen + 4 * experts + 4 * is_sigmoid
    if (groups := flags.get("moe_router_num_groups")) and (limit := flags.get("moe_router_group_topk")):
        num_bytes += experts + 8 * limit + 8 * groups * (chosen // limit)
    return float(num_bytes + 8 * experts + 8 * chosen + _router_value_bytes(flags) * chosen)


def _router_value_bytes(flags: dict[str, Any]) -> int:
    is_half = flags.get("bf16") or flags.get("fp16")
    return 2 if is_half and flags.get("moe_router_dtype") not in ("fp32", "fp64") else 4


def _dispatcher(flags: dict[str, Any]) -> str:
    """Return the dispatcher that Megatron's flags choose; any without times of its own counts as the plain one."""
    backend = flags.get("moe_flex_dispatcher_backend") or "deepep"
    return backend if flags.get("moe_token_dispatcher_type") == "flex" and backend in DISPATCHERS else ALLTOALL


def _latent(flags: dict[str, Any]) -> dict[str, Any]:
    rotated = _whole(flags, "qk_pos_emb_head_dim", 64)
    sizes = {"value_channels": _whole(flags, "v_head_dim", 128), "latent_rank": _whole(flags, "kv_lora_rank", 32)}
    sizes |= {"kv_channels": _whole(flags, "qk_head_dim", 128) + rotated, "rotated_channels": rotated}
    query_rank = None if flags.get("q_lora_rank") is None else _whole(flags, "q_lora_rank")
    return sizes | {"query_rank": query_rank, "relays_latents": flags.get("epp_latents") == "on"}


def _windows(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `ModelShape` for layers with windows. Raises `EppError` for one that looks ahead."""
    window, every = flags.get("window_size"), flags.get("window_attn_skip_freq")
    if not window:
        return {}
    sides = re.fullmatch(r"[(\[]?\s*(\d{1,9})\s*,\s*0\s*[)\]]?", str(window).strip())
    if sides is None:
        raise EppError(f"window_size {brief(window)}: formulas are for windows of tokens ahead and none behind, (N,0)")
    mixers = mixers_of(flags)
    attends = [symbol in "*+" for symbol in mixers * (_whole(flags, "num_layers") if len(mixers) == 1 else 1)]
    narrow = [True] * len(attends) if every is None else all_but_every(every, len(attends))
    return {"window": int(sides[1]), "window_share": sum(map(bool.__and__, narrow, attends)) / max(1, sum(attends))}


def mixers_of(flags: Mapping[str, Any]) -> str:
    """Return `ModelShape.mixers`. Raises `EppError` if flags do not say which layers have gated delta nets."""
    if (pattern := pattern_of(flags)) or flags.get("experimental_attention_variant") != GATED_DELTA_NET:
        return pattern or "*"
    if (every := flags.get("linear_attention_freq")) is None:
        raise EppError("a model with gated delta nets needs linear_attention_freq: which of its layers have one")
    return "".join("G" if is_linear else "*" for is_linear in all_but_every(every, _whole(flags, "num_layers")))


def delta_net(flags: Mapping[str, Any]) -> DeltaNet:
    sizes = {"key_heads": ("num_key_heads", 16), "key_channels": ("key_head_dim", 128), "value_heads": ("num_value_heads", 32)}
    sizes |= {"value_channels": ("value_head_dim", 128), "filter_width": ("conv_kernel_dim", 4)}
    net = DeltaNet(**{name: _whole(flags, f"linear_{flag}", usual) for name, (flag, usual) in sizes.items()})
    if net.value_heads % net.key_heads:
        has = f"linear_num_value_heads {net.value_heads} and linear_num_key_heads {net.key_heads}"
        raise EppError(f"{has}: heads of values cannot share key heads evenly")
    return net


def state_space(flags: Mapping[str, Any]) -> StateSpace:
    """Return the sizes of a model's Mamba-2 layers, with Megatron's defaults. Raises `EppError` if groups divide no heads."""
    channels = _whole(flags, "mamba_head_dim", 64)
    sizes = StateSpace(
        heads=_whole(flags, "mamba_num_heads", max(1, 2 * _whole(flags, "hidden_size") // channels)),
        channels=channels,
        groups=_whole(flags, "mamba_num_groups", 8),
        states=_whole(flags, "mamba_state_dim", 128),
    )
    if sizes.heads % sizes.groups:
        raise EppError(f"mamba_num_heads {sizes.heads} cannot share mamba_num_groups {sizes.groups} evenly")
    return sizes


def check_formulas(flags: dict[str, Any]) -> None:
    """Raise `EppError` for a model with layers that formulas would take for others."""
    variant = flags.get("experimental_attention_variant")
    unknown = [f"experimental_attention_variant {brief(variant)}"] if variant not in (None, GATED_DELTA_NET) else []
    unknown += [f"moe_latent_size {brief(size)}"] if (size := flags.get("moe_latent_size")) else []
    unknown += [f"layers {symbol}" for symbol in sorted(set(pattern_of(flags)) - set(PARTS))]
    if unknown:
        known = "models of grouped-query attention, latent attention, gated delta nets or Mamba-2, with an MLP or experts"
        raise EppError(f"there is no formula for {', '.join(unknown)}: {known}, are planned by formula")


def layers_of(flags: dict[str, Any]) -> int:
    return _whole(flags, "num_layers")


def token_multiple_of(flags: Mapping[str, Any]) -> int:
    """Multiple to which a training pads chunks: rows of products in FP8, on each rank that shares them. Raises `EppError`."""
    shards = _whole(flags, "context_parallel_size", 1)
    shards *= _whole(flags, "tensor_model_parallel_size", 1) if flags.get("sequence_parallel") else 1
    casts = casts_of(flags)
    return shards * (1 if casts is None else casts.rows)


def _whole(flags: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = flags.get(name)
    value = default if value is None else value
    most = MOST_LAYERS if name == "num_layers" else MOST_SIZE
    if type(value) is not int or not 1 <= value <= most:
        got = f"; got {brief(value)}" if value is not None else nearest(name, flags, "there is {!r}") or "; it is missing"
        raise EppError(f"the model needs {name}, a whole number from 1 to {most:,}{got}")
    return value


def _blocks(value: Any) -> str | int:
    if value == AUTO:
        return AUTO
    tokens = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < len(str(MOST_SIZE)) else value
    if type(tokens) is not int or not 0 <= tokens <= MOST_SIZE:
        raise EppError(f"epp_loss_block_tokens is {brief(value)}; it must be auto or a whole number from 0 to {MOST_SIZE:,}")
    return tokens


def balanced_layers(
    profile: Profile,
    num_layers: int,
    num_stages: int,
    batches: Iterable[Lengths | Problem] = (),
    rank_of: Sequence[int] = (),
    *,
    shards_vocabulary: bool = False,
) -> tuple[int, ...]:
    """Layers of each stage that level the ranks' times: with a large vocabulary fewer on the last stage, or its rank.

    Without batches attention takes no time, without `rank_of` every rank has one stage. Raises `EppError` for too many stages.
    """
    even_layers(num_layers, num_stages)
    tokens, all_pairs = tokens_and_pairs(part for batch in batches for part in own_parts(batch))
    pairs = all_pairs / max(tokens, 1)
    both = (part.forward + part.backward for part in (profile.mean_layer, profile.embedding, profile.head))
    layer, embedding, head = (line.per_token_us + line.per_pair_us * pairs for line in both)
    extra = [0.0] * num_stages
    extra[0] += embedding
    extra[-1] += 0.0 if shards_vocabulary else head
    return spread_layers(layer, extra, num_layers, rank_of)


def _number(path: Path, key: str, value: Any, least: float, most: float) -> float:
    try:
        return number(float(value) if isinstance(value, str) else value, least, most)  # YAML 1.1 reads 40e9 as text
    except (EppError, ValueError):
        raise EppError(f"{path}: {key} is {brief(value)}; it must be a number from {least:g} to {most:g}") from None
