"""Attention of a run's layers on the ranks that its plans choose: handlers of `A`, `G` and their messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_epp.contrib.helix.attention_operations import INPUTS, INPUTS_GRADIENT, RESULT, RESULT_GRADIENT, A, G
from megatron_epp.contrib.helix.cut_layers import Cut, end_where_cut
from megatron_epp.mcore.costs.megatron_facts import costs_file, run_facts
from megatron_epp.mcore.iteration.run_feature import RunFeature
from megatron_epp.mcore.model.core_attention import ChunkParams
from megatron_epp.plan import Action, EppError, Op, Plan
from megatron_epp.plan.attributes import having
from megatron_epp.plan.communicators import directions
from megatron_epp.plan.operations import MessageKind
from megatron_epp.runtime.autograd.handles import ReceiveLeaf
from megatron_epp.runtime.context import ChunkContext
from megatron_epp.runtime.executor import Executor, Handler
from megatron_epp.runtime.links.links import Links, Receive
from megatron_epp.runtime.links.objects import made_by_first

if TYPE_CHECKING:
    from megatron_epp.cost.model import PipelineCosts
    from megatron_epp.mcore.iteration.base_run import Run

_KINDS = (INPUTS, RESULT, RESULT_GRADIENT, INPUTS_GRADIENT)
_OF_STAGES = {INPUTS.send, RESULT.receive, RESULT_GRADIENT.send, INPUTS_GRADIENT.receive}
"""Sides of messages that are actions of stages; the others are those of attention."""


class SeparateAttention(RunFeature):
    """A rank's attention, and its stages, which are cut inside attention. Every rank of the job must make it."""

    def __init__(self, run: Run) -> None:
        self._run, self._last = run, run.placement.num_stages - 1
        attention: Any = next(iter(run.stages.values())).decoder.layers[0].self_attention
        self._core, self._channels = attention.core_attention, attention.hidden_size_per_attention_head
        heads, groups = attention.num_attention_heads_per_partition, attention.num_query_groups_per_partition
        self._widths = [self._channels * count for count in (heads, groups, groups)]
        if not all(parameter.requires_grad for stage in run.stages.values() for parameter in stage.parameters):
            raise EppError("--epp-planner helixpipe is for models of which everything trains")
        for stage in run.stages.values():
            stage.release_output = lambda output: None  # the next layer's norm has saved it
        for number in {0, self._last} & run.stages.keys():
            end_where_cut(run.stages[number])
        if (last := run.stages.get(self._last)) is not None:  # the weights are the first stage's, whose gradients are the last
            last.enter = partial(lambda enter, *_: enter(lambda: None, lambda: None), last.enter)
        self._of_inputs, self._of_results = self._new_links(), self._new_links()
        # By kind, site of attention and chunk: what has come or will be sent; by stage and chunk; by site and chunk.
        self._there: dict[tuple[MessageKind, int, int], Tensor | Receive] = {}
        self._cuts: dict[tuple[int, int], tuple[Cut, ReceiveLeaf]] = {}
        self._graphs: dict[tuple[int, int], tuple[Tensor, ReceiveLeaf]] = {}

    def _new_links(self) -> Links:
        run, names = self._run, ("activations", "gradients", "activations_down", "gradients_up")
        groups = {name: run.groups.of(run.links.ranks, options=run.link_options) for name in names}
        used = directions(*permutations(range(len(run.links.ranks)), 2))
        return replace(run.links, **groups, directions=used, _in_flight={}, _rings={})

    def allocate(self) -> None:
        for links in (self._of_inputs, self._of_results):
            links.connect(self._run.device)

    def costs(self, prior: PipelineCosts) -> PipelineCosts:
        run, ask = self._run, "megatron_epp.contrib.helix.costs:costs_of_run"
        return made_by_first(lambda: run.ask(ask, run_facts(run.args, run.ask), costs_file(run.args), prior))

    @contextmanager
    def running(
        self, plan: Plan, inputs: Any, reduction: Any, handlers: Mapping[Op, Handler]
    ) -> Iterator[Mapping[Op, Handler]]:
        self._inner, self._trains = handlers, not plan.forward_only
        self._rank_of = {step.action[1:]: rank for rank, row in enumerate(plan.ranks) for step in row if step.action.op is A}
        messages = {kind.send: partial(self._send, kind) for kind in _KINDS}
        messages |= {kind.receive: partial(self._receive, kind) for kind in _KINDS}
        yield {Op.F: self._forward, Op.B: self._backward, A: self._attend, G: self._attend_backward, **messages}
        assert not (self._there or self._cuts or self._graphs)  # all has been taken

    def _forward(self, run: Executor, action: Action) -> None:
        _, stage, chunk = action
        leaf, output = ReceiveLeaf(), self._take(RESULT, stage - 1, chunk) if stage else None
        cut = Cut(output if output is None or not self._trains else leaf.enter(output), begins=stage < self._last)
        if self._trains:
            self._cuts[stage, chunk] = cut, leaf
            if stage == self._last:  # it runs in its backward
                run.message(action, Op.RECV_F)
                return
        with self._having(run, stage, cut):
            self._inner[Op.F](run, action)
        if cut.inputs is not None:
            self._there[INPUTS, stage, chunk], cut.inputs = cut.inputs, None

    def _backward(self, run: Executor, action: Action) -> None:
        _, stage, chunk = action
        cut, leaf = self._cuts.pop((stage, chunk))
        with self._having(run, stage, cut):
            if stage == self._last:
                self._inner[Op.F](run, action._replace(op=Op.F))
            else:
                cut.gradient = self._take(INPUTS_GRADIENT, stage, chunk)
            self._inner[Op.B](run, action)
        if leaf.gradient is not None:
            self._there[RESULT_GRADIENT, stage - 1, chunk] = leaf.gradient

    def _attend(self, run: Executor, action: Action) -> None:
        _, site, chunk = action
        leaf, inputs = ReceiveLeaf(), self._take(INPUTS, site, chunk)
        context = ChunkContext(chunk, run.layouts[chunk].table, next(iter(run.stages.values())).kv_cache)
        with run.recorder.action(action), torch.set_grad_enabled(self._trains):
            inputs = leaf.enter(inputs) if self._trains else inputs
            parts = (part.unflatten(-1, (-1, self._channels)) for part in inputs.split(self._widths, -1))
            output = self._core(*parts, packed_seq_params=ChunkParams(context))
        self._there[RESULT, site, chunk] = output.detach()
        if self._trains:
            self._graphs[site, chunk] = output, leaf

    def _attend_backward(self, run: Executor, action: Action) -> None:
        _, site, chunk = action
        gradient, (output, leaf) = self._take(RESULT_GRADIENT, site, chunk), self._graphs.pop((site, chunk))
        with run.recorder.action(action):
            torch.autograd.backward(output, gradient)
        assert leaf.gradient is not None
        self._there[INPUTS_GRADIENT, site, chunk] = leaf.gradient

    def _having(self, run: Executor, stage: int, cut: Cut) -> Any:
        return having(run.stages[stage].decoder.layers[0].cut_layer, cut=cut)

    def _take(self, kind: MessageKind, site: int, chunk: int) -> Tensor:
        there = self._there.pop((kind, site, chunk))
        return there.wait() if isinstance(there, Receive) else there

    def _peer(self, run: Executor, kind: MessageKind, action: Action) -> tuple[Links, int, tuple[MessageKind, int, int], bool]:
        op, number, chunk = action
        behind = kind in (RESULT, RESULT_GRADIENT)
        is_stage = op in _OF_STAGES
        site = number - (behind and is_stage)
        peer = self._rank_of[site, chunk] if is_stage else run.plan.placement[site + behind]
        links = self._of_results if behind else self._of_inputs
        return links, peer, (kind, site, chunk), kind in (RESULT_GRADIENT, INPUTS_GRADIENT)

    def _send(self, kind: MessageKind, run: Executor, action: Action) -> None:
        links, peer, key, is_gradient = self._peer(run, kind, action)
        links.send(self._there.pop(key), peer, is_gradient)

    def _receive(self, kind: MessageKind, run: Executor, action: Action) -> None:
        links, peer, key, is_gradient = self._peer(run, kind, action)
        width = self._widths[0] if links is self._of_results else sum(self._widths)
        _, dtype, device = next(iter(run.stages.values())).message(1)
        shape = run.plan.padded_tokens(action.chunk), 1, width
        self._there[key] = links.post_receive(shape, dtype, device, peer, is_gradient)
