"""The cases that `bench/planner` plans, and what it asks of each plan."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from megatron_epp.cost.model import Costs, PipelineCosts
from megatron_epp.data import sequence_lengths
from megatron_epp.plan import InfeasibleError, Plan
from megatron_epp.plan.flags import AUTO
from megatron_epp.plan.problem import Lengths
from megatron_epp.plan.sizing import loss_block_tokens
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.tools.formulas import ModelShape, analytic_profile
from megatron_epp.tools.formulas.library import balanced_layers, load_cluster, load_flags, shape_of

SEQUENCES = {"wikipedia": 512, "code": 128, "agents": 128, "equal": 64, "whale": 501}
"""Per batch: about half a million to a few million tokens."""
OTHER_BATCHES = 8
"""Layers are balanced for batches like these, not for the one that is planned: a run has one partition."""
CONTEXTS = (32768, 131072, 196608, 524288, 1048576)
STAGES = (4, 8, 16)
MODELS = ("llama3-8b", "llama2-13b", "llama-30b", "llama3-70b")
CAPS_GB = (40, 80, 141)
CLUSTER = "h100x8"
REPLICAS = 8
"""Data-parallel replicas that share the optimizer's state: 7.5 bytes per parameter."""
MOST_CONTEXT_PARALLEL = 16
STATIC_SHARE, LEAST_SHARE = 0.5, 0.8
"""Shares of the cap: for weights and optimizer, and for a plan that recomputes everything."""
OURS = "greedy"
RIVALS = ("infinipipe", "seq1f1b", "chunkflow", "1f1b-packed", "1f1b-padded")


def equal(count: int, seed: int) -> np.ndarray:
    """Sequences of one length."""
    return np.full(count, 8192)


def whale(count: int, seed: int) -> np.ndarray:
    """One of a million tokens and tiny ones."""
    lengths = np.random.RandomState(seed).randint(20, 400, count)
    lengths[0] = 1 << 20
    return lengths


DRAWS: dict[str, Callable[[int, int], np.ndarray]] = {
    "wikipedia": sequence_lengths.wikipedia,
    "code": sequence_lengths.code,
    "agents": sequence_lengths.agents,
    "chat": sequence_lengths.chat,
    "equal": equal,
    "whale": whale,
}
"""A number of lengths, by a seed."""


def fitting(problem: Problem, costs: Costs, options: Options) -> Plan | None:
    """Plan a batch; return None where nothing fits."""
    try:
        return plan(problem, costs, options)
    except InfeasibleError:
        return None


def least_cap_bytes(problem: Problem, costs: Costs, options: Options) -> int:
    """Return the smallest cap of all ranks that a plan fits, as the planner names it when none does."""
    try:
        plan(replace(problem, cap_bytes=(1,) * problem.num_ranks), costs, options)
    except InfeasibleError as error:
        return error.least_cap_bytes
    raise AssertionError("a plan fits one byte")


