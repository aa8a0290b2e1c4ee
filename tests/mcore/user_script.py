"""A pretraining script as users write them: it imports Megatron's functions by name and knows nothing of this package."""

from functools import partial

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args


def add_own_flag(parser):
    parser.add_argument("--users-own-flag", type=int, default=0)
    return parser


def provide_datasets(num_samples, vp_stage=None):
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, num_samples, lambda: True, config).build()


def loss_of(mask, losses):
    total, tokens = torch.sum(losses.view(-1) * mask.view(-1)), mask.sum()
    return total, tokens.to(torch.int), {"lm loss": torch.stack([total.detach(), tokens])}


def forward_step(data_iterator, model):
    batch = {name: tensor.cuda() for name, tensor in next(data_iterator).items()}
    losses = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return losses, partial(loss_of, batch["loss_mask"])


if __name__ == "__main__":
    provide_datasets.is_distributed = True
    args = parse_and_validate_args(extra_args_provider=add_own_flag)
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, provide_datasets, ModelType.encoder_or_decoder, forward_step)
