"""Runs plans for many random batches on one model, each with other recompute, and measures what the device and the host hold.

Returns by training and rank what `test_memory.py` looks at.
"""

import contextlib
import random
import shlex
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from megatron_epp import planner
from megatron_epp.data.batch import GlobalBatch
from megatron_epp.features.offload.activations import ActivationOffload
from megatron_epp.features.offload.copy_handlers import offload_handlers
from megatron_epp.features.split_weights.deferred_gradients import handlers as weight_handlers
from megatron_epp.plan import RECOMPUTE_MODES, Action, InfeasibleError, Op
from megatron_epp.plan.kv_offload import host_peak_bytes, slices_in
from megatron_epp.plan.lowering import lower
from megatron_epp.plan.plan_figures import offload_share
from megatron_epp.planner import UNLIMITED_BYTES
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.tables import tabulate
from megatron_epp.runtime.executor import HANDLERS
from tests.support.mcore.jobs.common import flags_of, write, written
from tests.support.plan.random_forests import forest
from tests.support.runtime.synthetic_sequences import MemoryDataset

CONTEXT, VOCABULARY = 256, 95
OPTIONS, SPLIT = "--epp-offload --epp-slices 3", "--epp-split-weight-gradient"
LATENT = "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 24 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 20 "
LATENT += "--rope-type rope --no-rope-fusion"
MAMBA = "--mamba-num-heads 8 --mamba-head-dim 16 --mamba-num-groups 2 --mamba-state-dim 16 "
MAMBA += "--spec tests.support.mcore.mamba_hybrid stack_spec"
# By name: processes, model and flags.
RUNS = {
    "llama": (2, "llama", ""),
    "grouped, with dropout": (2, "grouped", "--hidden-dropout 0.1"),
    "grouped in bf16, ten slices": (2, "grouped", "--bf16 --epp-slices 10"),
    "latents": (2, "llama", f"{LATENT} --epp-latents on"),
    "windows, sinks": (2, "grouped", "--window-size 20,0 --window-attn-skip-freq 2 --softmax-type learnable"),
    "Mamba-2": (2, "llama", f"{MAMBA} --hybrid-layer-pattern MMMM|MMMM"),
    "Mamba-2 with attention": (2, "llama", f"{MAMBA} --hybrid-layer-pattern MM*M|*MMM"),
    "weights apart, there and back": (2, "gpt2", f"{SPLIT} --num-virtual-stages-per-pipeline-rank 2 --epp-placement v"),
}


def run(folder: Path, batches: int, names: Sequence[str] = ()) -> dict[str, Any]:
    common = [*flags_of(folder, 1, CONTEXT, 8), "--num-layers", "8", *shlex.split(OPTIONS)]
    from megatron_epp.mcore.iteration import base_run as schedule
    from scripts.parity.cells import MODELS
    from tests.support.mcore import local_hybrid

    local_hybrid.use_torch_norms()
    schedule.Executor = of_batches(schedule.Executor, batches)

    def flags(processes: int, model: str, own: str) -> list[str]:
        return [*common, "--pipeline-model-parallel-size", str(processes), *shlex.split(f"{MODELS[model]} {own}")]

    return written({name: (run[0], flags(*run)) for name, run in RUNS.items() if name in (names or RUNS)}, folder)


def of_batches(executor, batches):
    """An executor that forgets its plan and runs those of random batches."""
    from megatron_epp.features.offload.rank_offload import RankOffload
    from megatron_epp.mcore.costs.sources import pipeline_costs
    from megatron_epp.mcore.iteration import sliced_run

    class RandomText(MemoryDataset):
        def tokens(self, index, start=0, end=None):
            return np.random.default_rng(index).integers(VOCABULARY, size=self.lengths[index] + 1)[start:end]

    class OfBatches(executor):
        def run(self):
            run = sliced_run.current()
            args = run.args
            host = next(feature.host for feature in run.features if isinstance(feature, RankOffload))
            costs = pipeline_costs(args, self.stages, self.links, run.ask, run.measured)
            costs = replace(costs, host_latency_us=1.0, host_us_per_byte=1e-5)  # so that planners like to copy
            lines = []
            for name, plan in plans(args, costs, run, batches):
                indices = tuple(range(len(plan.lengths)))
                batch = GlobalBatch(indices=indices, lengths=plan.lengths, plan=plan, dataset=RandomText(plan.lengths))
                prepared = run.inputs.prepare(batch, lower(plan)[self.rank])
                others = [p for stage in self.stages.values() for p in stage.parameters]
                others.append(prepared.upload.buffer)
                cached = lambda: sum(stage.kv_cache.num_bytes for stage in self.stages.values())  # noqa: E731
                for stage in self.stages.values():
                    stage.begin(prepared.chunk)
                own = {**HANDLERS, **(weight_handlers(plan, self.stages) if run.options.split_weight else {})}
                with (
                    ActivationOffload(host, others, cached) as saved,
                    offload_handlers(plan, self.rank, self.stages, host, saved, own) as handlers,
                ):
                    executor(plan, self.rank, self.stages, prepared.program, self.links, handlers={**own, **handlers}).run()
                caches = [stage.kv_cache.offloaded for stage in self.stages.values() if stage.kv_cache.offloaded is not None]
                planned = plan.predicted.peak_bytes[self.rank] - plan.static_bytes[self.rank]
                lines.append(
                    {
                        "name": name,
                        "planned": planned,
                        "measured": saved.peak_bytes,
                        "left": saved.live_bytes + host.held_bytes,
                        "planned_host": host_peak_bytes(plan)[self.rank],
                        "host": host.held_peak_bytes,
                        "hosted": len(caches),
                        "share": offload_share(plan),
                        "borrowed": plan.num_shared_tokens,
                        "chunks": len(plan.chunks),
                        "offloadable": costs.offloadable_share,
                        "recompute": sorted({str(again) for row in plan.recompute for again in row}),
                    }
                )
            write(args, lines)

    return OfBatches


