"""Jobs of `tests/callers/test_bridge_weights.py`: Megatron-Bridge's conversions from and to folders of Hugging Face."""

import contextlib
import io
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_epp.mcore import entry
from tests.support.mcore.jobs.frameworks import outputs
from tests.support.mcore.jobs.training_steps import of_bridge


def imported(source: str, target: str) -> None:
    dist.init_process_group("gloo")  # by itself the bridge takes NCCL
    with of_bridge():
        from megatron.bridge import AutoBridge

        AutoBridge.import_ckpt(hf_model_id=source, megatron_path=target)


def exported(source: str, checkpoint: str, target: str) -> None:
    """Convert a checkpoint of Megatron's to a folder of Hugging Face; its model once came from the folder `source`."""
    with of_bridge():
        from megatron.bridge import AutoBridge

        AutoBridge.from_hf_pretrained(source).export_ckpt(megatron_path=checkpoint, hf_path=target)


def logits(flags: Sequence[str], tokens: Sequence[int]) -> list[list[float]]:
    entry.prepare()
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import argument_utils, arguments, checkpointing, initialize

    sys.argv = ["logits", *flags]
    args = arguments.parse_and_validate_args()
    initialize.initialize_megatron()
    config = argument_utils.gpt_config_from_args(args)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    models = config.get_builder_cls()(config).build_distributed_models(groups, wrap_with_ddp=False)
    checkpointing.load_checkpoint(models, None, None)
    with torch.no_grad():
        rows = outputs(models[0].eval(), torch.tensor([tokens]))
    values: list[list[float]] = rows[0].tolist()
    return values


def adapters(source: str, data: str, target: str, steps: int, batch: int) -> list[str]:
    entry.prepare()
    example = Path(__file__).parents[4] / "docs" / "examples" / "lora.py"
    with of_bridge(), contextlib.redirect_stdout(io.StringIO()) as printed:
        run = runpy.run_path(str(example))
        run["main"].__globals__.update(STEPS=steps, BATCH=batch)
        run["main"](source, data, target)
    return [line for line in printed.getvalue().splitlines() if line.startswith("step ")]
