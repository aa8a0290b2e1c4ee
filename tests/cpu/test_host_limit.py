"""Memory of the host: the machine's, or the least limit of a process's control groups, which are simulated."""

import pytest

from megatron_epp.runtime.offload.host import MACHINE, host_limit

MACHINE_BYTES = 1000
UNLIMITED_V1 = 9223372036854771712


@pytest.fixture
def limit(tmp_path):
    """The limit and where it is, for lines of /proc/self/cgroup and files below /sys/fs/cgroup."""

    def look(membership, files):
        (tmp_path / "groups").mkdir()
        for name, text in files.items():
            path = tmp_path / "groups" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        (tmp_path / "self").write_text(membership)
        found, source = host_limit(tmp_path / "groups", tmp_path / "self", MACHINE_BYTES)
        return found, source.removeprefix(f"{tmp_path / 'groups'}/")

    return look


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/\n", {}, (1000, MACHINE)),
        ("0::/\n", {"memory.max": "max"}, (1000, MACHINE)),
        ("0::/\n", {"memory.max": 600}, (600, "memory.max")),
        ("0::/\n", {"memory.max": 6000}, (1000, MACHINE)),
        (
            "0::/slurm/job_7/step_0\n",
            {"slurm/job_7/step_0/memory.max": "max", "slurm/job_7/memory.max": 400, "slurm/memory.max": 800},
            (400, "slurm/job_7/memory.max"),
        ),
        (
            "9:cpu,cpuacct:/a\n4:memory:/slurm/job_7\n0::/\n",
            {"memory/slurm/job_7/memory.limit_in_bytes": 300, "memory/memory.limit_in_bytes": UNLIMITED_V1},
            (300, "memory/slurm/job_7/memory.limit_in_bytes"),
        ),
        ("4:memory:/docker/of/the/host\n", {"memory/memory.limit_in_bytes": 200}, (200, "memory/memory.limit_in_bytes")),
    ],
)
def test_the_least_limit_counts_wherever_it_is(limit, membership, files, expected):
    assert limit(membership, files) == expected


def test_where_there_are_no_control_groups_the_machine_has_what_it_has(tmp_path):
    assert host_limit(tmp_path, tmp_path / "none", MACHINE_BYTES) == (1000, MACHINE)
