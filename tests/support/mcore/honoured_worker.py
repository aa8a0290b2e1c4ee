"""Runs the loop of `wrap_worker` with a model configuration's functions set in several ways, by stock and by a plan.

Prints for each of them what was called, in order, and the largest relative difference of gradients. Nothing of
`megatron.training` can be imported, as with a wheel that does not have it.
"""

import contextlib
import sys

import torch
import torch.distributed as dist

from tests.support.mcore import wrap_worker
from tests.support.mcore.figures import record_figures

STAGES = int(wrap_worker.sys.argv[1])


def main():
    models = wrap_worker.begin(STAGES)
    forget_training()
    from megatron.core.pipeline_parallel import get_forward_backward_func

    import megatron_epp

    schedules = {"stock": get_forward_backward_func(), "planned": megatron_epp.wrap()}
    cases = (synchronised, synchronised_by_hooks, scaled, three_parts, per_token, autocast, forward_only)
    cases += (own_groups, old_backward)
    for case in cases:
        found = {}
        for name, schedule in schedules.items():
            config = models[0].config
            before = dict(vars(config))
            found[name] = case(schedule, models, config)
            vars(config).clear()
            vars(config).update(before)
        (ours, events), (theirs, others) = found["planned"], found["stock"]
        worst = max((float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in zip(ours, theirs, strict=True)), default=0.0)
        finite = all(bool(one.isfinite().all()) for one in ours)
        said = {"case": case.__name__, "worst": worst, "finite": finite, "planned": events, "stock": others}
        record_figures({"rank": dist.get_rank(), "world": len(models)} | said)


def forget_training():
    """Let imports of `megatron.training` fail, and let this package be imported again, which the process did beforehand.

    Patches for the training loop are undone, as a framework that calls `wrap` has none.
    """
    from megatron_epp.mcore.patches import environment, install, patching

    patching.revert((*environment.patches(), *install.patches()))
    for name in list(sys.modules):
        if name.startswith(("megatron.training", "megatron_epp.mcore.")) and not name.startswith("megatron_epp.mcore.patches"):
            del sys.modules[name]
    sys.modules["megatron.training"] = None


def run(schedule, models, step=None, **named):
    """Gradients of one call."""
    for model in models:
        model.zero_grad()
    several = len(models) > 1
    schedule(
        forward_step_func=step or wrap_worker.forward_step,
        data_iterator=[wrap_worker.batches() for _ in models] if several else wrap_worker.batches(),
        model=models if several else models[0],
        num_microbatches=len(wrap_worker.LENGTHS),
        seq_length=1,
        micro_batch_size=1,
        **named,
    )
    return [p.grad.clone() for model in models for p in model.parameters() if p.grad is not None]


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def watched(models, config):
    """Set all functions of a configuration to ones that note their calls, and whether gradients change after a reduction."""
    events, reduced = [], {}

    @contextlib.contextmanager
    def no_sync(number):
        events.append(["held", number])
        yield
        events.append(["released", number])

    def reduce(number, _):
        events.append(["gradients", number])
        reduced[number] = gradients(models[number])

    def finalize(chunks, num_tokens, pg_collection=None, force_all_reduce=None):
        for number, kept in reduced.items():
            now = gradients(models[number])
            same = all((a is None and b is None) or torch.equal(a, b) for a, b in zip(kept, now, strict=True))
            events.append(["complete" if same else "incomplete", number])
        there = pg_collection is not None
        events.append(["finalize", len(chunks), None if num_tokens is None else int(num_tokens), there, force_all_reduce])

    numbers = range(len(models))
    config.no_sync_func = [lambda n=n: no_sync(n) for n in numbers]
    config.grad_sync_func = [lambda parameters, n=n: reduce(n, parameters) for n in numbers]
    config.param_sync_func = [lambda parameters, n=n: events.append(["parameters", n]) for n in numbers]
    config.finalize_model_grads_func = finalize
    if len(models) == 1:
        for name in ("no_sync_func", "grad_sync_func", "param_sync_func"):
            setattr(config, name, getattr(config, name)[0])
    return events


def synchronised(schedule, models, config):
    events = watched(models, config)
    return run(schedule, models, force_all_reduce=True), events


def synchronised_by_hooks(schedule, models, config):
    """Without a function that starts reductions, hooks of the model start them: nothing holds them in the last backward."""
    events = watched(models, config)
    config.grad_sync_func = None
    held = dict.fromkeys(range(len(models)), 0)
    hooks = []
    for number, model in enumerate(models):
        hooks += [p.register_post_accumulate_grad_hook(lambda _, n=number: note(n)) for p in list(model.parameters())[-1:]]

    def note(number):
        entered = sum(1 for event in events if event == ["held", number])
        held[number] = entered - sum(1 for event in events if event == ["released", number])

    found = run(schedule, models)
    for hook in hooks:
        hook.remove()
    return found, [["held in the last backward", held[number]] for number in held]


def scaled(schedule, models, config):
    config.grad_scale_func = lambda loss: loss * 1024.0
    return run(schedule, models), []


def step_of_parts(data_iterator, model):
    """A forward step whose loss is a sum beside its number of tokens, of which the third microbatch has none."""
    output, _ = wrap_worker.forward_step(data_iterator, model)

    def parts(losses):
        trained = 0 if losses.shape[-1] == wrap_worker.LENGTHS[2] else losses.numel()
        mask = torch.full_like(losses, float(trained > 0))
        return (losses * mask).sum(), torch.tensor(trained, dtype=torch.int), {"tokens": trained}

    return output, parts


def three_parts(schedule, models, config):
    events = watched(models, config)
    return run(schedule, models, step_of_parts), [event for event in events if event[0] == "finalize"]


def per_token(schedule, models, config):
    events = watched(models, config)
    config.calculate_per_token_loss = True
    return run(schedule, models, step_of_parts), [event for event in events if event[0] == "finalize"]


def autocast(schedule, models, config):
    """Megatron asks for autocast on a GPU; what it asks for is noted."""
    real, seen = torch.autocast, []

    def noted(device, **named):
        seen.append([device, str(named["dtype"])])
        return contextlib.nullcontext()

    torch.autocast = noted
    try:
        config.enable_autocast, config.autocast_dtype = True, torch.bfloat16
        return run(schedule, models), seen
    finally:
        torch.autocast = real


def forward_only(schedule, models, config):
    events = watched(models, config)
    with torch.no_grad():
        run(schedule, models, forward_only=True)
    return [], [event for event in events if event[0] not in ("held", "released")]


def own_groups(schedule, models, config):
    """The process groups of the parallel state, and Megatron's communicator of its pipeline, are given by the caller."""
    from megatron.core import mpu
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.process_groups_config import ProcessGroupCollection

    communicator = P2PCommunicator(mpu.get_pipeline_model_parallel_group(), config)
    return run(
        schedule, models, p2p_communicator=communicator, pg_collection=ProcessGroupCollection.use_mpu_process_groups()
    ), []


def old_backward(schedule, models, config):
    """The plan calls a backward that takes the type of the model, as that of 0.16 does."""
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import schedules

    if not hasattr(schedule, "state_dict"):  # stock's own calls its own
        return run(schedule, models), []
    new, kinds = schedules.backward_step, []

    def backward_step(input_tensor, output_tensor, output_tensor_grad, model_type, config):
        kinds.append(model_type)
        return new(input_tensor, output_tensor, output_tensor_grad, config)

    schedules.backward_step = backward_step
    try:
        found = run(schedule, models), []
    finally:
        schedules.backward_step = new
    assert set(kinds) == {ModelType.encoder_or_decoder}
    return found


if __name__ == "__main__":
    main()
