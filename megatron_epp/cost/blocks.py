"""Costs of a pipeline stage, which is a list of blocks: input, layers, head, and any that others add."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megatron_epp.cost import memory
from megatron_epp.cost.kv_costs import NO_KV, KVBytes
from megatron_epp.cost.memory import NO_STATIC, Static
from megatron_epp.cost.work import NO_TIME, ChunkWork, IntColumn, LinearTime, ModeCosts, TimeColumn
from megatron_epp.plan.codec import Codec
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.reading import MOST_LAYERS, brief, printable
from megatron_epp.plan.recompute import FULL, MODES

INPUT, LAYER, PREDICTION, HEAD = "input", "layer", "prediction", "head"
HANDOVER = "handover"
"""Kinds of blocks: the stage's input, with the embedding that makes it; layers; layers of multi-token prediction; final norm,
logits and loss; and what layers hand on to the next slice alone."""
KINDS = (INPUT, HANDOVER, LAYER, PREDICTION, HEAD)
_GROUPS = {LAYER: 0, INPUT: 2, HEAD: 2}
_IDLE_US = 1.0
"""Time of a backward that computes nothing, before it is measured. Assumed: an order of plans needs some."""
_ITEMS = {INPUT: memory.INPUTS, HEAD: memory.HEAD, HANDOVER: memory.STATES}
UNKNOWN_BYTES: dict[str, Any] = dict.fromkeys(
    f"{name}_bytes_per_token" for name in ("full", "attended", "apart", "apart_attended")
)
_MOST_PER_TOKEN = float(1 << 32)
"""Bytes: with the tokens of the largest chunk and all layers a sum is still a whole number of 64 bits."""
_PER_TOKEN = (
    *("full", "attended", "apart", "apart_attended", "weight", "input", "working", "gradient", "many_gradient"),
    *("expanded", "message", "hidden", "exchange", "kept", "passing", "recomputed_layer", "kv", "uncast", "least_working"),
)
CODEC = Codec(
    least={
        **dict.fromkeys(("heads", "kv_heads", "queries_per_key", "stage_ranks", "host_sharing", "host_turns"), 1),
        "weight_bytes": 0.125,  # a weight takes a bit at least
    },
    most={
        **dict.fromkeys(("bytes_per_token", *(f"{name}_bytes_per_token" for name in _PER_TOKEN)), _MOST_PER_TOKEN),
        **dict.fromkeys(("count", "num_layers"), MOST_LAYERS),
        **dict.fromkeys(("offloadable_share", "fragmentation_share"), 1.0),
    },
    least_of_others=0,
)
"""Limits of the numbers in files of costs and profiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCosts:
    """Costs that a block takes over unchanged from a profile's part of a model."""

    forward: LinearTime = NO_TIME  # one forward; recomputing a layer in full costs the same
    backward: LinearTime = NO_TIME  # one backward, weight gradient included, recompute not
    weight: LinearTime = NO_TIME  # the weight gradient, a part of `backward`: if W is a separate action, B takes the rest
    # The part of a layer's forward, and of its backward, in which tensor-parallel ranks exchange activations. Another action in
    # the same step can compute meanwhile.
    exchange: LinearTime = NO_TIME
    # A layer in each mode whose costs are known, except a layer that recomputes in full
    recompute: dict[str, ModeCosts] = field(default_factory=dict, hash=False)
    bytes_per_token: float = 0.0  # kept from forward to backward, K and V included
    # Held when its attention's backward has made the gradient of K and V; None assumes all bytes
    attended_bytes_per_token: float | None = None
    # apart_bytes_per_token, apart_attended_bytes_per_token: peak during a backward with split weight gradient, which keeps what
    # that needs, and `attended_bytes_per_token` of such a backward; None if unknown
    apart_bytes_per_token: float | None = None
    apart_attended_bytes_per_token: float | None = None
    weight_bytes_per_token: float = 0.0  # needed by its W after its B: inputs and output gradients of the linear layers
    workspace_bytes: int = 0  # held only while a pass runs, independent of its tokens: logits of a block of the loss


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCosts(PartCosts):
    """Equal neighbours in a stage's list, and the costs of one of them.

    A subclass with a kind of its own is a block that the planner has not seen before: its times count with the stage's, what it
    keeps with the stage's activations. Its methods return columns ``[chunk]``, without the fragmentation share.
    """

    kind: str  # one of `KINDS`, or a name of a subclass
    # Number of them; only layers can be none, and only layers recompute. Layers of multi-token prediction have times and bytes
    # of all of them, but for `kv`.
    count: int = 1
    # Peak in the backward of a layer that keeps everything or recomputes in full; None: `bytes_per_token`
    full_bytes_per_token: float | None = None
    input_bytes_per_token: float = 0.0  # of its input, which a layer that recomputes in full keeps
    # Held only while it runs: gradients, workspace of kernels. 0 if memory of passes is not counted.
    working_bytes_per_token: float = 0.0
    kv: KVBytes | None = None  # keys and values that one caches; None without attention
    cached_share: float = 1.0  # share of the layers that cache any, where others have a window or a state instead
    # Handed on to the next slice alone, and held from a slice's forward to its backward: the state, and from the next slice's
    # backward on its gradient
    state_bytes: float = 0.0
    # Tokens of a sequence from which on the state has these bytes, as of a window; fewer have a part of them
    state_tokens: int = 0
    tail_bytes: float = 0.0  # that a layer keeps besides in a slice which is not the first, such as rows of the slice before

    @property
    def group(self) -> int:
        """Position of its times in `StageCosts.lines`."""
        return _GROUPS.get(self.kind, 1)

    @property
    def item(self) -> str:
        """Name of what it keeps, in reports."""
        return _ITEMS.get(self.kind, memory.LAYERS)

    def mode(self, name: str) -> ModeCosts | None:
        """Costs of a recompute mode by its name in `plan.recompute.MODES`; None if unknown."""
        if name == FULL:
            return ModeCosts(self.forward, self.input_bytes_per_token)
        return self.recompute.get(name)

    def kept_per_token(self, work: ChunkWork, mode: ModeCosts | None = None, keeps_kv: bool = True) -> TimeColumn:
        """Bytes per token kept for backward, in a recompute mode or without one. Keys and values in a cache do not count."""
        of_cache = self.parts * self._in_cache(work) * keeps_kv
        return (self if mode is None else mode).bytes_per_token - of_cache

    def kept_bytes(self, work: ChunkWork) -> TimeColumn:
        """Bytes kept from forward to backward in addition, which are not proportional to tokens."""
        if not (self.state_bytes or self.tail_bytes):
            return 0.0 * work.tokens
        states, tails = work.handed(self.state_tokens)
        return states * self.state_bytes + tails * self.tail_bytes

    def kv_gradient_bytes(self, work: ChunkWork) -> TimeColumn:
        """Bytes of the gradient of keys and values for which a backward makes room, of one that caches any."""
        tokens = work.opened_gradients(lambda tokens: tokens)
        return 0.0 * tokens if self.kv is None else self.kv.gradient_per_token(work) * tokens

    def peak_bytes(self, work: ChunkWork, mode: str = "", split: bool = False) -> tuple[TimeColumn, TimeColumn, TimeColumn]:
        """Bytes of a `LayerPeak` (`PipelineCosts.layer_peak_bytes`) of one layer, not rounded."""
        full, attended = self._peaks_per_token(mode, split)
        cached, prefix = self._in_cache(work, share=1.0), self.prefix_bytes(work) * (self.cached_share > 0)
        gradient = self.cached_share * self.kv_gradient_bytes(work)
        # Where attention frees the keys and values, which still count, no more is held than in a chunk without a cache
        late = (np.where(work.sliced & ~work.first, attended, min(full, attended)) - cached) * work.tokens + gradient + prefix
        # Where layers are unlike, one that caches nothing may be the last that a backward comes to: all gradients are there.
        is_unlike = self.cached_share < 1
        early = full * work.tokens + gradient if is_unlike else (full - cached) * work.tokens
        comes = gradient if is_unlike else np.where(late > early, gradient, 0.0)
        return np.maximum(early, late), comes, np.where(late > early, prefix, 0.0)

    def passing_bytes(self, work: ChunkWork) -> TimeColumn:
        """Bytes that the backward of a block behind the layers needs for a moment: gradients of a prefix, and if weight
        gradients are split off the gradient of its output, which is as large as its input.
        """
        deferred = self.input_bytes_per_token if self.weight_bytes_per_token else 0.0
        return deferred * work.tokens + self.prefix_bytes(work)

    def gradients_ahead_bytes(self, work: ChunkWork, freed: IntColumn) -> TimeColumn:
        """Most bytes by which gradients of keys and values of multi-token prediction exceed what is freed ahead of them.

        A depth's are made when its layer has freed what comes behind its attention, the depths behind it have freed everything,
        and the head has freed `freed` bytes.
        """
        attended, kept_bytes = self.attended_bytes_per_token, self.kept_per_token(work) * work.tokens
        held = (self.bytes_per_token / self.parts if attended is None else attended) - self._in_cache(work)
        gradient = self.kv_gradient_bytes(work)
        most = np.maximum(gradient - kept_bytes / self.parts, self.num_cached * gradient - kept_bytes)
        return np.where(work.last, np.maximum(0.0, held * work.tokens - freed + most), 0.0)

    @property
    def parts(self) -> int:
        """Number of those whose times and bytes are counted together."""
        return max(1, self.count) if self.kind == PREDICTION else 1

    @property
    def num_cached(self) -> float:
        """Number of them that cache keys and values."""
        return 0.0 if self.kv is None else self.count * self.cached_share

    def _in_cache(self, work: ChunkWork, share: float | None = None) -> TimeColumn:
        share = self.cached_share if share is None else share
        return np.where(work.sliced, 0.0 if self.kv is None else share * self.kv.bytes_per_token, 0.0)

    def prefix_bytes(self, work: ChunkWork) -> TimeColumn:
        """Bytes of a prefix's new gradients (`KVBytes.prefix_bytes`), 0 if memory of passes is not counted, and loaded sums."""
        if self.kv is None:
            return np.zeros(len(work.tokens))
        new = self.kv.prefix_bytes(work) if self.working_bytes_per_token else np.zeros(len(work.tokens))
        return new if work.summed_tokens is None else new + self.kv.gradient_per_token(work) * work.summed_tokens

    def running_bytes(self, work: ChunkWork) -> TimeColumn:
        """Bytes held only while it runs, forward or backward; 0 if memory of passes is not counted."""
        of_caches = 0.0 if self.kv is None or not self.working_bytes_per_token else self.kv.forward_bytes(work)
        return self.working_bytes_per_token * work.tokens + of_caches

    def _peaks_per_token(self, mode: str, split: bool) -> tuple[float, float]:
        """Bytes per token when its backward begins, and when its attention has made the gradient of K and V."""
        if split:
            everything = self.bytes_per_token + self.weight_bytes_per_token
            sizes = self.apart_bytes_per_token, self.apart_attended_bytes_per_token
        else:
            own = self.mode(mode) if mode else None
            everything = self.bytes_per_token if self.full_bytes_per_token is None else self.full_bytes_per_token
            sizes = None if own is None else own.full_bytes_per_token, self.attended_bytes_per_token
        full, attended = sizes
        return everything if full is None else full, everything if attended is None else attended


