"""Names of the settings: the flags of a training run, and those of the command line."""

from __future__ import annotations

import argparse

from megatron_epp.plan.errors import Names

_SETTINGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "chunk_tokens": ("--epp-chunk-tokens", ("--chunk-tokens",)),
    "slices": ("--epp-slices", ("--slices",)),
    "recompute": ("--epp-recompute", ("--recompute",)),
    "planner": ("--epp-planner", ("--planner",)),
    "budget_ms": ("--epp-plan-budget-ms", ("--plan-budget-ms",)),
    "cap_bytes": ("--epp-memory-cap-gb", ("--memory-cap-gb",)),
    "host_cap_bytes": ("--epp-host-memory-gb", ("--host-memory-gb",)),
    "context": ("--seq-length", ("--context",)),
    "global_batch_size": ("--global-batch-size", ("--global-batch-size", "--batch-size")),
    "num_stages": ("--pipeline-model-parallel-size", ("--stages", "--pipeline-parallel")),
    "tensor_parallel": ("--tensor-model-parallel-size", ("--tensor-parallel",)),
    "context_parallel": ("--context-parallel-size", ("--context-parallel",)),
    "expert_parallel": ("--expert-model-parallel-size", ("--expert-parallel",)),
    "num_layers": ("--num-layers", ("--layers",)),
    "hidden_size": ("--hidden-size", ("--hidden",)),
    "num_attention_heads": ("--num-attention-heads", ("--heads",)),
    "num_query_groups": ("--num-query-groups", ("--kv-heads",)),
    "num_experts": ("--num-experts", ("--experts",)),
    "experts_per_token": ("--moe-router-topk", ("--experts-per-token",)),
    "eod_mask_loss": ("--eod-mask-loss", ()),
    "tokenizer_type": ("--tokenizer-type", ("--tokenizer-type",)),
    "tokenizer_model": ("--tokenizer-model", ("--tokenizer-model",)),
    "vocab_size": ("--vocab-size", ("--vocab-size",)),
}
"""For each setting that errors name: the flag in training, and those on the command line, of which a command has one."""

TRAINING: Names = {setting: training for setting, (training, _) in _SETTINGS.items()}
"""The flag of each setting in a training run."""


def names_of(parser: argparse.ArgumentParser) -> Names:
    """Return the flag of each setting that a command of the command line has."""
    known = parser._option_string_actions
    found = {setting: [flag for flag in short if flag in known] for setting, (_, short) in _SETTINGS.items()}
    return {setting: flags[0] for setting, flags in found.items() if flags}
