"""Slices on ranks that exchange messages over NCCL train as Megatron's own schedules do, in all ways to share a model."""

import pytest
import torch

from megatron_epp.cli.first_run.training import tiny_training
from megatron_epp.launch.machine import NO_TF32
from megatron_epp.launch.runs import train
from tests.support.gpu_ranks import ROOM, has_room_for

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

ITERATIONS = 3
SLICED = {"epp_slices": 3, "epp_memory_cap_gb": 8}  # ranks may share a GPU
V = {"num_virtual_stages_per_pipeline_rank": 2, "epp_placement": "v"}
SHARED = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
OVERLAPPED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
STOCK, WHOLE, UNCUT = {"epp_schedule": "stock"}, {"epp_schedule": "whole"}, {"epp_slices": 1}
RUNS = {
    "a stage per rank": (2, STOCK, {"pipeline_model_parallel_size": 2}, {}),
    "there and back, weights apart": (2, UNCUT, {"pipeline_model_parallel_size": 2} | V, {"epp_split_weight_gradient": True}),
    "four stages": (4, STOCK, {"pipeline_model_parallel_size": 4}, {"epp_recompute": 1}),
    "tensor and sequence parallel": (2, STOCK, SHARED, {}),
    "context parallel": (2, WHOLE, {"context_parallel_size": 2}, {}),
    "data parallel, reductions overlapped": (2, STOCK, OVERLAPPED, {}),
    "tensor parallel in a pipeline": (4, STOCK, SHARED | {"pipeline_model_parallel_size": 2}, {}),
}
"""Number of ranks, flags of the run that is compared with, of both runs, and of the run in slices alone, by name.

Megatron's own training where it has the layout: it has no placement in a V, and shares out tokens in another order.
"""


def losses(folder, num_ranks, changes):
    settings = tiny_training(folder, 1, ITERATIONS, is_reduced=False) | {"bf16": False, "num_attention_heads": 4}
    return torch.tensor(train(folder / "run", num_ranks, settings | changes, 300.0, environment=NO_TF32).losses)


@pytest.mark.parametrize("name", RUNS)
def test_slices_over_nccl_have_the_losses_of_whole_sequences(tmp_path, name):
    num_ranks, whole, both, alone = RUNS[name]
    if not has_room_for(num_ranks):
        pytest.skip(ROOM)
    expected = losses(tmp_path / "whole", num_ranks, both | whole)
    found = losses(tmp_path / "sliced", num_ranks, both | SLICED | alone)
    assert torch.allclose(found, expected, rtol=1e-5, atol=0), (found, expected)
