"""Costs of attention that runs separately from its layer, on a rank of its own choice (`helix.attention_operations`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from operator import add
from typing import Any

import numpy as np

from megatron_epp.contrib.helix.attention_operations import INPUTS, INPUTS_GRADIENT, RESULT, RESULT_GRADIENT, A
from megatron_epp.cost.blocks import HEAD, LAYER, UNKNOWN_BYTES, BlockCosts, StageCosts
from megatron_epp.cost.kv_costs import KVBytes
from megatron_epp.cost.memory import NO_STATIC
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.work import NO_TIME, ChunkWork, IntColumn, LinearTime, TimeColumn
from megatron_epp.plan import Op
from megatron_epp.plan.operations import OperationRows
from megatron_epp.port.run_facts import CostsFile, RunFacts
from megatron_epp.tools.formulas.profile import Profile, block_of, mlp_of

ATTENTION, MLP = "attention", "mlp"
"""Kinds of blocks: a layer's attention at the end of the first stage, and its MLP at the start of the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeparateAttention:
    """Times and bytes of one layer's core attention, on the rank that runs it."""

    # forward, backward: times; the part of a layer's that grows with query-key pairs
    forward: LinearTime
    backward: LinearTime
    input_bytes_per_token: float  # queries, keys and values, which the rank receives and keeps
    output_bytes_per_token: float  # attention's output, which the rank keeps and sends

    def rows(self, op: Op, num_sites: int, work: ChunkWork, message: LinearTime, fragmentation: float = 0.0) -> OperationRows:
        """Times and bytes of an operation, equal at all sites."""

        def size(per_token: float) -> IntColumn:
            return np.ceil(per_token * work.tokens * (1 + fragmentation)).astype(np.int64)

        def moved_us(per_token: float) -> list[float]:
            return [message.fixed_us + message.per_token_us * per_token * tokens for tokens in work.tokens.tolist()]

        kept_bytes = size(self.input_bytes_per_token + self.output_bytes_per_token)
        nothing, passing = np.zeros_like(kept_bytes), size(self.input_bytes_per_token)  # the gradient while `G` runs
        line, takes, gives = (self.forward, kept_bytes, nothing) if op is A else (self.backward, passing, passing + kept_bytes)
        times_us: list[float] = (line.time_us(work.tokens, work.pairs) + 0.0).tolist()
        inputs, output = (INPUTS, RESULT) if op is A else (INPUTS_GRADIENT, RESULT_GRADIENT)
        carried = {inputs.send: moved_us(self.input_bytes_per_token), output.send: moved_us(self.output_bytes_per_token)}
        return OperationRows([times_us] * num_sites, [takes.tolist()] * num_sites, [gives.tolist()] * num_sites, {}, carried)


@dataclass(frozen=True, slots=True)
class SeparateAttentionCosts(PipelineCosts):
    """Costs of stages that are cut inside attention, which runs separately from them."""

    attention: SeparateAttention | None = None

    def attention_rows(self, op: Op, sites: Sequence[int], work: ChunkWork) -> OperationRows | None:
        """Return times and bytes of `A` or `G`, ``[site][chunk]``."""
        message = LinearTime(self.message_latency_us, self.message_us_per_byte)
        return None if self.attention is None else self.attention.rows(op, len(sites), work, message, self.fragmentation_share)


def cut_at_attention(costs: PipelineCosts, profile: Profile) -> PipelineCosts:
    """Return the costs of stages that begin behind a layer's attention, from a stage without layers and others with one each.

    The last layer's attention goes to the first stage. Its weights stay with the last, which is on the same rank.
    """
    first, *stages, last = costs.stages
    received, layer, *head = last.blocks
    more: dict[str, Any] = {"working_bytes_per_token": layer.working_bytes_per_token}
    mlp = block_of(MLP, mlp_of(profile.layer, profile.attention), **more)
    more |= {"kv": layer.kv, "input_bytes_per_token": layer.input_bytes_per_token}
    first = replace(first, blocks=(*first.blocks, block_of(ATTENTION, profile.attention, **more)))
    last = replace(last, blocks=(received, mlp, replace(layer, count=0), *head))
    return replace(costs, stages=(first, *stages, last))


def costs_of_run(facts: RunFacts, file: CostsFile | None, whole: PipelineCosts) -> SeparateAttentionCosts:
    """Return the costs of a run's stages, given those of stages of a whole layer each, with one stage more on the first rank.

    That stage's weights are the first one's, and its MLP keeps what a layer does not keep that runs its MLP again.
    """
    from megatron_epp.tools.formulas.of_run import profile_for_search  # which only the planning process needs

    first, *stages, last = whole.stages
    stages = [first.changed(LAYER, count=0), *stages, replace(last, static=NO_STATIC)]
    costs = cut_at_attention(replace(whole, stages=tuple(stages)), profile_for_search(facts, file))
    *stages, cut = costs.stages
    if (mlp := last.layers.recompute.get("mlp")) is not None:
        cut = cut.changed(MLP, bytes_per_token=last.layers.bytes_per_token - mlp.bytes_per_token)
    return with_separate_attention(replace(costs, stages=(*stages, cut)))


