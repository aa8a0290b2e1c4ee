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
import re
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from megatron_epp.launch.script_flags import flags_of, words_of
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.reading import brief, naming_file, nearest
from megatron_epp.plan.yaml_files import read_yaml

logger = logging.getLogger(__name__)

_FLAG_OF_FIELD = {
    "num_moe_experts": "num_experts",
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "fp8_param": "fp8_param_gather",
}
"""Fields of Megatron's `TransformerConfig` whose flag has another name, in at least one release."""
_SWITCH_OF_VALUE = {
    ("activation_func", "swiglu"): "swiglu",
    ("activation_func", "squaredrelu"): "squared_relu",
    ("activation_func", "gelu"): None,
    ("init_method", "xavier_uniform"): "init_method_xavier_uniform",
    ("embedding_init_method", "xavier_uniform"): "init_method_xavier_uniform",
    ("persist_layer_norm", False): "no_persist_layer_norm",
    ("persist_layer_norm", True): None,
}
"""Values of such fields that a switch stands for; None where none is needed."""


def take_yaml(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.ArgumentParser:
    """Take the file of ``--yaml-cfg`` next to ``--epp`` as a parser's defaults, hidden from Megatron. Raises `EppError`."""
    args, _ = parser.parse_known_args(argv)
    if args.yaml_cfg is None or not args.epp:
        return parser
    flags = flags_of(parser) | {action.dest: action for action in parser._actions}
    words, unused = list[str](), dict[str, Any]()
    with naming_file(f"--yaml-cfg {args.yaml_cfg}"):
        for key, value in _values(read_yaml(Path(args.yaml_cfg)), flags).items():
            if (action := flags.get(key)) is None:
                unused[key] = value
            elif value is not None and value != action.default:
                if isinstance(value, str):  # with Megatron's syntax for variables
                    value = re.sub(r"\$\{(\w+)\}", lambda match: os.environ.get(match[1], match[0]), value)
                    value = value if action.nargs in (None, 0, "?") else value.split()
                taken = words_of(key, action.option_strings[0], action, value)
                if action.nargs == 0 and key == action.dest:  # of a switch that turns it off, or on
                    parser.set_defaults(**{key: value})
                else:
                    words += taken
            if "${" in str(value):
                raise EppError(f"{key} is {brief(value)}, with a variable that is not set")
        parser.set_defaults(**vars(parser.parse_known_args([*words, *argv])[0]))
    _warn(unused, flags, args.yaml_cfg)
    # Megatron looks at `yaml_cfg` and would replace the whole namespace, --epp flags included.
    parser._option_string_actions["--yaml-cfg"].dest = "epp_yaml_cfg"
    parser.set_defaults(yaml_cfg=None)
    return parser


def _values(body: dict[str, Any], flags: Container[str]) -> dict[str, Any]:
    """Return the keys of all sections as one dictionary, with fields that are not flags replaced by flags."""
    if "megatron" in body:
        raise EppError("the section `megatron:` is for files of `megatron-epp train -c`")
    values = dict(body)
    for section, prefix in (("language_model", ""), ("model_parallel", ""), ("epp", "epp_")):
        if not isinstance(inner := values.pop(section, None) or {}, dict):
            raise EppError(f"`{section}:` holds {brief(inner)}; it must hold names with values")
        values |= {f"{prefix}{key}": value for key, value in inner.items()}
        if inner.get("num_query_groups") is not None:  # the model's field needs no switch
            values["group_query_attention"] = True
    for field, flag in _FLAG_OF_FIELD.items():
        if field in values and field not in flags:
            values.setdefault(flag, values.pop(field))
    for (field, value), switch in _SWITCH_OF_VALUE.items():
        if values.get(field) == value:
            del values[field]
            values |= {} if switch is None else {switch: True}
    if values.get("swiglu"):
        values.pop("gated_linear_unit", None)
    return values


def _warn(unused: dict[str, Any], flags: dict[str, argparse.Action], path: str) -> None:
    """Log once which keys have no effect, except nulls and fields at their default, which request nothing."""
    from megatron.core.transformer import TransformerConfig

    usual = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    left = [key for key, value in unused.items() if value is not None and usual.get(key, ...) != value]
    if left and os.environ.get("RANK", "0") == "0":
        keys = ", ".join(f"{key}{f' ({hint[2:]})' if (hint := nearest(key, flags)) else ''}" for key in left)
        logger.warning("--yaml-cfg %s: these are no flags of this Megatron, and do nothing: %s", path, keys)
