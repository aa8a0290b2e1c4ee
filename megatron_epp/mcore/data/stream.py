"""Megatron's own GPT samples as sequences (`--epp-documents stream`): documents one after the other, cut every --seq-length."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_epp.data.token_record import Tokenizer, check_ids
from megatron_epp.mcore.data.document_dataset import DocumentFile, check_mask_size, check_pair, check_tokens, refuse_mask
from megatron_epp.mcore.data.documents import SPLITS, Shuffled, check_record, no_documents, prefixes_of, wanted_splits

_AS_FLAGS = ["split", "num_dataset_builder_threads", "mmap_bin_files", "reset_position_ids", "reset_attention_mask"]
_AS_FLAGS += ["eod_mask_loss", "mid_level_dataset_surplus", "allow_ambiguous_pad_tokens"]
"""Settings of Megatron's datasets that have the names of their flags."""
_KEPT = 256  # samples of a dataset that are kept after they are read: chunks and replicas read a sample in several parts


class StreamDataset:
    """A `SequenceDataset` of Megatron's GPT samples, each `num_positions` long, of tokens below `vocab_size`."""

    def __init__(self, samples: Any, num_positions: int, vocab_size: int, name: str = "train") -> None:
        self.lengths = np.full(len(samples), num_positions, dtype=np.int32)
        self._samples, self._vocab_size, self._name = samples, vocab_size, name
        self._read = functools.lru_cache(_KEPT)(self._read_sample)

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, index: int, start: int = 0, end: int | None = None) -> np.ndarray:
        """Return tokens ``[start, end)`` of the ``lengths[index] + 1`` of a sample. Raises `EppError` for one out of range."""
        return self._read(index)[0][start:end]

    def trained(self, index: int, start: int, end: int) -> np.ndarray:
        """Return the loss mask of these tokens as labels, as Megatron makes it (``--eod-mask-loss``, padding)."""
        return self._read(index)[1][start:end]

    def _read_sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        sample = self._samples[index]
        tokens, labels = sample["tokens"].numpy(), sample["labels"].numpy()
        ids = np.concatenate((tokens, labels[-1:]))
        check_ids(f"a sample of the {self._name} split", ids, self._vocab_size)
        return ids, np.concatenate(([1], sample["loss_mask"].numpy().astype(np.uint8)))


def build(args: Namespace, num_samples: Sequence[int], tokenizer: Tokenizer, train_tokens: int) -> list[Shuffled | None]:
    """Build the samples of the splits on every rank, in Megatron's order; their files are checked like all others."""
    for prefix in dict.fromkeys(prefixes_of(args)):
        refuse_mask(prefix)
        check_tokens(DocumentFile(prefix, args.mmap_bin_files), tokenizer, masks_eod=args.eod_mask_loss)
    # A mask has as many values as pairs of tokens; attention here is causal without one.
    without_masks = Namespace(**vars(args) | {"create_attention_mask_in_dataloader": False})
    datasets = build_gpt_datasets(without_masks, list(num_samples), lambda: True)  # all ranks need the lengths
    splits = list[Shuffled | None]()
    for name, samples, is_wanted in zip(SPLITS, datasets, wanted_splits(args), strict=True):
        split = None if samples is None else StreamDataset(samples, args.seq_length, tokenizer.vocab_size, name)
        if is_wanted and name != "test" and not split:
            raise no_documents(args, name, of_split=args.data_path is not None)
        splits.append((split, False) if is_wanted and split else None)
    return splits


def check_files(args: Namespace) -> None:
    for prefix in prefixes_of(args):
        check_pair(prefix)
        check_mask_size(prefix)
        refuse_mask(prefix)
        check_record(args, prefix)


def build_gpt_datasets(args: Namespace, num_samples: list[int], is_wanted_here: Callable[[], bool]) -> tuple[Any, Any, Any]:
    """Build Megatron's GPT datasets (train, valid, test) where `is_wanted_here` says so; None elsewhere."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        create_attention_mask=args.create_attention_mask_in_dataloader,
        **{name: getattr(args, name) for name in _AS_FLAGS},
    )
    dataset = MockGPTDataset if args.mock_data else GPTDataset
    train, valid, test = BlendedMegatronDatasetBuilder(dataset, num_samples, is_wanted_here, config).build()
    return train, valid, test
