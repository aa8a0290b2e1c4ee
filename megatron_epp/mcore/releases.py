"""Features of the installed Megatron: a function for each difference between its releases, and the range that is supported.

The only module that compares versions of Megatron, inspects the signatures of its functions, or looks for names that some
releases lack; `tests/mcore/test_features.py` holds the others to it. Each docstring says which releases have the feature: 0.18
and 0.19, and *main*, Megatron's development branch, as of August 2026. Nothing of Megatron is imported before a function
needs it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import logging
import os
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_epp.plan.errors import EppError

logger = logging.getLogger(__name__)

SUPPORTED = ">=0.18,<0.20"
RECOMMENDED = "0.19.2"
INSTALL = f'pip install "megatron-core[training]=={RECOMMENDED}"'


def installed_version() -> str:
    """Return the version of the megatron.core that `import megatron.core` would load, from a wheel or a clone.

    It is read from the source tree, not from package metadata, which names the wheel even where a clone shadows it.
    Raises EppError if there is none.
    """
    path = installed_in() / "package_info.py"
    spec = importlib.util.spec_from_file_location("_megatron_package_info", path)
    if spec is None or spec.loader is None or not path.exists():
        raise EppError(f"{path.parent} has no package_info.py: it is not a Megatron that megatron-epp {SUPPORTED} knows")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # Some releases add the commit of whatever repository is around the folder, an environment's as well.
    public, plus, commit = str(module.__version__).partition("+")
    return public + plus + commit if plus and is_clone() else public


def installed_in() -> Path:
    """Return the folder of that megatron.core. Raises EppError if there is none."""
    try:
        core = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        core = None
    if core is None or not core.submodule_search_locations:
        raise EppError(
            f"Megatron is not installed, and training needs it: {INSTALL}, or put a clone of Megatron-LM on PYTHONPATH"
        )
    return Path(core.submodule_search_locations[0])


def is_clone() -> bool:
    """True if it lies in a clone, not in an environment. Raises EppError if there is none."""
    return (installed_in().parents[1] / ".git").exists()


def described() -> str:
    """Say which Megatron it is, where it lies, and whether it is supported. Raises EppError if there is none."""
    version = installed_version()
    kind, verdict = "clone" if is_clone() else "package", "supported" if matches(version, SUPPORTED) else "not supported"
    return f"{version}, the {kind} in {installed_in()}; {verdict} ({SUPPORTED})"


def matches(version: str, versions: str) -> bool:
    """True if `version` lies in a range such as ">=0.19,<0.20"; a release candidate of 0.19 counts as before 0.19."""
    from packaging.specifiers import SpecifierSet  # which torch and Megatron bring; most commands need neither

    return SpecifierSet(versions).contains(version, prereleases=True)


def check_megatron(allow_unknown: bool = False) -> str:
    """Return the installed version. Raises EppError if it is missing, or outside SUPPORTED and not `allow_unknown`."""
    version = installed_version()
    if allow_unknown or matches(version, SUPPORTED):
        return version
    remedy = f"git checkout core_v{RECOMMENDED} in that clone" if is_clone() else INSTALL
    raise EppError(
        f"megatron-core {version} is installed and megatron-epp supports {SUPPORTED}: {remedy}, or pass "
        f"--epp-allow-unknown-megatron (it is in {installed_in()})"
    )


@functools.cache
def tell_untested() -> None:
    """Warn, once in a process, if the installed Megatron is outside SUPPORTED. Raises EppError if it is missing."""
    version = installed_version()
    if not matches(version, SUPPORTED) and os.environ.get("RANK", "0") == "0":
        logger.warning(
            "megatron-core %s is installed, and megatron-epp is tested with %s: compare losses and gradients with those of "
            "Megatron's own schedule first",
            version,
            SUPPORTED,
        )


def has(versions: str) -> bool:
    """True if the installed Megatron lies in a range of versions."""
    return matches(installed_version(), versions)


# ---- training --------------------------------------------------------------------------------------------------------


def training_args() -> Namespace:
    """Return the arguments of Megatron's training loop, from `megatron.training`.

    Nothing that `wrap` needs imports that: importing it can fail where its own dependencies are of other releases.
    """
    from megatron.training import get_args

    args: Namespace = get_args()
    return args


def checks_losses() -> bool:
    """True if Megatron's training loop is to look for NaN in losses; not so where another loop trains."""
    from megatron.training import global_vars

    args: Namespace | None = global_vars._GLOBAL_ARGS
    return args is not None and bool(args.check_for_nan_in_loss_and_grad)


