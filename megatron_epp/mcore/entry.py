"""Preparation that every entry point does before it uses Megatron, and checks of a run's flags and of the patches."""

import argparse
import contextlib
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import NamedTuple

import torch

from megatron_epp.launch import lifetime
from megatron_epp.launch.script_flags import TrainingParser
from megatron_epp.mcore import releases
from megatron_epp.mcore.arguments.consequences import prepare_epp_args
from megatron_epp.mcore.arguments.table import TRAINING
from megatron_epp.mcore.arguments.yaml_cfg import take_yaml
from megatron_epp.mcore.patches import fingerprints, patching
from megatron_epp.mcore.patches.patching import Patch
from megatron_epp.plan.errors import EppError


def _lacks_packages() -> bool:
    needed = "apex", "transformer_engine", "fused_weight_gradient_mlp_cuda", "scaled_masked_softmax_cuda"
    return any(find_spec(package) is None for package in needed)


_PATCHES = "megatron_epp.mcore.patches."
SETS: tuple[tuple[Callable[[], bool], str], ...] = (
    # Ahead of any import of Megatron, whose functions are decorated with torch.compile when they are imported.
    (lambda: not torch.cuda.is_available(), "megatron_epp.mcore.cpu:patches"),
    (lambda: True, f"{_PATCHES}install:patches"),
    # Around those: the flags that they check ask for what is installed.
    (_lacks_packages, f"{_PATCHES}environment:patches"),
    (lambda: True, f"{_PATCHES}environment:of_every_run"),
)
"""Sets of patches in the order in which they are applied: whether a process needs one, and the function that returns it."""


def _patches() -> Iterator[tuple[Patch, ...]]:
    return (resolve_name(target)() for is_needed, target in SETS if is_needed())


def prepare() -> None:
    """Make this machine and the installed Megatron ready to train, with or without `--epp`. Idempotent.

    Call it before megatron is imported. Raises EppError if Megatron is missing or unknown.
    """
    lifetime.end_with_launcher()  # first: whatever comes next may hang or be killed
    lifetime.keep_sockets_in_folder()
    allow_unknown = "--epp-allow-unknown-megatron" in sys.argv  # needed long before the arguments are parsed
    releases.check_megatron(allow_unknown)
    for patches in _patches():
        patching.apply(patches, allow_unknown=allow_unknown, level=logging.DEBUG)


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """End the process with the error's exit code and only the message if this package raises an `EppError`.

    The launcher gets the message too. If it is this package's own, it prints the message at the end, once for all ranks. If the
    error was caused by another kind of error, the traceback of that one is printed first, for debugging.
    """
    try:
        yield
    except EppError as error:
        if error.__cause__ is not None and not isinstance(error.__cause__, EppError):
            traceback.print_exception(error.__cause__)
        text = f"megatron_epp, rank {os.environ.get('RANK', '0')}: {error.text(error.names or TRAINING)}"
        is_told = lifetime.hand_over(text, error.exit_code)
        if not is_told and error.exit_code != 1:  # Python prints a text itself, and exits with 1
            sys.stderr.write(f"{text}\n")
        raise SystemExit(error.exit_code if is_told or error.exit_code != 1 else text) from None


def megatron_parser() -> argparse.ArgumentParser:
    """Return a parser with all of Megatron's flags and ours. Raises EppError if Megatron is missing or unknown."""
    prepare()
    from megatron.training import arguments

    return arguments.add_megatron_arguments(
        TrainingParser(prog="pretrain_gpt.py", allow_abbrev=False, conflict_handler="resolve")
    )


def check(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse as the training script will. Raises EppError that names the flag and the value it does not accept."""
    return take_yaml(parser, list(argv)).parse_args(list(argv))


def check_run(args: argparse.Namespace, world_size: int) -> None:
    """Refuse flags that every rank of a run of `world_size` processes would refuse, and modify them as training does.

    Raises:
        EppError: there is no model, or `--epp` cannot honour a flag, or sizes do not divide.
    """
    if not args.use_checkpoint_args:  # else sizes are in the checkpoint
        _refuse_no_model(args)
        _as_of_first_rank(args, world_size)
        prepare_epp_args(args)


def check_start(args: argparse.Namespace, world_size: int, *, wants_files: bool) -> None:
    """Refuse flags as `check_run` does, and flags that Megatron would refuse; with `wants_files` files and folders, too.

    Raises:
        EppError: the message has a line per problem.
    """
    from megatron_epp.mcore.arguments import start

    knows_sizes = not args.use_checkpoint_args  # else they are in the checkpoint
    if knows_sizes:
        _refuse_no_model(args)
    _as_of_first_rank(args, world_size)
    start.check_start(args, wants_flags=knows_sizes, wants_files=wants_files)


def _as_of_first_rank(args: argparse.Namespace, world_size: int) -> None:
    args.rank, args.world_size = 0, world_size
    if _lacks_packages():
        resolve_name(f"{_PATCHES}environment:ask_for_installed")(args)


def _refuse_no_model(args: argparse.Namespace) -> None:
    missing = [name for name in ("hidden_size", "num_attention_heads") if getattr(args, name) is None]
    missing += ["num_layers"] * (args.num_layers is None and args.hybrid_layer_pattern is None)
    if missing:
        raise EppError(
            f"there is no model, {', '.join(missing)} missing: include one, as in `include: [models/llama3-8b]`, or set them"
        )


class Fit(NamedTuple):
    """Result of comparing one of Megatron's functions with what our code expects."""

    target: str  # name of the function, as in `patching.Patch`
    fits: bool  # True if the function can be patched, or is the tested code
    what: str  # short description: the purpose of the patch, or the problem
    needed: bool  # True if training with `--epp` refuses to start where the function does not fit


def fits() -> list[Fit]:
    """Check every patch that `prepare` would apply, and every function that our schedule relies on. Imports Megatron."""
    ours = logging.getLogger("megatron_epp")
    level = ours.level
    ours.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = [_fit(patch) for patches in _patches() for patch in patches]
            strange = set(patching.unknown(fingerprints.RELIED_ON))
    finally:
        ours.setLevel(level)
    for target in fingerprints.RELIED_ON:
        known = target not in strange
        results.append(Fit(target, known, "known" if known else "is not the code megatron-epp is tested with", False))
    return results


def _fit(patch: Patch) -> Fit:
    try:
        patching.check(patch)
    except EppError as error:
        return Fit(patch.target, False, str(error), True)
    return Fit(patch.target, True, patch.reason, True)
