"""Costs stored in files: the file that `--epp-costs` names, and times measured earlier, which are kept with the checkpoints.

The first rank of the job reads and decides for all, since a folder may exist on its machine only, or appear late on others.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_epp.cost import PipelineCosts, StageCosts
from megatron_epp.cost.library import find, load_costs
from megatron_epp.cost.profile import Profile
from megatron_epp.plan import EppError
from megatron_epp.plan.layout import layers_text
from megatron_epp.plan.reading import parse_json, read_text, told
from megatron_epp.plan.writing import write_text

logger = logging.getLogger(__name__)

FILE_NAME = "epp_costs.json"

_FLAGS = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "pipeline_model_parallel_size",
    "epp_placement",
    "sequence_parallel",
    "bf16",
    "fp16",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "swiglu",
    "num_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "transformer_impl",
    "attention_backend",
    "epp_loss_block_tokens",
    "epp_split_weight_gradient",
    "epp_vocab_parallel",
)
"""Flags that must agree between two runs, besides layers and messages, for times of one to hold in the other.

The number of replicas may differ. Times of a stage include those of its messages to neighbours, so the placement must agree.
"""

_ONCE = {"epp_vocab_parallel": "off"}
"""Values of flags that earlier releases did not write."""

_TIMES_OF_STAGES = ("forward", "backward", "weight", "extra_forward", "extra_backward", "extra_weight")
_TIMES_OF_LINKS = ("message_latency_us", "message_us_per_byte", "host_latency_us", "host_us_per_byte")
_TIMES_OF_SHARDS = ("logits", "gradient", "spread", "gather")
"""Fields with times, besides those of recompute modes."""

_DEVICE = "device"
"""Key of the device's name, which must agree as well, among those of the flags."""


def of_first[T](make: Callable[[], T]) -> T:
    """Return the value that `make` gives on the first rank of the job, or raise its error, on all ranks. A collective call.

    Replicas measure, or read files, on their own, and must plan with the same figures. Any error of the first rank becomes an
    `EppError`, since all other ranks wait for its answer.
    """
    shared: list[T | EppError | None] = [None]
    if dist.get_rank() == 0:
        try:
            shared = [make()]
        except EppError as error:
            shared = [error]
        except Exception as error:
            failure = EppError(f"the first rank of the job failed ({type(error).__name__}: {error})")
            failure.__cause__ = error  # stays on this rank
            shared = [failure]
    dist.broadcast_object_list(shared, src=0)
    if isinstance(shared[0], EppError):
        raise shared[0]
    return shared[0]  # type: ignore[return-value]


def named(args: argparse.Namespace) -> Profile | PipelineCosts | None:
    """Read the file or shipped profile that `--epp-costs` names; None if it names none. A collective call of all ranks.

    Raises `EppError` if the file does not exist, or contains neither a profile nor costs of a pipeline.
    """
    if args.epp_costs in ("analytic", "measure", "learn"):
        return None
    return of_first(lambda: _read(args.epp_costs))


def _read(name: str) -> Profile | PipelineCosts:
    try:
        path = find("profiles", name)
    except EppError as error:
        raise EppError(f"--epp-costs {name}: {error}. Or give analytic, measure or learn") from error
    return load_costs(str(path))


def checked(costs: PipelineCosts, source: str, num_stages: int, token_bytes: float) -> PipelineCosts:
    """Return costs of a whole pipeline read from a file. Raises `EppError` if they are of another pipeline or precision."""
    if len(costs.stages) != num_stages:
        raise EppError(
            f"{source} has costs of {len(costs.stages)} stages but the pipeline has {num_stages}: give another file, or "
            "measure (--epp-costs measure)"
        )
    if not math.isclose(costs.hidden_bytes_per_token, token_bytes):
        raise EppError(f"{source} has {other_bytes(costs, token_bytes)}: measure again (--epp-costs measure)")
    return costs


def kept_times(args: argparse.Namespace, here: PipelineCosts) -> PipelineCosts | None:
    """Return `here`, costs of this run's bytes, with the times that the resumed run measured; None if there are none.

    Times that do not hold in this run are left out, with a warning. A collective call of all ranks.
    """
    kept = of_first(lambda: _fitting(args, here))
    return None if kept is None else with_times(here, kept)


