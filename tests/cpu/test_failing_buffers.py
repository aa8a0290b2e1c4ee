"""Whichever buffer of the package finds no memory, the run ends with the action, and no rank is left waiting."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_epp.plan import EppError, Plan
from megatron_epp.runtime.executor import OutOfMemoryRunError
from megatron_epp.runtime.upload import Uploader
from tests.support.runtime.failing_buffers import failing
from tests.support.runtime.pipeline_runs import run_plan
from tests.support.runtime.rank_processes import run_until_exit
from tests.support.runtime.runtime_plans import offloading, offloading_kv, one_rank_split, two_ranks

RECEIVED = "megatron_epp.runtime.links"


def test_whichever_buffer_of_a_rank_finds_no_memory_the_error_names_the_action() -> None:
    plan = offloading(offloading_kv(one_rank_split(num_layers=1)), 0.7)
    with failing(0) as made:
        run_plan(0, None, plan)
    assert {name.split(".")[2] for name in made} == {"attention", "offload"}
    for at in range(1, len(made) + 1):
        with failing(at), pytest.raises(OutOfMemoryRunError, match=r"action 0[FBWOL][012] failed: out of memory on stage 0"):
            run_plan(0, None, plan)


def run_failing(rank: int, links: object, plan: Plan, at: int) -> None:
    with failing(at if rank == 1 else 0, RECEIVED):
        run_plan(rank, links, plan)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_whichever_slot_of_messages_finds_no_memory_both_ranks_end_before_the_first_action(tmp_path: Path, at: int) -> None:
    ended = run_until_exit(2, tmp_path, run_failing, two_ranks(num_layers=1), at)
    assert [rank.exit_code for rank in ended] == [1, 1]
    assert "action 1RECV_F0 failed: out of memory" in ended[1].stderr


@pytest.mark.parametrize("at", [1, 2])
def test_an_upload_that_finds_no_memory_says_how_much_it_needs(at: int) -> None:
    uploader = Uploader(torch.device("cpu"))
    with failing(at, "megatron_epp.runtime.upload"), pytest.raises(EppError) as raised:
        uploader.begin([torch.arange(6)])
    assert str(raised.value).startswith("no memory for the 48 bytes that an iteration reads on its device: CUDA out of memory")
