"""Costs of a GPT from its shape: counted operations and bytes, divided by a few measured rates.

Good to within tens of percent, which is enough to plan with before anything was measured on the machine at hand.

Short chunks run their matrix products below the full rate. With a rate that is half reached at h tokens, ``n / (n + h)``, n
tokens take as long as n + h at the full rate: a fixed time more. Attention works in square tiles of pairs, and those on the
diagonal are half empty: half a tile of pairs more for every token. So both curves are lines, and the cost model stays linear.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.work import NO_TIME, LinearTime, ModeCosts
from megatron_epp.plan import EppError
from megatron_epp.plan.sizing import loss_workspace_bytes
from megatron_epp.tools.formulas.device import shard_bytes
from megatron_epp.tools.formulas.hardware import Rates
from megatron_epp.tools.formulas.model_shape import RECURRENT, Exchange, ModelShape, RecurrentShape
from megatron_epp.tools.formulas.profile import ModelPart, Profile, mean_of, mlp_of

MICROSECONDS = 1e6
_MLPS = "-E"  # symbols of parts without a mixer, see `ModelShape.mixers`
_WEIGHT_LAUNCHES, _ATTENTION_LAUNCHES, _ROUTED_LAUNCHES = 0.3, 0.6, 2.5
"""Times of launching: of weight gradients as a share of a backward, of attention as a share of a dense layer, of a layer with
experts as a multiple of a dense layer; by counts of dispatched operations, whose times are those of `H100_NODE`."""
_HEAD_LAUNCHES, _EMBEDDING_LAUNCHES = 0.5, 0.1  # time of launching a head and an embedding as shares of a layer's. Assumed.
_OF_LATENTS = ("kv_bytes_per_token", "kv_heads", "queries_per_key", "expanded_bytes_per_token", "expanded_heads")
_OF_CASTS = ("cast_bytes", "uncast_bytes_per_token", "least_working_bytes_per_token")
_OF_SHAPE = (
    *("num_layers", "dense_layers", "predictions", "queries_per_key", "expanded_bytes_per_token", "expanded_heads"),
    *("hidden_bytes_per_token", "exchange_bytes_per_token"),
    *_OF_CASTS,
)
"""Fields of a profile that are properties of the shape under the same names."""


def analytic_costs(
    shape: ModelShape, rates: Rates, layers_per_stage: Sequence[int], *, state_bytes_per_parameter: float = 18.0
) -> PipelineCosts:
    """Costs of a pipeline by formula. The first stage embeds; the last has the final norm, the logits and the loss.

    Args:
        shape: of the model; `formulas.library.shape_of` makes one of Megatron's flags.
        rates: of the devices, as `formulas.H100`.
        layers_per_stage: layers of each stage; their sum must be the model's.
        state_bytes_per_parameter: bytes of a parameter's weight, gradient and optimizer state (`Profile.costs`).

    Raises:
        EppError: the layers do not add up.
    """
    if sum(layers_per_stage) != shape.num_layers or min(layers_per_stage, default=-1) < 0:
        raise EppError(f"stages of {list(layers_per_stage)} layers do not make the model's num_layers {shape.num_layers}")
    return analytic_profile(shape, rates).costs(layers_per_stage, state_bytes_per_parameter=state_bytes_per_parameter)


def analytic_profile(shape: ModelShape, rates: Rates) -> Profile:
    """Costs of the model's parts by formula, for any number of stages (`Profile.costs`)."""
    copy = LinearTime(0.0, MICROSECONDS * 2 * shape.hidden_bytes_per_token / rates.memory_bytes)
    forward, backward = _launches(rates, _EMBEDDING_LAUNCHES)
    vocabulary = shape.vocabulary_parameters / shape.tensor_parallel
    attends, recurs = shape.share_of("*+"), {symbol: share for symbol in RECURRENT if (share := shape.share_of(symbol))}
    states = sum(share * RecurrentShape.of(shape, symbol).state_bytes for symbol, share in recurs.items())
    of_shape: dict[str, Any] = {name: getattr(shape, name) for name in _OF_SHAPE}
    return Profile(
        name=f"analytic:{rates.name}",
        layer=_mean(_layer, shape, rates),
        dense_layer=None if shape.dense is None else _mean(_layer, shape.dense, rates),
        attention=_mean(_attention_part, shape, rates),
        embedding=ModelPart(forward=forward + copy, backward=backward + copy, parameters=vocabulary, largest_weight=vocabulary),
        head=_head(shape, rates),
        prediction=_prediction(shape, rates) if shape.predictions else ModelPart(),
        cached_predictions=math.ceil(shape.predictions / attends) if attends else 0,
        recomputed_layer_bytes_per_token=shape.hidden_bytes_per_token,
        kv_bytes_per_token=attends * (1 - shape.window_share) * shape.kv_bytes_per_token,
        handed_bytes=attends * shape.window_share * shape.window * shape.kv_bytes_per_token + states,
        handed_tokens=shape.window,
        kv_heads=shape.kv_heads_on_rank,
        weight_bytes=shape.bytes_per_value,
        message_latency_us=rates.message_latency_us,
        message_us_per_byte=MICROSECONDS / rates.message_bytes,
        stage_ranks=shape.ranks,
        host_latency_us=rates.host_latency_us,
        host_us_per_byte=MICROSECONDS / rates.host_bytes if rates.host_bytes else math.inf,
        copy_us_per_byte=MICROSECONDS * 2 / rates.memory_bytes,
        host_sharing=rates.host_sharing,
        context_exchange_us=context_exchange_us(shape, rates),
        shards=shard_bytes(shape),
        **of_shape,
    )


