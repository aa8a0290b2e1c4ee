"""Runs a batch of some trainings without recompute, with every level, with offload, and with KV offload, all
from the same weights and random states.

Returns by training and rank what `test_recompute_modes.py` looks at.
"""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_epp.features.offload.activations import ActivationOffload
from megatron_epp.features.offload.copy_handlers import offload_handlers
from megatron_epp.features.offload.host import HostMemory
from megatron_epp.features.split_weights.deferred_gradients import handlers as weight_handlers
from megatron_epp.plan import Copy, KVOffload, Op, Recompute
from megatron_epp.plan.kv_offload import slices_of
from megatron_epp.runtime.attention import core as attention
from megatron_epp.runtime.executor import HANDLERS
from megatron_epp.runtime.lowered import prepare
from tests.support.mcore.jobs.common import flags_of, write, written

RECOMPUTE_MODES = {
    "whole": Recompute(full=8), "linear": Recompute(selective=8), "mlp": Recompute(mlp=8), "each": Recompute(1, 1, 1),
    "two": Recompute(0, 1, 8),
}  # fmt: skip
"""By name; more layers than there are stand for all."""
OFFLOADS = {
    "0.3 away": (Recompute(), 0.3),
    "1.0 away": (Recompute(), 1.0),
    "0.6 of linear away": (Recompute(selective=8), 0.6),
    "0.6 of each away": (Recompute(1, 1, 1), 0.6),
}
"""By name: recompute, and the share of what every chunk then keeps that is copied away."""
KV_OFFLOAD = {
    "hosted": (Recompute(), 0.0),
    "hosted, each": (Recompute(1, 1, 1), 0.0),
    "hosted, 0.6 of whole away": (Recompute(full=8), 0.6),
}
"""Decisions with KV offload of slices besides; where the share is 0, nothing is copied."""
LOCAL = "--epp-slices 3"
HYBRID = "--hybrid-layer-pattern *-*-*-*- --spec tests.support.mcore.local_hybrid stack_spec"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2 "
EXPERTS += "--moe-z-loss-coeff 1e-3 --moe-router-enable-expert-bias --moe-router-score-function sigmoid "
SHARED = "--tensor-model-parallel-size 2 --sequence-parallel"

# By name: pipeline stages, processes, model and flags.
RUNS = {
    "llama": (2, 2, "llama", LOCAL),
    "grouped, weights apart": (2, 2, "grouped", f"{LOCAL} --epp-split-weight-gradient"),
    "dropout": (2, 2, "gpt2", f"{LOCAL} --hidden-dropout 0.1"),
    "experts": (1, 1, "llama", f"{LOCAL} {EXPERTS} --no-bias-gelu-fusion"),
    "experts shared by replicas": (1, 2, "llama", f"{LOCAL} {EXPERTS} --no-bias-gelu-fusion --expert-model-parallel-size 2"),
    "hybrid": (1, 1, "llama", f"{HYBRID} {LOCAL}"),
    "tensor and sequence parallel": (1, 2, "grouped", f"{LOCAL} {SHARED} --hidden-dropout 0.1"),
    "context parallel": (1, 2, "llama", f"{LOCAL} --context-parallel-size 2"),
}
"""One iteration each."""


def run(folder: Path, names: Sequence[str] = ()) -> dict[str, Any]:
    common = flags_of(folder, 1, 64, 2)
    from megatron_epp.mcore.iteration import base_run as schedule
    from scripts.parity.cells import MODELS
    from tests.support.mcore import local_hybrid  # it imports Megatron, which has to be prepared

    local_hybrid.use_torch_norms()
    schedule.Executor = by_levels(schedule.Executor)

    def training(stages: int, processes: int, model: str, own: str) -> tuple[int, list[str]]:
        return processes, [*common, "--pipeline-model-parallel-size", str(stages), *shlex.split(f"{MODELS[model]} {own}")]

    return written({name: training(*run) for name, run in RUNS.items() if name in (names or RUNS)}, folder)