@dataclass(frozen=True)
class Case:
    """One batch on one pipeline."""

    lengths_like: str
    context: int
    stages: int
    model: str
    cap_gb: int

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        return self._batch(self.seed)

    @cached_property
    def other_lengths(self) -> tuple[int, ...]:
        """Lengths of other batches of the run, for choices made before it starts."""
        return tuple(length for batch in range(1, OTHER_BATCHES + 1) for length in self._batch(self.seed + 10_000 * batch))

    def _batch(self, seed: int) -> tuple[int, ...]:
        return tuple(np.minimum(DRAWS[self.lengths_like](self.sequences, seed), self.context).tolist())

    @property
    def sequences(self) -> int:
        """Sequences of a batch."""
        return SEQUENCES[self.lengths_like]

    @property
    def flags(self) -> dict[str, Any]:
        """Megatron's flags of the model."""
        return load_flags(self.model)

    @property
    def seed(self) -> int:
        """Another batch for each."""
        return self.context // 1024 + self.stages

    @property
    def longest(self) -> int:
        """Tokens that the pipeline must have room for."""
        return max(self.lengths)

    @cached_property
    def shape(self) -> ModelShape:
        """The model on the fewest ranks per stage that leave room, as their buyer would choose: tensor-parallel ranks
        (up to 8) for weights and optimizer, then context-parallel ones for the longest sequence. Of that, keys, values, their
        gradient and the layers' inputs stay whatever recomputes, and the logits unless the loss is computed by blocks. The
        ranks must share the heads evenly.
        """
        plain = replace(shape_of(self.flags), tensor_parallel=1, sequence_parallel=False)
        heads = plain.num_attention_heads
        cap = self.cap_gb << 30
        for tensor in (ranks for ranks in (1, 2, 4, 8) if heads % ranks == 0):
            shape = self._by_blocks(replace(plain, tensor_parallel=tensor, sequence_parallel=tensor > 1))
            static = max(stage.static_bytes for stage in self._costs(shape).stages)
            if static <= STATIC_SHARE * cap:
                break
        for context in (ranks for ranks in range(1, MOST_CONTEXT_PARALLEL + 1) if heads % (shape.tensor_parallel * ranks) == 0):
            shape = self._by_blocks(replace(shape, context_parallel=context))
            stages = self._costs(shape).stages
            bytes_per_token = max(
                s.num_layers * (2 * s.kv.bytes_per_token + s.layers.input_bytes_per_token)
                + sum(e.bytes_per_token for e in s.ends)
                for s in stages
            )
            if static + bytes_per_token * self.longest <= LEAST_SHARE * cap:
                break
        return shape

    def _by_blocks(self, shape: ModelShape) -> ModelShape:
        """Return a shape whose loss is computed by blocks where training with this context does so unasked."""
        tokens = loss_block_tokens(AUTO, shape.vocab_size // shape.tensor_parallel, self.context // shape.context_parallel)
        return replace(shape, loss_block_tokens=tokens)

    def _costs(self, shape: ModelShape) -> PipelineCosts:
        profile = analytic_profile(shape, load_cluster(CLUSTER).rates)
        layers = balanced_layers(profile, shape.num_layers, self.stages, [Lengths(self.other_lengths)])
        return profile.costs(layers, state_bytes_per_parameter=6 + 12 / REPLICAS)

    @cached_property
    def costs(self) -> PipelineCosts:
        return self._costs(self.shape)

    @cached_property
    def problem(self) -> Problem:
        caps = (self.cap_gb << 30,) * self.stages
        return Problem(self.lengths, tuple(range(self.stages)), caps, token_multiple=self.shape.ranks)

    def plan(self, planner: str) -> tuple[Plan | None, float]:
        """The plan, None when nothing fits, and the processor time it took in ms."""
        problem, costs = self.problem, self.costs
        start_s = time.process_time()
        best = fitting(problem, costs, Options(planner=planner, context=self.context))
        return best, (time.process_time() - start_s) * 1e3


def sampled_cases() -> list[Case]:
    """Two thirds of all kinds of lengths, contexts and numbers of stages; models and caps take turns. And two extremes."""
    cases = [
        Case(kind, context, stages, MODELS[(k + 3 * c + s) % 4], CAPS_GB[(c + s) % 3])
        for k, kind in enumerate(("wikipedia", "code", "agents"))
        for c, context in enumerate(CONTEXTS)
        for s, stages in enumerate(STAGES)
        if (k + c + s) % 3
    ]
    return [*cases, Case("equal", 32768, 8, "llama3-8b", 40), Case("whale", 1048576, 8, "llama3-8b", 80)]


def name_of(case: Case) -> str:
    return f"{case.lengths_like} {case.context // 1024}K, {case.stages} stages, {case.model}, {case.cap_gb} GB"


def row(case: Case, planners: tuple[str, ...]) -> dict[str, Any]:
    """All figures of one case."""
    columns = facts(case)
    ours, columns["planning_ms"] = case.plan(OURS)
    columns |= {"refused": True} if ours is None else figures(ours)
    columns["rivals"] = {}
    for name in planners:
        theirs, planning_ms = case.plan(name)
        makespan_us = None if theirs is None else theirs.predicted.makespan_us
        columns["rivals"][name] = {"makespan_us": makespan_us, "planning_ms": planning_ms}
    return columns


def facts(case: Case) -> dict[str, Any]:
    """Description of the case."""
    return {
        "lengths": case.lengths_like,
        "context": case.context,
        "stages": case.stages,
        "model": case.model,
        "cap_gb": case.cap_gb,
        "tensor_parallel": case.shape.tensor_parallel,
        "context_parallel": case.shape.context_parallel,
        "sequences": len(case.lengths),
        "tokens": sum(case.lengths),
        "longest": max(case.lengths),
    }


def figures(plan: Plan) -> dict[str, Any]:
    """A plan's size and makespan, its gap to the lower bound, and the share of recompute in it on the busiest rank."""
    predicted = plan.predicted
    busy_us = [sum(step.time_us for step in steps) for steps in plan.ranks]
    rank = max(range(len(busy_us)), key=busy_us.__getitem__)
    return {
        "chunks": len(plan.chunks),
        "makespan_us": predicted.makespan_us,
        "gap": predicted.makespan_us / predicted.lower_bound_us - 1,
        "recompute_share": sum(plan.recompute_us[rank]) / predicted.makespan_us,
        "peak_over_cap": max(peak / cap for peak, cap in zip(predicted.peak_bytes, plan.cap_bytes, strict=True)),
    }
