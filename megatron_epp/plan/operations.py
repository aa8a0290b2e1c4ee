"""The table of operations: everything that plans, proofs, simulations, planners and reports know about a kind of action.

A new kind is one `register(Operation(...))` here or in another module, and a handler in the runtime (`Executor`). All other
code reads this table, most of it in the compiled form of `plan.graph` or of `planner.kernels`, and names no kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import Any, Literal, NamedTuple

from megatron_epp.plan.action import Op
from megatron_epp.plan.errors import PlanError


class Track(Enum):
    """List of a rank in which actions stand."""

    COMPUTE = "compute"
    COPY = "copies"  # overlapped with compute, one at a time
    LOWERED = "lowered"  # in no list of a plan; lowering adds them


class Role(IntEnum):
    """Effect of an action on the activations of its stage and chunk."""

    OPENS = 0  # its output and what its backward needs stay in memory
    CLOSES = 1  # frees them, and leaves what a deferred action needs
    DEFERRED = 2  # frees what the closing action left
    NEITHER = 3


class Presence(Enum):
    """Sites and chunks for which a plan has the action."""

    ALWAYS = "always"
    TRAINING = "training"  # all, except in forward-only plans
    OPTIONAL = "optional"  # any, except in forward-only plans
    COMPLETE = "complete"  # all or none; none in forward-only plans
    COMPLETE_ALWAYS = "complete, forward-only plans included"  # all or none


class At(Enum):
    """Sites of an action that a dependency concerns, other than by an offset."""

    LAST = "last"
    EVERY = "every"


class Of(Enum):
    """Chunk of an action that a dependency concerns."""

    SAME = "same"
    PREVIOUS = "previous"  # holds the slice before one of the chunk's
    FOLLOWING = "following"  # holds the slice after one of the chunk's
    GROUP = "group"  # all chunks whose loss is computed together with the chunk's (`Plan.loss_groups`), itself included


class MessageKind(NamedTuple):
    """Transfer of a result to the rank of the neighbouring site that needs it; none if both sites are on one rank."""

    text: str
    # send, receive: the operations that lowering adds on both sides
    send: Op
    receive: Op
    # The table of `plan.messages` with its time, by the lower of the two sites and the chunk; None for a message of an added
    # operation, whose times by chunk are in `plan.messages.message_us`
    times: Literal["activation_us", "gradient_us"] | None = None


class Collective(NamedTuple):
    """Transfer in which all ranks of the pipeline take part, once per chunk, such as a broadcast or an all-reduce.

    It starts when all actions that give to it have ended; actions that need it wait for its end. Lowering adds `op` on every
    rank; its times, by chunk, are in `plan.messages.collective_us`.
    """

    op: Op

    @property
    def text(self) -> str:
        return str(self.op)


class Need(NamedTuple):
    """Relation of an action to others that it waits for."""

    op: Op
    site: int | At = 0  # sites of these: an offset from the action's own, or the last one, or every one
    chunk: Of = Of.SAME  # their chunk, relative to the action's
    only: Literal[At.LAST] | None = None  # the one site of the waiting action for which the relation holds; None for all
    # The transfer between the two; None if they share a rank, as they then have to
    carries: MessageKind | Collective | None = None
    if_present: bool = False  # it holds only for actions that the plan has, maybe none. Set for relations stated by `Before`.


class Before(NamedTuple):
    """Relation of an action to actions of operation `op` that wait for it, as their `Need` says."""

    op: Op
    need: Need


class Parties(Enum):
    """Rows of launches that take part in a shared event."""

    PAIR = "pair"  # the two sides of a message
    RANKS = "ranks"  # every rank of the pipeline
    REPLICAS = "replicas"  # every data-parallel replica that has the event


class Side(NamedTuple):
    """A lowered action as one side of an event that several ranks share: `parties` take part, by chunk or once.

    The event is named by an operation and a site, an offset; None if the event is one for all sites.
    """

    event: Op
    site: int | None
    parties: Parties = Parties.PAIR
    by_chunk: bool = True


def of_stages(placement: Sequence[int]) -> Sequence[int]:
    """Sites of an operation of stages: the rank of each."""
    return placement


ANYWHERE = -1
"""Rank of a site whose actions run on any rank, each on its own: the plan's lists say which."""


