"""Host memory is allocated on the NUMA node of the GPU, as the kernel's tables tell it, or anywhere if they do not."""

import os

import pytest

from megatron_epp.runtime.offload.host import cpus_of_node, near

ADDRESS = "0000:dc:00.0"


@pytest.fixture
def sysfs(tmp_path):
    """A machine of two nodes, with a GPU on the second and another device on none."""
    for name, text in {
        f"bus/pci/devices/{ADDRESS}/numa_node": "1\n",
        "bus/pci/devices/0000:01:00.0/numa_node": "-1\n",
        "devices/system/node/node0/cpulist": "0-1,4-5\n",
        "devices/system/node/node1/cpulist": "2-3,6\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return tmp_path


def test_the_processors_are_those_of_the_gpus_node(sysfs):
    assert cpus_of_node(ADDRESS, sysfs) == {2, 3, 6}


@pytest.mark.parametrize("address", ["0000:01:00.0", "0000:02:00.0"], ids=["on no node", "not there"])
def test_without_a_node_there_are_none(sysfs, address):
    assert cpus_of_node(address, sysfs) == frozenset()


def test_tables_that_cannot_be_read_tell_nothing(sysfs):
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