def plans(args, costs, run, batches):
    """Names and plans, the same on every rank: of every batch first one that recomputes, copies and hosts nothing."""
    from megatron_epp.mcore.arguments.layout import token_multiple
    from megatron_epp.mcore.arguments.parser import options_from

    draw = random.Random(8)
    placement = run.placement.rank_of
    static = [sum(costs.static_bytes(s) for s, on in enumerate(placement) if on == r) for r in range(max(placement) + 1)]
    free_of_caps = planner.Problem((), placement, (UNLIMITED_BYTES,) * len(static), token_multiple(args))
    for number in range(batches):
        lengths = tuple(min(CONTEXT, int(draw.lognormvariate(3.5, 1.2)) + 1) for _ in range(draw.randint(3, 12)))
        problem = replace(free_of_caps, lengths=lengths)
        if number % 2:  # of trees
            grown = forest(draw, trees=draw.randint(1, 3), depth=draw.randint(2, 4), tokens=30)
            problem = replace(free_of_caps, lengths=grown.lengths, borrowed=grown.borrowed)
        options = replace(options_from(args, training=True), slices=draw.randint(1, 4), offload=False)
        made = planner.PLANNERS["greedy"](problem, costs, options)
        free = build_plan(problem, costs, options, made)
        yield "free", free

        def chosen(modes, some, copied, problem=problem, options=options, made=made):
            """Recompute of all layers at one level, or of some at several; `copied`, or with some keys and values away."""
            passes = tabulate(made.chunks, problem, costs, modes).passes
            recompute_steps = [
                [draw.randint(0, int(passes[stage].most[c])) if some else count for c in range(len(made.chunks))]
                for stage, count in enumerate(costs.num_layers)
            ]
            copies = with_copies(made.order, costs.offloadable_share, draw) if copied else {}
            sequences = slices_in(made.chunks, problem.lengths, problem.borrowed)
            pairs = [*product(range(len(recompute_steps)), sequences)]
            kv_offload = frozenset(draw.sample(pairs, draw.randint(min(1, len(pairs)), len(pairs))) if not copied else [])
            changed = replace(made, modes=modes, recompute_steps=recompute_steps, kv_offload=kv_offload, **copies)
            return build_plan(problem, costs, options, changed)

        for at, mode in enumerate(RECOMPUTE_MODES):
            yield f"all {mode}", chosen((mode,), False, (at + number // 2) % 2 == 0)
        yield "some", chosen(tuple(draw.sample(RECOMPUTE_MODES, draw.randint(2, 3))), True, draw.random() < 0.5)
        part = draw.uniform(0.35, 0.9)
        caps = tuple(base + int(part * (peak - base)) for base, peak in zip(static, free.predicted.peak_bytes, strict=True))
        with contextlib.suppress(InfeasibleError):
            yield "capped", planner.plan(replace(problem, cap_bytes=caps), costs, replace(options, offload=draw.random() < 0.7))


def with_copies(order, most, draw):
    """Copies of some chunks, back behind one of the actions between their forward and their backward."""
    stages = 1 + max(action.stage for row in order for action in row)
    chunks = 1 + max(action.chunk for row in order for action in row)
    shares = [[0.0] * chunks for _ in range(stages)]
    rows = []
    for actions in order:
        found = []
        for at, action in enumerate(actions):
            backward = actions.index(Action(Op.B, action.stage, action.chunk))
            if action.op is Op.F and backward > at + 1 and draw.random() < 0.6:
                shares[action.stage][action.chunk] = draw.uniform(0.1, most)
                behind = draw.randrange(at, backward)
                found += [(at, 0, action._replace(op=Op.O), None), (behind, 1, action._replace(op=Op.L), actions[behind])]
        rows.append(tuple((action, after) for _, _, action, after in sorted(found, key=lambda copy: copy[:2])))
    return {"copies": tuple(rows), "offload": tuple(map(tuple, shares))}
