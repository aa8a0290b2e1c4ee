"""Whether this machine's GPUs are enough for several ranks: one each, or shared, which NCCL can from 2.30 on."""

import torch

from megatron_epp.launch.machine import nccl_version

ROOM = "needs more GPUs, or NCCL 2.30 or later, with which ranks share one"
_SHARES = (2, 30)


def has_room_for(num_ranks: int) -> bool:
    if not torch.cuda.is_available():
        return False
    return num_ranks <= torch.cuda.device_count() or (nccl_version() or (0,))[:2] >= _SHARES
