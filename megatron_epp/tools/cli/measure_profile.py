"""The part of `doctor` that measures this machine and writes a cost profile."""

from __future__ import annotations

import argparse
import datetime
import math
import os
import platform
from dataclasses import asdict, replace
from typing import Any

from megatron_epp.launch.machine import cpu_name, version_of
from megatron_epp.mcore.arguments.flag import WHOLE
from megatron_epp.plan.writing import write_text
from megatron_epp.tools.cli.planning_flags import add_model, flags_of, of_model
from megatron_epp.tools.cli.terminal import Parser, add_output, progress, say
from megatron_epp.tools.formulas.analytic import analytic_profile
from megatron_epp.tools.formulas.library import RATES, Cluster, load_cluster, shape_of
from megatron_epp.tools.formulas.model_shape import ModelShape
from megatron_epp.tools.formulas.profile import Profile
from megatron_epp.tools.formulas.profile_fit import fit_profile
from megatron_epp.tools.report.text import table


def add_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("measurement", "of a layer, the embedding and the head of a model")
    what = "measure, and write a cost profile to -o, instead of looking (needs torch)"
    group.add_argument("--profile", action="store_true", help=what)
    for name, sizes in (("tokens", "tokens of chunks and slices"), ("prefixes", "tokens before a slice")):
        text = f"{sizes} to measure{', from 0' * (name == 'prefixes')} (default: by device)"
        group.add_argument(f"--{name}", type=_numbers, metavar="N,N,...", help=text)
    formula = "do not measure: write what the formulas give for this machine, marked as such (default: measure)"
    group.add_argument("--by-formula", metavar="CLUSTER", help=formula)
    add_output(group, "write the profile as JSON; --profile needs it (default: none)")
    add_model(parser.add_argument_group("model", "(default: an 8B model)"))


def run(args: argparse.Namespace) -> int:
    """Measure, fit, write, and print the residuals. Raises `EppError`."""
    if args.output is None:
        args.parser.error("the following arguments are required: -o/--output")
    with of_model(args):
        shape = shape_of(flags_of(args))
    profile = _measured(args, shape) if args.by_formula is None else _by_formula(shape, load_cluster(args.by_formula))
    write_text(args.output, profile.to_json() + "\n")
    say(f"{profile.name}, {profile.origin['source']} ({profile.origin['machine']})")
    if residuals := profile.origin.get("residuals"):
        rows = [[kind, str(fit["points"]), f"{fit['median']:.1%}", f"{fit['worst']:.1%}"] for kind, fit in residuals.items()]
        say("\n".join(["", *table(("kind", "points", "median error of the fit", "worst"), rows)]))
    return 0


def _by_formula(shape: ModelShape, cluster: Cluster) -> Profile:
    origin = {
        "source": "analytic: by formula from the model's shape and the machine's rates, nothing was measured",
        "machine": cluster.name,
        "rates": {name: None if value == math.inf else value for name, value in asdict(cluster.rates).items()},
        "shape": asdict(shape),
    }
    return replace(analytic_profile(shape, cluster.rates), origin=origin)


def _measured(args: argparse.Namespace, shape: ModelShape) -> Profile:
    """Measure one rank's share of a model's parts and the link between two ranks, and fit a profile."""
    import torch

    from megatron_epp.runtime.links.processes import measure_link
    from megatron_epp.tools.machine.profiling import Grid, measure

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    usual = Grid.of(device)
    grid = Grid(args.tokens or usual.tokens, usual.prefixes if args.prefixes is None else args.prefixes)
    now = ["starting"]
    with progress("profiling", lambda: now[0]):
        points = measure(shape, device, grid, lambda kind: now.append(now.pop() and kind))
        if device.type == "cpu" or torch.cuda.device_count() > 1:
            now[0] = "message"
            points["message"] = measure_link(gpus=device.type == "cuda")
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    origin: dict[str, Any] = {
        "source": "measured",
        "machine": gpu or cpu_name(),
        "threads": None if gpu else torch.get_num_threads(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()} | {name: version_of(name) for name in ("torch", "megatron-epp")},
        "shape": asdict(shape),
    }
    rates = RATES["h100" if gpu else "cpu"]
    return fit_profile(points, shape, rates, f"measured:{gpu or 'cpu'}", origin)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(WHOLE(number)) for number in text.split(","))
