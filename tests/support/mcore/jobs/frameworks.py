"""Loops of frameworks around Megatron's schedules: the same microbatches by Megatron's own schedule and by plans.

Jobs of `test_user_*.py`, `test_reports.py`, `test_slow_stages.py` and `test_ways_in.py`. Worlds that stay cannot run
them: they set up and change what is global of Megatron, as frameworks do, and tests look at how ranks end and what they print.
"""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_epp
from megatron_epp.cost.blocks import LAYER
from megatron_epp.cost.kept import RECORDED, WARM_UP
from megatron_epp.cost.work import LinearTime
from megatron_epp.features.slow_stages.stage_watch import ITERATIONS
from megatron_epp.mcore import entry
from megatron_epp.plan import EppError
from megatron_epp.runtime.autograd.saved import SavedTensors

UNEVEN = (24, 8, 32, 16, 8, 32)
EVEN = (24,) * 6
"""For several stages per rank: of uneven ones stock's interleaved schedule mixes up the messages over gloo."""
HIDDEN = 16
Batch = dict[str, Tensor]
Schedule = Callable[..., Any]


@dataclass
class Loop:
    """A framework on one rank: chunks of its model, its microbatches, and its forward step."""

    models: list[Any]
    lengths: tuple[int, ...]
    batches: Callable[[], Any]
    forward_step: Callable[..., Any]

    def call(self, schedule: Schedule, **changes: Any) -> Any:
        several = len(self.models) > 1
        arguments = {
            "forward_step_func": self.forward_step,
            "data_iterator": [self.batches() for _ in self.models] if several else self.batches(),
            "model": self.models if several else self.models[0],
            "num_microbatches": len(self.lengths),
            "seq_length": 1,
            "micro_batch_size": 1,
        }
        return schedule(**arguments | changes)

    def run(self, schedule: Schedule, **changes: Any) -> tuple[Any, list[Tensor]]:
        """Return the results of one call and the gradients that it alone has made."""
        for model in self.models:
            model.zero_grad()
        results = self.call(schedule, **changes)
        return results, [p.grad.clone() for model in self.models for p in model.parameters() if p.grad is not None]


def causal(length: int) -> Tensor:
    """Return a mask of tokens that may not be seen, as Megatron's attention in torch takes it."""
    return torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)


