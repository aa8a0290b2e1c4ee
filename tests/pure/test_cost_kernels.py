"""Time of kernels in the costs: of launching them, of attention by published rates, and of products in FP8 with their casts."""

import shlex
from dataclasses import replace

import numpy as np
import pytest

from megatron_epp.cost.blocks import LAYER
from megatron_epp.cost.casts import RECIPES, casts_of
from megatron_epp.cost.optimizer import OptimizerBytes
from megatron_epp.cost.work import LinearTime, work_of
from megatron_epp.features.learnt_costs.timed import Timed, fitted_line
from megatron_epp.plan import Chunk, EppError, Recompute, Segment
from megatron_epp.plan.flags import FLASH_3, KERNELS
from megatron_epp.plan.layout import Layout
from megatron_epp.plan.placement import Placement
from megatron_epp.planner import UNLIMITED_BYTES, Problem, plan
from megatron_epp.tools.cli import main as cli
from megatron_epp.tools.cli.planning_flags import costs_source
from megatron_epp.tools.formulas import CPU, H100, H100_NODE, Profile, analytic_costs, analytic_profile
from megatron_epp.tools.formulas.analytic import profile_for
from megatron_epp.tools.formulas.hardware import BACKWARD_TFLOPS, FORWARD_TFLOPS, LENGTHS, speed_of
from megatron_epp.tools.formulas.library import load_cluster, load_flags, shape_of
from tests.support.calls import refusal

SHAPE = replace(shape_of(load_flags("llama3-8b") | {"tensor_model_parallel_size": 8}), num_layers=8)
SEQUENCES = 200, 60, 16_000
CHUNKS = tuple(Chunk((Segment(q, 0, length),)) for q, length in enumerate(SEQUENCES))
WORK = work_of(CHUNKS, SEQUENCES)
DEVICE, BOUND = (analytic_costs(SHAPE, rates, [4, 4]) for rates in (H100, H100_NODE))
PROBLEM = Problem((8192, 300, 200, 100), (0, 1), (UNLIMITED_BYTES,) * 2)


def test_a_line_is_the_larger_of_launching_and_of_the_device():
    line = LinearTime(10.0, 1.0, launch_us=50.0)
    assert [line.time_us(tokens, 0) for tokens in (20, 40, 60)] == [50.0, 50.0, 70.0]
    assert line.time_us(np.array([20, 60]), np.array([0, 0])).tolist() == [50.0, 70.0]
    assert (line + line.scaled(2)).launch_us == 150.0
    assert line.without(LinearTime(launch_us=20.0)).launch_us == 30.0


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("name", ["forward", "backward", "weight"])
def test_short_chunks_take_as_long_as_launching_and_long_ones_as_the_device(name: str, stage: int):
    launch_us = BOUND.stages[stage].line(name).launch_us
    short_us, shorter_us, long_us = getattr(BOUND, f"{name}_us")(stage, WORK)
    assert short_us == shorter_us == launch_us > 0
    assert long_us == getattr(DEVICE, f"{name}_us")(stage, WORK)[2] > launch_us


def test_a_backward_and_its_split_weight_gradient_are_launched_for_themselves():
    """Whole they are launched as long as apart where the host bounds both, and never faster apart."""
    whole, weight, saved = (getattr(BOUND, f"{name}_us")(1, WORK) for name in ("backward", "weight", "saved_by_split"))
    assert saved[:2] == pytest.approx(weight[:2])
    assert (whole - saved + weight >= whole * (1 - 1e-12)).all()
    mixed = BOUND.stages[1].changed(LAYER, weight=replace(BOUND.stages[1].layers.weight, launch_us=0.0))
    costs = replace(BOUND, stages=(mixed, mixed))
    # without its weight gradient the backward is launched as long as with it, so splitting it off spares nothing
    assert costs.saved_by_split_us(0, WORK)[0] < costs.weight_us(0, WORK)[0]
    assert (DEVICE.saved_by_split_us(1, WORK) == DEVICE.weight_us(1, WORK)).all()


@pytest.mark.parametrize("mode", DEVICE.recompute_modes)
def test_a_layer_that_recomputes_is_launched_again(mode: str):
    one = Recompute(**{mode: 1})
    assert BOUND.recompute_us(0, WORK, one)[1] == BOUND.stages[0].layers.mode(mode).again.launch_us > 0
    assert BOUND.recompute_us(0, WORK, one)[2] == DEVICE.recompute_us(0, WORK, one)[2]


