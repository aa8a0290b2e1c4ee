"""Memory that runs out in an action ends the run with numbers and flags."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_epp.mcore.arguments.table import TRAINING, names_in_loop
from megatron_epp.plan import Action, EppError, Op, Plan, PlanError
from megatron_epp.plan.errors import Remedy
from megatron_epp.plan.simulation import simulate
from megatron_epp.runtime.executor import OutOfMemoryRunError
from megatron_epp.runtime.lowered import executor_of
from megatron_epp.runtime.memory_use import HostMemoryError, Usage
from megatron_epp.runtime.out_of_memory import LEAST_SHARE, OutOfMemoryReport, lower_cap
from megatron_epp.runtime.upload import Uploader
from tests.support.runtime.failing_buffers import failing
from tests.support.runtime.plain_stage import PlainStage, run_plan, stages_of
from tests.support.runtime.rank_processes import run_until_exit
from tests.support.runtime.runtime_plans import offloading, offloading_kv, one_rank_split, planned, two_ranks

MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.20 GiB is free."


class ScarceStage(PlainStage):
    """Finds no memory in one of its forwards, given by its chunk: behind its work, as late as can be."""

    faulty_chunk = None

    def forward(self, context, hidden):
        output = super().forward(context, hidden)
        if context.chunk == self.faulty_chunk:
            raise torch.OutOfMemoryError(MESSAGE)
        return output


def run_short(rank, links, plan, faulty_rank, chunk):
    """Run a plan; the forward of a chunk on the first stage of a rank finds no memory."""
    stages = stages_of(plan, rank, ScarceStage)
    if rank == faulty_rank:
        stages[min(stages)].faulty_chunk = chunk
    report = OutOfMemoryReport(lambda static_bytes: Usage(static_bytes + 3 * 2**30, 8 * 2**30))
    executor_of(plan, rank, stages, links, out_of_memory=report.text).run()


def test_the_run_ends_with_stage_chunk_bytes_and_two_flags(tmp_path):
    ended = run_until_exit(2, tmp_path, run_short, two_ranks(), 1, 1)
    assert [rank.exit_code for rank in ended] == [1, 1]
    assert "OutOfMemoryRunError: pipeline rank 1, step " in ended[1].stderr
    assert "action 1F1 failed: out of memory on stage 1, chunk 1: 8 tokens, 2 layers, recompute: none\n" in ended[1].stderr
    assert "in use: 3.00 GiB, 8.00 GiB reserved, and 2.00 GiB more wanted\n" in ended[1].stderr
    assert "most likely to help: PYTORCH_ALLOC_CONF=expandable_segments:True or chunk_tokens=4\n" in ended[1].stderr
    assert "The above exception" not in ended[1].stderr


# What the error says, and how far the advised cap goes down.


def hybrid(cap_bytes=None):
    plan = planned((41, 22, 3, 1, 6), (2, 2), slices=3)
    return plan if cap_bytes is None else replace(plan, cap_bytes=(cap_bytes,) * plan.num_ranks)


def first_backward(plan):
    return next(action for action in plan.actions(1) if action.op is Op.B)


def text(error=None, usage=None, cap_bytes=None, names=TRAINING, **options):
    plan, report = hybrid(cap_bytes), OutOfMemoryReport(usage=lambda _: usage, names=names, **options)
    return report.text(plan, 1, first_backward(plan), error or torch.OutOfMemoryError("no"))


def test_the_cap_goes_down_by_what_is_in_use_beyond_the_plan_and_below_the_plans_peak_where_no_excess_was_seen():
    plan = hybrid()
    peak, static = simulate(plan).peak_bytes[1], plan.static_bytes[1]
    excess = (peak - static) // 3
    assert lower_cap(hybrid(peak + 10), 1, excess) == peak + 10 - excess
    assert lower_cap(hybrid(peak), 1, peak - static) is None
    assert plan.cap_bytes[1] > 2 * peak
    assert 0.9 * LEAST_SHARE <= (peak - lower_cap(plan, 1, 0)) / (peak - static) <= 1.1 * LEAST_SHARE


def test_what_could_not_be_had_counts_as_in_use():
    plan = hybrid()
    usage, peak = Usage(simulate(plan).planned_bytes(1, first_backward(plan))), simulate(plan).peak_bytes[1]
    for size, num_bytes in (("20.00 KiB", 20 * 1024), ("30.00 KiB", 30 * 1024), ("30720 bytes", 30 * 1024)):
        advised = f"--epp-memory-cap-gb {(peak - num_bytes) / 2**30:.4g}"
        assert advised in advice(torch.OutOfMemoryError(f"Tried to allocate {size}."), usage, cap_bytes=peak)


def advice(*args, **kwargs):
    line = text(*args, **kwargs).splitlines()[-1]
    assert line.startswith("most likely to help: ")
    return line.removeprefix("most likely to help: ").split(" or ")


def test_the_flags_named_follow_the_signs(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    full, gaps = Usage(1, 1), Usage(1, 10)
    assert [flag.split()[0] for flag in advice(usage=full)] == ["--epp-memory-cap-gb", "--epp-chunk-tokens"]
    assert advice(usage=gaps)[0] == "PYTORCH_ALLOC_CONF=expandable_segments:True"
    assert advice(usage=full, recompute_is_fixed=True)[0] == "--epp-recompute auto"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert advice(usage=gaps)[0].startswith("--epp-memory-cap-gb")


def test_other_pools_bring_their_own_words_and_flags():
    error = HostMemoryError("the host gives no more than 3 GB", Remedy("lower", "chunk_tokens"), Remedy("drop", "offload"))
    assert "\nthe host gives no more than 3 GB\n" in text(error)
    assert advice(error) == ["lower --epp-chunk-tokens", "leave out --epp-offload"]
    assert advice(error, names=names_in_loop(["memory_cap_gb", "offload"]), makes_chunks=False)[0] == "leave out offload"


def test_planned_bytes_are_those_of_the_plans_own_account():
    plan = hybrid()
    timeline = simulate(plan)
    for rank in range(plan.num_ranks):
        live = [timeline.planned_bytes(rank, action) for action in plan.actions(rank)]
        assert max(live) == timeline.peak_bytes[rank]
        assert live[0] == plan.static_bytes[rank] + plan.ranks[rank][0].alloc_bytes
    with pytest.raises(PlanError, match="rank 0 has no action 1F0"):
        timeline.planned_bytes(0, Action(Op.F, 1, 0))


def test_smaller_microbatches_are_advised_where_a_script_makes_them():
    advised = text(makes_chunks=False, names=names_in_loop(["memory_cap_gb", "offload"])).splitlines()[-1]
    assert "memory_cap_gb=" in advised
    assert "microbatches of at most " in advised
    assert "--" not in advised


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
