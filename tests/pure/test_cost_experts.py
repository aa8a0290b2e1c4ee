"""Experts over ranks: who shares them, what is exchanged for them, and what commands are told of them."""

import shlex
from dataclasses import replace

import pytest

from megatron_epp.cost.memory import WORKING
from megatron_epp.cost.optimizer import OptimizerBytes
from megatron_epp.cost.work import work_of
from megatron_epp.plan import Chunk, Segment
from megatron_epp.plan.layout import Layout
from megatron_epp.plan.placement import Placement
from megatron_epp.tools.cli import main as cli
from megatron_epp.tools.cli.planning_flags import costs_source, flags_of
from megatron_epp.tools.formulas import H100, ModelShape, Rates
from megatron_epp.tools.formulas.analytic import analytic_profile, exchange_line
from megatron_epp.tools.formulas.library import load_flags, shape_of

SHAPE = ModelShape(
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=32,
    num_attention_heads=8,
    vocab_size=128,
    num_experts=64,
    experts_per_token=8,
    tensor_parallel=2,
    sequence_parallel=True,
    expert_parallel=8,
    expert_tensor_parallel=1,
)
NODES = replace(H100, devices_per_node=8)
TOKEN = 64 * 2 / 2
"""Bytes of a copy of a token of a rank, of two that share the tokens."""


def seconds(shape: ModelShape, rates: Rates) -> float:
    return exchange_line(shape.mlp_exchanges, rates).per_token_us / 1e6


def test_experts_are_divided_by_the_ranks_of_an_expert_and_not_by_tensor_parallel_ones():
    whole, halves, default = (replace(SHAPE, expert_tensor_parallel=ranks) for ranks in (1, 2, None))
    assert whole.expert_parameters_on_rank == 2 * halves.expert_parameters_on_rank == 64 * SHAPE.mlp_parameters / 8
    assert default.expert_parameters_on_rank == halves.expert_parameters_on_rank
    assert (whole.neighbours, halves.neighbours, default.neighbours) == (8, 16, 16)
    flags = load_flags("mixtral-8x7b") | {"tensor_model_parallel_size": 4}
    assert shape_of(flags).ranks_of_an_expert == 4  # Megatron's default
    assert shape_of(flags | {"expert_tensor_parallel_size": 1}).ranks_of_an_expert == 1


def test_whole_experts_are_neighbours_and_halves_leave_the_node():
    assert seconds(SHAPE, NODES) == seconds(SHAPE, H100) == pytest.approx(2 * 8 * TOKEN * (7 / 8) / H100.exchange_bytes)
    halves = replace(SHAPE, expert_tensor_parallel=2)
    gathered, inside, abroad = (2 * 8 * TOKEN * share for share in (1, 3 / 8, 4 / 8))
    expected = (gathered + inside) / H100.exchange_bytes + abroad / H100.message_bytes
    assert seconds(halves, NODES) == pytest.approx(expected)
    assert seconds(halves, NODES) > 5 * seconds(SHAPE, NODES)


def test_the_expert_of_all_tokens_reduces_the_residual_stream_and_the_others_do_not():
    shared = replace(SHAPE, shared_ffn_hidden_size=16)
    assert [one.ranks for one in SHAPE.tensor_exchanges if one.num_bytes] == [2]
    assert [one.ranks for one in shared.tensor_exchanges if one.num_bytes] == [2, 2]
    assert replace(SHAPE, num_experts=None).mlp_exchanges == shared.mlp_exchanges[:1]


@pytest.mark.parametrize(("groups", "chosen", "nodes_of_a_token"), [(1, 1, 4 * (1 - 0.75**8)), (4, 2, 2 * (1 - 0.5**8))])
def test_a_node_gets_a_token_once(groups: int, chosen: int, nodes_of_a_token: float):
    """32 ranks in four nodes: a token has experts in all of them, or in two groups of experts, each a node's."""
    wide = replace(SHAPE, expert_parallel=32, expert_groups=groups, chosen_groups=chosen)
    once = replace(wide, expert_dispatcher="deepep")
    assert seconds(once, NODES) == pytest.approx(2 * nodes_of_a_token * TOKEN * (3 / 4) / H100.message_bytes)
    assert seconds(wide, NODES) > 2 * seconds(once, NODES)
    assert seconds(replace(wide, expert_dispatcher="hybridep"), NODES) == seconds(once, NODES)


def test_in_a_node_a_rank_gets_a_token_once():
    once = replace(SHAPE, expert_dispatcher="deepep")
    ranks = 8 * (1 - (7 / 8) ** 8)
    assert seconds(once, NODES) == pytest.approx(2 * ranks * TOKEN * (7 / 8) / H100.exchange_bytes)


def test_hybridep_has_room_for_the_tokens_of_all_ranks():
    """A rank's token is half of a chunk's: two ranks share these."""
    shape = replace(SHAPE, expert_tensor_parallel=2, expert_dispatcher="hybridep")
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