def epp_args() -> Namespace | None:
    """Return Megatron's arguments in a training with `--epp`; None in others, and where a model is built without training."""
    from megatron.training import global_vars

    args: Namespace | None = global_vars._GLOBAL_ARGS
    return args if getattr(args, "epp", False) else None


def document_args() -> Namespace | None:
    """Return Megatron's arguments if plans cut documents into chunks; None without `--epp` and for a script's microbatches."""
    args = epp_args()
    return None if args is None or has_user_microbatches(args) else args


def has_user_microbatches(args: Namespace) -> bool:
    """Return True if plans are of a script's own microbatches."""
    return getattr(args, "epp", False) and getattr(args, "epp_microbatches", "plan") == "user"


def bound(function: Callable[..., Any], *rest: Any, **named: Any) -> inspect.BoundArguments:
    """Bind a call's arguments to the names of parameters, whose order differs between releases."""
    return inspect.signature(function).bind(*rest, **named)


def takes(function: Callable[..., Any], name: str) -> bool:
    """Return True if a function has a parameter of a name, or takes any."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())


def pretrain_builds_model() -> bool:
    """True if `pretrain` builds the model from a config: 0.19 and later. Before it takes a function that does."""
    from megatron.training import argument_utils

    return hasattr(argument_utils, "gpt_config_from_args")


def reads_ahead(args: Namespace) -> bool:
    """Return True if training takes its microbatches from one iterator from beginning to end, so that the next can be seen."""
    changing = ("iterations_to_skip", "sequence_packing_scheduler", "perform_rl_step")
    return not any(getattr(args, name, None) for name in changing)


def saves_several_buckets_resharded() -> bool:
    """True if the form of optimizer state that any layout can load is right for gradients in several buckets: main.

    Up to 0.19 it forgets the padding between buckets, so that wrong values are saved for all parameters behind the first bucket
    (NVIDIA/Megatron-LM pull request 5077).
    """
    return has(">=0.20.dev0")


# ---- schedules -------------------------------------------------------------------------------------------------------

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
CALLED = {
    f"{_SCHEDULES}:forward_step": (
        "forward_step_func data_iterator model num_microbatches input_tensor forward_data_store config",
        "cp_group_size collect_non_loss_data is_first_microbatch current_microbatch vp_stage is_last_stage",
    ),
    f"{_SCHEDULES}:backward_step": ("", "input_tensor output_tensor output_tensor_grad config"),
    f"{_SCHEDULES}:deallocate_output_tensor": ("out deallocate_pipeline_outputs", ""),
    "megatron.core.distributed.finalize_model_grads:finalize_model_grads": (
        "model num_tokens",
        "pg_collection force_all_reduce",
    ),
}
"""Functions that run a script's own microbatches: the arguments that they get by position, and by name."""


def check_calls() -> None:
    """Raise `EppError` that names the functions of CALLED which are missing or take other arguments, as a fork's may."""
    strange = [obstacle for target, arguments in CALLED.items() if (obstacle := _obstacle(target, *map(str.split, arguments)))]
    if strange:
        raise EppError(
            f"microbatches cannot be run with megatron-core {installed_version()}, in which {'; '.join(strange)}: install "
            f"megatron-core {SUPPORTED}, or use Megatron's own schedule"
        )


def _obstacle(target: str, by_position: list[str], by_name: list[str]) -> str:
    """Return why a function cannot be called with arguments of these names; empty if it can."""
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name, None)
    if function is None:
        return f"there is no {target}"
    signature = inspect.signature(function)
    try:
        bound_names = signature.bind(*by_position, **dict(zip(by_name, by_name, strict=True))).arguments
    except TypeError:
        bound_names = {}
    fits = bound_names and all(name == value for name, value in bound_names.items() if isinstance(value, str))
    return "" if fits else f"{target} takes {signature} and not ({', '.join((*by_position, *by_name))})"


# ---- tokenizers ------------------------------------------------------------------------------------------------------


