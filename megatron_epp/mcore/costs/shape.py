"""Shape of the model that trains, from Megatron's arguments, and its costs by formula."""

from __future__ import annotations

import argparse

import torch

from megatron_epp.cost import CPU, H100_NODE, ModelShape, Profile, analytic_profile
from megatron_epp.cost.library import shape_of
from megatron_epp.mcore.arguments.vocabulary import shards_vocabulary
from megatron_epp.mcore.model.block_loss import block_tokens_of


def model_shape(args: argparse.Namespace) -> ModelShape:
    """Return the model's shape from Megatron's arguments.

    Loss blocks are up to the last stage, so it has none, unless the output layer is divided over ranks, which all have them.
    """
    block_tokens = block_tokens_of(args) if shards_vocabulary(args) else 0
    return shape_of({**vars(args), "vocab_size": args.padded_vocab_size, "epp_loss_block_tokens": block_tokens})


def formulas(args: argparse.Namespace) -> Profile:
    """Return the costs of the run's model by formula."""
    return analytic_profile(model_shape(args), H100_NODE if torch.cuda.is_initialized() else CPU)