def apart(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Return the largest norm of a difference over the norm of what is wanted; 0 without any tensor, as of a frozen stage."""
    pairs = zip(found, wanted, strict=True)
    return max((float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30)) for ours, theirs in pairs), default=0.0)


def megatrons_schedule() -> Schedule:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    return get_forward_backward_func()  # type: ignore[no-any-return]


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except EppError as error:
        return str(error)
    return ""


def begin(
    lengths: Sequence[int],
    stages: int | None = None,
    *,
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    replicas: int = 1,
    expert_parallel: int = 1,
    inside: str | None = None,
    **settings: Any,
) -> Loop:
    """Prepare Megatron on this rank, and return its loop.

    Args:
        stages: of the pipeline; None for one per rank.
        context_parallel: ranks that share a chunk's tokens, which plans know; Megatron's own attention in torch does not.
        inside: attribute of another model that holds the model; None for no other.
    """
    entry.prepare()
    dist.init_process_group("gloo")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    ranks = dist.get_world_size() // tensor_parallel // replicas // context_parallel
    stages = stages or ranks
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel,
        context_parallel_size=context_parallel,
        pipeline_model_parallel_size=ranks,
        virtual_pipeline_model_parallel_size=stages // ranks if ranks < stages else None,
        expert_model_parallel_size=expert_parallel,
    )
    model_parallel_cuda_manual_seed(1)
    models = [within(inside, model) for model in build(stages, ranks < stages, **settings)]
    for model in models:
        model.config.context_parallel_size = context_parallel  # when attention is there, which would refuse it
    return Loop(models, tuple(lengths), partial(batches, lengths), forward_step)


def build(
    stages: int,
    virtual: bool,
    num_experts: int | None = None,
    positions: str = "learned_absolute",
    pattern: str = "",
    **settings: Any,
) -> list[Any]:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    from megatron.core.transformer.enums import AttnBackend

    has_engine = specs.HAVE_TE  # in ranks of `transformer_engine.forked`
    layer = specs.get_gpt_layer_with_transformer_engine_spec if has_engine else specs.get_gpt_layer_local_spec
    is_latent = bool(settings.get("multi_latent_attention"))
    if "experimental_attention_variant" in settings:
        settings["activation_func"] = torch.nn.functional.silu  # which gated delta nets demand
    if is_latent:
        _take_sizes_of_latent_attention()
    if settings.get("moe_token_dispatcher_type") == "flex":
        from tests.support.mcore import deep_ep_stand_in

        deep_ep_stand_in.install()
    world, rank = parallel_state.get_pipeline_model_parallel_world_size(), parallel_state.get_pipeline_model_parallel_rank()
    # Megatron asks for this dispatcher even without experts.
    settings = {"moe_token_dispatcher_type": "alltoall"} | settings
    config = (MLATransformerConfig if is_latent else TransformerConfig)(
        num_layers=4,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        pipeline_model_parallel_size=world,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=stages // world if virtual else None,
        deallocate_pipeline_outputs=not virtual,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        num_moe_experts=num_experts,
        attention_backend=AttnBackend.unfused if has_engine else AttnBackend.auto,
        **settings,
    )
    config.batch_p2p_comm = False
    spec = layer(num_experts=num_experts, multi_latent_attention=is_latent)
    if config.experimental_attention_variant is not None:
        from tests.support.mcore.delta_hybrid import alternating

        spec = alternating(spec, config.num_layers // stages)
    of_model = GPTModel
    if pattern:
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        from tests.support.mcore import local_hybrid, mamba_hybrid

        local_hybrid.use_torch_norms()
        of_model, spec = partial(HybridModel, hybrid_layer_pattern=pattern), mamba_hybrid.stack_spec
    chunks = []
    for number in range(stages // world):
        stage = number * world + rank
        model = of_model(
            config,
            spec,
            vocab_size=64,
            max_sequence_length=64,
            position_embedding_type=positions,
            pre_process=stage == 0,
            post_process=stage == stages - 1,
            vp_stage=number if virtual else None,
        )
        model.vp_stage = number if virtual else None
        chunks.append(model)
    return chunks


def _take_sizes_of_latent_attention() -> None:
    """Have Megatron's attention in torch take the sizes that latent attention names, which must be its own for all."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    construct = DotProductAttention.__init__

    def taking(self: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **named: Any) -> None:
        construct(self, *args, **named)
        assert {k_channels, v_channels} <= {None, self.hidden_size_per_attention_head}

    DotProductAttention.__init__ = taking


def within(name: str | None, model: Any) -> Any:
    """Return a model that has `model` as its attribute `name`, beside a tower with a decoder of its own; `model` for None."""
    from megatron.core.enums import ModelType

    if name is None:
        return model

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config, self.model_type, self.vp_stage = model.config, ModelType.encoder_or_decoder, model.vp_stage
            setattr(self, name, model)
            self.vision_model = torch.nn.Module()
            self.vision_model.decoder = torch.nn.Module()
            self.vision_model.decoder.layers = torch.nn.ModuleList([torch.nn.Linear(1, 1)])

        def forward(self, *args: Any, **named: Any) -> Any:
            return model(*args, **named)

        def set_input_tensor(self, tensors: Any) -> None:
            model.set_input_tensor(tensors)

    return Outer()


def batches(lengths: Sequence[int], seed: int = 5, pixels: int = 0) -> Iterator[Batch]:
    """Yield a microbatch of each length, with so many bytes beside its tokens."""
    made = torch.Generator().manual_seed(seed)
    for length in lengths:
        batch = {name: torch.randint(64, (1, length), generator=made) for name in ("tokens", "labels")}
        yield batch | {"pixels": torch.zeros(pixels, dtype=torch.uint8)}


def outputs(model: Any, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
    length = tokens.shape[1]
    return model(tokens, torch.arange(length)[None], causal(length), labels=labels)


def forward_step(data_iterator: Iterator[Batch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
    """Run a microbatch, whose loss is three times the mean."""
    batch = next(data_iterator)
    output, length = outputs(model, batch["tokens"], batch["labels"]), batch["tokens"].shape[1]

    def loss_func(losses: Tensor, non_loss_data: bool = False) -> Any:
        if non_loss_data:
            return {"tokens": length, "of each": losses.flatten().tolist()}
        return 3.0 * losses.mean(), {"tokens": length, "loss": float(losses.mean())}

    return output, loss_func


RUNS = 6
"""Costs are learnt in the first four."""


def frozen_later(lengths: Sequence[int]) -> dict[str, Any]:
    """Freeze the layers of the last stage after a call, and free those of the first, which were frozen, after another."""
    loop = begin(lengths)
    (model,), rank = loop.models, dist.get_rank()
    if rank == 0:
        model.requires_grad_(False)
    planned = megatron_epp.wrap()
    loop.run(planned)
    if rank == 1:
        model.decoder.requires_grad_(False)
    _, gradients = loop.run(planned)
    loop.run(planned)
    if rank == 0:
        model.requires_grad_(True)
    return {"rank": rank, "num_gradients": len(gradients), "refused": refusal(lambda: loop.run(planned))}


def compared(
    stages: int,
    lengths: Sequence[int],
    *,
    settings: Mapping[str, Any] | None = None,
    inside: str | None = None,
    pixels: int = 0,
    host_link: Sequence[float] | None = None,
    us_per_token: Mapping[str, float] | None = None,
    part: str | None = None,
    recomputes: bool = False,
) -> dict[str, Any]:
    """Run microbatches once by stock, then several times by plans with settings of `wrap`, and evaluate with both.

    Args:
        pixels: bytes of a microbatch beside its tokens.
        host_link: latency in us and us per byte of copies to the host: this machine's are too slow for such tiny layers.
        us_per_token: times of a layer in place of those that are learnt.
        part: of the model that trains, as of `adapters.freeze`; None for all.
        recomputes: the model recomputes all layers by its own configuration, but for the run by stock.
    """
    loop = begin(lengths, stages, inside=inside)
    if part is not None:
        from tests.support.mcore.adapters import freeze

        for model in loop.models:
            freeze(model, part)
    loop.batches = partial(loop.batches, pixels=pixels)
    schedule = megatrons_schedule()
    stock = loop.run(schedule)
    if recomputes:
        config = loop.models[0].config
        config.recompute_granularity, config.recompute_method, config.recompute_num_layers = "full", "uniform", 1
    if host_link is not None:
        from megatron_epp.features.offload import rank_offload

        rank_offload.measure_host_link = lambda device: tuple(host_link)
    if us_per_token is not None:
        with_fixed_times(us_per_token)
    planned = megatron_epp.wrap(**settings or {})
    parameters = [parameter for model in loop.models for parameter in model.parameters()]
    runs = []
    for _ in range(RUNS):
        with SavedTensors(parameters) as saved:
            results, gradients = loop.run(planned)
        runs.append({"worst": apart(gradients, stock[1]), "results": results, "peak_bytes": saved.peak_bytes})
    found = {"rank": dist.get_rank(), "runs": runs, "stock": stock[0], "num_gradients": len(stock[1])}
    with torch.no_grad():
        found["evaluated"] = loop.run(planned, forward_only=True)[0]
        for name, one in (("collected", planned), ("collected by stock", schedule)):
            found[name] = loop.run(one, forward_only=True, collect_non_loss_data=True)[0]
    return found


def installed(stages: int, lengths: Sequence[int], name: str) -> dict[str, Any]:
    """Run microbatches by a framework that knows nothing of plans, before they are installed, meanwhile, and afterwards. It has
    imported Megatron's schedule by its name, too.
    """
    loop = begin(lengths, stages)
    from megatron.core.pipeline_parallel import get_forward_backward_func, schedules

    from megatron_epp.mcore.iteration.wrap import uninstall

    sys.modules["framework"] = framework = ModuleType("framework")
    framework.run = original = getattr(schedules, name)  # type: ignore[attr-defined]
    stock = loop.run(get_forward_backward_func())
    schedule = megatron_epp.install(memory_cap_gb=1)
    twice = refusal(megatron_epp.install)
    runs = [loop.run(run) for run in (get_forward_backward_func(), framework.run) for _ in range(RUNS // 2)]
    learnt = schedule._runs[0].learning.is_done
    uninstall()
    afterwards = loop.run(get_forward_backward_func())
    return {
        "worst": max(apart(gradients, stock[1]) for _, gradients in (*runs, afterwards)),
        "results": [results for results, _ in runs] + [afterwards[0]],
        "stock": stock[0],
        "learnt": learnt,
        "twice": twice,
        "is_stock": framework.run is original is getattr(schedules, name),
    }


def with_fixed_times(us_per_token: Mapping[str, float]) -> None:
    """Replace the times that are learnt: those of such tiny layers are mostly noise, so plans would differ from run to run.

    Weight gradients take none unless told: measured, they can take longer than the whole backward that they are a part of.
    """
    from megatron_epp.features.learnt_costs import learn_costs

    learn, us_per_token = learn_costs.fitted_costs, {"weight": 0.0, **us_per_token}
    lines = {name: LinearTime(0.0, value) for name, value in us_per_token.items()}

    def fixed(*rest: Any, **named: Any) -> Any:
        costs = learn(*rest, **named)
        no_times = dict.fromkeys(lines, LinearTime())
        return replace(costs, stages=tuple(own.changed(**no_times).changed(LAYER, **lines) for own in costs.stages))

    learn_costs.fitted_costs = fixed


def of_core_alone(stages: int, lengths: Sequence[int]) -> dict[str, Any]:
    """Compare with some release's `megatron.core` on the path, and nothing of `megatron.training`. Prints the release."""
    from megatron_epp.mcore import cpu, entry, releases
    from megatron_epp.mcore.patches import patching

    def prepare() -> None:
        """Let Megatron run without a GPU, which a framework needs not."""
        if cpu.activate():
            patches = [patch for patch in cpu.patches() if "core.tensor_parallel" in patch.target]
            patching.apply(patches, allow_unknown=True)

    sys.modules["megatron.training"] = None  # type: ignore[assignment] # another release's may be installed
    entry.prepare = prepare
    print(f"megatron-core {releases.installed_version()}")
    found = compared(stages, lengths)
    dist.destroy_process_group()  # or threads of gloo may end the process while it exits
    return found


def learnt() -> dict[str, Any]:
    """Keep what a schedule has learnt.

    Returns whether they learn, and their state, of a schedule that has learnt, one that takes its state, and one that takes
    the state of another machine; and what the first says to a state that comes too late.
    """
    loop = begin(UNEVEN)
    found: list[dict[str, Any]] = []

    def after(calls: int, loaded: Mapping[str, Any] | None = None) -> Any:
        schedule = megatron_epp.wrap()
        if loaded is not None:
            schedule.load_state_dict(loaded)
        for _ in range(calls):
            loop.run(schedule)
        learns = not schedule._runs[0].learning.is_done
        found.append({"learns": learns, "state": json.loads(json.dumps(schedule.state_dict()))})
        return schedule

    own = after(WARM_UP + RECORDED)
    state = json.loads(json.dumps(own.state_dict()))
    after(1, state)
    state["pipelines"][0]["learnt_with"]["the device"] = "another one"
    after(1, state)
    return {"schedules": found, "late": refusal(lambda: own.load_state_dict(state))}


SLEEP_S = 0.05


def slow() -> None:
    loop = begin(UNEVEN[:4])
    schedule = megatron_epp.wrap()

    def sleeping(data_iterator: Iterator[Batch], model: Any) -> Any:
        time.sleep(SLEEP_S)
        return forward_step(data_iterator, model)

    for iteration in range(WARM_UP + RECORDED + 3 * ITERATIONS):
        if iteration == WARM_UP + RECORDED and dist.get_rank() == dist.get_world_size() - 1:
            loop.forward_step = sleeping
        loop.run(schedule)


def wrong(case: str) -> None:
    """Run a loop on two ranks whose input is wrong in the way that is named.

    Prints `stepped` where the schedule returns, and whether weights have changed.
    """
    with entry.errors_in_one_line():
        loop = begin(UNEVEN, tensor_parallel=2 if case.startswith("tensor parallel") else 1)
        planned = megatron_epp.wrap(**({"shape_of": too_long} if case == "other lengths" else {}))
        if "differ" in case:
            loop.batches = partial(longer_on_rank_1, loop.batches)
        loop.forward_step = wrong_step(case)
        optimizer = torch.optim.SGD([parameter for model in loop.models for parameter in model.parameters()], lr=0.1)
        before = [parameter.clone() for parameter in loop.models[0].parameters()]
        try:
            if case == "two iterators":
                loop.call(planned, data_iterator=[loop.batches(), loop.batches()], model=loop.models, num_microbatches=1)
            loop.run(planned, num_microbatches=len(UNEVEN) + (case == "one too few"))
            optimizer.step()
            print(f"rank {dist.get_rank()} stepped", flush=True)
        finally:
            same = all(torch.equal(a, b) for a, b in zip(before, loop.models[0].parameters(), strict=True))
            print(f"rank {dist.get_rank()}: weights are {'as they were' if same else 'changed'}", flush=True)


def too_long(item: Batch) -> list[int]:
    return [2 * item["tokens"].shape[1]]


def longer_on_rank_1(own: Callable[[], Iterator[Batch]]) -> Iterator[Batch]:
    for number, batch in enumerate(own()):
        longer = number == 1 and dist.get_rank() == 1
        yield {name: torch.cat([one, one], dim=-1) for name, one in batch.items()} if longer else batch


def wrong_step(case: str) -> Callable[..., Any]:
    """Return a forward step that fails on the rank that the case names at the fourth microbatch it sees."""
    seen = []

    def step(data_iterator: Iterator[Batch], model: Any) -> Any:
        seen.append(None)
        if case.endswith(f"fails on rank {dist.get_rank()}") and len(seen) == 4:
            raise ValueError("this sample has no image")
        output, loss_func = forward_step(data_iterator, model)
        if case == "another type" and dist.get_rank() == 0:
            return output.double(), loss_func
        if case == "four values":
            return output, lambda losses: (*loss_func(losses), 1, 2)
        if case == "one number for each token":
            return output, lambda losses: (losses, {})
        return output, loss_func

    return step


def split_step(ways: Sequence[tuple[bool, bool]]) -> list[dict[str, Any]]:
    """Reduce gradients of training steps of two calls after both: on two replicas, on four ranks.

    The hooks of the model's configuration are set so that no call reduces. Returns for every way of data parallelism, whether
    reductions overlap and whether the optimizer is distributed, the relative difference of the reduced gradients from those of
    Megatron's own schedule; and that of planned calls that reduce by themselves, as the hooks of Megatron's training ask, where
    one of the replicas has no microbatches.
    """
    loop = begin(UNEVEN, 2, replicas=2)
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    replica, count = parallel_state.get_data_parallel_rank(), len(UNEVEN)
    loop.batches = partial(batches, UNEVEN, seed=5 + replica)
    found = []
    for overlap, distributed in ways:
        settings = DistributedDataParallelConfig(overlap_grad_reduce=overlap, use_distributed_optimizer=distributed)
        (bare,) = build(2, virtual=False)
        model = DistributedDataParallel(bare.config, settings, bare)
        loop.models = [model]
        of_each = []
        for schedule in (megatrons_schedule(), megatron_epp.wrap()):
            for _ in range(2):  # of the first batch, Megatron's hooks only count
                of_each.append(stepped(loop, schedule, finalize_model_grads, replica))
        figures = {"rank": dist.get_rank(), "overlap": overlap, "distributed": distributed}
        found.append(figures | {"worst": apart([of_each[3]], [of_each[1]])})
        alone, schedule = [], megatron_epp.wrap()
        counts = [0 if replica == number else count for number in range(2)]
        stock = [stepped(loop, megatrons_schedule(), finalize_model_grads, replica, 1, own) for own in counts]
        for number in range(RUNS):  # while costs are learnt and after
            own = counts[number % 2]
            model.zero_grad_buffer()
            model.config.no_sync_func = model.no_sync if overlap else None
            model.config.finalize_model_grads_func = finalize_model_grads
            results = loop.call(schedule, model=[model], num_microbatches=own)
            assert len(results) == (own if bare.post_process else 0)
            alone.append(apart([reduced(model, replica)], [stock[number % 2]]))
        found.append(figures | {"worst": max(alone)})
    return found


def stepped(loop: Loop, schedule: Schedule, finalize: Any, replica: int, calls: int = 2, count: int = len(UNEVEN)) -> Tensor:
    """Return the gradients that this rank's optimizer would use after a training step: all, or the shard it owns."""
    (model,) = loop.models
    model.zero_grad_buffer()
    config = model.config
    config.no_sync_func, config.grad_sync_func, config.finalize_model_grads_func = contextlib.nullcontext, None, None
    for _ in range(calls):
        with model.no_sync():
            loop.call(schedule, model=[model], num_microbatches=count)
    if model.ddp_config.overlap_grad_reduce:
        model.start_grad_sync()
    finalize([model])
    return reduced(model, replica)


def reduced(model: Any, replica: int) -> Tensor:
    sharded, found = model.ddp_config.use_distributed_optimizer, []
    for buffer in model.buffers:
        for bucket in buffer.buckets:
            shards = bucket.grad_data.chunk(dist.get_world_size(buffer.data_parallel_group)) if sharded else [bucket.grad_data]
            found.append(shards[replica if sharded else 0].clone())
    return torch.cat(found)