def of_ranks(placement: Sequence[int]) -> Sequence[int]:
    """Sites of an operation with one shard per rank."""
    return range(max(placement) + 1)


class OperationRows(NamedTuple):
    """Times and bytes of an operation, ``[site][chunk]``, as its `Operation.rows` returns them."""

    time_us: list[list[float]]
    # takes, gives: bytes that an action allocates when it starts and frees when it ends
    takes: list[list[int]]
    gives: list[list[int]]
    collective_us: Mapping[Op, Sequence[float]]  # time by chunk of every collective that carries its results, or its needs
    # Time by chunk, between two ranks, of every message of its own, by the operation that sends it
    message_us: Mapping[Op, Sequence[float]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Definition of a kind of action."""

    op: Op
    text: str  # for people, such as ``weight gradient``
    # Of its boxes in pictures, ``#RRGGBB``
    colour: str = "#999999"
    track: Track = Track.COMPUTE
    role: Role = Role.NEITHER
    presence: Presence = Presence.OPTIONAL
    together: tuple[Op, ...] = ()  # operations that a plan has if it has this one
    # From the placement of the stages to the rank of each of its sites, or `ANYWHERE`. `Action.stage` counts these.
    sites: Callable[[Sequence[int]], Sequence[int]] = of_stages
    # needs, before: the actions it waits for, and actions of other operations that wait for it
    needs: tuple[Need, ...] = ()
    before: tuple[Before, ...] = ()
    in_layers: bool = False  # it runs layers, whose experts exchange tokens with other replicas
    # Of weights, which replicas reduce: with its stage, or if its sites are ranks with their first stage
    gives_gradients: bool = False
    # For planners, ``module:function`` that inserts it, with those it is `together` with, into an order: from the order, its
    # tables and recompute steps. Empty if orders are made with it.
    inserted: str = ""
    # The same, from the rows of all added operations: ``room``, and whether a plan trains, to the bytes of each rank set aside
    # while the order is not known; ``turn`` to the least time by chunk between the last stage's forward and its backward
    room: str = ""
    turn: str = ""
    setting: str = ""  # that gives a run its handler; empty for an operation that every run has
    side: Side | None = None  # for a lowered operation that other ranks take part in, the event it is a side of
    # For planners, ``rows(costs, sites, work)``: its times and bytes, or None if these costs have no such action. Without this
    # function, planners have columns of their own for it, or do not order it.
    rows: Callable[[Any, Sequence[int], Any], OperationRows | None] | None = None


_TABLE: dict[Op, Operation] = {}


def register(operation: Operation) -> Operation:
    """Add a kind of action. Raises `ValueError` if there is another definition of its name, or it needs an unknown kind."""
    present = _TABLE.get(operation.op)
    if present is not None and present != operation:
        raise ValueError(f"operation {operation.op} is already defined")
    known = {*_TABLE, operation.op}
    for other in (*(need.op for need in operation.needs), *(before.op for before in operation.before)):
        if other not in known:
            raise ValueError(f"operation {operation.op} names {other}, which is not defined")
    _TABLE[operation.op] = operation
    for waits, need in (*((operation.op, need) for need in operation.needs), *operation.before):
        for lowered in _lowered(waits, need):
            _TABLE.setdefault(lowered.op, lowered)
    return operation


def _lowered(waits: Op, need: Need) -> Iterator[Operation]:
    carries = need.carries
    if isinstance(carries, Collective):
        text, side = f"collective {carries.op}", Side(carries.op, None, Parties.RANKS)
        yield Operation(op=carries.op, text=text, track=Track.LOWERED, sites=of_ranks, side=side)
    elif isinstance(carries, MessageKind) and isinstance(need.site, int):
        send, receive = _sides(carries, carries.text, need.op, need.site)
        yield replace(send, sites=_TABLE[need.op].sites)
        yield replace(receive, sites=_TABLE[waits].sites)


def _sides(kind: MessageKind, text: str, source: Op, offset: int, colour: str = "#999999") -> tuple[Operation, Operation]:
    """Return send and receive of a message that `source` makes, at an `offset` from the site that needs it."""
    own, other = Side(kind.send, -offset), Side(kind.send, 0)
    return (
        Operation(op=kind.send, text=f"send of {text}", track=Track.LOWERED, needs=(Need(source),), side=own),
        Operation(
            op=kind.receive,
            text=f"receive of {text}",
            colour=colour,
            track=Track.LOWERED,
            needs=(Need(kind.send, offset),),
            side=other,
        ),
    )


def operation(op: Op) -> Operation:
    """Definition of a kind of action. Raises `PlanError` for a name without one."""
    try:
        return _TABLE[op]
    except KeyError:
        raise PlanError(f"operation {op} has no definition: `plan.operations.register` adds one") from None


def is_defined(op: Op) -> bool:
    return op in _TABLE


def operations(track: Track | None = None) -> tuple[Operation, ...]:
    """All operations, or the operations of one track, in the order of their registration."""
    return tuple(each for each in _TABLE.values() if track is None or each.track is track)


def is_compute(op: Op) -> bool:
    return operation(op).track is Track.COMPUTE


def needs_of(op: Op) -> tuple[Need, ...]:
    """Everything that an operation waits for, including relations that other operations state (`Before`)."""
    others = (before.need for other in _TABLE.values() for before in other.before if before.op is op)
    return *operation(op).needs, *(need._replace(if_present=True) for need in others)


ACTIVATION = MessageKind("activation", Op.SEND_F, Op.RECV_F, "activation_us")
GRADIENT = MessageKind("gradient", Op.SEND_B, Op.RECV_B, "gradient_us")
_OWN_B = (Need(Op.B),)

_DEFINED = (
    Operation(
        op=Op.F,
        text="forward",
        colour="#0072B2",
        role=Role.OPENS,
        presence=Presence.ALWAYS,
        needs=(Need(Op.F, -1, carries=ACTIVATION), Need(Op.F, chunk=Of.PREVIOUS)),  # the latter's keys and values
        in_layers=True,
    ),
    Operation(
        op=Op.B,
        text="backward",  # the input gradient, and the weight gradient too unless the plan has a `W` for it
        colour="#D55E00",
        role=Role.CLOSES,
        presence=Presence.TRAINING,
        needs=(
            Need(Op.F),
            Need(Op.F, chunk=Of.GROUP, only=At.LAST),
            Need(Op.B, 1, carries=GRADIENT),
            Need(Op.B, chunk=Of.FOLLOWING),  # the gradient of its keys and values
        ),
        in_layers=True,
        gives_gradients=True,
    ),
    Operation(
        op=Op.W,
        text="weight gradient",
        colour="#009E73",
        role=Role.DEFERRED,
        needs=_OWN_B,
        gives_gradients=True,
        setting="split_weight",
    ),
    Operation(
        op=Op.R,
        text="recompute",  # as an action of its own, before the backward that needs it
        colour="#CC79A7",
        needs=(Need(Op.F),),
        before=(Before(Op.B, Need(Op.R)),),
        in_layers=True,
    ),
    Operation(op=Op.O, text="offload", colour="#56B4E9", track=Track.COPY, needs=(Need(Op.F),), setting="offload"),
    Operation(
        op=Op.L,
        text="load",  # of the activations that `O` moved
        colour="#F0E442",
        track=Track.COPY,
        needs=(Need(Op.O),),
        before=(Before(Op.B, Need(Op.L)),),
        setting="offload",
    ),
    Operation(op=Op.FREE, text="release of offloaded activations", track=Track.LOWERED, needs=(Need(Op.O),), setting="offload"),
    *_sides(ACTIVATION, "an activation", Op.F, -1, "#8FA3B5"),
    *_sides(GRADIENT, "a gradient", Op.B, 1, "#A68A73"),
    Operation(  # of a stage's gradients over replicas; its chunk is the one with the last gradient
        op=Op.REDUCE,
        text="gradient reduction",
        track=Track.LOWERED,
        needs=_OWN_B,
        side=Side(Op.REDUCE, 0, Parties.REPLICAS, by_chunk=False),
    ),
)
_TABLE.update({each.op: each for each in _DEFINED})
