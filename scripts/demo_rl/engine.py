"""verl's own Megatron engine, from its wheel, around a small GPT of Megatron's: for tests and the demonstration, without a GPU.

`scripts/callers.sh verl` installs it into a folder. Nothing of verl is changed: what its bridge would load from a checkpoint,
the model with its configuration and optimizer, is put into an engine that its constructor has made, and its methods are called.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from scripts.tiny_stage import config_of, stage_of

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "EPP_CALLERS"
"""Environment variable: folder of the frameworks that `scripts/callers.sh` installs."""
PROMPT = 8
"""Tokens of every prompt."""


def folder(framework: str) -> Path:
    """Return the folder into which a framework is installed."""
    return Path(os.environ.get(VARIABLE) or ROOT / ".callers") / framework


def command(framework: str = "verl") -> str:
    """Return the command that installs a framework there."""
    return f"bash scripts/callers.sh {framework}"


def is_installed(framework: str = "verl") -> bool:
    """Return whether the folder of a framework is complete."""
    return (folder(framework) / ".complete").is_file()


def reachable(framework: str = "verl", module: str | None = None) -> None:
    """Let this process import a framework, behind everything that it can import anyway.

    Args:
        module: of the framework; None for one with its name.
    """
    if importlib.util.find_spec(module or framework) is None:
        sys.path.append(str(folder(framework)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Sizes of a model and of its pipeline.

    Attributes:
        stages: of the pipeline.
        experts: of every layer; 0 for none.
        expert_parallel: ranks that share them.
        layers, hidden, heads, vocabulary, longest: of the model, and the most tokens of a sequence.
        budget: most tokens of a microbatch.
    """

    stages: int = 2
    experts: int = 0
    expert_parallel: int = 1
    layers: int = 4
    hidden: int = 32
    heads: int = 4
    vocabulary: int = 128
    longest: int = 1024
    budget: int = 96


@dataclass(slots=True)
class Samples:
    """Responses to prompts, and what is known of each.

    Attributes:
        tokens: of every sample, prompt and response.
        advantages: of every response.
        old_logprobs: of the tokens of every response; empty before they are known.
    """

    tokens: list[Tensor]
    advantages: list[float]
    old_logprobs: list[Tensor] = field(default_factory=list)

    @property
    def lengths(self) -> list[int]:
        return [len(tokens) for tokens in self.tokens]

    def part(self, rank: int, ranks: int) -> Samples:
        """Return a replica's samples: every so many-th."""
        return Samples(self.tokens[rank::ranks], self.advantages[rank::ranks], self.old_logprobs[rank::ranks])


def pipeline_stage(size: Size, change: Callable[[Any], object] | None = None, **more: Any) -> Any:
    """Build this rank's stage, wrapped by Megatron's data parallelism. Parallel state and random numbers are set up.

    Args:
        change: called with the model before it is wrapped, as what adds adapters.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    experts = {"num_moe_experts": size.experts, "moe_router_topk": 2, "add_bias_linear": False} if size.experts else {}
    config = config_of(
        size.layers,
        size.hidden,
        size.heads,
        expert_model_parallel_size=size.expert_parallel,
        apply_rope_fusion=False,
        deallocate_pipeline_outputs=True,
        finalize_model_grads_func=finalize_model_grads,
        **experts | more,
    )
    spec = get_gpt_layer_local_spec(num_experts=size.experts or None)
    rotary, untied = {"position_embedding_type": "rope"}, {"share_embeddings_and_output_weights": False}
    bare = stage_of(config, spec, size.vocabulary, size.longest, **rotary, **untied)
    # Of the class, which has no kernel for packed sequences without Transformer Engine: an object's own is refused in slices.
    DotProductAttention.forward = packed_attention
    if change is not None:
        change(bare)
    settings = DistributedDataParallelConfig(use_distributed_optimizer=False)
    return DistributedDataParallel(config, settings, bare)


def packed_attention(_: Any, query: Tensor, key: Tensor, value: Tensor, *rest: object, **named: Any) -> Tensor:
    """Attend causally within each packed sequence by torch's fused kernel; all are ``[tokens, heads, channels]``."""
    packed = named["packed_seq_params"]
    ends = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    sizes = ends.diff().tolist()
    parts = zip(*(states.transpose(0, 1).split(sizes, dim=1) for states in (query, key, value)), strict=True)
    attend = torch.nn.functional.scaled_dot_product_attention
    outputs = [attend(q[None], k[None], v[None], is_causal=True)[0] for q, k, v in parts]
    return torch.cat(outputs, dim=1).transpose(0, 1).flatten(1)