def profile_for(measured: Profile | None, shape: ModelShape, rates: Rates) -> Profile:
    """Return a measured profile, or one by formula; latents that are relayed add times, and bytes follow formulas.

    Raises `EppError` if the profile is of a model with experts in other layers.
    """
    if measured is None:
        return analytic_profile(shape, rates)
    if measured.dense_layers != shape.dense_layers:
        counts = len(measured.dense_layers), len(shape.dense_layers)
        raise EppError(f"the profile has {counts[0]} layers without experts, and the model {counts[1]}: measure it again")
    of_casts: dict[str, Any] = {name: getattr(shape, name) for name in _OF_CASTS}
    measured = replace(measured, copy_us_per_byte=MICROSECONDS * 2 / rates.memory_bytes, **of_casts)
    if not shape.relays_latents:
        return measured
    formula, made_us = analytic_profile(shape, rates), expansion_line(shape, rates).per_token_us

    def timed(part: ModelPart, own: ModelPart) -> ModelPart:
        again = {name: replace(mode, again=own.recompute[name].again) for name, mode in part.recompute.items()}
        forward = own.forward + LinearTime(per_read_us=made_us)
        backward = own.backward + LinearTime(0.0, made_us, per_read_us=3 * made_us)
        return replace(part, forward=forward, backward=backward, weight=own.weight, exchange=own.exchange, recompute=again)

    there = "layer", "attention", *["dense_layer"] * bool(measured.dense_layers), *["prediction"] * bool(measured.predictions)
    parts: dict[str, Any] = {name: timed(getattr(formula, name), getattr(measured, name)) for name in there}
    return replace(measured, **parts | {name: getattr(formula, name) for name in _OF_LATENTS})


def context_exchange_us(shape: ModelShape, rates: Rates) -> tuple[float, ...]:
    """Return the time of exchanging a token in a layer in groups of 1, 2, 4, ... ranks; empty for 1, or no power of two."""
    ranks = shape.context_parallel
    if ranks == 1 or ranks & (ranks - 1):
        return ()
    parts = (replace(shape, context_parallel=1 << power) for power in range(ranks.bit_length()))
    return tuple(exchange_line(part.exchanges, rates).per_token_us for part in parts)


def _mean(part: Callable[[ModelShape, Rates], ModelPart], shape: ModelShape, rates: Rates) -> ModelPart:
    """Costs of a layer, or of its attention, in the mean of layers of several kinds."""
    mean, counted, is_whole = ModelPart(), 0, part is _layer
    for symbol, count in Counter(shape.mixers).items():
        if symbol in _MLPS:
            own = _mlp_layer(shape.with_one_mlp if symbol == "-" else shape, rates) if is_whole else ModelPart()
        else:
            mixer = RecurrentShape.of(shape, symbol) if symbol in RECURRENT else shape
            own = (_mixer_layer if is_whole and shape.is_hybrid else part)(mixer, rates)
        counted += count
        mean = own if counted == count else mean_of(mean, own, count / counted)
    return mean


