"""Runs `wrap_worker` with some release's `megatron.core` on the path, and nothing of `megatron.training`.

python -m tests.support.mcore.core_only_worker STAGES LENGTHS
"""

import sys

import torch.distributed as dist

from megatron_epp.mcore import cpu, entry, features
from megatron_epp.mcore.patches import patching
from tests.support.mcore import wrap_worker


def prepare() -> None:
    """Let Megatron run without a GPU, which a framework needs not."""
    if cpu.activate():
        patches = [patch for patch in cpu.patches() if "core.tensor_parallel" in patch.target]
        patching.apply(patches, allow_unknown=True)


if __name__ == "__main__":
    sys.modules["megatron.training"] = None  # type: ignore[assignment] # another release's may be installed
    entry.prepare = prepare
    print(f"megatron-core {features.installed_version()}")
    wrap_worker.main()
    dist.destroy_process_group()  # or threads of gloo may end the process while it exits
