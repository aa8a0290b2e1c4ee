"""The part of `doctor` that measures this machine, fits a cost profile to the points, and writes it."""

from __future__ import annotations

import argparse
import datetime
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from megatron_epp.cost.line_fits import Point, fit_line
from megatron_epp.cost.work import LinearTime
from megatron_epp.launch.machine import cpu_name, version_of
from megatron_epp.mcore.arguments.flag import WHOLE
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.recompute import MLP, MODES, PROJECTIONS
from megatron_epp.plan.writing import write_text
from megatron_epp.tools.cli.planning_flags import add_model, flags_of, of_model
from megatron_epp.tools.cli.terminal import Parser, add_output, progress, say
from megatron_epp.tools.formulas.analytic import analytic_profile, exchange_line
from megatron_epp.tools.formulas.hardware import Rates
from megatron_epp.tools.formulas.library import RATES, Cluster, load_cluster, shape_of
from megatron_epp.tools.formulas.model_shape import ModelShape
from megatron_epp.tools.formulas.profile import ModelPart, Profile, mlp_of
from megatron_epp.tools.report.text import table


def fit_profile(
    points: Mapping[str, Sequence[Point]], shape: ModelShape, rates: Rates, name: str, origin: dict[str, Any]
) -> Profile:
    """Build a profile from points by kind of `machine.profiling.measure`, and ``message``; `origin` takes these and residuals.

    Memory, the exchange between ranks that share a layer, and links that were not measured follow formulas.
    """
    fits = {kind: fit_line(some, pairs=kind.startswith("attention")) for kind, some in points.items()}
    lines = {kind: fit.line for kind, fit in fits.items()}
    formula, exchange = analytic_profile(shape, rates), exchange_line(shape.exchanges, rates)
    # Of the times without core attention, attention's projections have the share of their parameters.
    share = shape.attention_parameters / shape.parameters_per_token
    attention = _timed(formula.attention, share, exchange_line(shape.attention_exchanges, rates), lines)
    layer, alone = _timed(formula.layer, 1.0, exchange, lines), (lines["linear forward"], lines["attention forward"])
    modes = formula.layer.recompute.items()
    layer = replace(layer, recompute={kind: replace(mode, again=_again(kind, shape, rates, *alone)) for kind, mode in modes})
    embedding = replace(formula.embedding, forward=lines["embedding forward"], backward=lines["embedding backward"])
    weight = LinearTime() if shape.loss_block_tokens else lines["loss weight"].within(lines["loss backward"])
    head = replace(formula.head, forward=lines["loss forward"], backward=lines["loss backward"], weight=weight)
    dense = formula.dense_layer
    if dense is not None:  # the layer without experts: attention as measured, its MLP by formula
        mlp = mlp_of(dense, formula.attention)
        forward, backward = attention.forward + mlp.forward, attention.backward + mlp.backward
        dense = replace(dense, forward=forward, backward=backward, weight=attention.weight + mlp.weight)
    profile = replace(formula, name=name, attention=attention, dense_layer=dense, layer=layer, embedding=embedding, head=head)
    if link := lines.get("message"):
        profile = replace(profile, message_latency_us=link.fixed_us, message_us_per_byte=link.per_token_us)
    if host := lines.get("host copy"):
        profile = replace(profile, host_latency_us=host.fixed_us, host_us_per_byte=host.per_token_us)
    by_formula = ["memory", *["layers without experts"] * bool(profile.dense_layers)]
    by_formula += [kind for kind in ("message", "host copy") if kind not in fits]
    figures = {
        "by_formula": [*by_formula, *["exchange between ranks"] * bool(exchange.per_token_us)],
        "residuals": {kind: fit.residuals() for kind, fit in fits.items()},
        "points": {kind: [list(point) for point in some] for kind, some in points.items()},
    }
    return replace(profile, origin=origin | figures)


def _timed(part: ModelPart, share: float, exchange: LinearTime, lines: Mapping[str, LinearTime]) -> ModelPart:
    """Return a layer, or its attention, with measured times: core attention's, and a share of the others."""
    forward, backward, weight = (lines[f"linear {name}"].scaled(share) for name in ("forward", "backward", "weight"))
    return replace(
        part,
        forward=forward + lines["attention forward"] + exchange,
        backward=backward + lines["attention backward"] + exchange,
        weight=weight.within(backward),
    )


def _again(mode: str, shape: ModelShape, rates: Rates, linear: LinearTime, attention: LinearTime) -> LinearTime:
    """Time of what a recompute mode runs again, given measured times of a layer without core attention, and of that."""
    parts = MODES[mode].runs_again
    if not parts & {PROJECTIONS, MLP}:
        raise EppError(f"recompute mode {mode} runs nothing again that is measured: give its time here")
    parameters = {PROJECTIONS: shape.attention_parameters, MLP: shape.mlp_parameters_per_token}
    exchanged = {PROJECTIONS: shape.attention_exchanges, MLP: shape.mlp_exchanges}
    line = linear.scaled(sum(parameters[part] for part in parameters if part in parts) / shape.parameters_per_token)
    line += exchange_line((exchange for part in exchanged if part in parts for exchange in exchanged[part]), rates)
    return line + attention if MODES[mode].repeats_attention else line


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
    with progress("profiling") as note:
        points = measure(shape, device, grid, note)
        if device.type == "cpu" or torch.cuda.device_count() > 1:
            note("message")
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
    return fit_profile(points, shape, RATES["h100" if gpu else "cpu"], f"measured:{gpu or 'cpu'}", origin)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(WHOLE(number)) for number in text.split(","))
