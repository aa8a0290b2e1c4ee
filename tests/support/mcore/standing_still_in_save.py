"""Training whose second rank stands still while the first checkpoint is saved."""

import os
import time
from typing import Any

from megatron_epp.mcore import entry, pretrain_gpt

entry.prepare()

from megatron.core import dist_checkpointing  # noqa: E402 - it has to be prepared

original = dist_checkpointing.save


def save(*rest: Any, **named: Any) -> Any:
    if os.environ["RANK"] == "1":
        time.sleep(600)
    return original(*rest, **named)


dist_checkpointing.save = save
pretrain_gpt.main()
