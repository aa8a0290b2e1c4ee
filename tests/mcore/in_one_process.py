"""Several training runs in one launch, each from its own command line: starting Megatron takes longer than a tiny GPT."""

import gc
import sys
from collections.abc import Sequence


def train(flags: Sequence[str]) -> None:
    """Train once through `megatron.training.pretrain`, then take Megatron's global state down."""
    from megatron.core import mpu
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine
    from megatron.training import global_vars

    from megatron_epp.mcore import gpt

    sys.argv = [sys.argv[0], *flags]
    gpt.pretrain()
    global_vars.destroy_global_vars()
    mpu.destroy_model_parallel()
    destroy_num_microbatches_calculator()
    destroy_rerun_state_machine()
    gc.collect()
