"""Megatron's `--yaml-cfg FILE` with `--epp`: the file's values count as flags, and flags on the command line take precedence.

Megatron itself replaces all flags by the file. In releases 0.18 and 0.19 no file can satisfy it: it looks for
``account_for_embedding_in_pipeline_split`` outside the sections, builds its model from the sections' content, and refuses the
key in both places. Therefore the file gives defaults to the parser here, and Megatron reads and checks a command line as usual.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_epp.launch.script_flags import EPP_PREFIX, flags_of, takes_several, words_of
from megatron_epp.launch.yaml_settings import read_settings
from megatron_epp.mcore.arguments import ArgumentError
from megatron_epp.plan.reading import brief, nearest

logger = logging.getLogger(__name__)

_NESTED = ("language_model", "model_parallel")
"""Sections of fields of Megatron's `TransformerConfig`, most of which are flags of the same name."""
_FLAG_OF_FIELD = {
    "num_moe_experts": "num_experts",
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "fp8_param": "fp8_param_gather",
}
"""Fields whose flag has another name, in at least one release."""
_ACTIVATIONS = {"swiglu": "swiglu", "squaredrelu": "squared_relu", "gelu": None}
"""Values of the field ``activation_func``, and the switch for each; None where it needs none."""

type Extra = Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None


def parse_with_yaml(
    parse_args: Callable[..., argparse.Namespace], extra_args_provider: Extra = None, ignore_unknown_args: bool = False
) -> argparse.Namespace:
    """Call Megatron's `parse_args`, for which ``--yaml-cfg`` together with ``--epp`` names a file of defaults."""
    path = _yaml_path(sys.argv[1:])
    if path is None:
        return parse_args(extra_args_provider, ignore_unknown_args)

    def with_defaults(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        if extra_args_provider is not None:
            parser = extra_args_provider(parser)
        take_defaults(parser, path)
        return parser

    return parse_args(with_defaults, ignore_unknown_args)


def take_defaults(parser: argparse.ArgumentParser, path: str) -> None:
    """Set the values of a file as a parser's defaults, and hide ``--yaml-cfg`` from Megatron (as ``epp_yaml_cfg``).

    Raises:
        ArgumentError: a value does not fit its flag.
        EppError: the file cannot be read.
    """
    body = _flat(read_settings(Path(path)), path)
    by_name = {name: action for name, (_, action) in flags_of(parser).items()} | {
        action.dest: action for action in parser._actions
    }
    _translate(body, by_name)
    unused = {}
    for key, value in body.items():
        action = by_name.get(key)
        if action is None:
            unused[key] = value
        elif value is not None and value != action.default:
            parser.set_defaults(**_default(parser, action, key, value, path))
    _warn(unused, by_name, path)
    # Megatron looks at `yaml_cfg` and would replace the whole namespace, --epp flags included.
    parser._option_string_actions["--yaml-cfg"].dest = "epp_yaml_cfg"
    parser.set_defaults(yaml_cfg=None)


def _yaml_path(argv: Sequence[str]) -> str | None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--yaml-cfg")
    parser.add_argument("--epp", action="store_true")
    flags, _ = parser.parse_known_args(list(argv))
    return flags.yaml_cfg if flags.epp else None


def _flat(body: dict[str, Any], path: str) -> dict[str, Any]:
    """Return a flat dictionary of the keys of all sections and of the top-level keys."""
    if "megatron" in body:
        raise ArgumentError(f"--yaml-cfg {path} has a section `megatron:`; such files are for `megatron-epp train -c {path}`")
    flat = {key: value for key, value in body.items() if key not in (*_NESTED, "epp") or not isinstance(value, dict)}
    for section in _NESTED:
        inner = body.get(section) or {}
        if not isinstance(inner, dict):
            raise ArgumentError(f"--yaml-cfg {path}: `{section}:` holds {brief(inner)}; it must hold names with values")
        flat |= inner
    if (body.get("language_model") or {}).get("num_query_groups") is not None:  # the model's field needs no switch
        flat["group_query_attention"] = True
    if isinstance(epp_section := body.get("epp"), dict):
        flat |= {EPP_PREFIX + key: value for key, value in epp_section.items()}
    return flat


def _translate(body: dict[str, Any], by_name: dict[str, argparse.Action]) -> None:
    """Replace fields that are not flags by the flags that correspond to them."""
    for field, flag in _FLAG_OF_FIELD.items():
        if field in body and field not in by_name:
            body.setdefault(flag, body.pop(field))
    if (activation := body.get("activation_func")) in _ACTIVATIONS:
        del body["activation_func"]
        if (switch := _ACTIVATIONS[activation]) is not None:
            body[switch] = True
        if activation == "swiglu":
            body.pop("gated_linear_unit", None)
    for name in ("init_method", "embedding_init_method"):
        if body.get(name) == "xavier_uniform":
            del body[name]
            body["init_method_xavier_uniform"] = True
    if body.get("persist_layer_norm") is not None:
        body["no_persist_layer_norm"] = not body.pop("persist_layer_norm")


def _default(parser: argparse.ArgumentParser, action: argparse.Action, key: str, value: Any, path: str) -> dict[str, Any]:
    """Convert a value by the flag's own type and choices; return it keyed by the flag's name in the namespace."""
    if takes_several(action) and isinstance(value, str):
        value = value.split()
    words = words_of(f"{path}: {key}", action.option_strings[0], action, value)
    if action.nargs == 0:
        if key == action.dest:
            return {key: value}
        return {action.dest: action.const} if value else {}
    try:
        return {action.dest: parser._get_values(action, words)}
    except argparse.ArgumentError as error:
        raise ArgumentError(f"{path}: {error}") from None


def _warn(unused: dict[str, Any], by_name: dict[str, argparse.Action], path: str) -> None:
    """Log once which keys have no effect, except nulls and fields at their default, which request nothing."""
    from megatron.core.transformer import TransformerConfig

    usual = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    left = [key for key, value in unused.items() if value is not None and usual.get(key, ...) != value]
    if left and os.environ.get("RANK", "0") == "0":
        keys = ", ".join(f"{key}{f' ({hint[2:]})' if (hint := nearest(key, by_name)) else ''}" for key in left)
        logger.warning("--yaml-cfg %s: these are no flags of this Megatron, and do nothing: %s", path, keys)