def test_an_action_that_launching_bounds_hides_no_exchange():
    assert DEVICE.exchange_us(0, WORK).min() > 0
    assert BOUND.exchange_us(0, WORK)[:2].tolist() == [0.0, 0.0]
    assert BOUND.exchange_us(0, WORK)[2] == DEVICE.exchange_us(0, WORK)[2]


def test_experts_are_launched_besides_attention():
    experts = replace(SHAPE, num_experts=8, experts_per_token=2)
    dense, routed = (analytic_costs(shape, H100_NODE, [8]).stages[0].layers.forward.launch_us for shape in (SHAPE, experts))
    assert routed > dense


def test_slices_are_fewer_where_launching_bounds_them():
    problem = Problem((32768,), (0, 1, 2, 3), (UNLIMITED_BYTES,) * 4)
    launching = replace(H100_NODE, launch_forward_us=1500.0, launch_backward_us=2500.0)
    bound, device = (len(plan(problem, analytic_costs(SHAPE, rates, [2] * 4)).chunks) for rates in (launching, H100))
    assert bound < device


def test_learnt_lines_keep_the_time_of_launching_unless_a_pass_took_less():
    earlier = LinearTime(10.0, 1.0, launch_us=500.0)
    times = [Timed(tokens, 0, max(500.0, 2.0 * tokens)) for tokens in (100, 200, 400, 800, 1600)]
    assert fitted_line(earlier, times).launch_us == 500.0
    assert fitted_line(earlier, [one._replace(time_us=2.0 * one.tokens) for one in times]).launch_us == 200.0


@pytest.mark.parametrize(("kernel", "width"), FORWARD_TFLOPS)
def test_lines_are_near_every_published_rate(kernel: str, width: int):
    speed = speed_of(kernel, width)
    for length, published in zip(LENGTHS, FORWARD_TFLOPS[kernel, width], strict=True):
        pairs = length**2 / 2
        rate = speed.forward_flops * pairs / (pairs + speed.forward_pairs * length) / 1e12
        assert rate == pytest.approx(published, rel=0.06)
    for length, published in zip(LENGTHS, BACKWARD_TFLOPS.get((kernel, width), ()), strict=(kernel, width) in BACKWARD_TFLOPS):
        rate = speed.backward_flops * length**2 / (length**2 + speed.backward_pairs * length) / 1e12
        assert rate == pytest.approx(published, rel=0.06)


@pytest.mark.parametrize("kernel", KERNELS)
def test_widths_between_the_published_ones_are_between_them_and_others_are_as_the_last(kernel: str):
    narrow, between, wide = (speed_of(kernel, channels).forward_flops for channels in (64, 96, 128))
    assert (between, speed_of(kernel, 32)) == (pytest.approx((narrow + wide) / 2), speed_of(kernel, 64))
    assert speed_of(kernel, 512) == speed_of(kernel, 256)


@pytest.mark.parametrize("command", ["plan", "compare", "memory"])
def test_commands_take_a_kernel_for_a_cluster_that_names_one(command: str):
    def pair_us(more: str) -> float:
        args = cli._parser().parse(shlex.split(f"{command} --model llama3-8b --stages 4 --lengths 4096 {more}"))
        source, _ = costs_source(args, 4096)
        return source.layer.forward.per_pair_us

    flash, cudnn = (pair_us(f"--cluster h100x8 --attention-kernel {name}") for name in ("flash-attention-3", "cudnn"))
    assert flash < cudnn == pair_us("--cluster h100x8")
    of_a100 = "--cluster a100x8 --attention-kernel cudnn"
    assert "an H100's, and cluster a100x8 has its own" in refusal(pair_us, of_a100)
    assert "--attention-kernel is of a --cluster" in refusal(pair_us, "--attention-kernel cudnn")


def test_a_cluster_file_names_a_kernel_or_has_rates_of_its_own(tmp_path):
    path = tmp_path / "mine.yaml"
    for text, kernel in (("attention_kernel: flash-attention-3", FLASH_3), ("attention_forward_flops: 3e14", "")):
        path.write_text(f"rates: h100\n{text}\n")
        assert load_cluster(str(path)).rates.attention_kernel == kernel
    path.write_text("attention_kernel: cudn")
    with pytest.raises(EppError, match=r"attention_kernel is 'cudn'; it must be one of .*did you mean"):
        load_cluster(str(path))
    assert load_cluster("a100x8").rates.attention_kernel == ""


