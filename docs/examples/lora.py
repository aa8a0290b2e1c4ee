"""Trains adapters (LoRA) of a model of Hugging Face on pipeline stages and in slices, and writes a folder of PEFT:

torchrun --nproc-per-node 2 -m megatron_epp.run docs/examples/lora.py Qwen/Qwen3-8B documents/chats adapters
"""

import sys

import numpy as np
import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge
from megatron.bridge.peft.lora import LoRA
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

import megatron_epp

STEPS, BATCH = 200, 64


def chats(prefix: str) -> list[dict[str, object]]:
    """Read what `megatron-epp prepare --chat` has written."""
    tokens, trained = IndexedDataset(prefix), np.fromfile(f"{prefix}.mask", dtype=np.uint8)
    ends = np.cumsum(tokens.sequence_lengths)
    begins = [0, *ends[:-1]]
    return [{"tokens": tokens[i].tolist(), "trained": trained[begins[i] : ends[i]]} for i in range(len(ends))]


def main(model: str, prefix: str, output: str) -> None:
    dist.init_process_group()
    bridge, lora = AutoBridge.from_hf_pretrained(model), LoRA(dim=16, alpha=32)
    provider = bridge.to_megatron_provider()
    provider.pipeline_model_parallel_size = dist.get_world_size()  # set tensor_model_parallel_size, sequence_parallel, ... here
    provider.attention_dropout = 0.0
    on_gpu = torch.cuda.is_available()
    provider.params_dtype = provider.pipeline_dtype = torch.bfloat16 if on_gpu else torch.float32
    provider.bf16 = on_gpu
    provider.register_pre_wrap_hook(lambda chunks: lora(chunks, training=True))  # behind the one that loads weights
    provider.finalize()
    provider.initialize_model_parallel(seed=1)
    chunks = provider.provide_distributed_model(DistributedDataParallelConfig(use_distributed_optimizer=True), bf16=on_gpu)
    for chunk in chunks:
        chunk.config.finalize_model_grads_func = finalize_model_grads
    adam = OptimizerConfig(lr=1e-3, bf16=on_gpu, params_dtype=provider.params_dtype, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(adam, chunks)

    samples, draw = chats(prefix), np.random.RandomState(0)
    train = megatron_epp.wrap_samples(memory_cap_gb=60)
    for step in range(STEPS):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        batch = [samples[index] for index in draw.permutation(len(samples))[:BATCH]]
        report = train(model=chunks, samples=batch)
        optimizer.step()
        if dist.get_rank() == 0:
            loss = report.means[train.loss.name]
            print(f"step {step}: loss {loss:.6f}, {report.num_chunks} chunks")
    train.close()
    bridge.save_hf_adapter(chunks, output, lora, model)


if __name__ == "__main__":
    main(*sys.argv[1:])
