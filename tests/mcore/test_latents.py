"""Latents in the relay: when a run hands them on, what it refuses, and layers that fuse the norm of the latent."""

import argparse
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_epp.cost.model import PipelineCosts
from megatron_epp.mcore.arguments.consequences import prepare_epp_args
from megatron_epp.mcore.costs import stored
from megatron_epp.mcore.costs.megatron_facts import run_facts
from megatron_epp.mcore.model.kinds import latent_attention
from megatron_epp.mcore.training import layout_search
from megatron_epp.plan import EppError
from megatron_epp.tools.formulas import CPU, analytic_profile
from megatron_epp.tools.formulas.of_run import model_shape
from tests.mcore.test_refusals import arguments
from tests.support.mcore.asking import ask_here

LATENT = "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 32 --qk-pos-emb-head-dim 4 --v-head-dim 32 "
LATENT += "--pipeline-model-parallel-size 2 --seq-length 4096 --global-batch-size 2"


def run_of(flags: str, **values: Any) -> argparse.Namespace:
    """Arguments of a run of two stages, as they are when the model is about to be built."""
    args = arguments(*flags.split(), processes=2, **values)
    prepare_epp_args(args)
    args.padded_vocab_size, args.data_parallel_size, args.virtual_pipeline_model_parallel_size = 1024, 1, None
    return args


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the run be one process with data of its own, and formulas for its costs."""
    monkeypatch.setattr(layout_search, "made_by_first", lambda make: make())
    monkeypatch.setattr(layout_search, "ask", ask_here)
    monkeypatch.setattr(layout_search, "first_batches", lambda args: iter([(3000, 500)]))


@pytest.mark.parametrize(
    ("flags", "settled"),
    [
        (LATENT, "off"),
        (f"{LATENT} --epp-memory-cap-gb 0.02", "on"),
        (f"{LATENT} --epp-memory-cap-gb 0.02 --epp-latents off", "off"),
        (f"{LATENT} --epp-latents on", "on"),
        (f"{LATENT} --epp-memory-cap-gb 0.02 --skip-train", "off"),
    ],
)
def test_latents_are_handed_on_where_faster(alone: None, flags: str, settled: str, caplog: pytest.LogCaptureFixture) -> None:
    args = run_of(flags)
    with caplog.at_level("INFO"):
        layout_search.settle_latents(args)
    assert args.epp_latents == settled
    told = [record.getMessage() for record in caplog.records if "--epp-latents auto" in record.getMessage()]
    planned = "latent" in flags and "--epp-latents" not in flags and "skip" not in flags
    assert len(told) == planned


@pytest.mark.parametrize(("theirs", "own"), [("on", "off"), ("off", "on")])
def test_costs_of_a_pipeline_are_of_what_the_run_hands_on(theirs: str, own: str) -> None:
    costs = pipeline_costs(theirs)
    sizes = len(costs.stages), costs.hidden_bytes_per_token
    stored.check_costs(argparse.Namespace(epp_latents=theirs), costs, *sizes)
    with pytest.raises(EppError, match=rf"costs\.json has costs of slices .* give another file; set latents to {theirs}"):
        stored.check_costs(argparse.Namespace(epp_latents=own, epp_costs="costs.json"), costs, *sizes)


@pytest.mark.parametrize("choice", ["on", "off"])
def test_costs_of_a_pipeline_settle_the_choice(alone: None, monkeypatch: pytest.MonkeyPatch, choice: str) -> None:
    monkeypatch.setattr(layout_search, "named", lambda args, ask: pipeline_costs(choice))
    args = run_of(LATENT)
    layout_search.settle_latents(args)
    assert args.epp_latents == choice


def pipeline_costs(choice: str) -> PipelineCosts:
    args = run_of(f"{LATENT} --epp-latents {choice}")
    return analytic_profile(model_shape(run_facts(args, ask_here)), CPU).costs([args.num_layers // 2] * 2)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_the_norm_that_a_layer_fuses_is_applied_to_the_latents(normalization: str, zero_centered: bool) -> None:
    x, weight, bias = torch.randn(5, 8), torch.randn(8), torch.randn(8)
    linear = SimpleNamespace(
        layer_norm_weight=weight - 1 if zero_centered else weight,
        layer_norm_bias=bias,
        zero_centered_gamma=zero_centered,
        normalization=normalization,
        eps=1e-3,
    )
    centered = x if normalization == "RMSNorm" else x - x.mean(1, keepdim=True)
    expected = centered / (centered.square().mean(1, keepdim=True) + 1e-3).sqrt() * weight
    expected = expected if normalization == "RMSNorm" else expected + bias
    torch.testing.assert_close(latent_attention._normed(linear, x), expected)
    assert latent_attention._normed(torch.nn.Linear(8, 8), x) is x
