"""Time of kernels in the costs: of launches, attention, products in FP8 with their casts, and exchanges of experts."""

import shlex
from dataclasses import replace

import numpy as np
import pytest

from megatron_epp.cost.blocks import LAYER
from megatron_epp.cost.casts import RECIPES, casts_of
from megatron_epp.cost.memory import WORKING
from megatron_epp.cost.optimizer import OptimizerBytes
from megatron_epp.cost.work import LinearTime, work_of
from megatron_epp.features.learnt_costs.timed import Timed, fitted_line
from megatron_epp.plan import Chunk, EppError, Recompute, Segment
from megatron_epp.plan.flags import FLASH_3, KERNELS
from megatron_epp.plan.layout import Layout
from megatron_epp.plan.placement import Placement
from megatron_epp.planner import UNLIMITED_BYTES, Problem, plan
from megatron_epp.tools.cli import main as cli
from megatron_epp.tools.cli.planning_flags import costs_source, flags_of
from megatron_epp.tools.formulas import CPU, H100, H100_NODE, ModelShape, Profile, Rates, analytic_costs, analytic_profile
from megatron_epp.tools.formulas.analytic import exchange_line, profile_for
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


SIZES = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 32, "num_attention_heads": 8, "vocab_size": 128}
EXPERTS = {"num_experts": 64, "experts_per_token": 8, "expert_parallel": 8, "expert_tensor_parallel": 1}
OF_EXPERTS = ModelShape(tensor_parallel=2, sequence_parallel=True, **SIZES, **EXPERTS)
NODES = replace(H100, devices_per_node=8)
TOKEN = 64 * 2 / 2
"""Bytes of a copy of a token of a rank, of two that share the tokens."""


def seconds(shape: ModelShape, rates: Rates) -> float:
    return exchange_line(shape.mlp_exchanges, rates).per_token_us / 1e6


def test_experts_are_divided_by_the_ranks_of_an_expert_and_not_by_tensor_parallel_ones():
    whole, halves, default = (replace(OF_EXPERTS, expert_tensor_parallel=ranks) for ranks in (1, 2, None))
    assert whole.expert_parameters_on_rank == 2 * halves.expert_parameters_on_rank == 64 * OF_EXPERTS.mlp_parameters / 8
    assert default.expert_parameters_on_rank == halves.expert_parameters_on_rank
    assert (whole.neighbours, halves.neighbours, default.neighbours) == (8, 16, 16)
    flags = load_flags("mixtral-8x7b") | {"tensor_model_parallel_size": 4}
    assert shape_of(flags).ranks_of_an_expert == 4  # Megatron's default
    assert shape_of(flags | {"expert_tensor_parallel_size": 1}).ranks_of_an_expert == 1


def test_whole_experts_are_neighbours_and_halves_leave_the_node():
    assert (
        seconds(OF_EXPERTS, NODES) == seconds(OF_EXPERTS, H100) == pytest.approx(2 * 8 * TOKEN * (7 / 8) / H100.exchange_bytes)
    )
    halves = replace(OF_EXPERTS, expert_tensor_parallel=2)
    gathered, inside, abroad = (2 * 8 * TOKEN * share for share in (1, 3 / 8, 4 / 8))
    expected = (gathered + inside) / H100.exchange_bytes + abroad / H100.message_bytes
    assert seconds(halves, NODES) == pytest.approx(expected)
    assert seconds(halves, NODES) > 5 * seconds(OF_EXPERTS, NODES)


def test_the_expert_of_all_tokens_reduces_the_residual_stream_and_the_others_do_not():
    shared = replace(OF_EXPERTS, shared_ffn_hidden_size=16)
    assert [one.ranks for one in OF_EXPERTS.tensor_exchanges if one.num_bytes] == [2]
    assert [one.ranks for one in shared.tensor_exchanges if one.num_bytes] == [2, 2]
    assert replace(OF_EXPERTS, num_experts=None).mlp_exchanges == shared.mlp_exchanges[:1]


@pytest.mark.parametrize(("groups", "chosen", "nodes_of_a_token"), [(1, 1, 4 * (1 - 0.75**8)), (4, 2, 2 * (1 - 0.5**8))])
def test_a_node_gets_a_token_once(groups: int, chosen: int, nodes_of_a_token: float):
    """32 ranks in four nodes: a token has experts in all of them, or in two groups of experts, each a node's."""
    wide = replace(OF_EXPERTS, expert_parallel=32, expert_groups=groups, chosen_groups=chosen)
    once = replace(wide, expert_dispatcher="deepep")
    assert seconds(once, NODES) == pytest.approx(2 * nodes_of_a_token * TOKEN * (3 / 4) / H100.message_bytes)
    assert seconds(wide, NODES) > 2 * seconds(once, NODES)
    assert seconds(replace(wide, expert_dispatcher="hybridep"), NODES) == seconds(once, NODES)


