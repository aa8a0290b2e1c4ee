"""A loop of a framework's own around Megatron's schedules: uneven microbatches, once with stock's and several times by plans.

Prints the largest relative difference of gradients, the results in order, and for each planned run whether both agree.
"""

import json
import os
import sys

import torch
import torch.distributed as dist

from tests.support.mcore.figures import record_figures

LENGTHS = tuple(map(int, sys.argv[2].split(",")))
HIDDEN = 16


def begin(stages=None, tensor_parallel=1, replicas=1, **settings):
    """Prepare Megatron on this rank, and return the rank's model chunks.

    Args:
        stages: of the pipeline; None for one per rank.
        tensor_parallel: ranks that share a stage's layers.
        replicas: of the pipeline.
        settings: of the model's configuration.
    """
    from megatron_epp.mcore import entry

    entry.prepare()
    dist.init_process_group("gloo")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    ranks = dist.get_world_size() // tensor_parallel // replicas
    stages = stages or ranks
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel,
        pipeline_model_parallel_size=ranks,
        virtual_pipeline_model_parallel_size=stages // ranks if ranks < stages else None,
    )
    model_parallel_cuda_manual_seed(1)
    return build(stages, ranks < stages, **settings)


def main():
    models = begin(int(sys.argv[1]))
    from megatron.core.pipeline_parallel import get_forward_backward_func

    import megatron_epp
    from megatron_epp.runtime.autograd.saved import SavedTensors

    schedule = get_forward_backward_func()
    stock = [None, []] if "MICROBATCHES" in os.environ else run(schedule, models)
    if "HOST_LINK" in os.environ:  # latency in us, us per byte: this machine's is too slow for such tiny layers
        from megatron_epp.mcore.costs import sources

        sources.measure_host_link = lambda device: tuple(json.loads(os.environ["HOST_LINK"]))
    if "US_PER_TOKEN" in os.environ:
        with_fixed_times(json.loads(os.environ["US_PER_TOKEN"]))
    planned = megatron_epp.wrap(**json.loads(os.environ.get("SETTINGS", "{}")))
    parameters = [parameter for model in models for parameter in model.parameters()]
    for _ in range(6):
        with SavedTensors(parameters) as saved:
            found = run(planned, models)
        worst = max(
            float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))
            for ours, theirs in zip(found[1], stock[1], strict=True)
        )
        figures = {"worst": worst, "results": found[0], "stock": stock[0], "peak_bytes": saved.peak_bytes}
        record_figures({"rank": dist.get_rank()} | figures)
    with torch.no_grad():
        evaluated = run(planned, models, forward_only=True)
        collected, by_stock = (run(one, models, forward_only=True, collect=True)[0] for one in (planned, schedule))
    figures = {"evaluated": evaluated[0], "stock": stock[0], "collected": collected, "collected by stock": by_stock}
    record_figures({"rank": dist.get_rank()} | figures)


def with_fixed_times(us_per_token):
    """Replace the times that are learnt: those of such tiny layers are mostly noise, so plans would differ from run to run."""
    from dataclasses import replace

    from megatron_epp.cost import Line
    from megatron_epp.mcore import run

    learn, lines = run.fitted_costs, {name: Line(0.0, value) for name, value in us_per_token.items()}
    lines |= {f"extra_{name}": Line() for name in us_per_token}

    def fixed(*rest, **named):
        costs = learn(*rest, **named)
        return replace(costs, stages=tuple(replace(stage, **lines) for stage in costs.stages))

    run.fitted_costs = fixed


def build(stages, virtual, num_experts=None, **settings):
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    world, rank = parallel_state.get_pipeline_model_parallel_world_size(), parallel_state.get_pipeline_model_parallel_rank()
    config = TransformerConfig(
        num_layers=4,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        pipeline_model_parallel_size=world,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=stages // world if virtual else None,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # which Megatron asks for even without experts
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        deallocate_pipeline_outputs=not virtual,
        num_moe_experts=num_experts,
        **settings,
    )
    config.batch_p2p_comm = False
    chunks = []
    for number in range(stages // world):
        stage = number * world + rank
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(num_experts=num_experts),
            vocab_size=64,
            max_sequence_length=64,
            pre_process=stage == 0,
            post_process=stage == stages - 1,
            vp_stage=number if virtual else None,
        )
        model.vp_stage = number if virtual else None
        chunks.append(within(os.environ.get("INSIDE"), model))
    return chunks


def within(name, model):
    """Return a model that has `model` as its attribute `name`, beside a tower with a decoder of its own; `model` for None."""
    from megatron.core.enums import ModelType

    if name is None:
        return model

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config, self.model_type, self.vp_stage = model.config, ModelType.encoder_or_decoder, model.vp_stage
            setattr(self, name, model)
            self.vision_model = torch.nn.Module()
            self.vision_model.decoder = torch.nn.Module()
            self.vision_model.decoder.layers = torch.nn.ModuleList([torch.nn.Linear(1, 1)])

        def forward(self, *args, **named):
            return model(*args, **named)

        def set_input_tensor(self, tensors):
            model.set_input_tensor(tensors)

    return Outer()


def batches(seed=5):
    made = torch.Generator().manual_seed(seed)
    for length in LENGTHS:
        batch = {name: torch.randint(64, (1, length), generator=made) for name in ("tokens", "labels")}
        yield batch | {"pixels": torch.zeros(int(os.environ.get("PIXELS", "0")), dtype=torch.uint8)}


def forward_step(data_iterator, model):
    batch = next(data_iterator)
    length = batch["tokens"].shape[1]
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    output = model(batch["tokens"], torch.arange(length)[None], mask, labels=batch["labels"])

    def loss_func(losses, non_loss_data=False):
        if non_loss_data:
            return {"tokens": length, "of each": losses.flatten().tolist()}
        return 3.0 * losses.mean(), {"tokens": length, "loss": float(losses.mean())}

    return output, loss_func


def run(schedule, models, forward_only=False, collect=False):
    """Gradients and results of one call."""
    for model in models:
        model.zero_grad()
    several = len(models) > 1
    results = schedule(
        forward_step_func=forward_step,
        data_iterator=[batches() for _ in models] if several else batches(),
        model=models if several else models[0],
        num_microbatches=int(os.environ.get("MICROBATCHES", len(LENGTHS))),
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=collect,
    )
    gradients = [p.grad.clone() for model in models for p in model.parameters() if p.grad is not None]
    return results, gradients


if __name__ == "__main__":
    main()
