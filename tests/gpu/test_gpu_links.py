"""NCCL takes the options that links between a pipeline's ranks are given."""

from argparse import Namespace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture
def world(tmp_path):
    """A job of one rank on NCCL, whose processes share nothing but a file."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("placement", [(0, 1, 2, 3), (0, 1, 2, 3, 3, 2, 1, 0)])
def test_links_with_bounded_ctas_and_the_runs_limit_run_collectives(world, placement):
    from megatron_epp.mcore.training.nccl_settings import link_options  # imports Megatron
    from megatron_epp.plan.communicators import directions
    from megatron_epp.runtime.links.links import Links
    from megatron_epp.runtime.links.objects import Groups

    args = Namespace(distributed_timeout_minutes=7, nccl_communicator_config_path=None, high_priority_stream_groups=[])
    options = link_options(args, directions(placement))
    links = Links.create([0], [0], Groups(timedelta(minutes=7)), directions(placement), options)
    for group in {links.activations, links.gradients, links.activations_down, links.gradients_up}:
        made = group._get_backend(torch.device("cuda")).options
        assert made._timeout == timedelta(minutes=7)
        assert 1 <= made.config.max_ctas <= 4
        assert made.is_high_priority_stream
        total = torch.ones(1 << 20, device="cuda")
        dist.all_reduce(total, group=group)  # makes the communicator
        assert float(total.sum()) == 1 << 20