def _layer(shape: ModelShape, rates: Rates) -> ModelPart:
    """Costs of one transformer layer.

    Backward has twice the matrix products with weights, half of them for the weight gradient, and five products over the pairs
    where forward has two. A split weight gradient keeps its tensors in memory: a gradient of residual width besides the kept
    activations, and after attention's backward the MLP's inputs and gradients, four more of that width.
    """
    overhead = LinearTime(rates.layer_overhead_us)
    launch_forward, launch_backward = _launches(rates, _layer_launches(shape))
    linear = _layer_products(shape, shape.parameters_per_token, rates)
    exchange = exchange_line(shape.exchanges, rates)
    moved = LinearTime(0.0, MICROSECONDS * shape.moved_bytes_per_token / rates.memory_bytes)
    attention_forward, attention_backward = _mixing(shape, rates)
    runs_again = attention_forward if isinstance(shape, RecurrentShape) else NO_TIME
    expansion = expansion_line(shape, rates)  # a recomputed layer that keeps attention's output makes none of it
    hidden, layer_bytes, attended = shape.hidden_bytes_per_token, shape.layer_bytes_per_token, shape.attended_bytes_per_token
    return ModelPart(
        forward=launch_forward + overhead + linear + moved.scaled(2) + exchange + attention_forward,
        backward=launch_backward + overhead + linear.scaled(2) + moved.scaled(3) + exchange + attention_backward,
        weight=launch_backward.scaled(_WEIGHT_LAUNCHES) + linear.without(expansion),
        exchange=exchange_line(shape.tensor_exchanges, rates),
        recompute={
            "selective": ModeCosts(
                launch_forward + overhead + linear.without(expansion) + moved.scaled(2) + exchange + runs_again,
                hidden + shape.attention_result_bytes_per_token,
            ),
            "mlp": ModeCosts(_mlp_again(shape, rates), attended, layer_bytes - hidden),
        },
        bytes_per_token=layer_bytes,
        attended_bytes_per_token=attended,
        apart_bytes_per_token=layer_bytes + hidden,
        apart_attended_bytes_per_token=attended + shape.mlp_bytes_per_token + 4 * hidden,
        weight_bytes_per_token=shape.weight_bytes_per_token,
        parameters=shape.layer_parameters_on_rank,
        expert_parameters=shape.expert_parameters_on_rank,
        largest_weight=shape.largest_layer_weight,
    )


def _prediction(shape: ModelShape, rates: Rates) -> ModelPart:
    """Costs of one depth of multi-token prediction without its logits: a projection, a layer, and three norms."""
    layer, parameters = _layer(shape, rates), 2 * shape.hidden_size**2
    linear, hidden = _layer_products(shape, parameters, rates), shape.hidden_bytes_per_token
    moved = LinearTime(0.0, MICROSECONDS * 8 * hidden / rates.memory_bytes)
    return ModelPart(
        forward=layer.forward + linear + moved,
        backward=layer.backward + linear.scaled(2) + moved.scaled(1.5),
        weight=layer.weight + linear,
        exchange=layer.exchange,
        bytes_per_token=layer.bytes_per_token + 6 * hidden,
        attended_bytes_per_token=shape.attended_bytes_per_token + 6 * hidden,
        weight_bytes_per_token=layer.weight_bytes_per_token + 3 * hidden,
        parameters=layer.parameters + parameters / shape.tensor_parallel,
        expert_parameters=layer.expert_parameters,
    )


def _attention_part(shape: ModelShape, rates: Rates) -> ModelPart:
    """Costs of a layer's attention with its norm and projections, a part of the costs of `_layer`."""
    overhead, hidden = LinearTime(rates.layer_overhead_us / 2), shape.hidden_bytes_per_token
    linear = _layer_products(shape, shape.attention_parameters, rates)
    launch_forward, launch_backward = _launches(rates, _ATTENTION_LAUNCHES)
    exchange = exchange_line(shape.attention_exchanges, rates)
    moved = LinearTime(0.0, MICROSECONDS * shape.attention_moved_bytes_per_token / rates.memory_bytes)
    attention_forward, attention_backward = _mixing(shape, rates)
    return ModelPart(
        forward=launch_forward + overhead + linear + moved.scaled(2) + exchange + attention_forward,
        backward=launch_backward + overhead + linear.scaled(2) + moved.scaled(3) + exchange + attention_backward,
        weight=launch_backward.scaled(_WEIGHT_LAUNCHES) + linear,
        bytes_per_token=shape.attended_bytes_per_token,
        weight_bytes_per_token=2 * hidden + shape.mixer_linear_width * shape.bytes_per_value / shape.ranks,
        parameters=shape.attention_parameters / shape.tensor_parallel,
    )


