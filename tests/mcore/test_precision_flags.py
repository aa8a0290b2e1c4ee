"""Flags about precision: what becomes of kernels that are not installed."""

import argparse
import importlib.util
import inspect
import logging
from types import SimpleNamespace

import pytest
from megatron.core.tensor_parallel import layers

from megatron_epp.mcore.patches import environment, patching


def settled(monkeypatch, **flags):
    """Flags after the patch of a machine without Transformer Engine and Apex."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(environment, "_missing", lambda: frozenset(module for _, module, _, _ in environment._KERNELS))
    seen = []
    args = environment._without_kernels(lambda args: seen.append(args) or args, argparse.Namespace(**flags))
    assert seen == [args]
    return args


@pytest.mark.parametrize("asked", [True, False])
def test_kernels_that_are_not_installed_are_switched_off_and_named(caplog, monkeypatch, asked):
    with caplog.at_level(logging.WARNING, logger="megatron_epp"):
        args = settled(monkeypatch, gradient_accumulation_fusion=asked)
    assert args.gradient_accumulation_fusion is False
    assert ("changed are gradient_accumulation_fusion" in caplog.text) is asked


@pytest.mark.parametrize(
    ("asked", "spec", "gets"),
    [
        ("transformer_engine", None, "local"),
        ("transformer_engine", ["my.layers", "spec"], "transformer_engine"),
        ("local", None, "local"),
        ("inference_optimized", None, "inference_optimized"),
    ],
)
def test_without_transformer_engine_layers_are_local_and_one_warning_says_so(caplog, monkeypatch, asked, spec, gets):
    with caplog.at_level(logging.WARNING, logger="megatron_epp"):
        args = settled(monkeypatch, transformer_impl=asked, spec=spec, apply_rope_fusion=True)
    assert (args.transformer_impl, args.apply_rope_fusion) == (gets, False)
    (record,) = caplog.records
    assert record.getMessage().startswith("NVIDIA Apex or Transformer Engine is not installed, so torch's counterparts run")
    assert ("transformer_impl (local)" in caplog.text) is (gets != asked)


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
    monkeypatch.setattr(environment, "_missing", environment._missing.__wrapped__)
    args = argparse.Namespace(**ENGINE | changes)
    environment.ask_for_installed(args)
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
