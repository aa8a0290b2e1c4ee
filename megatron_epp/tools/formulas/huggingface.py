"""Megatron's flags of a model that a Hugging Face ``config.json`` describes.

A row of `ARCHITECTURES` says which parts a kind of model is made of; each part is a function that reads its keys and returns
its flags. It raises `EppError` for what is missing, out of its range, or contradicts the rest. Names of keys and their defaults
are those of the `transformers` classes (release 5.24). Tokenizers, weights and settings of inference are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from megatron_epp.plan.errors import EppError
from megatron_epp.plan.reading import MOST_LAYERS, MOST_SIZE, brief, brief_text, nearest, number, whole

type Flags = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Config:
    """Values, each under the first of several names that it has; readers raise `EppError` for other kinds than they read."""

    body: Mapping[str, Any]

    def get(self, *names: str) -> Any:
        return next((self.body[name] for name in names if self.body.get(name) is not None), None)

    def size(self, *names: str, default: int | None = None, least: int = 1, most: int = MOST_SIZE) -> int:
        """Return a whole number within the limits. Raises `EppError` if it is missing and has no default, too."""
        size = self._read(names, default, lambda value: whole(value, least, most))
        if size is None:
            raise EppError(f"there is no {' or '.join(names)}")
        return size

    def number(self, *names: str, default: float) -> float:
        return self._read(names, default, number)

    def switch(self, name: str) -> bool:
        """Return a truth value, false by default."""
        return self._read([name], False, lambda value: _of_kind(bool, value, "neither true nor false"))

    def section(self, *names: str) -> Config:
        """Return the object under a name, an empty one by default."""
        return Config(self._read(names, {}, lambda value: _of_kind(dict, value, "not an object")))

    def layers(self, *names: str) -> list[str]:
        """Return the kind of every layer, none by default, but as many as the config says."""
        kinds: list[Any] = self._read(names, [], lambda value: _of_kind(list, value, "not a list of names"))
        count = self.get("num_hidden_layers")
        if kinds and count not in (None, len(kinds)):
            has = f"lists {len(kinds):,} layers, where num_hidden_layers says {brief_text(count)}"
            raise EppError(f"{' or '.join(names)} {has}")
        return [_of_kind(str, kind, "not the name of a layer") for kind in kinds]

    def _read[T](self, names: Sequence[str], default: T, read: Callable[[Any], T]) -> T:
        value = self.get(*names)
        try:
            return default if value is None else read(value)
        except EppError as error:
            name = next(name for name in names if self.body.get(name) is not None)
            raise EppError(f"{name}: {error}") from None


def _of_kind[T](kind: type[T], value: Any, otherwise: str) -> T:
    if type(value) is not kind:
        raise EppError(f"{brief(value)} is {otherwise}")
    return value


type Part = Callable[[Config], Flags]


def flags_of_config(body: Any) -> Flags:
    """Convert ``config.json`` to Megatron's flags. Raises `EppError` if it is of an unknown kind, or contradicts itself."""
    if not isinstance(body, dict):
        raise EppError(f"a Hugging Face config is an object, not {brief(body)}")
    kind = body.get("model_type")
    if "text_config" in body and kind not in ARCHITECTURES:
        raise EppError(f"{brief_text(kind)} is a model of several modalities; give the object under its text_config as a file")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        near = nearest(str(kind), ARCHITECTURES)
        raise EppError(f"model_type is {brief(kind)}{near}; known are {', '.join(ARCHITECTURES)}")
    flags: Flags = {}
    for part in ARCHITECTURES[kind]:
        flags |= part(Config(body))
    return flags


def trunk(config: Config) -> Flags:
    flags: Flags = {name: config.size(name) for name in ("hidden_size", "vocab_size")} | {"normalization": "RMSNorm"}
    flags["norm_epsilon"] = config.number("rms_norm_eps", "layer_norm_epsilon", "norm_eps", default=1e-6)
    flags |= {"init_method_std": config.number("initializer_range", default=0.02), "hidden_dropout": 0.0, "bf16": True}
    return flags if config.switch("tie_word_embeddings") else flags | {"untie_embeddings_and_output_weights": True}


def count(config: Config) -> Flags:
    return {"num_layers": config.size("num_hidden_layers", most=MOST_LAYERS)}