_NO_LAYERS = BlockCosts(kind=LAYER, count=0)


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Time and memory of one pipeline stage.

    `blocks` are in the order in which a forward runs them; layers are one block, also where there are none. `unlike` has layers
    of several kinds one by one, of which only what they keep and their peaks count: their block has times and mean sizes.
    """

    blocks: tuple[BlockCosts, ...]
    static: Static = NO_STATIC
    unlike: tuple[BlockCosts, ...] = ()

    @property
    def layers(self) -> BlockCosts:
        return next((block for block in self.blocks if block.kind == LAYER), _NO_LAYERS)

    @property
    def inner(self) -> tuple[BlockCosts, ...]:
        """Blocks that are neither layers nor ends: multi-token prediction, and any that others add."""
        return tuple(block for block in self.blocks if block.group == 1)

    @property
    def ends(self) -> tuple[BlockCosts, ...]:
        return tuple(block for block in self.blocks if block.group == 2)

    @property
    def ends_bytes_per_token(self) -> float:
        return sum(block.bytes_per_token for block in self.ends)

    @property
    def behind(self) -> tuple[BlockCosts, ...]:
        """Inner blocks that a backward passes before it reaches the layers."""
        at = next((at for at, block in enumerate(self.blocks) if block.kind == LAYER), -1)
        return tuple(block for block in self.blocks[at + 1 :] if block.group == 1)

    @property
    def num_layers(self) -> int:
        return self.layers.count

    @property
    def num_cached_layers(self) -> int:
        """Number of layers of which the stage caches keys and values of all or of some: layers whose attention it has."""
        return sum(block.count for block in self.blocks if block.kv is not None)

    @property
    def num_caches(self) -> float:
        """Number of layers whose keys and values the stage caches."""
        return sum(block.num_cached for block in self.blocks)

    @property
    def kv(self) -> KVBytes:
        return next((block.kv for block in self.blocks if block.kv is not None), NO_KV)

    @property
    def static_bytes(self) -> int:
        return self.static.num_bytes

    @property
    def workspace_bytes(self) -> int:
        return sum(block.workspace_bytes for block in self.blocks)

    def lines(self, name: str) -> tuple[LinearTime, LinearTime, LinearTime]:
        """Times of each layer, of all inner blocks and of all ends in a pass: ``forward``, ``backward`` or ``weight``."""
        inner, ends = (sum((getattr(block, name) for block in blocks), NO_TIME) for blocks in (self.inner, self.ends))
        return getattr(self.layers, name), inner, ends

    def line(self, name: str) -> LinearTime:
        """Time of the stage's whole pass; ``split`` is a backward whose weight gradients are split off."""
        if name == "split":
            return self.line("backward").without(self.line("weight"))
        layer, inner, ends = self.lines(name)
        return layer.scaled(self.num_layers) + inner + ends

    def line_of_ends(self, name: str) -> LinearTime:
        """Time of the ends in `line`."""
        if name == "split":
            return self.line_of_ends("backward").without(self.line_of_ends("weight"))
        return self.lines(name)[2]

    @property
    def exchange(self) -> LinearTime:
        """Time of the exchange in the stage's forward, equal to its backward's."""
        return sum((block.exchange for block in self.inner), self.layers.exchange.scaled(self.num_layers))

    def with_lines(self, name: str, layer: LinearTime, inner: LinearTime, ends: LinearTime) -> StageCosts:
        """Return the stage with other times of a pass, see `lines`. The last of several inner blocks, or ends, has all."""
        last = {block.group: at for at, block in enumerate(self.blocks)}
        none = self.changed(**{name: NO_TIME}).blocks
        timed = {at: replace(none[at], **{name: (layer, inner, ends)[group]}) for group, at in last.items()}  # type: ignore[arg-type]
        return replace(self, blocks=tuple(timed.get(at, block) for at, block in enumerate(none)))

    def without_backward(self) -> StageCosts:
        """Return the stage with backwards that compute no gradient, for which forwards keep only caches of slices."""
        blocks = []
        for block in self.blocks:
            cached = 0.0 if block.kv is None else block.parts * block.cached_share * block.kv.bytes_per_token
            modes = dict.fromkeys(block.recompute, ModeCosts(NO_TIME, cached))
            sizes = dict.fromkeys(("bytes_per_token", "input_bytes_per_token"), cached)
            times = dict.fromkeys(("backward", "weight", "exchange"), NO_TIME)
            kv = block.kv and replace(block.kv, gradient_bytes_per_token=0.0, many_gradient_bytes_per_token=0.0)
            changes: dict[str, Any] = {**sizes, **UNKNOWN_BYTES, "weight_bytes_per_token": 0.0, **times}
            blocks.append(replace(block, recompute=modes, kv=kv, **changes))
        blocks[0] = replace(blocks[0], backward=LinearTime(_IDLE_US))
        return replace(self, blocks=tuple(blocks), unlike=())

    def changed(self, *kinds: str, **changes: Any) -> StageCosts:
        """Return the stage with other fields of its blocks of these kinds (none for all), and of unlike layers. A head is added
        if it has none.
        """
        blocks = self.blocks
        if kinds == (HEAD,) and any(changes.values()) and all(block.kind != HEAD for block in blocks):
            blocks = (*blocks, BlockCosts(kind=HEAD))
        changed, unlike = (
            tuple(replace(block, **changes) if not kinds or block.kind in kinds else block for block in row)
            for row in (blocks, self.unlike)
        )
        return replace(self, blocks=changed, unlike=unlike)


