"""Caps leave out what is no longer there of a device when communicators, context and libraries are set up."""

import json
import logging
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from megatron_epp.cost.memory import SETUP_MARGIN_BYTES, room_bytes
from megatron_epp.mcore.training import caps
from megatron_epp.plan import UNLIMITED_BYTES
from megatron_epp.tools.cli.planning_flags import cap_of
from megatron_epp.tools.formulas import H100
from megatron_epp.tools.formulas.library import Cluster

GIB = 1 << 30


def test_there_is_room_for_what_is_free_and_what_torch_has_less_a_margin_and_little_makes_no_other_cap():
    for free_gib, reserved_gib, room_gib in (60, 15, 74), (60.3, 15, 74.25), (74.99, 0, 73.75), (0.5, 0.5, 0), (0.2, 0, 0):
        assert room_bytes(int(free_gib * GIB), int(reserved_gib * GIB)) == room_gib * GIB
    assert len({room_bytes(60 * GIB + more, 15 * GIB) for more in range(0, GIB // 4, GIB // 64)}) == 1
    assert SETUP_MARGIN_BYTES == GIB


@pytest.fixture
def device(monkeypatch):
    """A GPU of 80 GiB; says how much of it is free and how much torch has reserved."""
    left = SimpleNamespace(free=0, reserved=0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * GIB))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (left.free, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: left.reserved)
    return left


@pytest.mark.parametrize(("free", "asked", "cap"), [(50, None, 72), (50, 70, 70), (50, 78, 75), (40, None, 65), (40, 70, 65)])
def test_a_cap_is_what_is_wanted_or_the_room_there_is(device, free, asked, cap):
    device.free, device.reserved = free * GIB, 26 * GIB
    assert caps.cap_bytes(Namespace(epp_memory_cap_gb=asked)) == cap * GIB


def test_without_a_cap_a_run_takes_as_much_of_a_device_as_the_command_line_plans_for(device):
    device.free = 79 * GIB
    assert caps.cap_bytes(Namespace(epp_memory_cap_gb=None)) == cap_of(None, Cluster("of 80 GiB", H100, 80.0)) < 80 * GIB


def run(monkeypatch, folder, *, position: int = 0, others=(), **changes) -> tuple[int, ...]:
    """The caps of a run with two pipeline ranks that resumes what is in a folder, in GiB, and saves there. This rank is the
    first of the job; of others there are position and cap in bytes.
    """
    monkeypatch.setattr(caps, "made_by_first", lambda make: make())
    monkeypatch.setattr(caps, "from_each_of_job", lambda mine: [mine, *others])
    given = {"epp_memory_cap_gb": None, "pipeline_model_parallel_size": 2, "rank": 0, "load": str(folder), "save": str(folder)}
    return tuple(cap / GIB for cap in caps.agreed_caps(Namespace(**given | changes), position))


OTHERS = [(1, 70 * GIB), (0, 74 * GIB), (1, 69 * GIB)]


def test_a_resumed_run_has_the_caps_of_the_run_before_though_its_kernels_are_loaded_already(device, monkeypatch, tmp_path):
    device.free, device.reserved = int(30.3 * GIB), 40 * GIB
    assert run(monkeypatch, tmp_path, others=OTHERS) == (69.25, 69)
    device.free, device.reserved = int(22.2 * GIB), 48 * GIB  # the same with states, and 0.1 GiB of code
    assert caps.cap_bytes(Namespace(epp_memory_cap_gb=None)) == 69 * GIB  # a step less, by what is free
    for _ in range(2):
        assert run(monkeypatch, tmp_path, others=OTHERS) == (69.25, 69)
        device.free += GIB // 4  # and so it stays in the run after that


@pytest.mark.parametrize("now_gib", [53, 65])
def test_a_resumed_run_on_a_device_with_other_room_has_caps_of_its_own(device, monkeypatch, tmp_path, now_gib, caplog):
    device.free = 60 * GIB
    assert run(monkeypatch, tmp_path, others=OTHERS) == (59, 69)
    device.free = (now_gib + 1) * GIB
    with caplog.at_level(logging.WARNING, logger="megatron_epp"):
        assert run(monkeypatch, tmp_path, others=OTHERS) == (now_gib, 69)
    assert f"plans fill {now_gib}.00 GiB of the device of rank 0, where those of the run before filled 59.00" in caplog.text


@pytest.mark.parametrize("changes", [{"epp_memory_cap_gb": 58.9}, {"pipeline_model_parallel_size": 1}])
def test_a_resumed_run_that_wants_another_cap_or_has_other_ranks_has_its_own(device, monkeypatch, tmp_path, changes):
    device.free = 60 * GIB
    run(monkeypatch, tmp_path, others=OTHERS)
    device.free -= GIB // 4
    assert run(monkeypatch, tmp_path, others=OTHERS, **changes)[0] in (58.75, int(58.9 * GIB) / GIB)


OF_BEFORE = {"wanted_bytes": 72 * GIB, "cap_bytes": [58 * GIB, 69 * GIB]}
"""What versions wrote that gave it no schema."""
NEGATIVE = OF_BEFORE | {"schema": "megatron-epp/caps", "version": 1, "cap_bytes": [-1, 69 * GIB]}


@pytest.mark.parametrize("text", ["[1, 2", "{}", json.dumps(OF_BEFORE), json.dumps(NEGATIVE)])
def test_caps_that_cannot_be_read_are_named(device, monkeypatch, tmp_path, caplog, text):
    device.free = 60 * GIB
    (tmp_path / caps.FILE_NAME).write_text(text)
    with caplog.at_level(logging.WARNING, logger="megatron_epp"):
        assert run(monkeypatch, tmp_path, others=OTHERS) == (59, 69)
    assert f"{tmp_path / caps.FILE_NAME} cannot be read" in caplog.text


def test_without_a_device_a_cap_is_what_is_asked_and_nothing_is_kept(monkeypatch, tmp_path):
    assert run(monkeypatch, tmp_path, others=OTHERS, epp_memory_cap_gb=0.5) == (0.5, 69)
    assert not any(tmp_path.iterdir())
    assert caps.cap_bytes(Namespace(epp_memory_cap_gb=None)) == UNLIMITED_BYTES
    assert caps.cap_bytes(Namespace(epp_memory_cap_gb=0.5)) == GIB // 2


def test_a_cap_that_was_asked_for_and_is_lowered_is_a_warning_with_the_numbers(device, caplog):
    caplog.set_level(logging.INFO)
    caps.tell_lowered(Namespace(epp_memory_cap_gb=70), [70 * GIB, 70 * GIB])
    caps.tell_lowered(Namespace(epp_memory_cap_gb=None), [72 * GIB])
    assert caplog.records == []
    caps.tell_lowered(Namespace(epp_memory_cap_gb=70), [65 * GIB, 70 * GIB])
    caps.tell_lowered(Namespace(epp_memory_cap_gb=None), [65 * GIB, 65 * GIB])
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    asked, default = (record.getMessage() for record in caplog.records)
    assert "--epp-memory-cap-gb, 70.00 GiB, is more than" in asked
    assert "fill 65.00, 70.00 GiB on pipeline ranks 0 to 1 (free memory and what torch has reserved, less 1.00 GiB)" in asked
    assert "90% of the device's memory, 72.00 GiB" in default
