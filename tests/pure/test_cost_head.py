"""The loss by blocks, in the costs: when it is on by itself, and what it takes and saves."""

import pytest

from megatron_epp.cli import main as cli
from megatron_epp.cost import H100, LinearTime, analytic_profile, on_device, work_of
from megatron_epp.cost.library import load_flags, shape_of
from megatron_epp.cost.memory import WORKING
from megatron_epp.cost.output_layer import AUTO, BLOCK_BYTES, loss_block_tokens, loss_workspace_bytes
from megatron_epp.plan import Chunk, Segment
from megatron_epp.plan.serialize import load

FLAGS = load_flags("llama3-8b")
WHOLE = shape_of(FLAGS | {"epp_loss_block_tokens": 0})
BLOCKS = shape_of(FLAGS | {"epp_loss_block_tokens": 2048})


@pytest.mark.parametrize("vocabulary", [1000, 32000, 128256, 10**6])
def test_by_itself_it_is_on_where_a_sequences_logits_have_more_than_two_blocks(vocabulary):
    most = 2 * BLOCK_BYTES // (4 * vocabulary)
    assert loss_block_tokens(AUTO, vocabulary, most) == 0
    tokens = loss_block_tokens(AUTO, vocabulary, most + 1)
    assert BLOCK_BYTES / 2 < 4 * vocabulary * tokens <= BLOCK_BYTES


def test_it_counts_what_is_on_one_rank():
    assert loss_block_tokens(AUTO, 10**9, 10**6) == 1
    long = FLAGS | {"seq_length": 131072}
    one, four = (shape_of(long | {"tensor_model_parallel_size": ranks}).loss_block_tokens for ranks in (1, 4))
    assert (one, four) == (2048, 8192)
    longest = 2 * BLOCK_BYTES // (4 * 128256)
    ranks = {"seq_length": 4 * longest, "context_parallel_size": 4}
    assert shape_of(FLAGS | ranks).loss_block_tokens == 0
    assert shape_of(FLAGS | ranks | {"context_parallel_size": 2}).loss_block_tokens > 0
    assert shape_of(FLAGS).loss_block_tokens == 0  # nobody says how long sequences are


def test_the_head_keeps_no_probabilities_and_computes_logits_twice():
    whole, blocks = (analytic_profile(shape, H100).head for shape in (WHOLE, BLOCKS))
    assert whole.bytes_per_token - blocks.bytes_per_token == 4 * WHOLE.vocab_size
    assert blocks.forward == whole.forward
    more_us = blocks.backward.per_token_us - whole.backward.per_token_us
    assert more_us == pytest.approx(1e6 * 2 * WHOLE.vocabulary_parameters / H100.linear_flops)
    assert (blocks.weight, blocks.weight_bytes_per_token) == (LinearTime(), 0)


def test_while_it_runs_a_device_holds_whole_logits_once_more_in_two_bytes_each():
    work = work_of([Chunk((Segment(0, 0, 3000),))], [3000])
    whole, blocks = (on_device(analytic_profile(shape, H100).costs([16, 16]), 0.0) for shape in (WHOLE, BLOCKS))
    of_layers = blocks.pass_items(0, work)[WORKING]
    assert whole.pass_items(0, work)[WORKING] == blocks.pass_items(1, work)[WORKING] == of_layers
    norm = 2 * 2 * WHOLE.hidden_size  # which the head keeps besides
    assert whole.pass_items(1, work)[WORKING] == 3000 * (2 * WHOLE.vocab_size + norm / 2) > of_layers


def test_a_workspace_does_not_grow_with_chunks_and_is_held_throughout():
    costs = analytic_profile(BLOCKS, H100).costs([16, 16])
    workspace = loss_workspace_bytes(2048, 128256, 4096, 2)
    assert [stage.workspace_bytes for stage in costs.stages] == [0, workspace]
    assert costs.static_bytes(1) == costs.stages[1].static_bytes + workspace
    assert loss_workspace_bytes(4096, 128256, 4096, 2) - workspace == 2048 * 128256 * 6
    assert loss_workspace_bytes(0, 128256, 4096, 2) == 0


def test_plan_takes_the_flag_and_by_itself_goes_by_the_longest_sequence(tmp_path):
    def planned(*flags):
        batch = ["--lengths", "60000,2000", "--stages", "2", "--tensor-parallel", "8"]
        assert cli.main(["plan", *batch, *flags, "-o", str(tmp_path / "plan.json")]) == 0
        return load(tmp_path / "plan.json").predicted

    whole = planned("--loss-block-tokens", "0")
    assert planned() == planned("--context", "100000") == planned("--loss-block-tokens", "16384")
    assert planned().peak_bytes[1] < whole.peak_bytes[1]
    assert planned("--context", "16000") == planned("--context", "16000", "--loss-block-tokens", "0")


def test_a_workspace_counts_the_tensors_of_a_block():
    """Bytes of 10 tokens, 100 entries and a hidden size of 8: logits, copies in bf16, and what the weight's gradient takes."""
    assert loss_workspace_bytes(10, 100, 8, 4) == 100 * (10 * 4 + 8 * 4)
    assert loss_workspace_bytes(10, 100, 8, 2) == 100 * (10 * (4 + 2) + 8 * (4 + 2))
    assert loss_workspace_bytes(10, 100, 8, 2, fused_accumulation=True) == 100 * (10 * (4 + 2) + 8 * 2)
    assert loss_workspace_bytes(10, 100, 8, 2, in_place=True) == 2 * 10 * (100 + 8) + 100 * 8 * (4 + 2)
