"""Ranks of measurements have a core each, and what they fork, such as the planning process, may use every core."""

import os
import subprocess
import sys

from tests.support import ROOT

PROGRAM = """
import os
from megatron_epp.mcore.pinned import pin

cores = os.sched_getaffinity(0)
pin(1)
assert os.sched_getaffinity(0) == {sorted(cores)[1 % len(cores)]}
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
else:
    os._exit(os.sched_getaffinity(0) != cores)
"""


def test_a_pinned_rank_has_one_core_and_what_it_forks_has_all():
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