def with_separate_attention(costs: PipelineCosts, *, last_in_backward: bool = True) -> SeparateAttentionCosts:
    """Return the costs of the same stages, each cut inside attention, which runs separately from them.

    The output projection is counted with the queries, keys and values of its layer, one stage before the one it runs in.
    To be called behind `on_device`.

    Args:
        last_in_backward: the last stage's backward runs its forward too, so that little of it waits.
    """
    *stages, last = map(without_attention, costs.stages)
    last = in_backward(last) if last_in_backward else last
    values = {field.name: getattr(costs, field.name) for field in fields(PipelineCosts)}
    return SeparateAttentionCosts(**values | {"stages": (*stages, last)}, attention=attention_of(costs.stages))


def without_attention(stage: StageCosts) -> StageCosts:
    """Return the costs of a stage whose attention runs separately.

    Queries, keys and values are on attention's rank. A layer that recomputes keeps attention's output besides its input and
    leaves attention out, so modes that keep that output or run attention again are no modes of their own.
    """
    queries = _query_bytes_per_token(stage)
    away = queries + stage.kv.bytes_per_token
    own, mlp = stage.layers, stage.layers.recompute.get("mlp")
    if mlp is not None:
        mlp = replace(mlp, bytes_per_token=mlp.bytes_per_token - away, full_bytes_per_token=None)
    for name in ("forward", "backward"):
        layer, inner, ends = stage.lines(name)
        stage = stage.with_lines(name, replace(layer, per_pair_us=0.0), replace(inner, per_pair_us=0.0), ends)
    for block in stage.inner:
        if block.kv is not None:
            stage = stage.changed(block.kind, bytes_per_token=block.bytes_per_token - away)
    kv = KVBytes(bytes_per_token=0.0, heads=stage.kv.heads, queries_per_key=stage.kv.queries_per_key)
    input_bytes = own.input_bytes_per_token + queries
    return stage.changed(LAYER, ATTENTION, kv=kv, input_bytes_per_token=input_bytes).changed(
        LAYER, recompute={} if mlp is None else {"mlp": mlp}, bytes_per_token=own.bytes_per_token - away, **UNKNOWN_BYTES
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardBlock(BlockCosts):
    """A block whose forward runs in its backward."""

    again_bytes_per_token: float  # that this forward keeps until the backward ends, with the head's

    def passing_bytes(self, work: ChunkWork) -> TimeColumn:
        """Bytes that the backward needs for a moment."""
        return BlockCosts.passing_bytes(self, work) + self.again_bytes_per_token * work.tokens


def in_backward(last: StageCosts) -> StageCosts:
    """Return the costs of a last stage whose backward runs the forward too, of the MLP that it begins with and of the head.

    Orders with separate attention run all forwards first, so what the last stage kept would wait; instead it keeps its input:
    attention's output besides the residual. `last` is as `without_attention` returns it.
    """
    goes = [*last.inner, *(block for block in last.ends if block.kind == HEAD)]
    again = sum(block.bytes_per_token for block in goes)
    (layer, *forward), (of_layer, *backward) = last.lines("forward"), last.lines("backward")
    last = last.with_lines("backward", of_layer, *map(add, backward, forward)).with_lines("forward", layer, NO_TIME, NO_TIME)
    last = last.changed(ATTENTION, MLP, bytes_per_token=last.layers.input_bytes_per_token).changed(HEAD, bytes_per_token=0.0)
    received, mlp, no_layer, *head = last.blocks
    values = {field.name: getattr(mlp, field.name) for field in fields(BlockCosts)}
    return replace(last, blocks=(received, no_layer, BackwardBlock(**values, again_bytes_per_token=again), *head))


def attention_of(stages: Sequence[StageCosts]) -> SeparateAttention:
    """Return the costs of the attention of any of the layers, which are all equal."""
    stage = max(stages, key=lambda costs: costs.num_layers)
    queries = _query_bytes_per_token(stage)
    return SeparateAttention(
        forward=LinearTime(0.0, 0.0, stage.layers.forward.per_pair_us),
        backward=LinearTime(0.0, 0.0, stage.layers.backward.per_pair_us),
        input_bytes_per_token=queries + stage.kv.bytes_per_token,
        output_bytes_per_token=queries,
    )


def _query_bytes_per_token(stage: StageCosts) -> float:
    """Bytes of a layer's queries, equal to its attention output's: keys take half of `stage.kv`."""
    return stage.kv.bytes_per_token / 2 * stage.kv.queries_per_key
