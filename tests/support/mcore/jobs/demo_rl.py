"""The second part of the demonstration of reinforcement learning (`scripts/demo_rl.sh`), without what it prints."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from scripts.demo_rl import slices


def sliced(has_verl: bool) -> dict[str, Any]:
    """Measure the reduced batch once, whole and in slices."""
    from megatron_epp.mcore import entry

    entry.prepare()
    dist.init_process_group("gloo")
    return slices.measured(slices.Updates(has_verl, slices.REDUCED), rounds=1)
