"""Trains with one optimizer after the other, and notes what tensors are there of each after its first step.

Figures: name, rank, planned and real bytes of this rank.
"""

import os
import shlex

from megatron_epp.mcore import entry
from tests.support.mcore.figures import record_figures
from tests.support.mcore.memory_cases import COMMON, LLAMA

SETTINGS = {
    "adam, shared by replicas": "--bf16 --use-distributed-optimizer",
    "adam, shared by context-parallel ranks": "--bf16 --use-distributed-optimizer --context-parallel-size 2",
    "adam in fp32, shared": "--use-distributed-optimizer",
    "adam, whole": "--bf16",
    "adam, whole, gradients in bf16": "--bf16 --grad-reduce-in-bf16",
    "sgd": "--bf16 --optimizer sgd",
    "adam, experts with few holders": "--bf16 --use-distributed-optimizer --num-experts 4 --expert-model-parallel-size 2 "
    "--moe-token-dispatcher-type alltoall",
}


def run(documents, names):
    from scripts.parity.planner import share_planner
    from scripts.parity.runs import train

    entry.prepare()
    share_planner()
    from megatron.training import training

    step, now = training.train_step, {}

    def noting(*rest, **named):
        done = step(*rest, **named)
        model, optimizer = named.get("model", rest[2]), named.get("optimizer", rest[3])
        record_figures(now | {"rank": int(os.environ["RANK"]), "real": real(model, optimizer), "planned": planned()})
        return done

    common = [*COMMON[: COMMON.index("--epp-measure-memory")], "--train-iters", "1", "--global-batch-size", "2"]
    common += ["--seq-length", "64", "--max-position-embeddings", "64", "--num-layers", "4"]
    for name in names:
        now["name"], training.train_step = name, noting
        train([*common, *shlex.split(LLAMA), *shlex.split(SETTINGS[name]), "--data-path", documents])


def planned():
    from megatron_epp.mcore.iteration.sliced_run import current

    (static,) = (stage.static for stage in current().costs.stages)
    return static.items()


def real(models, optimizer):
    """Bytes of tensors, by item; of the optimizer without views of the weights."""
    weights = [weight for model in models for weight in model.parameters()]
    theirs = {weight.untyped_storage().data_ptr() for weight in weights}
    buffers = [buffer for model in models for buffer in (*model.buffers, *model.expert_parallel_buffers)]
    found = {}
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        for tensor in tensors_of(one.optimizer):
            if tensor.numel() > 1 and (place := tensor.untyped_storage().data_ptr()) not in theirs:
                found[place, tensor.storage_offset()] = tensor.nbytes
    of_gradients = sum(buffer.grad_data.nbytes for buffer in buffers)
    return {"weights": sum(weight.nbytes for weight in weights), "gradients": of_gradients, "optimizer": sum(found.values())}


def tensors_of(optimizer):
    """Yield the tensors of a torch optimizer: the parameters it steps, and its states."""
    inner = [*getattr(optimizer, "sub_optimizers", ()), optimizer]
    for one in inner:
        for group in one.param_groups:
            yield from group["params"]
        for state in one.state.values():
            yield from (value for value in state.values() if hasattr(value, "untyped_storage"))
