"""Checks of flags and files that Megatron makes only after it has started, made before: by our table, and by asking it."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import re
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from megatron_epp.data.token_record import missing_tokenizer
from megatron_epp.mcore.arguments import ArgumentError
from megatron_epp.mcore.arguments.consequences import door_of, prepare_epp_args
from megatron_epp.mcore.arguments.layout import recipe
from megatron_epp.mcore.arguments.refusals import START
from megatron_epp.mcore.arguments.rule import Door, problems_of
from megatron_epp.mcore.model.kinds import flex_backend
from megatron_epp.mcore.patches import patching
from megatron_epp.plan.attributes import having
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.flags import flag_of
from megatron_epp.plan.reading import one_line

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"  # file with the iteration that Megatron loads, or the word "release"
_BRIDGE_CONFIG = "run_config.yaml"  # file in a checkpoint by which Megatron-Bridge knows the model that it exports
_MODEL = ("num_layers", "hidden_size", "num_attention_heads")  # flags of the model that Megatron compares with a checkpoint's


def check_start(args: Namespace, *, wants_flags: bool = True, wants_files: bool) -> None:
    """Refuse what Megatron would refuse later by an `ArgumentError` with a line per problem, and modify flags as training does.

    Args:
        args: parsed flags that Megatron has not validated yet.
        wants_flags: look at flags. Without, their values may be in a checkpoint.
        wants_files: look at files and folders, which need not be there before a run begins.
    """
    door = door_of(args)
    is_user = door is Door.USER
    of_flags = (prepare_epp_args, lambda args: problems_of(args, door, START))
    of_documents = (resolve_name("megatron_epp.mcore.data.documents:check_files_of"),) if wants_files and args.epp else ()
    of_files = (_packages, _written_folders) if is_user else (*of_documents, *FILES)  # a script may read its own
    problems: list[str] = []
    for check in (*(of_flags if wants_flags else ()), *(of_files if wants_files else ())):
        try:
            answers = check(args)
            problems += answers if isinstance(answers, Iterator) else ()
        except EppError as error:
            problems.append(str(error))
    if problems:
        raise ArgumentError("\n".join(problems))
    if args.epp and not args.eval_iters and not args.eval_interval:
        args.eval_interval = args.train_iters  # it divides by the interval also where nothing is evaluated
    if wants_flags:
        validated = validate(args)
        if wants_files and not is_user and (problem := _other_schedule(validated)):
            raise ArgumentError(problem)


def validate(args: Namespace) -> Namespace:
    """Return flags as Megatron validates them, on documents with a configuration, too. Raises `ArgumentError` by refusal."""
    import torch
    from megatron.training import arguments

    flags, cuda = copy.deepcopy(args), torch.cuda
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} | os.environ  # as ``launch.environment`` sets it for the run
    # Where there is no GPU, as on a login node, the capability is the least that Megatron takes for grouped experts.
    capability = cuda.get_device_capability if cuda.is_available() else lambda device=None: (8, 0)
    with (
        contextlib.redirect_stdout(io.StringIO()),
        having(os, environ=environment),
        having(cuda, get_device_capability=capability),
        refusals_of_megatron(args),
    ):
        # The original: ours would make the checks of `check_start` again.
        patching.original_of("megatron.training.arguments:validate_args")(flags, {"tokenizer_type": "GPT2BPETokenizer"})
        if door_of(args) is Door.DOCUMENTS:
            # A configuration that delays weight gradients is made as `--epp` allows it only where there is a run.
            arguments.core_transformer_config_from_args(Namespace(**vars(flags) | {"delay_wgrad_compute": False}))
    return flags


@contextlib.contextmanager
def refusals_of_megatron(args: Namespace) -> Iterator[None]:
    """Translate errors of Megatron's validation into an `ArgumentError` of one line, with the names of flags in `args`."""
    before = dict(vars(args))
    try:
        yield
    except (AssertionError, ValueError, RuntimeError) as error:
        asserted, named = _asserted(error), []

        def flag(match: re.Match[str]) -> str:
            if (name := match[1] or match[0]) not in before:
                return match[0]
            named.append(f"{flag_of(name)} {before[name]}")
            return flag_of(name)

        text = re.sub(r"\b(?:args|self)\.(\w+)|\b[a-z]+(?:_\w+)+", flag, asserted or one_line(error))
        values = f" ({', '.join(dict.fromkeys(named))})" if asserted and named else ""
        raise ArgumentError(f"Megatron refuses these flags: {text}{values}") from None