def verl_engine(size: Size) -> Any:
    """Make verl's engine on this rank with a model, and without an optimizer: `with_optimizer`, or one of the caller's.

    `entry.prepare` has been called and torch's process group is there.
    """
    reachable()
    from megatron.core import tensor_parallel
    from verl.workers.config import McoreEngineConfig
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    settings = McoreEngineConfig(
        pipeline_model_parallel_size=size.stages,
        expert_model_parallel_size=size.expert_parallel,
        use_distributed_optimizer=False,
    )
    no_predictions = SimpleNamespace(enable=False, enable_train=False)
    model = SimpleNamespace(
        model_type="language_model",
        hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
        mtp=no_predictions,
        tokenizer=SimpleNamespace(pad_token_id=0),
    )
    engine = MegatronEngineWithLMHead(model, settings, None, None)
    tensor_parallel.model_parallel_cuda_manual_seed(1)  # which it does itself where there is a GPU
    engine.module = [pipeline_stage(size)]
    engine.tf_config = engine.module[0].config
    return engine


def with_optimizer(engine: Any, lr: float) -> Any:
    """Return the engine with Megatron's Adam."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    engine.optimizer = get_megatron_optimizer(OptimizerConfig(lr=lr, use_distributed_optimizer=False), engine.module)
    return engine


class GradientsKept:
    """Optimizer that leaves weights and gradients as they are, for comparisons of gradients."""

    def zero_grad(self) -> None:
        pass

    def step(self) -> tuple[bool, float, int]:
        return True, 0.0, 0


def in_groups(tokens: Sequence[Tensor], size: int) -> Iterator[Tensor]:
    """Yield samples, so many of which at a time begin with the prompt of the first of them."""
    for at, own in enumerate(tokens):
        yield torch.cat([tokens[at - at % size][:PROMPT], own[PROMPT:]])


def batch_of(samples: Samples, size: Size, global_count: int, rows: int | None = None) -> Any:
    """Return a batch in verl's form, jagged.

    Args:
        rows: samples of a microbatch, if it has no token budget.
    """
    from verl.utils import tensordict_utils

    jagged = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    responses = [tokens[PROMPT:] for tokens in samples.tokens]
    masks = [torch.ones_like(response) for response in responses]
    columns = {
        "input_ids": jagged(samples.tokens),
        "prompts": jagged([tokens[:PROMPT] for tokens in samples.tokens]),
        "responses": jagged(responses),
        "response_mask": jagged(masks),
        "loss_mask": jagged(masks),
        "advantages": jagged([torch.full((len(of),), by) for of, by in zip(responses, samples.advantages, strict=True)]),
    }
    if samples.old_logprobs:
        columns["old_log_probs"] = jagged(samples.old_logprobs)
    settings = {
        "temperature": 1.0,
        "use_dynamic_bsz": rows is None,
        "max_token_len_per_gpu": size.budget,
        "micro_batch_size_per_gpu": rows,
        "global_batch_size": global_count,
    }
    return tensordict_utils.get_tensordict(columns, settings)


def ppo_loss(**settings: Any) -> Any:
    """Return verl's own loss of clipped ratios with settings of its configuration."""
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss as loss

    return partial(loss, ActorConfig(strategy="megatron", rollout_n=1, use_dynamic_bsz=True, **settings))


def old_logprobs(engine: Any, samples: Samples, size: Size, global_count: int) -> list[Tensor]:
    """Return the log-probabilities of the tokens of every response, by verl's forward pass; on the last stage only."""
    with engine.eval_mode():
        inferred = engine.infer_batch(batch_of(samples, size, global_count))
    if not engine.is_mp_src_rank_with_outputs():
        return []
    # verl returns one for every token of a sample, about the next one.
    return [row[PROMPT - 1 : -1].detach() for row in inferred["model_output"]["log_probs"].unbind()]


def gradients(engine: Any) -> list[Tensor]:
    """Copy this rank's reduced gradients."""
    return [
        parameter.main_grad.clone() for model in engine.module for parameter in model.parameters() if parameter.requires_grad
    ]


def from_last_stage(mine: Any) -> Any:
    """Return what the last stage of this rank's pipeline has. A collective call."""
    from megatron.core import parallel_state

    values = [mine]
    dist.broadcast_object_list(
        values, parallel_state.get_pipeline_model_parallel_last_rank(), parallel_state.get_pipeline_model_parallel_group()
    )
    return values[0]


def drawn(count: int, longest: int, vocabulary: int, seed: int, median: float = 24.0) -> Samples:
    """Draw prompts with responses of log-normal lengths, with random advantages."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.empty(count).log_normal_(torch.log(torch.tensor(median)).item(), 1.0, generator=random)
    sizes: Sequence[int] = lengths.round().clamp(4, longest - PROMPT).int().tolist()
    tokens = [torch.randint(1, vocabulary, (PROMPT + size,), generator=random) for size in sizes]
    return Samples(tokens, torch.randn(count, generator=random).tolist())
