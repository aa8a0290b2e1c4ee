"""Ranks that share experts are those that Megatron's own rank generator puts together."""

import pytest
from megatron.core.parallel_state import RankGenerator

from megatron_epp.advice.question import Configuration
from megatron_epp.cost import ModelShape

ORDER = "tp-cp-ep-dp-pp"
"""Megatron's default."""


@pytest.mark.parametrize(
    ("tensor", "context", "data", "expert", "sharing"),
    [(2, 1, 4, 4, 1), (2, 2, 4, 4, 2), (4, 2, 2, 4, 1), (2, 2, 2, 8, 1), (4, 1, 2, 1, 2), (1, 4, 4, 2, 1), (2, 1, 8, 4, 4)],
)
def test_experts_span_neighbours_across_tensor_and_context_parallel_ranks_and_replicas(
    tensor: int, context: int, data: int, expert: int, sharing: int
):
    config = Configuration(tensor, context, 2, data, expert, sharing)
    shape = ModelShape(
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=64,
        num_attention_heads=8,
        vocab_size=128,
        num_experts=8,
        tensor_parallel=tensor,
        context_parallel=context,
        expert_parallel=expert,
        expert_tensor_parallel=sharing,
    )
    holders = tensor * context * data // (expert * sharing)
    experts = RankGenerator(tp=sharing, ep=expert, dp=holders, pp=2, cp=1, order=ORDER)
    dense = RankGenerator(tp=tensor, ep=1, dp=data, pp=2, cp=context, order=ORDER)
    of_experts = [exchange for exchange in shape.mlp_exchanges if exchange.ranks == expert][-1]
    for group in experts.get_ranks("ep"):
        assert group == list(range(group[0], group[-1] + 1, of_experts.spacing))
        assert len(group) == of_experts.ranks
    shared, stages = experts.get_ranks("tp-ep"), dense.get_ranks("tp-cp")
    assert max(group[-1] - group[0] + 1 for group in shared + stages) == shape.neighbours
    replica_of = {rank: number % data for number, ranks in enumerate(stages) for rank in ranks}
    assert {tuple(sorted({replica_of[rank] for rank in group})) for group in shared} == set(config.lockstep_groups)
