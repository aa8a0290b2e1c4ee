"""Attention of a run's layers on the ranks that its plans choose: handlers of `A` and `G`, and around those of stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_epp.contrib.helix.attention_messages import AttentionMessages, Message, attention_links
from megatron_epp.contrib.helix.attention_operations import INPUTS, INPUTS_GRADIENT, RESULT, RESULT_GRADIENT, A, G
from megatron_epp.contrib.helix.cut_layers import Cut, end_where_cut
from megatron_epp.mcore.costs.megatron_facts import costs_file, run_facts
from megatron_epp.mcore.iteration.run_feature import RunFeature
from megatron_epp.mcore.model.core_attention import ChunkParams
from megatron_epp.plan import Action, EppError, Op, Plan
from megatron_epp.plan.attributes import having
from megatron_epp.plan.operations import MessageKind
from megatron_epp.runtime.autograd.handles import ReceiveLeaf
from megatron_epp.runtime.context import ChunkContext
from megatron_epp.runtime.executor import Executor, Handler
from megatron_epp.runtime.links.objects import made_by_first

if TYPE_CHECKING:
    from megatron_epp.cost.model import PipelineCosts
    from megatron_epp.mcore.iteration.base_run import Run


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
            stage.release_output = lambda output: None  # the norm behind it has saved it
        for number in {0, self._last} & run.stages.keys():
            end_where_cut(run.stages[number])
        if (last := run.stages.get(self._last)) is not None:  # its weights are the first stage's, whose gradients end later
            last.enter = partial(lambda enter, *_: enter(lambda: None, lambda: None), last.enter)
        self._links = attention_links(run.links, lambda: run.groups.of(run.links.ranks, options=run.link_options))

    def allocate(self) -> None:
        for links in self._links:
            links.connect(self._run.device)

    def costs(self, prior: PipelineCosts) -> PipelineCosts:
        run, ask = self._run, "megatron_epp.contrib.helix.costs:costs_of_run"
        costs: PipelineCosts = made_by_first(lambda: run.ask(ask, run_facts(run.args, run.ask), costs_file(run.args), prior))
        return costs

    @contextmanager
    def running(
        self, plan: Plan, inputs: Any, reduction: Any, handlers: Mapping[Op, Handler]
    ) -> Iterator[Mapping[Op, Handler]]:
        self._inner, self._trains, self._plan = handlers, not plan.forward_only, plan
        self._between = AttentionMessages(plan, self._links, self._message)
        self._cuts: dict[tuple[int, int], tuple[Cut, ReceiveLeaf]] = {}  # by stage and chunk
        self._graphs: dict[tuple[int, int], tuple[Tensor, ReceiveLeaf]] = {}  # by site and chunk
        own = {Op.F: self._forward, Op.B: self._backward, A: self._attend, G: self._attend_backward}
        yield {**own, **self._between.handlers()}
        self._between.assert_empty()

    def _message(self, kind: MessageKind, chunk: int) -> Message:
        _, dtype, device = next(iter(self._run.stages.values())).message(1)
        tokens = self._plan.padded_tokens(chunk) // self._run.args.context_parallel_size
        return (tokens, 1, self._widths[0] if kind in (RESULT, RESULT_GRADIENT) else sum(self._widths)), dtype, device

    def _forward(self, run: Executor, action: Action) -> None:
        _, stage, chunk = action
        leaf, output = ReceiveLeaf(), self._between.take(RESULT, stage - 1, chunk) if stage else None
        cut = Cut(output if output is None or not self._trains else leaf.enter(output), begins=stage < self._last)
        if self._trains:
            self._cuts[stage, chunk] = cut, leaf
            if not cut.begins:  # it runs in its backward, and what it gets waits
                run.message(action, Op.RECV_F)
                return
        with self._having(run, stage, cut):
            self._inner[Op.F](run, action)
        if cut.inputs is not None:
            self._between.put(INPUTS, stage, chunk, cut.inputs)
            cut.inputs = None

    def _backward(self, run: Executor, action: Action) -> None:
        _, stage, chunk = action
        cut, leaf = self._cuts.pop((stage, chunk))
        with self._having(run, stage, cut):
            if cut.begins:
                cut.gradient = self._between.take(INPUTS_GRADIENT, stage, chunk)
            else:
                self._inner[Op.F](run, action._replace(op=Op.F))
            self._inner[Op.B](run, action)
        if leaf.gradient is not None:
            self._between.put(RESULT_GRADIENT, stage - 1, chunk, leaf.gradient)

    def _having(self, run: Executor, stage: int, cut: Cut) -> Any:
        return having(self._run.stages[stage].decoder.layers[0].cut_layer, cut=cut)

    def _attend(self, run: Executor, action: Action) -> None:
        _, site, chunk = action
        leaf, inputs = ReceiveLeaf(), self._between.take(INPUTS, site, chunk)
        context = ChunkContext(chunk, run.layouts[chunk].table, next(iter(run.stages.values())).kv_cache)
        with run.recorder.action(action), torch.set_grad_enabled(self._trains):
            inputs = leaf.enter(inputs) if self._trains else inputs
            parts = (torch.unflatten(part, -1, (-1, self._channels)) for part in torch.split(inputs, self._widths, -1))
            output = self._core(*parts, packed_seq_params=ChunkParams(context))
        self._between.put(RESULT, site, chunk, output.detach())
        if self._trains:
            self._graphs[site, chunk] = output, leaf

    def _attend_backward(self, run: Executor, action: Action) -> None:
        _, site, chunk = action
        gradient, (output, leaf) = self._between.take(RESULT_GRADIENT, site, chunk), self._graphs.pop((site, chunk))
        with run.recorder.action(action):
            torch.autograd.backward(output, gradient)
        assert leaf.gradient is not None
        self._between.put(INPUTS_GRADIENT, site, chunk, leaf.gradient)
