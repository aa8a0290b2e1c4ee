"""Flags about precision: what planning is told of wide gradients, and what becomes of kernels that are not installed."""

import argparse
import logging
from dataclasses import replace

import pytest

from megatron_epp.cost import CPU, ModelShape, analytic_profile
from megatron_epp.cost.work import work_of
from megatron_epp.mcore import plain_torch
from megatron_epp.mcore.costs import _with_wide_gradients
from megatron_epp.schedule import Chunk, Segment


def test_planning_never_holds_fp32_gradients_of_keys_for_smaller_than_they_are():
    """In bf16, cache and gradient together take three times the cache, and no sum of the parts is too small."""
    shape = ModelShape(
        num_layers=4, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4, vocab_size=128, bytes_per_value=2
    )
    costs = analytic_profile(shape, CPU).costs((2, 2))
    wide = replace(costs, stages=tuple(map(_with_wide_gradients, costs.stages)))
    first, last = (Chunk((Segment(0, *part),)) for part in ((0, 32), (32, 40)))
    work = work_of((first, last), (40,))
    cache = costs.cache_bytes(0, work)
    assert (2 * wide.cache_bytes(0, work) == 3 * cache).all()
    assert (wide.activation_bytes(0, work) == costs.activation_bytes(0, work)).all()
    assert (wide.backward_bytes(0, work)[1] - costs.backward_bytes(0, work)[1] >= (0, cache[1] // 2)).all()


@pytest.mark.parametrize("asked", [True, False])
def test_kernels_that_are_not_installed_are_switched_off_and_named(caplog, monkeypatch, asked):
    monkeypatch.setenv("RANK", "0")
    seen = []
    validate = plain_torch._without_kernels(["gradient_accumulation_fusion"], lambda args: seen.append(args) or args)
    with caplog.at_level(logging.WARNING, logger="megatron_epp"):
        args = validate(argparse.Namespace(gradient_accumulation_fusion=asked))
    assert args.gradient_accumulation_fusion is False
    assert seen == [args]
    assert ("off are gradient_accumulation_fusion" in caplog.text) is asked
