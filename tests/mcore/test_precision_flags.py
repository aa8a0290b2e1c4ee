"""Flags about precision: what becomes of kernels that are not installed."""

import argparse
import logging

import pytest

from megatron_epp.mcore.patches import environment


@pytest.mark.parametrize("asked", [True, False])
def test_kernels_that_are_not_installed_are_switched_off_and_named(caplog, monkeypatch, asked):
    monkeypatch.setenv("RANK", "0")
    seen = []
    with caplog.at_level(logging.WARNING, logger="megatron_epp"):
        args = environment._without_kernels(
            ("gradient_accumulation_fusion",),
            lambda args: seen.append(args) or args,
            argparse.Namespace(gradient_accumulation_fusion=asked),
        )
    assert args.gradient_accumulation_fusion is False
    assert seen == [args]
    assert ("off are gradient_accumulation_fusion" in caplog.text) is asked