def _mixer_layer(shape: ModelShape, rates: Rates) -> ModelPart:
    part, hidden = _attention_part(shape, rates), shape.hidden_bytes_per_token
    kept_output = NO_TIME if isinstance(shape, RecurrentShape) else _core_attention(shape, rates)[0]
    modes = {
        "selective": ModeCosts(part.forward.without(kept_output), hidden + shape.attention_result_bytes_per_token),
        "mlp": ModeCosts(NO_TIME, part.bytes_per_token - hidden),  # the norm's output alone
    }
    exchange, largest = exchange_line(shape.attention_exchanges[:1], rates), shape.widest_projection / shape.tensor_parallel
    return replace(_alone(part, modes, hidden), exchange=exchange, largest_weight=largest)


def _mlp_layer(shape: ModelShape, rates: Rates) -> ModelPart:
    """Costs of a layer of a hybrid model that has an MLP or experts alone: what a whole layer has besides its attention."""
    whole, hidden = _layer(shape, rates), shape.hidden_bytes_per_token
    exchange, modes = exchange_line(shape.tensor_exchanges[1:], rates), ModeCosts(_mlp_again(shape, rates), hidden)
    part = replace(mlp_of(whole, _attention_part(shape, rates)), exchange=exchange, largest_weight=whole.largest_weight)
    return _alone(part, dict.fromkeys(("selective", "mlp"), modes), hidden)


def _alone(part: ModelPart, modes: dict[str, ModeCosts], hidden: float) -> ModelPart:
    """Return a part as a layer, whose peaks are what it keeps, and a gradient where its weights' are split off."""
    peak = part.bytes_per_token + hidden
    part = replace(part, recompute=modes, attended_bytes_per_token=part.bytes_per_token)
    return replace(part, apart_bytes_per_token=peak, apart_attended_bytes_per_token=peak)


def _mlp_again(shape: ModelShape, rates: Rates) -> LinearTime:
    linear = _layer_products(shape, shape.mlp_parameters_per_token, rates)
    moved_bytes = 2 * (shape.mlp_bytes_per_token + 3 * shape.hidden_bytes_per_token)
    launch, _ = _launches(rates, _layer_launches(shape) - _ATTENTION_LAUNCHES)
    moved = LinearTime(rates.layer_overhead_us / 2, MICROSECONDS * moved_bytes / rates.memory_bytes)
    return launch + linear + moved + exchange_line(shape.mlp_exchanges, rates)


def _launches(rates: Rates, factor: float) -> tuple[LinearTime, LinearTime]:
    """Time of launching a forward, and a backward, as a multiple of a dense layer's."""
    return LinearTime(launch_us=factor * rates.launch_forward_us), LinearTime(launch_us=factor * rates.launch_backward_us)


def _layer_launches(shape: ModelShape) -> float:
    return _ROUTED_LAUNCHES if shape.num_experts else 1.0


def _head(shape: ModelShape, rates: Rates) -> ModelPart:
    """Final norm, logits and loss; by blocks logits are made again in backward, and weight gradients count as workspace."""
    logits, norm = 4.0 * shape.vocab_size / shape.ranks, 2 * shape.hidden_bytes_per_token
    linear = _linear(shape.vocabulary_parameters / shape.ranks, rates)
    moved = LinearTime(rates.layer_overhead_us, MICROSECONDS * 3 * (logits + norm) / rates.memory_bytes)
    launch_forward, launch_backward = _launches(rates, _HEAD_LAUNCHES)
    parameters, by_blocks = shape.vocabulary_parameters / shape.tensor_parallel, shape.loss_block_tokens > 0
    block = shape.loss_block_tokens, shape.vocab_size // shape.tensor_parallel, shape.hidden_size, shape.bytes_per_value
    to_split = shape.vocab_size * shape.bytes_per_value / shape.ranks + shape.hidden_bytes_per_token
    return ModelPart(
        forward=launch_forward + linear + moved,
        backward=launch_backward + linear.scaled(2 + by_blocks) + moved,
        weight=NO_TIME if by_blocks else launch_backward.scaled(_WEIGHT_LAUNCHES) + linear,
        bytes_per_token=norm if by_blocks else logits + norm,
        weight_bytes_per_token=0.0 if by_blocks else to_split,
        parameters=parameters,
        largest_weight=0.0 if by_blocks else parameters,
        workspace_bytes=loss_workspace_bytes(*block),
    )


