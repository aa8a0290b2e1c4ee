"""Small plans as text: order, messages, times and bytes, compared exactly.

After a change that is meant, write them anew with ``MEGATRON_EPP_WRITE_GOLDEN=1 pytest tests/pure/test_plan_golden.py`` and
read the difference.
"""

import pytest

from megatron_epp.plan.document import digest
from megatron_epp.plan.grid import to_grid
from megatron_epp.plan.lowering import lower
from megatron_epp.plan.simulation import simulate
from tests.support.golden import assert_as_written
from tests.support.plan.small_plans import EXAMPLES


def described(plan):
    line = simulate(plan)
    parts = [f"digest {digest(plan)}\n", to_grid(plan), to_grid(lower(plan))]
    for rank, steps in enumerate(plan.ranks):
        spans = zip(steps, line.start_us[rank], line.end_us[rank], strict=True)
        parts.append(f"rank {rank} us: " + ", ".join(f"{s.action} {start:g}-{end:g}" for s, start, end in spans) + "\n")
        parts.append(f"rank {rank} live bytes: " + ", ".join(f"{live}@{at:g}" for at, live in line.live_bytes(rank)) + "\n")
    for rank, steps in enumerate(plan.copies):
        spans = zip(steps, line.copy_start_us[rank], line.copy_end_us[rank], strict=True)
        parts.append(f"copy {rank} us: " + ", ".join(f"{s.action} {start:g}-{end:g}" for s, start, end in spans) + "\n")
    parts.append(f"makespan {line.makespan_us:g} us, bubble {line.bubble_fraction:.6f}, peak bytes {list(line.peak_bytes)}\n")
    return "".join(parts)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_plan_is_lowered_and_simulated_as_written(name):
    assert_as_written(f"schedule_{name}", described(EXAMPLES[name]()))