def heads(config: Config) -> Flags:
    queries, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    groups = config.size("num_key_value_heads", default=queries)
    if queries % groups:
        raise EppError(f"num_attention_heads {queries} cannot share num_key_value_heads {groups} evenly")
    if config.get("head_dim") is None and hidden % queries:
        raise EppError(f"hidden_size {hidden} is not a multiple of num_attention_heads {queries}, and there is no head_dim")
    flags: Flags = {"num_attention_heads": queries, "kv_channels": config.size("head_dim", default=hidden // queries)}
    flags["attention_dropout"] = config.number("attention_dropout", default=0.0)
    if groups != queries:
        flags |= {"group_query_attention": True, "num_query_groups": groups}
    return flags | {"add_qkv_bias": True} if config.switch("attention_bias") else flags


def rotation(config: Config) -> Flags:
    """Read how positions turn queries and keys: the base, the share of a head's width, and how long contexts are reached."""
    rope = config.section("rope_parameters", "rope_scaling")
    base = rope.number("rope_theta", default=config.number("rope_theta", default=10_000.0))
    share = rope.number("partial_rotary_factor", default=config.number("partial_rotary_factor", default=1.0))
    flags: Flags = {"position_embedding_type": "rope", "rotary_base": int(base)}
    if share != 1.0:
        flags["rotary_percent"] = share
    if rope.get("rope_type", "type") == "llama3":
        flags |= {"use_rope_scaling": True, "rope_scaling_factor": rope.number("factor", default=8.0)}
    return flags


def gated_mlp(config: Config) -> Flags:
    act = config.get("hidden_act") or "silu"
    if act != "silu":
        raise EppError(f"hidden_act is {brief(act)}; only silu, of a gated MLP, is known")
    flags: Flags = {"swiglu": True, "ffn_hidden_size": config.size("intermediate_size")}
    return flags if config.switch("mlp_bias") else flags | {"disable_bias_linear": True}


def experts(config: Config) -> Flags:
    number_of, passed = config.size("num_experts", "num_local_experts", "n_routed_experts"), config.size("num_experts_per_tok")
    if passed > number_of:
        raise EppError(f"num_experts_per_tok {passed} is more than the {number_of} experts")
    flags: Flags = {"num_experts": number_of, "moe_router_topk": passed}
    flags["moe_ffn_hidden_size"] = config.size("moe_intermediate_size", "intermediate_size")
    balance = config.number("router_aux_loss_coef", "aux_loss_alpha", default=0.0)
    flags |= {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": balance}
    flags |= {"moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall"}
    # The expert that all tokens pass is as wide as several routed ones, or of a width of its own.
    width = config.size("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", default=0, least=0)
    several = config.size("n_shared_experts", default=0, least=0)
    width = width or several * config.size("moe_intermediate_size", default=0)
    return flags | ({"moe_shared_expert_intermediate_size": width} if width else {}) | _expert_layers(config)


def _expert_layers(config: Config) -> Flags:
    layers, dense = config.size("num_hidden_layers"), config.size("first_k_dense_replace", default=0, least=0)
    only, every = config.get("mlp_only_layers") or [], config.size("decoder_sparse_step", default=1)
    if dense > layers:
        raise EppError(f"first_k_dense_replace {dense} is more than the {layers} layers")
    if not isinstance(only, list) or not all(type(layer) is int and 0 <= layer < layers for layer in only):
        raise EppError(f"mlp_only_layers is {brief(only)}, not a list of layers from 0 to {layers - 1}")
    has = [int(layer >= dense and layer not in only and (layer + 1) % every == 0) for layer in range(layers)]
    return {} if all(has) else {"moe_layer_freq": runs(has)}


def runs(values: Sequence[int]) -> str:
    return f"({'+'.join(f'[{value}]*{len(list(equal))}' for value, equal in groupby(values))})"


def sigmoid_router(config: Config) -> Flags:
    """Read a router that scores experts apart from each other and balances them by a bias, within groups of experts."""
    groups, chosen = config.size("n_group", default=1), config.size("topk_group", default=1)
    number_of = config.size("n_routed_experts", "num_local_experts", "num_experts")
    if number_of % groups or chosen > groups:
        raise EppError(f"{number_of} experts in n_group {groups} groups, of which topk_group {chosen} count, do not add up")
    flags: Flags = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_dtype": "fp32"}
    balance, scale = config.number("aux_loss_alpha", default=1e-4), config.number("routed_scaling_factor", default=1.0)
    flags |= {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": balance}
    flags["moe_router_topk_scaling_factor"] = scale
    return flags | ({"moe_router_num_groups": groups, "moe_router_group_topk": chosen} if groups > 1 else {})


def latents(config: Config) -> Flags:
    sizes = {"qk_head_dim": "qk_nope_head_dim", "qk_pos_emb_head_dim": "qk_rope_head_dim", "v_head_dim": "v_head_dim"}
    flags: Flags = {"multi_latent_attention": True}
    flags |= {name: config.size(name) for name in ("num_attention_heads", "kv_lora_rank")}
    flags |= {flag: config.size(name) for flag, name in sizes.items()} | {"qk_layernorm": True}
    flags["attention_dropout"] = config.number("attention_dropout", default=0.0)
    own = {} if config.get("q_lora_rank") is None else {"q_lora_rank": config.size("q_lora_rank")}
    return flags | own | _yarn(config)


def _yarn(config: Config) -> Flags:
    """Read how rotated positions of latent attention reach longer contexts; plain rotation if the config does not say."""
    rope = config.section("rope_scaling", "rope_parameters")
    if rope.get("type", "rope_type") != "yarn":
        return {"rope_type": "rope"}
    # Megatron has no flags for the length before the extension and the two betas: they are 4096, 32 and 1.
    scales = {name: rope.number(name, default=usual) for name, usual in (("mscale", 1.0), ("mscale_all_dim", 0.0))}
    return {"rope_type": "yarn", "rotary_scaling_factor": rope.number("factor", default=40.0)} | scales


def extra_prediction(config: Config) -> Flags:
    """Read the layers that predict tokens further ahead; none if the config does not say."""
    depths = config.size("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", default=0, least=0)
    return {"mtp_num_layers": depths} if depths else {}


def windows(config: Config, usual: int = 0) -> Flags:
    """Read in which layers a token attends to its last `sliding_window` tokens alone; `usual` if the config has no such key."""
    kinds = config.layers("layer_types")
    width = config.size("sliding_window", default=0 if "sliding_window" in config.body else usual, least=0)
    if unknown := set(kinds) - {"sliding_attention", "full_attention"}:
        raise EppError(f"layer_types has {brief(sorted(unknown)[0])}; known are sliding_attention and full_attention")
    narrow = [int(kind == "sliding_attention") for kind in kinds]
    if any(narrow) and not width and "use_sliding_window" not in config.body:
        raise EppError("layer_types has sliding_attention, and sliding_window does not say how wide it is")
    if not width or (kinds and not any(narrow)):
        return {}
    flags: Flags = {"window_size": f"({width - 1},0)"}
    if all(narrow):
        return flags
    every = narrow.index(0) + 1
    is_regular = narrow == [int(layer % every != 0) for layer in range(1, len(narrow) + 1)]
    return flags | {"window_attn_skip_freq": every if is_regular else runs(narrow)}


def listed_windows(config: Config) -> Flags:
    """Read windows of a kind of model that has them only where its config lists the layers."""
    return {} if config.get("layer_types") is None else windows(config)


def switched_windows(config: Config, first: int | None = None) -> Flags:
    """Read windows that `use_sliding_window` turns on: of the layers that the config lists, or from `max_window_layers` on."""
    if not config.switch("use_sliding_window"):
        return {}
    if first is None:
        first = config.size("max_window_layers", default=28, least=0)
    return windows(_with_layers(config, ["full_attention"] * first + ["sliding_attention"] * MOST_LAYERS), 4096)


def alternating_windows(config: Config) -> Flags:
    """Read windows of every second layer, beginning with the first, where the config does not list the layers."""
    return windows(_with_layers(config, ["sliding_attention", "full_attention"] * MOST_LAYERS), 128)


def _with_layers(config: Config, kinds: Sequence[str]) -> Config:
    """Return a config that lists its layers: these kinds, as many as there are layers, unless it lists them itself."""
    return Config({**config.body, "layer_types": config.get("layer_types") or kinds[: config.size("num_hidden_layers")]})


def gated_delta(config: Config) -> Flags:
    """Read layers of gated delta nets between layers of attention: every fourth layer attends, if the config does not say."""
    kinds, layers = config.layers("layer_types"), config.size("num_hidden_layers")
    every = config.size("full_attention_interval", default=4)
    linear = [int(kind == "linear_attention") for kind in kinds] or [int((layer + 1) % every != 0) for layer in range(layers)]
    usual = {"conv_kernel_dim": 4, "key_head_dim": 128, "value_head_dim": 128, "num_key_heads": 16, "num_value_heads": 32}
    flags: Flags = {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": runs(linear)}
    flags |= {name: config.size(name, default=size) for key, size in usual.items() if (name := f"linear_{key}")}
    return flags | {"attention_output_gate": True}


SYMBOLS = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E"}
SYMBOLS |= {symbol: symbol for symbol in "M*-E"}
"""Symbols of a hybrid layer pattern by the config's names, of which two changed, and by those of its oldest pattern."""


def hybrid(config: Config) -> Flags:
    pattern: Sequence[str] = config.get("hybrid_override_pattern") or config.layers("layers_block_type", "layer_types")
    if not pattern:
        raise EppError("there is no hybrid_override_pattern or layers_block_type")
    if unknown := sorted(set(pattern) - set(SYMBOLS)):
        raise EppError(f"its layers have {brief(unknown[0])}; known are {', '.join(SYMBOLS)}")
    flags: Flags = {"hybrid_layer_pattern": "".join(SYMBOLS[kind] for kind in pattern), "num_layers": len(pattern)}
    sizes = {"mamba_state_dim": ("ssm_state_size", 128), "mamba_head_dim": ("mamba_head_dim", 64)}
    sizes |= {"mamba_num_groups": ("n_groups", 8), "mamba_num_heads": ("mamba_num_heads", 128)}
    flags |= {flag: config.size(name, default=usual) for flag, (name, usual) in sizes.items()}
    flags["ffn_hidden_size"] = config.size("intermediate_size")
    flags |= {"squared_relu": True, "disable_bias_linear": True, "position_embedding_type": "none"}
    if "E" in flags["hybrid_layer_pattern"]:
        flags |= experts(Config({"num_hidden_layers": len(pattern), **config.body})) | sigmoid_router(config)
        flags |= {"moe_latent_size": config.size("moe_latent_size")} if config.get("moe_latent_size") else {}
    return flags


def always(**flags: Any) -> Part:
    """Return a part for flags that every model of a kind has."""
    return lambda _: flags


_GQA = (trunk, count, heads, rotation, gated_mlp)
_QK_NORM = always(qk_layernorm=True)
_LATENT = (trunk, count, rotation, gated_mlp, latents, experts, sigmoid_router, extra_prediction)
_DELTA = (*_GQA, gated_delta, extra_prediction, _QK_NORM)

ARCHITECTURES: dict[str, tuple[Part, ...]] = {
    "llama": (*_GQA, listed_windows),
    "mistral": (*_GQA, partial(windows, usual=4096)),
    "qwen2": (*_GQA, switched_windows, always(add_qkv_bias=True)),
    "qwen3": (*_GQA, switched_windows, _QK_NORM),
    "olmo3": (*_GQA, windows, _QK_NORM),
    "mixtral": (*_GQA, experts, windows),
    "qwen3_moe": (*_GQA, experts, partial(switched_windows, first=0), _QK_NORM),  # in all layers
    "minimax_m2": (*_GQA, experts, sigmoid_router, listed_windows, _QK_NORM),
    "glm4_moe": (*_GQA, experts, sigmoid_router, extra_prediction, listed_windows),
    "deepseek_v3": _LATENT,
    "kimi_k2": _LATENT,
    "gpt_oss": (*_GQA, experts, alternating_windows, always(softmax_type="learnable", add_qkv_bias=True)),
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe_text"), (*_DELTA, experts, always(moe_shared_expert_gate=True))),
    "qwen3_5_text": _DELTA,
    "nemotron_h": (trunk, heads, hybrid),
}
"""By ``model_type``; the flags of later parts replace those of earlier ones."""