def keep(args: argparse.Namespace, costs: PipelineCosts) -> None:
    """Write measured costs to the checkpoint folder, on the first rank only. Does nothing if no checkpoints are saved."""
    if args.epp_costs != "measure" or not args.save or dist.get_rank() != 0:
        return
    body = json.loads(costs.to_json()) | {"measured_with": flags_of(args), "host_link": args.epp_offload == "on"}
    write_whole(Path(args.save, FILE_NAME), json.dumps(body, sort_keys=True, indent=1, allow_nan=False))


def write_whole(path: Path, text: str) -> None:
    """Write a file of a checkpoint folder, which is made if needed, whole or not at all. Raises `EppError`, which names it."""
    try:
        os.makedirs(path.parent, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise EppError(f"cannot write {error.filename or path}: {error.strerror}") from None


def flags_of(args: argparse.Namespace) -> dict[str, object]:
    """Return the values of the flags that times depend on, by their names with underscores, and the name of the device."""
    values = {name: getattr(args, name, None) for name in _FLAGS}
    device = torch.cuda.get_device_name() if torch.cuda.is_initialized() else "cpu"
    return {name: value.name if isinstance(value, Enum) else value for name, value in values.items()} | {_DEVICE: device}


def _fitting(args: argparse.Namespace, here: PipelineCosts) -> PipelineCosts | None:
    """Read the costs in the folder of the loaded checkpoint; None if there are none or their times do not hold here.

    If they were written without a measured link to the host, they get this run's.
    """
    path = Path(args.load, FILE_NAME) if args.load else None
    if path is None or not path.exists():
        return None
    try:
        text = read_text(path)
        kept = PipelineCosts.from_json(text)
        body = parse_json(text, "the text")
        then = body.get("measured_with")
        obstacle = _obstacle(kept, here, then if isinstance(then, dict) else {}, flags_of(args))
    except (EppError, OSError, UnicodeDecodeError) as error:
        obstacle = str(error)
    if obstacle is not None:
        logger.warning("%s: %s. Times are measured again, so plans may differ from those of the run before", path, obstacle)
        return None
    if body.get("host_link"):
        return kept
    return replace(kept, host_latency_us=here.host_latency_us, host_us_per_byte=here.host_us_per_byte)


def _obstacle(kept: PipelineCosts, here: PipelineCosts, then: Mapping[str, object], now: Mapping[str, object]) -> str | None:
    """Return the reason why times of one run do not hold in the other; None if they do."""
    if [(s.num_layers, s.half.kind) for s in kept.stages] != [(s.num_layers, s.half.kind) for s in here.stages]:
        then_layers, now_layers = (layers_text(costs.num_halves) for costs in (kept, here))
        return f"its stages have [{then_layers}] layers where this run's have [{now_layers}]"
    if not math.isclose(kept.hidden_bytes_per_token, here.hidden_bytes_per_token):
        return f"it has {other_bytes(kept, here.hidden_bytes_per_token)}"
    then = _ONCE | dict(then)
    others = [
        f"{'the device' if name == _DEVICE else '--' + name.replace('_', '-')} "
        f"was {told(then.get(name, 'not told'))} and is {value}"
        for name, value in now.items()
        if name not in then or then[name] != value
    ]
    return ", ".join(others) or None


def with_times(here: PipelineCosts, kept: PipelineCosts) -> PipelineCosts:
    """Combine the bytes of `here` with the times of `kept`."""
    stages = tuple(map(_stage_with_times, here.stages, kept.stages))
    vocabulary = here.vocabulary
    if vocabulary is not None and kept.vocabulary is not None:
        vocabulary = replace(vocabulary, **{name: getattr(kept.vocabulary, name) for name in _TIMES_OF_SHARDS})
    times = {name: getattr(kept, name) for name in _TIMES_OF_LINKS}
    return replace(here, name=kept.name, stages=stages, vocabulary=vocabulary, **times)


def _stage_with_times(now: StageCosts, then: StageCosts) -> StageCosts:
    both = now.recompute.keys() & then.recompute.keys()
    modes = {name: replace(known, again=then.recompute[name].again) for name, known in now.recompute.items() if name in both}
    half = replace(now.half, forward=then.half.forward, backward=then.half.backward, weight=then.half.weight)
    return replace(now, half=half, recompute=modes, **{name: getattr(then, name) for name in _TIMES_OF_STAGES})


def other_bytes(costs: PipelineCosts, token_bytes: float) -> str:
    """Describe costs whose messages differ in size from this run's, as a part of a sentence."""
    return (
        f"costs of messages of {costs.hidden_bytes_per_token:g} bytes per token where this run's take {token_bytes:g}, so they "
        "are of another precision (--bf16, --fp16), --hidden-size or number of ranks that share a layer"
    )
