"""The flags of Megatron's argument parser, including the `--epp-*` flags, against which YAML settings are checked."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from megatron_epp.launch.flags import Flag
from megatron_epp.launch.settings import SettingsError
from megatron_epp.mcore import entry
from megatron_epp.mcore.arguments.consequences import prepare_epp_args
from megatron_epp.mcore.arguments.yaml_cfg import take_defaults


class _Parser(argparse.ArgumentParser):
    """A parser that raises `SettingsError` where argparse would print its usage, here hundreds of lines, and exit."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"the training script refuses this: {message}")


def megatron_parser() -> argparse.ArgumentParser:
    """Return a parser with all of Megatron's flags and ours. Raises EppError if Megatron is missing or unknown."""
    entry.prepare()
    from megatron.training import arguments

    return arguments.add_megatron_arguments(_Parser(prog="pretrain_gpt.py", allow_abbrev=False, conflict_handler="resolve"))


def flags_of(parser: argparse.ArgumentParser) -> dict[str, Flag]:
    """Return every option of a parser by its name, with underscores."""
    found = {}
    for option, action in parser._option_string_actions.items():  # old names too, which an action does not show
        if option.startswith("--"):
            several = action.nargs in ("*", "+") or isinstance(action.nargs, int)
            on_or_off = {"on", "off"} <= set(action.choices or ())
            flag = Flag(option, action.nargs != 0, several, _opposite(option, action), on_or_off)
            found[option.removeprefix("--").replace("-", "_")] = flag
    return found


def check(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse as the training script will. Raises EppError that names the flag and the value it does not accept."""
    args = parser.parse_args(list(argv))
    if args.yaml_cfg is not None and args.epp:
        take_defaults(parser, args.yaml_cfg)
        args = parser.parse_args(list(argv))
    return args


def check_run(args: argparse.Namespace, world_size: int) -> None:
    """Refuse flags that every rank of a run would refuse at start-up.

    Args:
        args: as `check` returns them; modified as training modifies them.
        world_size: processes of the run.

    Raises:
        EppError: there is no model, or `--epp` cannot honour a flag, or sizes do not divide.
    """
    if args.use_checkpoint_args:  # sizes are in the checkpoint
        return
    missing = [name for name in ("hidden_size", "num_attention_heads") if getattr(args, name) is None]
    missing += ["num_layers"] * (args.num_layers is None and args.hybrid_layer_pattern is None)
    if missing:
        raise SettingsError(
            f"there is no model, {', '.join(missing)} missing: include one, as in `include: [models/llama3-8b]`, or set them"
        )
    args.rank, args.world_size = 0, world_size
    prepare_epp_args(args)


def check_files(args: argparse.Namespace) -> None:
    """Raise EppError for data paths without files on this node."""
    if not args.epp:
        return
    from megatron_epp.mcore.data.documents import check_files_of

    check_files_of(args)


def _opposite(option: str, action: Any) -> str | None:
    """Return ``--no-x`` if one action defines both ``--x`` and ``--no-x`` (`argparse.BooleanOptionalAction`), else None."""
    if not isinstance(action, argparse.BooleanOptionalAction) or option.startswith("--no-"):
        return None
    negative = f"--no-{option.removeprefix('--')}"
    return negative if negative in action.option_strings else None
