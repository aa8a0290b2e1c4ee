"""Operations of an output layer whose vocabulary is sharded over the pipeline ranks ("Balancing Pipeline Parallelism with
Vocabulary Parallelism", Yeung et al., 2024).

`S` computes a shard's logits and its part of the gradient of their input, `N` the loss from the sums over all shards, `T` the
weight gradient of a shard. There is one barrier per chunk, between `S` and what follows: the last stage's backward needs the
reduced gradient, which is for tokens of weight one; `B` and `T` apply the weights of the tokens.
"""

from __future__ import annotations

from typing import Any

from megatron_epp.plan.action import Op
from megatron_epp.plan.operations import At, Before, Collective, Need, Operation, Presence, of_ranks, register

SPREAD = Collective(Op.SPREAD)
"""Broadcast of the last stage's output. Every rank has the labels of the batch."""
GATHER = Collective(Op.GATHER)
"""All-reduce of maximum, sum of exponentials and target logit, and reduction of the input's gradient to the last stage."""


def _define(op: Op, **more: Any) -> None:
    """Register an operation of shards, which has times and bytes unless the costs have the output layer on a stage."""
    more |= {"rows": lambda costs, sites, work: costs.vocabulary_rows(op, sites, work)}
    register(Operation(op=op, together=(Op.S, Op.N, Op.T), setting="vocab_parallel", **more))


_define(
    Op.S,
    text="vocabulary shard",
    colour="#8C564B",
    presence=Presence.COMPLETE_ALWAYS,
    sites=of_ranks,
    needs=(Need(Op.F, At.LAST, carries=SPREAD),),
    inserted="megatron_epp.features.vocabulary.vocabulary_order:with_shards",
    room="megatron_epp.features.vocabulary.shard_tables:shard_room",
    turn="megatron_epp.features.vocabulary.shard_tables:turn_us",
)
_define(
    Op.N,
    text="loss",
    colour="#444444",
    presence=Presence.COMPLETE_ALWAYS,
    sites=lambda placement: placement[-1:],  # one site, on the rank of the last stage
    needs=(Need(Op.S, At.EVERY, carries=GATHER),),
    before=(Before(Op.B, Need(Op.N, At.LAST, only=At.LAST)),),
)
_define(
    Op.T,
    text="weight gradient of a shard",
    gives_gradients=True,
    colour="#C49C94",
    presence=Presence.COMPLETE,
    sites=of_ranks,
    needs=(Need(Op.S, At.EVERY, carries=GATHER),),
)
