"""A pretraining script as users write them: it imports Megatron's functions by name and knows nothing of this package.

Its functions have the names of those in Megatron's `pretrain_gpt.py`, whose text is not ours to copy. `known_as_megatrons` has
a run take them for Megatron's own.
"""

from functools import lru_cache, partial

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

BATCH_KEYS = ["tokens", "position_ids", "attention_mask", "labels", "loss_mask"]


def add_own_flag(parser):
    parser.add_argument("--users-own-flag", type=int, default=0)
    return parser


@lru_cache(maxsize=1)
def is_dataset_built_on_rank():
    return True


def core_gpt_dataset_config_from_args(args):
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )


def train_valid_test_datasets_provider(num_samples, vp_stage=None):
    config = core_gpt_dataset_config_from_args(get_args())
    return BlendedMegatronDatasetBuilder(MockGPTDataset, num_samples, is_dataset_built_on_rank, config).build()


def get_batch(data_iterator):
    loaded = next(data_iterator)
    return [loaded[key].cuda() for key in BATCH_KEYS]


def loss_func(mask, losses):
    """The sum of the losses of unmasked tokens."""
    total, tokens = torch.sum(losses.view(-1) * mask.view(-1)), mask.sum()
    return total, tokens.to(torch.int), {"lm loss": torch.stack([total.detach(), tokens])}


def forward_step(data_iterator, model):
    tokens, position_ids, attention_mask, labels, loss_mask = get_batch(data_iterator)
    return model(tokens, position_ids, attention_mask, labels=labels), partial(loss_func, loss_mask)


def get_embedding_ranks(pp_ranks):
    return [pp_ranks[0], pp_ranks[-1]] if len(pp_ranks) > 1 else [pp_ranks[0]]


if __name__ == "__main__":
    train_valid_test_datasets_provider.is_distributed = True
    args = parse_and_validate_args(extra_args_provider=add_own_flag)
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(
        config,
        train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        get_embedding_ranks=get_embedding_ranks,
    )
