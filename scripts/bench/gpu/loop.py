"""A training loop of its own, as a framework has one, on several ranks: Megatron's schedule, `wrap` and `wrap_samples`.

Ranks run this file: `torchrun --nproc-per-node 2 -m megatron_epp.run scripts/bench/gpu/loop.py FILE`. The first rank writes how
far gradients are from those of Megatron's schedule, and those of samples in slices from those of whole samples.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_epp.launch.machine import NO_TF32, sharing_gpus
from megatron_epp.tools.launch.runs import TrainingError, reason_in
from scripts.tiny_stage import config_of, stage_of

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

ROOT = Path(__file__).resolve().parents[3]
ALLOWED = 1e-5
"""Largest relative distance of gradients, in fp32."""
_LENGTHS = (700, 40, 300, 24, 90, 1500)
_VOCABULARY, _CAP_GB = 128, 4
_CALLS = 6
"""Calls of the planned schedule: costs are learnt from the second to the fourth, so later ones have other plans."""


def on_ranks(folder: Path, num_ranks: int, limit_s: float) -> dict[str, Any]:
    """Run the loop on ranks of this machine, which share its GPUs where there are fewer.

    Returns:
        The largest relative distances of `gradients` by name, which are `allowed`, and whether all are `met`.

    Raises:
        TrainingError: it failed, or takes longer than its limit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figures, log, sharing = folder / "gradients.json", folder / "loop.log", sharing_gpus(num_ranks)
    figures.unlink(missing_ok=True)
    command = [sys.executable, "-m", "megatron_epp.tools.launch.torchrun", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(num_ranks), *(["--virtual-local-rank"] if sharing else [])]
    command += ["-m", "megatron_epp.run", __file__, str(figures)]
    variables = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", **os.environ, **NO_TF32, **sharing}
    try:
        with log.open("w") as output:
            subprocess.run(command, stdout=output, stderr=output, env=variables, cwd=ROOT, timeout=limit_s, check=True)
    except subprocess.TimeoutExpired:
        raise TrainingError(f"the loop on {num_ranks} ranks has not ended after {limit_s:.0f} s: see {log}") from None
    except subprocess.CalledProcessError as error:
        reason = reason_in(log.read_text(errors="replace"))
        code = error.returncode
        raise TrainingError(f"the loop on {num_ranks} ranks ended with exit code {code}, see {log}: {reason}") from None
    gradients = json.loads(figures.read_text())
    return {"gradients": gradients, "allowed": ALLOWED, "met": all(far <= ALLOWED for far in gradients.values())}


def _model() -> DistributedDataParallel:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    config = config_of(4, 256, 4, finalize_model_grads_func=finalize_model_grads)
    stage = stage_of(config, get_gpt_layer_local_spec(), _VOCABULARY, 2048)
    return DistributedDataParallel(config, DistributedDataParallelConfig(), stage.cuda())


def _microbatches() -> Iterator[tuple[Tensor, Tensor]]:
    """Draw tokens and labels, the same on every rank."""
    random = torch.Generator().manual_seed(3)
    for length in _LENGTHS:
        tokens = torch.randint(_VOCABULARY, (1, length + 1), generator=random).cuda()
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _samples() -> list[dict[str, Any]]:
    random = torch.Generator().manual_seed(4)

    def logprobs(length: int) -> list[float]:
        return (-4.8 + 0.3 * torch.randn(length + 1, generator=random)).tolist()

    return [
        {
            "tokens": torch.randint(_VOCABULARY, (length + 1,), generator=random),
            "trained": [0] * 8 + [1] * (length - 7),
            "old_logprobs": logprobs(length),
            "reference_logprobs": logprobs(length),
            "advantages": 1.0 - number / 2,
        }
        for number, length in enumerate(_LENGTHS)
    ]


def _forward_step(batches: Iterator[tuple[Tensor, Tensor]], model: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
    tokens, labels = next(batches)
    output = model(tokens, torch.arange(tokens.shape[1], device=tokens.device)[None], None, labels=labels)
    return output, lambda losses: (losses.float().mean(), {"loss": losses.detach().float().mean()})


def _gradients(model: DistributedDataParallel, step: Callable[[], object]) -> list[Tensor]:
    model.zero_grad_buffer()
    step()
    return [cast(Any, parameter).main_grad.clone() for parameter in model.parameters()]


def _distance(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest norm of a difference over the norm of what is expected, over all ranks."""
    here = max(float((a - b).norm() / b.norm()) for a, b in zip(actual, expected, strict=True) if float(b.norm()) > 0)
    largest = torch.tensor([here]).cuda()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def _rank(figures: Path) -> None:
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    import megatron_epp
    from megatron_epp.losses import Average, ClippedRatio

    dist.init_process_group()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(1)
    model, rows = _model(), dict[str, float]()

    def schedule(run: Callable[..., object]) -> Callable[[], object]:
        sizes = {"num_microbatches": len(_LENGTHS), "seq_length": max(_LENGTHS), "micro_batch_size": 1, "forward_only": False}
        return lambda: run(forward_step_func=_forward_step, data_iterator=_microbatches(), model=model, **sizes)

    expected = _gradients(model, schedule(get_forward_backward_func()))
    planned = schedule(megatron_epp.wrap(memory_cap_gb=_CAP_GB))
    calls = [_distance(_gradients(model, planned), expected) for _ in range(_CALLS)]
    rows |= {"wrap, first call": calls[0], "wrap, last call": calls[-1]}
    loss = ClippedRatio(average=Average.SEQUENCE_MEANS, kl="k3", kl_weight=0.1)
    gradients = []
    for slices in (1, 3):
        train = megatron_epp.wrap_samples(loss=loss, slices=slices, memory_cap_gb=_CAP_GB)
        gradients.append(_gradients(model, partial(train, model=model, samples=_samples())))
        train.close()
    rows["wrap_samples in slices"] = _distance(gradients[1], gradients[0])
    if dist.get_rank() == 0:
        figures.write_text(json.dumps(rows, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(Path(sys.argv[1]))
