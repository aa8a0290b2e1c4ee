"""Flags about precision: kernels that are not installed, and recipes of FP8 without state."""

import argparse
import importlib.util
import inspect
import logging
from argparse import Namespace
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
from megatron.core.enums import Fp8Recipe
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.tensor_parallel import layers
from torch import Tensor

from megatron_epp.cost.casts import RECIPES
from megatron_epp.features.split_weights.linear_layers import _tensors_of
from megatron_epp.features.vocabulary.rank_vocabulary import fuses_own_gradients
from megatron_epp.mcore.arguments.layout import row_multiple, token_multiple, token_shards
from megatron_epp.mcore.arguments.rule import Door
from megatron_epp.mcore.arguments.setting_checks import fp8_recipe
from megatron_epp.mcore.model.stage import add_to_gradients, forget_casts
from megatron_epp.mcore.patches import environment, patching
from megatron_epp.plan import EppError


def settled(monkeypatch, **flags):
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
    assert not fuses_own_gradients(args)
    there["fused_weight_gradient_mlp_cuda"] = True
    assert fuses_own_gradients(args) is expected


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


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_without_state_are_taken_and_pad_chunks_to_the_rows_that_megatron_asks_for(name: str) -> None:
    for recipe in (name, Fp8Recipe(name)):  # of flags, and of a model's configuration
        settings = Namespace(fp8="hybrid", fp8_recipe=recipe)
        assert [*fp8_recipe(settings, Door.ALL)] == []
        assert row_multiple(settings) == RECIPES[name].rows
    assert RECIPES[name].rows % get_fp8_align_size(Fp8Recipe(name)) == 0


def test_recipes_that_keep_something_between_chunks_are_refused_with_the_reason() -> None:
    (said,) = fp8_recipe(Namespace(fp8="e4m3", fp8_recipe="delayed"), Door.DOCUMENTS)
    assert "--fp8-recipe delayed (its amax histories advance with every chunk" in said
    (said,) = fp8_recipe(Namespace(fp8="e4m3", fp8_recipe=Fp8Recipe.custom), Door.MODEL)
    assert "fp8_recipe='custom'" in said
    assert [*fp8_recipe(Namespace(fp8="e4m3"), Door.MODEL)]  # Megatron's default is delayed
    assert [*fp8_recipe(Namespace(fp8=None, fp8_recipe="delayed"), Door.DOCUMENTS)] == []


def test_every_rank_that_shares_a_chunk_has_the_rows() -> None:
    sizes: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2}
    args = Namespace(**sizes, fp8="hybrid", fp8_recipe="mxfp8")
    assert (token_multiple(args), token_shards(args)) == (128, 4)
    assert token_multiple(Namespace(**sizes, fp8=None, fp8_recipe="delayed")) == 4


def test_casts_of_weights_are_forgotten_and_layers_that_keep_them_elsewhere_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0]._fp8_workspaces = casts = {"weight": torch.ones(1)}
    model[0].is_first_microbatch = True
    add_to_gradients(model, in_fp8=True)
    forget_casts(model)
    assert casts == {}
    layer = torch.nn.Linear(2, 2)
    layer.is_first_microbatch = True  # type: ignore[assignment]
    add_to_gradients(layer, in_fp8=False)
    with pytest.raises(EppError, match="Linear keeps its weights in FP8 where plans cannot renew them"):
        add_to_gradients(layer, in_fp8=True)


class _Cast:
    def __init__(self, *parts: Tensor | None) -> None:
        self.parts: list[Tensor | None] = list(parts)

    def prepare_for_saving(self) -> tuple[list[Tensor | None], Self]:
        parts, self.parts = self.parts, []
        return parts, self

    def restore_from_saved(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        count = len(tensors)
        self.parts = tensors[:count]
        return tensors[count:]


def test_casts_that_wait_for_a_w_are_held_as_tensors_and_made_again() -> None:
    a, b, c = (torch.full((2,), float(number)) for number in range(3))
    first, second = _Cast(None, a), _Cast(c, None, None)
    tensors, rebuild = _tensors_of([first, b, second])
    assert all(one is other for one, other in zip(tensors, (a, b, c), strict=True))
    assert first.parts == [None, a]  # the backward goes on with it
    moved = [tensor.clone() for tensor in tensors]
    one, two, three = rebuild(moved)
    assert one.parts == [None, moved[0]]
    assert two is moved[1]
    assert three.parts == [moved[2], None, None]
    assert one is not first
