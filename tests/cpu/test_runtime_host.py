"""Host memory holds as much as its cap says in any order of coming and going, so that a plan which fits the cap runs in it."""

import os
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_epp.features.offload.host import MACHINE, HostMemory, Region, cpus_of_node, host_limit, near
from megatron_epp.plan import EppError, Op
from megatron_epp.plan.kv_offload import HOST_UNIT_BYTES, host_peak_bytes, in_units, kv_offload_changes, slices_of
from megatron_epp.plan.lowering import lower
from megatron_epp.runtime.memory_use import HostMemoryError
from tests.support.runtime.late_host import late_host
from tests.support.runtime.runtime_plans import offloading, offloading_kv, planned

CPU = torch.device("cpu")
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@given(st.randoms(use_true_random=False), st.sampled_from([10 * KIB, 3 * MIB, 90 * MIB]))
def test_whatever_comes_and_goes_the_most_that_was_there_at_once_is_enough(rng, largest):
    sizes = [rng.randint(1, largest) for _ in range(40)]
    steps, here, level, most = [], [], 0, 0  # numbers that come, or go
    for number, size in enumerate(sizes):
        steps.append(number)
        here.append(number)
        level += in_units(size)
        most = max(most, level)
        while here and rng.random() < 0.45:
            steps.append(here.pop(rng.randrange(len(here))))
            level -= in_units(sizes[steps[-1]])
    host, regions = HostMemory(CPU, most), {}
    for _ in range(2):
        for number in (*steps, *here):
            if number in regions:
                regions.pop(number).give_back()
            else:
                regions[number] = Region(host)
                regions[number].reserve(sizes[number])
    assert (host.held_bytes, host.held_peak_bytes) == (0, most)
    assert host.allocated_bytes <= most


@given(st.randoms(use_true_random=False))
def test_what_lies_in_parts_comes_back_whole_and_nobody_writes_over_it(rng):
    host, here = HostMemory(CPU, 40 * KIB), {}
    for number in range(60):
        size = rng.randint(1, 9 * KIB)
        if host.held_bytes + in_units(size) <= host.cap_bytes:
            made, region, cut = torch.randint(0, 256, (size,), dtype=torch.uint8), Region(host), rng.randint(0, size)
            for part in (made[:cut], made[cut:]):
                for device, memory in region.pairs(region.reserve(len(part)), part):
                    memory.copy_(device)
            here[number] = made, region
        elif here:
            made, region = here.pop(rng.choice(sorted(here)))
            back = torch.empty_like(made)
            for device, memory in region.pairs(0, back):
                device.copy_(memory)
            assert torch.equal(back, made)
            region.give_back()


def test_pages_are_kept_and_no_larger_than_the_cap_lets_them_be():
    host = HostMemory(CPU, 100 * MIB + 3 * KIB + 100)
    spans = host.take(1)
    assert host.allocated_bytes == 32 * MIB
    host.give_back(spans)
    host.give_back(host.take(100 * MIB + 3 * KIB))
    assert (host.allocated_bytes, len(host.take(32 * MIB))) == (100 * MIB + 3 * KIB, 1)
    assert host.allocated_bytes == 100 * MIB + 3 * KIB


def test_the_cap_on_host_memory_is_named_and_what_does_not_fit_takes_nothing():
    host = HostMemory(CPU, MIB)
    (region := Region(host)).reserve(MIB)
    with pytest.raises(EppError, match=r"needs 0\.0009769 GiB .* a rank may take 0\.0009766 GiB; raise host_cap_bytes"):
        region.reserve(1)
    assert (region.num_bytes, host.held_bytes) == (MIB, MIB)


def test_memory_that_a_load_still_reads_is_offloaded_to_only_behind_it():
    host = late_host(eager=True)  # offloads at once, loads as late as may be
    region = Region(host)
    first, loaded = torch.full((HOST_UNIT_BYTES,), 7, dtype=torch.uint8), torch.zeros(HOST_UNIT_BYTES, dtype=torch.uint8)
    for out, device in ((True, first), (False, loaded)):
        start = region.reserve(HOST_UNIT_BYTES) if out else 0
        with host.streams.copying(out):
            for part, memory in region.pairs(start, device):
                (memory if out else part).copy_(part if out else memory)
    region.give_back(host.streams.mark(False))
    other = Region(host)
    other.reserve(HOST_UNIT_BYTES)
    with host.streams.copying(True):
        for part, memory in other.pairs(0, torch.full_like(first, 9)):
            memory.copy_(part)
    host.streams.wait(host.streams.mark(False))
    assert torch.equal(loaded, first)


def moving(copy, size, sizes):
    """The copy with a size; a load has that of its offload."""
    size = sizes.setdefault(copy.action[1:], size)
    return copy._replace(alloc_bytes=size) if copy.action.op is Op.L else copy._replace(free_bytes=size)