def check_within(part: LinearTime, whole: LinearTime, name: str) -> None:
    """Raise `EppError` if a line exceeds the line that it is a part of: the remainder would be negative."""
    if part.within(whole) != part:
        raise EppError(f"{name} is above the backward that it is a part of ({part} and {whole})")


def check_part(part: PartCosts, name: str) -> None:
    """Raise `EppError` if weight gradients take longer than a backward, or a recompute mode is not known."""
    for mode in part.recompute:
        if mode not in MODES:
            raise EppError(f"{name}.recompute.{printable(mode)} is unknown; modes are {', '.join(MODES)}")
    check_within(part.weight, part.backward, f"{name}.weight")


def check_stage(stage: StageCosts, name: str) -> None:
    """Raise `EppError` if a block's costs contradict each other (`check_part`), or its kind is not known."""
    for at, block in enumerate(stage.blocks):
        where = f"{name}.blocks[{at}]"
        if block.kind not in KINDS:
            raise EppError(f"{where}.kind is {brief(block.kind)}; kinds are {', '.join(KINDS)}")
        check_part(block, where)
    if stage.unlike and len(stage.unlike) != stage.num_layers:
        raise EppError(f"{name}.unlike has {len(stage.unlike)} layers of the stage's {stage.num_layers}")
    modes = {mode for mode in stage.layers.recompute if any(mode not in layer.recompute for layer in stage.unlike)}
    if modes:
        raise EppError(f"{name}.unlike has layers whose costs do not know recompute mode {', '.join(sorted(modes))}")