LLAMA = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "vocab_size": 512, "swiglu": True, "bf16": True}
TENSORWISE = {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}
PLAIN, CAST = shape_of(LLAMA), shape_of(LLAMA | TENSORWISE)
HIDDEN, INSIDE = PLAIN.hidden_size, PLAIN.ffn_hidden_size


def test_flags_of_training_and_of_model_files_name_the_recipe() -> None:
    assert casts_of(TENSORWISE) is casts_of({"fp8": "e4m3", "fp8_recipe": "tensorwise"}) is RECIPES["tensorwise"]
    assert casts_of({"fp8_recipe": "mxfp8"}) is None
    with pytest.raises(EppError, match="FP8 by tensorwise, blockwise or mxfp8, not by delayed"):
        casts_of({"fp8_format": "hybrid"})


@pytest.mark.parametrize("name", RECIPES)
def test_weights_of_layers_have_two_casts_that_stay(name: str) -> None:
    cast = shape_of(LLAMA | TENSORWISE | {"fp8_recipe": name})
    plain, in_fp8 = (analytic_costs(shape, H100, [3, 1]).stages for shape in (PLAIN, cast))
    for count, one, other in zip((3, 1), plain, in_fp8, strict=True):
        bytes_more = count * PLAIN.layer_parameters * RECIPES[name].weight_bytes
        assert other.static == replace(one.static, weights=one.static.weights + int(bytes_more))


def test_measured_costs_get_the_casts_of_weights() -> None:
    optimizer = OptimizerBytes.of_flags({"bf16": True})
    measured = Profile.from_json(analytic_profile(PLAIN, H100).to_json())
    in_fp8 = profile_for(measured, CAST, H100)
    plain, more = (profile.costs([4], optimizer=optimizer).stages[0].static.weights for profile in (measured, in_fp8))
    assert (more - plain, Profile.from_json(in_fp8.to_json())) == (2 * 4 * PLAIN.layer_parameters, in_fp8)


def test_linear_layers_keep_a_byte_of_what_they_alone_need() -> None:
    """Inputs of attention's first projection and of both of an MLP. Experts and latent attention keep theirs as they are."""
    assert PLAIN.layer_bytes_per_token - CAST.layer_bytes_per_token == 2 * HIDDEN + INSIDE
    assert PLAIN.attended_bytes_per_token - CAST.attended_bytes_per_token == HIDDEN
    assert CAST.moved_bytes_per_token == PLAIN.moved_bytes_per_token
    experts = LLAMA | {"num_experts": 4, "moe_ffn_hidden_size": 64}
    assert shape_of(experts | TENSORWISE).saved_bytes_per_token == HIDDEN
    latents = experts | {"multi_latent_attention": True, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4}
    assert shape_of(latents | {"v_head_dim": 8} | TENSORWISE).saved_bytes_per_token == 0


def test_a_layer_that_runs_holds_gradients_that_are_not_cast() -> None:
    assert CAST.layer_bytes_per_token + CAST.uncast_bytes_per_token == PLAIN.layer_bytes_per_token
    layout, optimizer = Layout((4,), Placement("looped", 1, 1)), OptimizerBytes.of_flags({"bf16": True})
    costs = [analytic_profile(shape, H100).costs_on_device(layout, optimizer, 1).stages[0].layers for shape in (PLAIN, CAST)]
    assert costs[0].working_bytes_per_token == costs[1].working_bytes_per_token > costs[1].bytes_per_token
    one_dense = shape_of(LLAMA | TENSORWISE | {"num_experts": 4, "moe_layer_freq": [0, 1, 1, 1]})
    assert one_dense.uncast_bytes_per_token == 2 * HIDDEN + INSIDE


def test_products_of_layers_are_faster_where_the_speed_is_known() -> None:
    for rates in (H100, CPU):
        plain, cast = (analytic_profile(shape, rates) for shape in (PLAIN, CAST))
        saved_us = plain.layer.forward.per_token_us - cast.layer.forward.per_token_us
        products_us = 1e6 * 2 * PLAIN.layer_parameters / rates.linear_flops
        assert saved_us == pytest.approx(products_us * (1 - 1 / rates.fp8_speedup), abs=1e-12)
        assert cast.head.forward == plain.head.forward
    assert [load_cluster(name).rates.fp8_speedup for name in ("h100x8", "a100x8")] == [H100.fp8_speedup, 1]
