"""Fits of a profile to measured points of a layer, the embedding and the head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_epp.cost.line_fits import LineFit, Point, fit_line
from megatron_epp.cost.work import LinearTime
from megatron_epp.plan.recompute import MLP, MODES, PROJECTIONS
from megatron_epp.tools.formulas.analytic import analytic_profile, exchange_line
from megatron_epp.tools.formulas.hardware import Rates
from megatron_epp.tools.formulas.model_shape import ModelShape
from megatron_epp.tools.formulas.profile import ModelPart, Profile


def fit_profile(
    points: Mapping[str, Sequence[Point]], shape: ModelShape, rates: Rates, name: str, origin: dict[str, Any]
) -> Profile:
    """Build a profile from points by kind (`megatron_epp.tools.machine.profiling.measure`, and ``message``).

    Memory and the exchange between ranks that share a layer follow formulas, and so do the link between stages and the host
    copy if they were not measured. To `origin` points, residuals and what was not measured are added.
    """
    fits = {kind: fit_line(some, pairs=kind.startswith("attention")) for kind, some in points.items()}
    formula = analytic_profile(shape, rates)
    exchange = exchange_line(shape.exchanges, rates)
    layer_forward, layer_backward = fits["linear forward"].line, fits["linear backward"].line
    attention = _attention_part(formula, shape, rates, fits)
    profile = replace(
        formula,
        name=name,
        attention=attention,
        dense_layer=_dense_layer(formula, attention),
        layer=replace(
            formula.layer,
            forward=layer_forward + fits["attention forward"].line + exchange,
            backward=layer_backward + fits["attention backward"].line + exchange,
            weight=fits["linear weight"].line.within(layer_backward),
            recompute={
                name: replace(mode, again=_again(name, shape, rates, layer_forward, fits["attention forward"].line))
                for name, mode in formula.layer.recompute.items()
            },
        ),
        embedding=replace(formula.embedding, forward=fits["embedding forward"].line, backward=fits["embedding backward"].line),
        head=replace(
            formula.head,
            forward=fits["loss forward"].line,
            backward=fits["loss backward"].line,
            weight=LinearTime() if shape.loss_block_tokens else fits["loss weight"].line.within(fits["loss backward"].line),
        ),
    )
    if link := fits.get("message"):
        profile = replace(profile, message_latency_us=link.line.fixed_us, message_us_per_byte=link.line.per_token_us)
    if host := fits.get("host copy"):
        profile = replace(profile, host_latency_us=host.line.fixed_us, host_us_per_byte=host.line.per_token_us)
    by_formula = [
        "memory",
        *["layers without experts"] * bool(profile.dense_layers),
        *(kind for kind in ("message", "host copy") if kind not in fits),
    ]
    figures = {
        "by_formula": [*by_formula, *["exchange between ranks"] * bool(exchange.per_token_us)],
        "residuals": {kind: fit.residuals() for kind, fit in fits.items()},
        "points": {kind: [list(point) for point in some] for kind, some in points.items()},
    }
    return replace(profile, origin=origin | figures)


def _dense_layer(formula: Profile, attention: ModelPart) -> ModelPart | None:
    """Return the layer without experts of a model that has such layers too: attention as measured, its MLP by formula."""
    if (dense := formula.dense_layer) is None:
        return None
    times: dict[str, Any] = {}
    for name in ("forward", "backward", "weight"):
        times[name] = getattr(attention, name) + getattr(dense, name).without(getattr(formula.attention, name))
    return replace(dense, **times)


def _attention_part(formula: Profile, shape: ModelShape, rates: Rates, fits: Mapping[str, LineFit]) -> ModelPart:
    """Attention's part of a layer: of the other times its projections have the share of their parameters."""
    exchange = exchange_line(shape.attention_exchanges, rates)
    share = shape.attention_parameters / shape.parameters_per_token
    forward, backward, weight = (fits[f"linear {name}"].line.scaled(share) for name in ("forward", "backward", "weight"))
    return replace(
        formula.attention,
        forward=forward + fits["attention forward"].line + exchange,
        backward=backward + fits["attention backward"].line + exchange,
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
