"""Megatron's data flags under `--epp`: those that change nothing say so, and what a resumed run may not change."""

import argparse
import logging

import pytest
import torch
from megatron.core.datasets import gpt_dataset

from megatron_epp.data.batch import GlobalBatch
from megatron_epp.mcore.arguments.consequences import prepare_epp_args
from megatron_epp.mcore.data.document_dataset import DocumentDataset
from megatron_epp.mcore.data.documents import check_order
from megatron_epp.plan import Segment
from tests.support.mcore.megatron_flags import arguments
from tests.support.mcore.synthetic_documents import write_pair


def warned(caplog, *epp, **flags):
    caplog.clear()
    prepare_epp_args(arguments(*epp, **flags))
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_flags_that_are_given_and_change_nothing_are_named_in_a_line_on_rank_0(caplog):
    (line,) = warned(caplog, reset_position_ids=True, reset_attention_mask=True, create_attention_mask_in_dataloader=False)
    assert "--reset-position-ids, --reset-attention-mask, --no-create-attention-mask-in-dataloader" in line
    (line,) = warned(caplog, data_cache_path="cache", num_dataset_builder_threads=4)
    assert "--data-cache-path, --num-dataset-builder-threads" in line
    (line,) = warned(caplog, eod_mask_loss=True)
    assert "--eod-mask-loss" in line
    (line,) = warned(caplog, "--epp-documents", "stream", data_cache_path="cache", num_workers=7, eod_mask_loss=True)
    assert line.startswith("--epp makes no use of --num-workers: ")
    assert warned(caplog) == []
    assert warned(caplog, num_workers=2, mid_level_dataset_surplus=0.005, create_attention_mask_in_dataloader=True) == []
    assert warned(caplog, rank=1, reset_position_ids=True) == []


SAVED, EXPERTS = {"save": "runs", "use_distributed_optimizer": True}, {"num_experts": 4, "expert_model_parallel_size": 2}
RESHARDABLE = SAVED | {"dist_ckpt_optim_fully_reshardable": True}


@pytest.mark.parametrize(
    ("flags", "others", "says"),
    [
        (SAVED, {"save": "runs"}, "--dist-ckpt-optim-fully-reshardable keeps it for every layout"),
        (RESHARDABLE | EXPERTS, RESHARDABLE, "state saved with --expert-model-parallel-size 2 loads only with 2 or more"),
        (RESHARDABLE | {"overlap_grad_reduce": True}, RESHARDABLE, "saves wrong optimizer state for --dist-ckpt-optim-fully"),
    ],
)
def test_with_what_saved_optimizer_state_loads_is_told_and_a_warning_where_it_is_wrong(caplog, flags, others, says):
    caplog.set_level(logging.INFO)
    assert bool(warned(caplog, **flags)) == ("wrong" in says)
    assert says in caplog.text
    for quiet in (others, flags | {"rank": 1}):
        assert warned(caplog, **quiet) == []
        assert says not in caplog.text


def test_the_loss_is_masked_behind_ends_of_documents_where_megatron_masks_it(tmp_path):
    """In a document of several texts, split too: the ends inside of it."""
    eod, document = 9, [1, 2, 9, 3, 9, 9, 4, 5, 6, 9, 7, 9]
    prefix = write_pair(tmp_path / "corpus", [document])
    for limit in (100, 4):
        dataset = DocumentDataset(prefix, limit)
        lengths = tuple(dataset.lengths.tolist())
        for index, length in enumerate(lengths):
            batch = GlobalBatch(indices=(index,), lengths=(length,), plan=None, dataset=dataset, mask_loss_of=eod)
            arrays = batch.chunk_of([Segment(0, 0, length)])
            _, mask, _ = gpt_dataset._get_ltor_masks_and_position_ids(arrays.tokens, eod, False, False, True, False)
            assert torch.equal(arrays.loss_mask, mask)
            assert torch.equal(arrays.position_ids, torch.arange(length))


def checkpoint(**changes):
    values = {"epp": True, "epp_documents": "split", "seed": 1, "split": "99,1,0", "seq_length": 64, "rank": 0} | changes
    return argparse.Namespace(**{name: value for name, value in values.items() if value != "gone"})


def test_a_run_that_changes_nothing_of_the_order_or_is_of_megatrons_own_training_resumes_without_a_word(caplog):
    check_order(checkpoint(), checkpoint())
    truncated = checkpoint(epp_documents="truncate")
    check_order(truncated, checkpoint(epp_documents="truncate", seq_length=128))  # shorter ones are the same, in the same order
    assert not caplog.records
    check_order(checkpoint(epp=False, epp_documents="gone"), checkpoint(seed=7))
    check_order(checkpoint(epp="gone", epp_documents="gone"), checkpoint(seed=7))


@pytest.mark.parametrize("changed", [{"seed": 2}, {"split": "100,0,0"}, {"seq_length": 128}], ids=str)
def test_what_changes_the_order_of_sequences_is_named(caplog, changed):
    ((name, value),) = changed.items()
    for how in ("split", "stream"):
        caplog.clear()
        for rank in (0, 1):
            check_order(checkpoint(epp_documents=how), checkpoint(epp_documents=how, rank=rank, **changed))
        (line,) = [record.getMessage() for record in caplog.records]
        assert f"--{name.replace('_', '-')} was {getattr(checkpoint(), name)} and is {value}: sequences come in another" in line