def _layer_products(shape: ModelShape, parameters_per_token: float, rates: Rates) -> LinearTime:
    """Time of the matrix products of a layer's parts, of whose parameters its ranks have a part each."""
    return _linear(parameters_per_token / (shape.ranks * (rates.fp8_speedup if shape.casts else 1.0)), rates)


def _linear(parameters_per_token: float, rates: Rates) -> LinearTime:
    per_token_us = MICROSECONDS * 2 * parameters_per_token / rates.linear_flops
    return LinearTime(rates.saturation_tokens * per_token_us, per_token_us)


def exchange_line(exchanges: Iterable[Exchange], rates: Rates) -> LinearTime:
    """Time of exchanging a token's bytes, one exchange after the other; of a single copy to a node the slower link counts."""
    seconds = 0.0
    for exchange in exchanges:
        inside, abroad = exchange.split(rates.devices_per_node)
        links = inside / rates.exchange_bytes, abroad / rates.message_bytes
        seconds += max(links) if exchange.copies else sum(links)
    return LinearTime(0.0, MICROSECONDS * seconds)


def expansion_line(shape: ModelShape, rates: Rates) -> LinearTime:
    """Time of making a token's keys and values of its latent, where attention does so."""
    if not shape.relays_latents:
        return LinearTime()
    product = _linear(shape.expansion_parameters * shape.expanded_heads / shape.num_attention_heads, rates)
    return product + LinearTime(0.0, MICROSECONDS * shape.expanded_bytes_per_token / rates.memory_bytes)


def _mixing(shape: ModelShape, rates: Rates) -> tuple[LinearTime, LinearTime]:
    """Time of what mixes tokens, forward and backward: of a recurrence by assumption at attention's rates, with 2.5 times the
    products backward. What its kernels write for each other is read once in the forward, and made again and read twice in the
    backward.
    """
    if not isinstance(shape, RecurrentShape):
        return _core_attention(shape, rates)
    products_us = MICROSECONDS * 2 * (shape.net.rule_products / shape.ranks) / rates.attention_forward_flops
    moved_us = MICROSECONDS * (shape.net.rule_bytes(shape.bytes_per_value) / shape.ranks) / rates.memory_bytes
    return LinearTime(0.0, products_us + 2 * moved_us), LinearTime(0.0, 2.5 * products_us + 4 * moved_us)


def _core_attention(shape: ModelShape, rates: Rates) -> tuple[LinearTime, LinearTime]:
    """Time of core attention, forward and backward, with two and five products over the pairs: one and three are as wide as the
    queries, the others as the output.

    Keys and values of latents are made in both, of a slice's prefix too; its backward adds to the gradients of the prefix's
    latents and of the matrix. Products for the slice's own tokens count with the linear layers, but for the backward's first.
    With a window a token is taken to see all of it: of short sequences more than there is, by at most the window.
    """
    queries, output = shape.attended_query_width, shape.attended_output_width
    forward, backward, ranks = (queries + output) / 2, (3 * queries + 2 * output) / 5, shape.ranks
    speed = rates.attention_speed((shape.head_width + shape.value_head_width) / 2)
    seconds = 4 * (forward / ranks) / speed.forward_flops, 10 * (backward / ranks) / speed.backward_flops
    forward_us, backward_us = (MICROSECONDS * pair_s for pair_s in seconds)
    made_us, in_windows = expansion_line(shape, rates).per_token_us, shape.window_share * shape.window
    forward_token_us = (speed.forward_pairs + in_windows) * forward_us
    backward_token_us = (speed.backward_pairs + in_windows) * backward_us + made_us
    of_all = 1 - shape.window_share
    backward_line = LinearTime(0.0, backward_token_us, of_all * backward_us, per_read_us=3 * made_us)
    return LinearTime(0.0, forward_token_us, of_all * forward_us, per_read_us=made_us), backward_line
