"""Flags about precision: what becomes of kernels that are not installed."""

import argparse
import importlib.util
import inspect
import logging
from types import SimpleNamespace

import pytest
from megatron.core.tensor_parallel import layers

from megatron_epp.mcore.patches import environment, patching


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


ENGINE = {"gradient_accumulation_fusion": True, "transformer_impl": "transformer_engine"}


@pytest.mark.parametrize(
    ("has_engine", "changes", "expected"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"transformer_impl": "local"}, False),
        (True, {"defer_embedding_wgrad_compute": True}, False),
    ],
)
def test_without_apex_only_transformer_engines_layers_fuse_weight_gradients(monkeypatch, has_engine, changes, expected):
    find = importlib.util.find_spec
    there = {"transformer_engine": has_engine or None, "fused_weight_gradient_mlp_cuda": None}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: there[name] if name in there else find(name))
    args = argparse.Namespace(**ENGINE | changes)
    environment._without_kernels(("gradient_accumulation_fusion",), lambda args: args, args)
    assert args.gradient_accumulation_fusion is expected
    assert not environment.fuses_own_gradients(args)
    there["fused_weight_gradient_mlp_cuda"] = True
    assert environment.fuses_own_gradients(args) is expected


@pytest.mark.skipif(layers._grad_accum_fusion_available, reason="needs an environment without Apex's kernel")
@pytest.mark.parametrize("kind", ["ColumnParallelLinear", "RowParallelLinear"])
def test_without_apex_megatrons_own_layers_do_not_fuse_them_whatever_the_config_says(kind):
    (patch,) = [one for one in environment.patches() if one.target.endswith(f"layers:{kind}.__init__")]
    assert "self.gradient_accumulation_fusion = config.gradient_accumulation_fusion" in inspect.getsource(getattr(layers, kind))
    config = SimpleNamespace(gradient_accumulation_fusion=True, sequence_parallel=True)

    def original(self, *sizes, config, bias):
        if config.gradient_accumulation_fusion:
            raise RuntimeError("fused_weight_gradient_mlp_cuda module is not found")
        self.gradient_accumulation_fusion, self.config, self.made = False, config, (sizes, config.sequence_parallel, bias)

    layer = SimpleNamespace()
    patching.around(original, environment._without_fusion)(layer, 4, 8, config=config, bias=False)
    assert layer.made == ((4, 8), True, False)
    assert layer.gradient_accumulation_fusion is False
    assert layer.config is config
    assert config.gradient_accumulation_fusion
    assert patch.wraps