def by_levels(executor):
    """An executor that runs a plan without recompute, then with every level, and compares gradients."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from megatron_epp.mcore.iteration import sliced_run
    from megatron_epp.mcore.model.layer_recompute import begin_graphs, recompute_by_mode
    from megatron_epp.mcore.releases import logged_router_losses

    calls = counted_calls()

    class ByLevels(executor):
        def __init__(self, plan, rank, stages, program, links, recorder, watchdog, **named):
            super().__init__(plan, rank, stages, program, links, recorder, watchdog, **named)
            rest = links, recorder, watchdog
            self.again = lambda variant, own: executor(variant, rank, stages, prepare(variant, rank), *rest, handlers=own)

        def gradients_of(self, variant, states):
            """Gradients, what routers count, calls of attention's kernel, most bytes that autograd held, and that were away."""
            torch.set_rng_state(states[0])
            get_cuda_rng_tracker().set_states(dict(states[1]))
            models = [stage.model for stage in self.stages.values()]
            buffers = {name: one for model in models for name, one in torch.nn.Module.named_buffers(model)}
            counts = {name: one for name, one in buffers.items() if "local_tokens_per_expert" in name}
            for sums in (*counts.values(), *logged_router_losses().values()):
                sums.zero_()
            for model in models:
                model.zero_grad_buffer()
            calls.clear()
            host, relays = HostMemory(torch.device("cpu"), 1 << 30), [stage.kv_cache for stage in self.stages.values()]
            others = [self._upload.buffer, *(p for stage in self.stages.values() for p in stage.parameters)]
            splits = sliced_run.current().options.split_weight
            own = {**HANDLERS, **(weight_handlers(variant, self.stages) if splits else {})}
            with (
                ActivationOffload(host, others, lambda: sum(kv_cache.num_bytes for kv_cache in relays)) as saved,
                offload_handlers(variant, self.rank, self.stages, host, saved, own) as handlers,
            ):
                self.again(variant, {**own, **handlers}).run()
            assert saved.live_bytes == host.held_bytes == 0
            gradients = {name: p.main_grad.clone() for model in models for name, p in model.named_parameters()}
            counted = {name: one.clone() for name, one in (counts | logged_router_losses()).items()}
            return gradients, counted, len(calls), saved.peak_bytes, host.held_peak_bytes

        def run(self):
            for stage in self.stages.values():  # as another schedule of the model would
                recompute_by_mode(stage.decoder.layers)
                begin_graphs(stage.model)
            states = torch.get_rng_state(), get_cuda_rng_tracker().get_states()
            differ, kernels, peaks, away, plain, miscounted, first = {}, {}, {}, {}, {}, {}, {}
            for name, variant in variants_of(self.plan).items():
                gradients, counted, kernels[name], peaks[name], away[name] = self.gradients_of(variant, states)
                plain, first = plain or gradients, first or counted
                differ[name] = [key for key, grad in gradients.items() if not torch.equal(grad, plain[key])]
                close = {key: torch.allclose(one, first[key], rtol=1e-6, atol=0.0) for key, one in counted.items()}
                miscounted[name] = [key for key, is_close in close.items() if not is_close]
            facts = {
                "hooks": [len(stage.decoder._forward_pre_hooks) for stage in self.stages.values()],
                "differ": differ,
                "miscounted": miscounted,
                "counted": sum(bool(one.any()) for one in first.values()),
                "kernels": kernels,
                "peaks": peaks,
                "away": away,
                "num_gradients": len(plain),
                "zeros": [key for key, grad in plain.items() if not grad.any()],
                "slices": any(chunk.slice_of(self.plan.lengths) is not None for chunk in self.plan.chunks),
            }
            write(sliced_run.current().args, facts)

    return ByLevels


def counted_calls():
    calls: list[int] = []
    choose = attention.kernels.choose

    def counting(*args, **options):
        kernel = choose(*args, **options)
        return replace(kernel, forward=lambda *call: (calls.append(1), kernel.forward(*call))[1])

    attention.kernels.choose = counting
    return calls


def variants_of(plan):
    variants = {name: with_levels(plan, recompute) for name, recompute in ({"": Recompute()} | RECOMPUTE_MODES).items()}
    variants |= {name: with_copies(with_levels(plan, again), share) for name, (again, share) in OFFLOADS.items()}
    for name, (again, share) in KV_OFFLOAD.items():
        variant = with_levels(plan, again)
        variants[name] = with_kv_offload(with_copies(variant, share) if share else variant)
    return variants


def with_levels(plan, recompute):
    """The plan with so many layers of each level, as far as a stage has them, whole ones first."""
    rows = []
    for layers in plan.num_layers:
        counts, left = [], layers
        for count in recompute:
            counts.append(min(count, left))
            left -= counts[-1]
        rows.append((Recompute(*counts),) * len(plan.chunks))
    return replace(plan, recompute=tuple(rows))


def with_copies(plan, share):
    """The plan with so much of what every chunk keeps copied away behind its forward, and back ahead of its backward."""
    copies = []
    for rank in range(plan.num_ranks):
        row, actions = [], plan.actions(rank)
        for at, action in enumerate(actions):
            if action.op is Op.F:
                row.append(Copy(action._replace(op=Op.O), 0.0, 0, 0))
            elif action.op is Op.B:
                row.append(Copy(action._replace(op=Op.L), 0.0, 0, 0, actions[at - 1]))
        copies.append(tuple(row))
    return replace(plan, copies=tuple(copies), offload_share=((share,) * len(plan.chunks),) * plan.num_stages)


def with_kv_offload(plan):
    pairs = ((stage, sequence) for stage in range(plan.num_stages) for sequence in slices_of(plan))
    return replace(plan, kv_offload=tuple(KVOffload(*pair, 0, 0) for pair in pairs))