def test_in_a_node_a_rank_gets_a_token_once():
    once = replace(OF_EXPERTS, expert_dispatcher="deepep")
    ranks = 8 * (1 - (7 / 8) ** 8)
    assert seconds(once, NODES) == pytest.approx(2 * ranks * TOKEN * (7 / 8) / H100.exchange_bytes)


def test_hybridep_has_room_for_the_tokens_of_all_ranks():
    """A rank's token is half of a chunk's: two ranks share these."""
    shape = replace(OF_EXPERTS, expert_tensor_parallel=2, expert_dispatcher="hybridep")
    assert shape.exchange_bytes_per_token == 8 * 2 * TOKEN
    assert replace(shape, expert_dispatcher="deepep").exchange_bytes_per_token == 0
    assert replace(shape, num_experts=None).exchange_bytes_per_token == 0
    layout, adam = Layout((2, 2), Placement("looped", 2, 1)), OptimizerBytes.of_flags({})
    hybrid, plain = (
        analytic_profile(replace(shape, expert_dispatcher=name), H100).costs_on_device(layout, adam, 1)
        for name in ("hybridep", "deepep")
    )
    assert (hybrid.exchange_bytes_per_token, plain.exchange_bytes_per_token) == (8 * 2 * TOKEN, 0)
    assert hybrid.stages == plain.stages


def test_while_small_experts_run_a_device_holds_four_copies_for_each_and_they_keep_a_fifth():
    flags = load_flags("qwen3-30b-a3b") | {"expert_model_parallel_size": 8}
    copies = 8 * 2048 * 2
    work = work_of([Chunk((Segment(0, 0, 3000),))], [3000])

    def running(**more: object) -> tuple[float, float]:
        """Bytes per token that a layer holds while it runs, and those that it keeps."""
        layout, adam = Layout((48, 48), Placement("looped", 2, 1)), OptimizerBytes.of_flags({})
        profile = analytic_profile(shape_of(flags | more), H100)
        costs = profile.costs_on_device(layout, adam, 1, 0.0)
        return costs.pass_items(0, work)[WORKING][0] / 3000, profile.layer.bytes_per_token

    held, kept = running()
    assert held == 4 * copies > kept
    assert running(expert_model_parallel_size=1)[0] == kept  # there are three: what is sent is what arrives
    assert running(moe_token_dispatcher_type="flex")[0] == kept
    shared = {"tensor_model_parallel_size": 4, "sequence_parallel": True, "expert_model_parallel_size": 4}
    of_rank = copies / 4
    assert running(**shared, expert_tensor_parallel_size=1)[0] == 4 * of_rank
    assert running(**shared)[0] == 3 * of_rank + 2 * copies  # outputs of the tokens of four ranks
    assert running(**shared, moe_router_dtype="fp32")[0] == 4 * of_rank + 4 * copies  # and once more in fp32


def test_the_dispatcher_is_the_one_that_the_flags_choose():
    flags = load_flags("deepseek-v3")
    assert shape_of(flags).expert_dispatcher == "alltoall"
    flex = flags | {"moe_token_dispatcher_type": "flex"}
    assert shape_of(flex).expert_dispatcher == "deepep"  # Megatron's default
    assert shape_of(flex | {"moe_flex_dispatcher_backend": "hybridep"}).expert_dispatcher == "hybridep"
    assert shape_of(flags | {"moe_flex_dispatcher_backend": "hybridep"}).expert_dispatcher == "alltoall"
    assert (shape_of(flags).expert_groups, shape_of(flags).chosen_groups) == (8, 4)


@pytest.mark.parametrize("command", ["plan", "compare", "memory"])
def test_commands_take_both(command: str):
    def exchange_us(more: str, devices: int = 64) -> float:
        sizes = f"--tensor-parallel 2 --sequence-parallel --expert-parallel 8 --cluster h100x8 --devices {devices}"
        line = f"{command} --model mixtral-8x7b --stages 4 --lengths 4096 {sizes} {more}"
        source, _ = costs_source(cli._parser().parse(shlex.split(line)), 4096)
        return source.layer.forward.per_token_us

    halves, whole, once = map(exchange_us, ("", "--expert-tensor-parallel 1", "--expert-dispatcher deepep"))
    assert whole < once < halves


def test_profiles_take_both():
    line = "profile --model mixtral-8x7b --by-formula h100x8 --tensor-parallel 2 --sequence-parallel --expert-parallel 4 "
    args = cli._parser().parse(shlex.split(line + "--expert-tensor-parallel 1 --expert-dispatcher hybridep -o x.json"))
    shape = shape_of(flags_of(args))
    assert (shape.ranks_of_an_expert, shape.expert_dispatcher) == (1, "hybridep")