def _asserted(error: Exception) -> str:
    """Return the condition of an assertion without a text, as its source has it; empty for other errors."""
    if not isinstance(error, AssertionError) or str(error) or error.__traceback__ is None:
        return ""
    line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    return f"it requires {line.removeprefix('assert ').rstrip(', \\')}" if line.startswith("assert ") else ""


# ---- files -----------------------------------------------------------------------------------------------------------


def _is_remote(path: str) -> bool:
    return "://" in path


def _tokenizer(args: Namespace) -> Iterator[str]:
    """Yield which files of the tokenizer are missing."""
    kind, model = args.tokenizer_type, args.tokenizer_model
    if kind and model and (missing := missing_tokenizer(kind, model)):
        yield f"--tokenizer-model: {missing}"
    for name in ("vocab_file", "merge_file"):
        path = getattr(args, name)
        if path and not _is_remote(path) and not Path(path).is_file():
            yield f"{flag_of(name)}: there is no file {path}"


def _packages(args: Namespace) -> Iterator[str]:
    """Yield a package or a GPU that is missing, which Megatron would say without a flag, or when it builds the model."""
    import torch

    if args.moe_grouped_gemm:
        try:
            torch.cuda.get_device_capability()
        except (AssertionError, RuntimeError):  # torch without CUDA, or no driver
            yield "--moe-grouped-gemm needs a GPU, and torch finds none: leave it out"
    if recipe(args) and find_spec("transformer_engine") is None:
        yield f"--fp8-format {args.fp8} needs Transformer Engine, which is not installed: add it, or leave it out"
    if (backend := flex_backend(args)) in ("deepep", "hybridep") and find_spec("deep_ep") is None:
        yield f"--moe-token-dispatcher-type flex by {backend} needs deep_ep, which is not installed: add it, or use alltoall"


def _written_folders(args: Namespace) -> Iterator[str]:
    for name in ("save", "tensorboard_dir", "wandb_save_dir", "epp_report_dir"):
        folder = getattr(args, name, None)
        if not folder or _is_remote(folder):
            continue
        path = Path(folder).absolute()
        nearest = next(existing for existing in (path, *path.parents) if existing.exists())
        flag = f"{flag_of(name)} {folder}"
        if not nearest.is_dir():
            yield f"{flag}: {nearest} is a file, not a folder; choose another folder"
        elif not os.access(nearest, os.W_OK | os.X_OK):
            yield f"{flag}: the folder {nearest} cannot be written; choose another folder"


def _checkpoint(args: Namespace) -> Iterator[str]:
    """Yield which checkpoints are missing, and which values in the checkpoint to resume from do not fit these flags."""
    load, pretrained = args.load, args.pretrained_checkpoint
    if (load is None and pretrained is None) or any(_is_remote(path) for path in (load, pretrained) if path):
        return
    loaded = next((Path(path) for path in (load, pretrained) if path and (Path(path) / TRACKER).is_file()), None)
    if loaded is not None and args.transformer_impl == "local":
        yield from _without_way_back(loaded)
    if load is not None and loaded == Path(load):
        yield from _unlike(args, loaded)
    elif pretrained is not None:
        if not (Path(pretrained) / TRACKER).is_file():
            yield f"--pretrained-checkpoint: {_without_checkpoint(pretrained)}"
    elif args.non_persistent_ckpt_type != "local":
        missing = f"--load: {_without_checkpoint(load)}"
        for flag in ("finetune", "exit_on_missing_checkpoint", "use_checkpoint_args"):
            if getattr(args, flag):
                yield f"{missing}; {flag_of(flag)} needs one"
                return
        if load != args.save:  # a run that goes on from its own checkpoints has none when it begins
            logger.warning("%s: training begins with new weights", missing)


