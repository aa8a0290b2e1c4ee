"""Ranks of measurements have a core each, and what they fork, such as the planning process, may use every core."""

from tests.support.calls import run_python

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
    done = run_python(PROGRAM)
    assert done.returncode == 0, done.stderr
