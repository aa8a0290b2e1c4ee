"""Bytes of a plan by purpose: the steps that `assemble` writes, split into items.

Sizes are rounded as a whole, so the byte or two that items lack, or have too many, are the layers'.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import groupby

import numpy as np

from megatron_epp.cost import memory as item
from megatron_epp.cost.model import Costs
from megatron_epp.cost.work import ChunkWork
from megatron_epp.plan import Action, Op, Plan, Recompute
from megatron_epp.plan.kv_offload import slices_of
from megatron_epp.plan.memory_breakdown import Items, MemoryBreakdown
from megatron_epp.plan.operations import Operation, operation, operations
from megatron_epp.plan.plan import AnyStep, Step
from megatron_epp.plan.simulation import simulate
from megatron_epp.planner.kernels.compiled import Numbers
from megatron_epp.planner.passes import BackwardBytes, LayerGroup, backward_items, by_item, moments
from megatron_epp.planner.tables import static_items, work_of_batch
from megatron_epp.port.packed import PackedPlans


def memory_breakdown(plan: Plan, costs: Costs) -> MemoryBreakdown:
    """Split the bytes of a plan, made with `costs`, into items."""
    work = work_of_batch(plan, plan.chunks)
    stages = [_Stage(plan, costs, stage, work) for stage in range(plan.num_stages)]
    steps = [step for _, rows in plan.tables for row in rows for step in row]
    known = {kind.op for kind in operations() if kind.rows is None}
    pairs = {step.action: stages[step.action.stage].pairs(step) if step.action.op in known else _added(step) for step in steps}
    *dynamic, lost = item.DYNAMIC
    there = {step.action.op for step in steps}
    added = dict.fromkeys(_name_of(kind) for kind in operations() if kind.rows is not None and kind.op in there)
    more = sorted({name for stage in stages for items in stage.kept_items for name in items}.difference(item.DYNAMIC))
    messages = plan.message_bytes or (0,) * plan.num_ranks
    static = [static_items(plan.stages_of(rank), work, costs) | {item.MESSAGES: size} for rank, size in enumerate(messages)]
    if costs.exchange_bytes_per_token:  # of the largest chunk of all replicas, of which the plan has one
        for items, size in zip(static, plan.static_bytes, strict=True):
            items[item.EXCHANGE] = size - sum(items.values())
    return MemoryBreakdown(
        simulate(plan),
        tuple(static),
        {action: takes for action, (takes, _) in pairs.items()},
        {action: gives for action, (_, gives) in pairs.items()},
        (*dynamic, *more, *added, lost),
        costs.fragmentation_share,
    )


def peak_items(plan: Plan, costs: Costs) -> dict[str, int]:
    """Return the bytes by item of the fullest rank of a plan, at its peak. The plan was made with `costs`."""
    peaks = plan.predicted.peak_bytes
    return memory_breakdown(plan, costs).peak(peaks.index(max(peaks))).items


def with_peak_items(plans: PackedPlans, costs: Costs) -> PackedPlans:
    return tuple(packed._replace(peak_items=peak_items(packed.plan(), costs)) for packed in plans)


def _added(step: AnyStep) -> tuple[Items, Items]:
    name = _name_of(operation(step.action.op))
    return {name: step.alloc_bytes}, {name: step.free_bytes}


def _name_of(added: Operation) -> str:
    """Name an added operation's item, one for those that are only there together: one frees what another allocates."""
    return operation(added.together[0]).text if added.together else added.text