def replay(plan, rank, host):
    """All that a run of a rank takes at a host and gives back there, in the order of the run."""
    copies = {copy.action: copy for copy in plan.copies[rank]} if plan.copies else {}
    entries, changes, away, caches = {entry[:2]: entry for entry in plan.kv_offload}, {}, {}, {}
    for key, entry in entries.items():
        for action, at_end, _ in kv_offload_changes([entry], slices_of(plan), plan.forward_only):
            changes.setdefault(action, []).append((at_end, key))
    for action in lower(plan)[rank]:
        if action.op is Op.O:
            away[action[1:]] = Region(host)
            away[action[1:]].reserve(copies[action].free_bytes)
        elif action.op is Op.L:
            away.pop(action[1:]).give_back()
        for at_end, key in sorted(changes.get(action, [])):
            if at_end:
                caches.pop(key).give_back()
                continue
            _, _, cache, gradient = entries[key]
            total, region = gradient if action.op is Op.B else cache, caches.setdefault(key, Region(host))
            for piece in range(3):
                region.reserve(total // 3 + (piece < total % 3))
    assert not away
    assert not caches


@pytest.mark.parametrize("seed", range(20))
def test_plans_that_fit_the_host_run_in_it_to_the_byte(seed):
    draw = random.Random(seed)
    lengths = [draw.randint(40, 90), draw.randint(30, 60), *(draw.randint(1, 30) for _ in range(draw.randint(1, 6)))]
    plan = offloading_kv(offloading(planned(lengths, (2, 2), slices=draw.randint(3, 8)), 0.5))
    copies = [tuple(moving(copy, draw.randint(1, 70 * MIB), sizes) for copy in row) for row in plan.copies for sizes in [{}]]
    entries = [one._replace(cache_bytes=draw.randint(1, GIB), gradient_bytes=draw.randint(1, GIB)) for one in plan.kv_offload]
    plan = replace(plan, copies=tuple(copies), kv_offload=tuple(entries))
    for rank, peak in enumerate(host_peak_bytes(plan)):
        host = HostMemory(CPU, peak)
        for _ in range(3):
            replay(plan, rank, host)
        assert 0.9 * peak < host.held_peak_bytes <= peak
        with pytest.raises(HostMemoryError):
            replay(plan, rank, HostMemory(CPU, host.held_peak_bytes - HOST_UNIT_BYTES))


MACHINE_BYTES = 1000
UNLIMITED_V1 = 9223372036854771712


def put(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/", {}, (1000, MACHINE)),
        ("0::/", {"memory.max": "max"}, (1000, MACHINE)),
        ("0::/", {"memory.max": 600}, (600, "memory.max")),
        ("0::/", {"memory.max": 6000}, (1000, MACHINE)),
        (
            "0::/slurm/job_7/step_0",
            {"slurm/job_7/step_0/memory.max": "max", "slurm/job_7/memory.max": 400, "slurm/memory.max": 800},
            (400, "slurm/job_7/memory.max"),
        ),
        (
            "9:cpu,cpuacct:/a\n4:memory:/slurm/job_7\n0::/",
            {"memory/slurm/job_7/memory.limit_in_bytes": 300, "memory/memory.limit_in_bytes": UNLIMITED_V1},
            (300, "memory/slurm/job_7/memory.limit_in_bytes"),
        ),
        ("4:memory:/docker/of/the/host", {"memory/memory.limit_in_bytes": 200}, (200, "memory/memory.limit_in_bytes")),
    ],
)
def test_the_least_limit_counts_wherever_it_is(tmp_path, membership, files, expected):
    """For lines of /proc/self/cgroup and files below /sys/fs/cgroup."""
    put(tmp_path, {"self": membership} | {f"groups/{name}": text for name, text in files.items()})
    found, source = host_limit(tmp_path / "groups", tmp_path / "self", MACHINE_BYTES)
    assert (found, source.removeprefix(f"{tmp_path / 'groups'}/")) == expected


def test_where_there_are_no_control_groups_the_machine_has_what_it_has(tmp_path):
    assert host_limit(tmp_path, tmp_path / "none", MACHINE_BYTES) == (1000, MACHINE)


ADDRESS = "0000:dc:00.0"


@pytest.fixture
def sysfs(tmp_path):
    """A machine of two nodes, with a GPU on the second and another device on none."""
    devices = {f"bus/pci/devices/{ADDRESS}/numa_node": 1, "bus/pci/devices/0000:01:00.0/numa_node": -1}
    put(tmp_path, devices | {f"devices/system/node/node{at}/cpulist": ids for at, ids in enumerate(("0-1,4-5", "2-3,6"))})
    return tmp_path


def test_the_processors_are_those_of_the_gpus_node_and_none_where_tables_do_not_tell(sysfs):
    assert cpus_of_node(ADDRESS, sysfs) == {2, 3, 6}
    for address in ("0000:01:00.0", "0000:02:00.0"):  # on no node, and not there
        assert cpus_of_node(address, sysfs) == frozenset()
    (sysfs / "devices/system/node/node1/cpulist").write_text("two to six\n")
    assert cpus_of_node(ADDRESS, sysfs) == frozenset()


def test_the_thread_is_on_these_processors_for_the_allocation_only(monkeypatch):
    allowed = {0, 1, 2, 3}
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(allowed))

    def move(thread, cpus):
        allowed.clear()
        allowed.update(cpus)

    monkeypatch.setattr(os, "sched_setaffinity", move)
    with near(frozenset({2, 3, 6})):
        assert allowed == {2, 3}
    assert allowed == {0, 1, 2, 3}
    with near(frozenset({7})):  # none that this job may use
        assert allowed == {0, 1, 2, 3}
    with pytest.raises(MemoryError), near(frozenset({1})):
        raise MemoryError
    assert allowed == {0, 1, 2, 3}


def test_the_kernel_moves_the_thread():
    before = os.sched_getaffinity(0)
    with near(frozenset({min(before)})):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before
