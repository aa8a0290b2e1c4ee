"""Fits of a profile to measured points of a layer, the embedding and the head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_epp.cost.line_fits import Point, fit_line
from megatron_epp.cost.work import LinearTime
from megatron_epp.plan.recompute import MLP, MODES, PROJECTIONS
from megatron_epp.tools.formulas.analytic import analytic_profile, exchange_line
from megatron_epp.tools.formulas.hardware import Rates
from megatron_epp.tools.formulas.model_shape import ModelShape
from megatron_epp.tools.formulas.profile import ModelPart, Profile, mlp_of


def fit_profile(
    points: Mapping[str, Sequence[Point]], shape: ModelShape, rates: Rates, name: str, origin: dict[str, Any]
) -> Profile:
    """Build a profile from points by kind of `machine.profiling.measure`, and ``message``; `origin` takes these and residuals.

    Memory, the exchange between ranks that share a layer, and links that were not measured follow formulas.
    """
    fits = {kind: fit_line(some, pairs=kind.startswith("attention")) for kind, some in points.items()}
    lines = {kind: fit.line for kind, fit in fits.items()}
    formula = analytic_profile(shape, rates)
    exchange = exchange_line(shape.exchanges, rates)
    # Of the times without core attention, attention's projections have the share of their parameters.
    share = shape.attention_parameters / shape.parameters_per_token
    attention = _timed(formula.attention, share, exchange_line(shape.attention_exchanges, rates), lines)
    layer, alone = _timed(formula.layer, 1.0, exchange, lines), (lines["linear forward"], lines["attention forward"])
    modes = formula.layer.recompute.items()
    layer = replace(layer, recompute={kind: replace(mode, again=_again(kind, shape, rates, *alone)) for kind, mode in modes})
    embedding = replace(formula.embedding, forward=lines["embedding forward"], backward=lines["embedding backward"])
    weight = LinearTime() if shape.loss_block_tokens else lines["loss weight"].within(lines["loss backward"])
    head = replace(formula.head, forward=lines["loss forward"], backward=lines["loss backward"], weight=weight)
    dense = _dense_layer(formula, attention)
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


def _dense_layer(formula: Profile, attention: ModelPart) -> ModelPart | None:
    """Return the layer without experts of a model that has such layers too: attention as measured, its MLP by formula."""
    if formula.dense_layer is None:
        return None
    mlp = mlp_of(formula.dense_layer, formula.attention)
    times: dict[str, Any] = {name: getattr(attention, name) + getattr(mlp, name) for name in ("forward", "backward", "weight")}
    return replace(formula.dense_layer, **times)


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
    parameters = {PROJECTIONS: shape.attention_parameters, MLP: shape.mlp_parameters_per_token}
    exchanged = {PROJECTIONS: shape.attention_exchanges, MLP: shape.mlp_exchanges}
    line = linear.scaled(sum(parameters[part] for part in parameters if part in parts) / shape.parameters_per_token)
    line += exchange_line((exchange for part in exchanged if part in parts for exchange in exchanged[part]), rates)
    return line + attention if MODES[mode].repeats_attention else line