def tokenizer_settings(options: Mapping[str, object]) -> Namespace:
    """Return the settings from which Megatron builds a tokenizer: fields of `TokenizerConfig`.

    The vocabulary is not padded, which concerns the model and not the data.
    """
    from megatron.training.config import TokenizerConfig

    config = TokenizerConfig(**options, pad_vocab_size=False)
    return Namespace(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})


# ---- mixture of experts ----------------------------------------------------------------------------------------------


def logged_router_losses() -> dict[str, Any]:
    """Return the sums that routers keep for the log, ``[layers]`` for each kind of loss."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    return {name: entry.values for name, entry in get_moe_metrics_tracker().metrics.items()}


def takes_state_dtype() -> bool:
    """True if Megatron gives Mamba's kernel the type of states: 0.19 and later, with a mamba-ssm whose kernel takes it."""
    from megatron.core.ssm import mamba_mixer

    return bool(getattr(mamba_mixer, "MAMBA_HAS_STATE_DTYPE", False))


def pads_uneven_exchanges(settings: Any) -> bool:
    """True if flags, or a configuration, can have Megatron pad unequal numbers of tokens for HybridEP: 0.19 and later."""
    return hasattr(settings, "moe_hybridep_pad_uneven_dispatch_inputs")


def router_loss_tokens(total: int, ranks: int) -> float:
    """Return the number of tokens to give a rank's router, so that its loss counts as for `total` tokens on `ranks` ranks.

    0.19 and later multiply by the number of ranks, which 0.18 forgets: there a loss of several ranks is too small.
    """
    return total / ranks if _multiplies_router_losses() else total


@functools.cache
def _multiplies_router_losses() -> bool:
    return has(">=0.19.dev0")


def router_loss_scale(config: Any) -> Callable[[], Any] | None:
    """Return the function that gives router losses a scale of their own: 0.19 and later, where the user sets one; else None."""
    return getattr(config, "moe_grad_scale_func", None)


def logged_prediction_losses() -> dict[Any, Any]:
    """Return what is kept for the log of multi-token prediction, by name: tensors that are added to."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    return {name: value for name, value in MTPLossLoggingHelper.tracker.items() if hasattr(value, "copy_")}


def log_prediction_loss(loss: Any, depth: int, depths: int) -> None:
    """Add a mean loss of multi-token prediction to the log's: since 0.19 with counts of tokens that a draft would get right,
    for which a plan would need all logits at once.

    Args:
        loss: on the device, without gradient.
        depth, depths: the depth, from 0, and how many there are.
    """
    from megatron.core import mpu
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    counts = (loss.new_zeros(()),) * 2 if hasattr(MTPLossLoggingHelper, "save_metrics_to_tracker") else ()
    save = MTPLossLoggingHelper.save_metrics_to_tracker if counts else MTPLossLoggingHelper.save_loss_to_tracker
    own = loss * mpu.get_context_parallel_world_size()  # ranks that share the sequence add up, and the log averages over them
    save(own, *counts, depth, depths, avg_group=mpu.get_data_parallel_group(with_context_parallel=True))


# ---- output layer and loss -------------------------------------------------------------------------------------------


def fuses_output_with_loss(model: Any) -> bool:
    """True if the model's flags ask for Megatron's kernel that fuses output layer and loss: main only, and forks."""
    return getattr(model, "fuse_linear_cross_entropy", False)


def fused_loss_obstacle() -> str:
    """Return the reason why the kernel of `fuses_output_with_loss` cannot run here, as Megatron gives it; empty if it can."""
    try:
        from megatron.core.fusions.fused_linear_cross_entropy import Platform

        Platform()
    except Exception as error:  # an architecture it has no kernel for, no GPU, no CUTLASS: it raises what comes
        return f"it cannot run here ({type(error).__name__}: {error})"
    return ""


def multiplying_output_layers() -> tuple[type, ...]:
    """Return the types of output layers that compute logits by a multiplication only; main has a second one."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    try:
        from megatron.core.transformer.linear_cross_entropy import LinearCrossEntropyModule
    except ImportError:
        return (ColumnParallelLinear,)
    return ColumnParallelLinear, LinearCrossEntropyModule


def gathers_output_weight(layer: Any) -> bool:
    """True if ranks share an output layer's weight and gather it for every use: 0.19 and later, where a flag says so."""
    return getattr(layer, "gtp_remat_size", 1) > 1
