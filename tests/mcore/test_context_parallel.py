"""Demands of `--epp` on flags under context parallelism, where the ranks of a layer share tokens, and heads in attention."""

import pytest

from megatron_epp.mcore.arguments import ArgumentError
from megatron_epp.mcore.arguments.consequences import prepare_epp_args
from megatron_epp.mcore.arguments.layout import token_multiple
from tests.support.mcore.megatron_flags import arguments


@pytest.mark.parametrize(("tensor", "context"), [(1, 3), (2, 8), (8, 2)])
def test_heads_that_context_parallel_ranks_do_not_divide_are_taken(tensor, context):
    prepare_epp_args(arguments(tensor_model_parallel_size=tensor, context_parallel_size=context))


def test_heads_that_tensor_parallel_ranks_cannot_share_evenly_are_refused():
    with pytest.raises(
        ArgumentError, match=r"--num-attention-heads 8 .*--tensor-model-parallel-size 3: make it a multiple of 3"
    ):
        prepare_epp_args(arguments(tensor_model_parallel_size=3))


def test_exchanges_that_are_not_heads_for_tokens_are_refused():
    for allowed in (["p2p"], ["a2a"]):
        prepare_epp_args(arguments(context_parallel_size=2, cp_comm_type=allowed))
    with pytest.raises(ArgumentError, match=r"--cp-comm-type \['allgather'\]"):
        prepare_epp_args(arguments(context_parallel_size=2, cp_comm_type=["allgather"]))


def test_megatrons_own_attention_is_refused():
    with pytest.raises(ArgumentError, match=r"--epp-schedule stock .*--epp-schedule whole"):
        prepare_epp_args(arguments("--epp-schedule", "stock", context_parallel_size=2))


def test_chunks_are_padded_to_what_the_ranks_that_share_tokens_divide():
    sizes = {"tensor_model_parallel_size": 2, "context_parallel_size": 4}
    assert token_multiple(arguments(**sizes)) == 4
    assert token_multiple(arguments(sequence_parallel=True, **sizes)) == 8
    with pytest.raises(ArgumentError, match=r"--seq-length 64 .*10 slices of at least 8 tokens.*raise it to 80"):
        prepare_epp_args(arguments("--epp-slices", "10", sequence_parallel=True, **sizes))