def _without_way_back(folder: Path) -> Iterator[str]:
    """Yield that Megatron-Bridge could not export what a run with Megatron's own layers makes of a checkpoint of Bridge's."""
    try:
        config = newest_checkpoint(folder) / _BRIDGE_CONFIG
    except (OSError, ValueError):  # a damaged one is named when it is loaded
        return
    if config.is_file():
        how = "" if find_spec("transformer_engine") else "install Transformer Engine and "
        why = "cannot export to Hugging Face what Megatron's own layers save (they have no _extra_state)"
        todo = f"{how}set --transformer-impl transformer_engine; to train without the way back, remove {config}"
        yield f"the checkpoint in {folder} is Megatron-Bridge's, which {why}: {todo}"


def _without_checkpoint(folder: str) -> str:
    path = Path(folder)
    if not path.is_dir():
        return f"there is no folder {folder}"
    is_hugging_face = (path / "config.json").exists() and any(path.glob("*.safetensors"))
    why = "; its weights are in the format of Hugging Face: convert them to Megatron's" if is_hugging_face else ""
    return f"there is no checkpoint in {folder} (no {TRACKER}){why}"


def _unlike(args: Namespace, folder: Path) -> Iterator[str]:
    """Yield the differences from the run that saved the newest checkpoint of a folder for which Megatron would end the run."""
    if (saved := common_state(folder)) is None:
        return
    then = saved.get("args")
    if not args.use_checkpoint_args and then is not None:
        own = {name: value for name in _MODEL if (value := getattr(args, name)) is not None}  # layers may follow from a pattern
        other = [name for name, value in own.items() if hasattr(then, name) and getattr(then, name) != value]
        if other:
            words = ", ".join(f"{flag_of(name)} {getattr(args, name)}, not {getattr(then, name)}" for name in other)
            yield f"the checkpoint in {folder} is of another model: this run has {words}"
    if args.finetune or args.no_load_optim or args.skip_train:
        return
    ranks, saved_ranks = args.expert_model_parallel_size, getattr(then, "expert_model_parallel_size", 1)
    is_fixed = not args.num_experts or "opt_param_scheduler" not in saved or args.use_mp_args_from_checkpoint_args
    if not is_fixed and (ranks > 1) != (saved_ranks > 1):  # with several ranks, experts have an optimizer of their own
        then_saved = f"the optimizer state in {folder} was saved with --expert-model-parallel-size {saved_ranks}"
        why = f"Megatron cannot load it with {ranks}, in whatever form it was saved"
        yield f"{then_saved}, and {why}: resume with {saved_ranks}, or begin it anew with --no-load-optim"


def _other_schedule(args: Namespace) -> str:
    """Return that validated flags give another schedule of learning rates than the checkpoint to resume from; else nothing."""
    takes_any = args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler
    if takes_any or args.finetune or args.no_load_optim or args.skip_train or args.load is None or _is_remote(args.load):
        return ""
    saved = (common_state(Path(args.load)) or {}).get("opt_param_scheduler")
    if not saved:
        return ""
    import torch
    from megatron.training import training

    with having(training, get_args=lambda: args), refusals_of_megatron(args):
        schedule = training.get_optimizer_param_scheduler(torch.optim.SGD([torch.zeros(1)]))
    try:
        schedule.load_state_dict(saved)
    except AssertionError as error:
        what = f"the checkpoint in {args.load} was saved with another schedule of learning rates ({one_line(error)})"
        todo = "add --override-opt-param-scheduler to go on with this run's, or --use-checkpoint-opt-param-scheduler to keep it"
        return f"{what}: {todo}"
    return ""


def newest_checkpoint(folder: Path) -> Path:
    """Return the checkpoint that a folder's tracker file names. Raises OSError without one, ValueError if it names none."""
    named = (folder / TRACKER).read_text(encoding="utf-8").strip()
    return folder / ("release" if named == "release" else f"iter_{int(named):07d}")


def common_state(folder: Path) -> dict[str, Any] | None:
    """Read the state of a distributed checkpoint without its tensors; None if there is none, or it is damaged."""
    from megatron.core.dist_checkpointing.serialization import load_common_state_dict

    with contextlib.suppress(Exception):  # a damaged one is named when it is loaded, or set aside then
        state = load_common_state_dict(str(newest_checkpoint(folder)))
        return state if isinstance(state, dict) else None
    return None


FILES: tuple[Callable[[Namespace], Iterator[str]], ...] = (_packages, _tokenizer, _written_folders, _checkpoint)
"""Checks of packages, files and folders, which are made on the first rank, and not in a dry run."""