class _Stage:
    def __init__(self, plan: Plan, costs: Costs, stage: int, work: ChunkWork) -> None:
        self.plan, self.num_layers, self.recompute = plan, plan.num_layers[stage], plan.recompute[stage]
        self.streamed = [(0, 0)] * len(plan.chunks)
        if there := plan.kv_offload_on(stage):
            work, streams, which = work.offloading({q: own for q, own in slices_of(plan).items() if q in there})
            host = costs.kv_offload_costs(stage, streams)
            self.streamed = [*zip(*((which * own).tolist() for own in (host.forward_bytes, host.backward_bytes)), strict=True)]
        self.opened, self.gone = (column.tolist() for column in costs.opened_bytes(stage, work))
        self.closed, self.comes = costs.released_bytes(stage, work).tolist(), costs.gradient_bytes(stage, work).tolist()
        self.head: list[int] = costs.head_bytes(stage, work).tolist()
        self.stays: list[int] = costs.weight_bytes(stage, work).tolist()
        steps = {action: step for step in plan.ranks[plan.placement[stage]] for action in step.actions}
        self.split = {action.chunk for action in steps if action.op is Op.W and action.stage == stage}
        layers = costs.stages[stage].unlike
        self.kinds: list[int | None] = [*map(layers.index, layers)] or [None] * self.num_layers
        self.backward = {
            (mode, kind, split): by_item(backward_items(stage, work, costs, mode, kind, split=split))
            for mode in {"", *(name for r in set(self.recompute) for name, _ in r.by_mode())}
            for kind in {None, *self.kinds}
            for split in {False, bool(self.split)}
        }
        for sizes in self.backward.values():
            sizes.constant[item.DYNAMIC.index(item.KV_OFFLOAD)] += [in_backward for _, in_backward in self.streamed]
        recomputes = [step for action, step in steps.items() if action.op is Op.R and action.stage == stage]
        self.passing = {name: row.tolist() for name, row in costs.pass_items(stage, work).items()}
        self.ahead = {step.action.chunk: step.alloc_bytes - step.free_bytes for step in recomputes}
        columns = {r: costs.activation_items(stage, work, r) for r in set(self.recompute)}
        self.kept_items = []
        for c, r in enumerate(self.recompute):
            items = {name: int(row[c]) for name, row in columns[r].items()}
            if plan.forward_only:
                items = {item.HEAD: self.head[c]}
            if not (step := steps[Action(Op.F, stage, c)]).also:
                items = _filled(items, step.alloc_bytes - self.opened[c] - self.streamed[c][0], _busiest(items, r))
            self.kept_items.append(items)

    def pairs(self, step: AnyStep) -> tuple[Items, Items]:
        """Return `pair` of a step; of two actions of one stage the sum, with what both need while they run."""
        if len(step.actions) == 1:
            return self.pair(step)
        takes, gives = Counter[str](), Counter[str]()
        for action in step.actions:
            if action.op is Op.F:
                own = self.pair(Step(action, 0.0, 0, 0))
                takes.update(own[0])
                gives.update(own[1])
        more = {name: min(row[chunk] for _, _, chunk in step.actions) for name, row in self.passing.items()}
        takes.update(more)
        gives.update(more)
        if (other := step.actions[-1]).op is not Op.F:
            rest = self.pair(Step(other, 0.0, step.alloc_bytes - takes.total(), step.free_bytes - gives.total()))
            takes.update(rest[0])
            gives.update(rest[1])
        return _filled(takes, step.alloc_bytes, item.LAYERS), _filled(gives, step.free_bytes, item.LAYERS)

    def pair(self, step: AnyStep) -> tuple[Items, Items]:
        """Compute the bytes by item that a step allocates when it starts and frees when it ends."""
        op, _, c = step.action
        if op is Op.F:
            gives = {item.CACHE: self.closed[c], **self.kept_items[c]} if self.plan.forward_only else {}
            passing = {item.KV_OFFLOAD: self.streamed[c][0]}
            return {**self.kept_items[c], item.CACHE: self.opened[c]} | passing, gives | passing
        if op is Op.B:
            return self._backward(step, c)
        if op is Op.W:
            return {}, {item.WEIGHT_INPUTS: step.free_bytes}
        if op is Op.R:
            return {item.RECOMPUTED: step.alloc_bytes}, {item.RECOMPUTED: step.free_bytes}
        moved = _moved(self.kept_items[c], step.free_bytes or step.alloc_bytes)
        return ({}, moved) if op is Op.O else (moved, {})

    def _backward(self, step: AnyStep, c: int) -> tuple[Items, Items]:
        split = c in self.split
        left = Counter({item.CACHE: -self.opened[c], item.CACHE_GRADIENT: self.comes[c] - self.gone[c]})
        left.subtract(self.kept_items[c])
        left[item.WEIGHT_INPUTS] += self.stays[c] if split else 0
        takes = self._backward_peak(c, step.alloc_bytes, split, left)
        gives = Counter(takes)
        gives.subtract(left)
        gives[item.RECOMPUTED] += self.ahead.get(c, 0)
        return takes, _filled(gives, step.free_bytes, item.LAYERS)

    def _backward_peak(self, c: int, num_bytes: int, split: bool, left: Counter[str]) -> dict[str, int]:
        """Compute by item the peak of a backward above the bytes live when it starts: at its end, what it leaves."""
        recompute = self.recompute[c]
        sizes = {key[:2]: BackwardBytes(*(items[:, c] for items in self.backward[*key[:2], split])) for key in self.backward}
        layers = [(recompute.mode(number), kind) for number, kind in enumerate(self.kinds)][::-1]
        groups = [LayerGroup(len([*same]), *sizes[key][-3:]) for key, same in groupby(layers)]
        most: Numbers = max(moments(sizes["", None], groups), key=np.sum)
        items = dict(zip(item.DYNAMIC, most.tolist(), strict=True))
        if left.total() > most.sum() and num_bytes > most.sum() + self.num_layers + 1:
            items = dict(left)
        return _filled(items, num_bytes, item.RECOMPUTED if recompute.num_layers else item.LAYERS)


def _busiest(items: Mapping[str, int], recompute: Recompute) -> str:
    names = item.RECOMPUTE_MODE_ITEMS.values() if recompute.num_layers else (item.LAYERS,)
    return max(names, key=lambda name: items.get(name, 0))


def _filled(items: dict[str, int], num_bytes: int, name: str) -> dict[str, int]:
    """Return the bytes by item with one item adjusted so that they add up to `num_bytes`."""
    return items | {name: items.get(name, 0) + num_bytes - sum(items.values())}


def _moved(sizes: Items, num_bytes: int) -> dict[str, int]:
    whole, before, part, moved = sum(sizes.values()), 0, 0, {}
    for name, size in sizes.items():
        part += size
        after = part * num_bytes // max(1, whole)
        moved[name], before = after - before, after
    return moved
