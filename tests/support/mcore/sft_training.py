"""A training script for conversations, with no knowledge of plans: Megatron's `--sft` data.

Megatron's own are the dataset, its tokenizer, loaders and batches. Stand-ins: `datasets`, the library that reads
JSONL for Megatron, and the forward step, since Megatron's script is not installed with it, and its attention on a CPU takes a
mask and no `cu_seqlens`.
"""

import json
import sys
import types
from functools import partial

import torch

from megatron_epp.mcore import entry
from tests.support.mcore import recorded_training


def conversations(num_samples, vp_stage=None):
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training import get_args
    from megatron.training.datasets.sft_dataset import SFTDataset
    from megatron.training.utils import get_blend_and_blend_per_split

    args = get_args()
    assert args.sft
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=get_blend_and_blend_per_split(args)[0],
        split=args.split,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        context_parallel_size=args.context_parallel_size,
    )
    return BlendedMegatronDatasetBuilder(SFTDataset, num_samples, lambda: True, config).build()


def forward_step(data_iterator, model):
    """Run a microbatch, in which tokens attend to earlier ones of their own conversation."""
    from megatron_epp.mcore.model.losses import token_loss

    batch = next(data_iterator)
    num_tokens = batch["tokens"].shape[1]
    conversation = torch.searchsorted(batch["cu_seqlens"][0].unique(), torch.arange(num_tokens), right=True)
    visible = (conversation[:, None] == conversation) & torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    labels = batch["labels"].clamp(min=0)  # -100 where a label is not trained
    output = model(batch["tokens"], batch["position_ids"], ~visible[None, None], labels=labels)
    return output, partial(token_loss, batch["loss_mask"])


def reading_jsonl(kind, data_files, split):
    with open(data_files, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def main():
    with entry.errors_in_one_line():
        entry.prepare()
        from megatron_epp.mcore.model import gpt

        sys.modules["datasets"] = types.ModuleType("datasets")
        sys.modules["datasets"].load_dataset = reading_jsonl
        gpt.forward_step = forward_step
        gpt.build_datasets = conversations
        gpt.build_datasets.is_distributed = True
        recorded_training.main()


if __name__ == "__main__":
    main()
