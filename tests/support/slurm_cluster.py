"""A SLURM cluster on this machine, in a folder of its own: a controller and virtual nodes on loopback ports."""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from tests.support.calls import wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "srun")
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # where Debian puts daemons
_CONF = """\
ClusterName=epp-test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
KillWait=5
SelectType=select/linear
SchedulerParameters=sched_interval=2
SlurmctldParameters=node_reg_mem_percent=0
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
"""A requeued job starts again when its credential has expired, after 5 seconds instead of 2 minutes, and the scheduler looks at
the queue, every 2 seconds instead of every minute."""


def missing() -> list[str]:
    return [program for program in PROGRAMS if shutil.which(program, path=_PATH) is None]


class Cluster:
    """Controller and nodes. Use as a context manager; everything is taken down at its end."""

    def __init__(self, folder: Path, num_nodes: int) -> None:
        self.folder, self.num_nodes = folder, num_nodes
        self.env = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as starting:
            starting.enter_context(self._running())
            self._stack = starting.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, *command: object, **env: str) -> str:
        done = subprocess.run(
            [*map(str, command)], env=self.env | env, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout

    def state(self, job: str) -> str:
        words = dict(word.split("=", 1) for word in self.run("scontrol", "show", "job", "-o", job).split() if "=" in word)
        return words["JobState"]

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.log")))

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        folder = self.folder
        (folder / "state").mkdir()
        ports = [_free_port() for _ in range(1 + self.num_nodes)]
        host = socket.gethostname().split(".")[0]
        nodes = [
            f"NodeName=n{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1 RealMemory=100"
            for i, port in enumerate(ports[1:], 1)
        ]
        names = {"host": host, "user": getpass.getuser(), "folder": folder, "controller_port": ports[0]}
        (folder / "slurm.conf").write_text(_CONF.format(nodes="\n".join(nodes), **names))
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        munge = [f"--{name}={folder}/munge.{name.split('-')[0]}" for name in ("key-file", "log-file", "pid-file", "seed-file")]
        with contextlib.ExitStack() as daemons:
            daemons.enter_context(self._daemon("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *munge))
            wait_for(lambda: (folder / "munge.socket").exists(), 60, "munged listens")
            daemons.enter_context(self._daemon("slurmctld", "-D"))
            for i in range(1, self.num_nodes + 1):
                (folder / f"spool-n{i}").mkdir()
                daemons.enter_context(self._daemon("slurmd", "-D", "-N", f"n{i}"))
            wait_for(self._is_idle, 120, "the nodes are idle", self.logs)
            yield

    def _is_idle(self) -> bool:
        sinfo = ["sinfo", "-h", "-t", "idle", "-o", "%D"]
        done = subprocess.run(sinfo, env=self.env, capture_output=True, text=True, check=False)
        return done.stdout.strip() == str(self.num_nodes)

    @contextlib.contextmanager
    def _daemon(self, *command: str) -> Iterator[None]:
        with open(self.folder / f"{command[0]}-output.log", "a", encoding="utf-8") as output:
            process = subprocess.Popen(command, env=self.env, stdout=output, stderr=subprocess.STDOUT)
            try:
                yield
            finally:
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
