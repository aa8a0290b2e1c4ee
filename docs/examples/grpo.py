"""Trains GRPO's update on a list of responses, on two pipeline stages and in slices:

torchrun --nproc-per-node 2 -m megatron_epp.run docs/examples/grpo.py
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

import megatron_epp
from megatron_epp.losses import Average, ClippedRatio


def responses(count: int) -> list[dict[str, object]]:
    """Draw prompts of 8 tokens with responses of very different lengths, of which those that repeat a token are rewarded."""
    random, samples = torch.Generator().manual_seed(0), []
    for number in range(count):
        length = int(torch.randint(4, 500 if number % 8 == 0 else 40, (1,), generator=random))
        tokens = torch.randint(1, 64, (8 + length,), generator=random)
        if number % 2:
            tokens[8:] = tokens[8]
        trained = [0] * 8 + [1] * length  # the response; the prompt is only read
        samples.append({"tokens": tokens, "trained": trained, "advantages": 1.0 if number % 2 else -1.0})
    return samples


def model() -> DistributedDataParallel:
    """Build this rank's stage as a framework does, which knows nothing of plans."""
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    config = TransformerConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        pipeline_dtype=torch.float32,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    bare = GPTModel(config, get_gpt_layer_local_spec(), 64, 1024, pre_process=first, post_process=last)
    return DistributedDataParallel(config, DistributedDataParallelConfig(), bare.cuda())


def main() -> None:
    dist.init_process_group()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(1)
    policy, samples = model(), responses(32)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, use_distributed_optimizer=False), [policy])

    loss = ClippedRatio(average=Average.SEQUENCE_MEANS, kl="k3", kl_weight=0.01)
    train = megatron_epp.wrap_samples(loss=loss, memory_cap_gb=4)
    old = megatron_epp.wrap_samples()(model=policy, samples=samples, forward_only=True, wants_logprobs=True).logprobs
    for sample, logprobs in zip(samples, old, strict=True):  # a value for every token; none predicts the first
        sample["old_logprobs"] = sample["reference_logprobs"] = [0.0, *logprobs.tolist()]

    for step in range(8):
        policy.zero_grad_buffer()
        optimizer.zero_grad()
        report = train(model=policy, samples=samples)
        optimizer.step()
        if dist.get_rank() == 0:
            means = ", ".join(f"{name} {value:.4f}" for name, value in report.means.items())
            print(f"step {step}: {means}, {report.num_chunks} chunks")
    train.close()


if __name__ == "__main__":
    main()
