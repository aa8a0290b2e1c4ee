"""Jobs of `test_attachments.py`: what a program attaches to modules, in a training by Megatron's schedule and in slices."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize

import megatron_epp
from megatron_epp.losses import NextToken
from megatron_epp.plan import Recompute
from tests.support.mcore.jobs.data_parallel import DataParallel
from tests.support.mcore.jobs.frameworks import apart, begin, megatrons_schedule, outputs, refusal

LENGTHS = (40, 10, 24)
OWN_ROTARY = "a class of its own"


def changed(value: Any, entries: int = 0) -> Any:
    """Return a tensor, or the first of several, changed token by token: numbers of tokens to others, all else unevenly."""
    if isinstance(value, tuple):
        return (changed(value[0], entries), *value[1:])
    if not isinstance(value, Tensor):
        return value
    return value + 0.3 * torch.tanh(value) if value.is_floating_point() else (value + 1) % entries


class Halved(torch.nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 0.5 * weight


def halved(gradients: Any) -> Any:
    """Halve gradients; torch gives one of a mask, too."""
    return tuple(each if each is None or not each.is_floating_point() else 0.5 * each for each in gradients)


@contextmanager
def attached(module: Any, kind: str) -> Iterator[None]:
    """Attach something to a module, or assign to it, in the body."""
    handle = ATTACH[kind](module)
    try:
        yield
    finally:
        if kind != "parametrization":  # that is for good: taking it away makes another weight
            handle.remove()


class Assigned:
    """A `forward` of a module's object that changes what it had returned."""

    def __init__(self, module: Any) -> None:
        self._module, self._before, original = module, vars(module).get("forward"), module.forward
        module.forward = lambda *args, **named: changed(original(*args, **named))

    def remove(self) -> None:
        del self._module.forward
        if self._before is not None:
            self._module.forward = self._before


ATTACH: dict[str, Callable[[Any], Any]] = {
    "forward hook": lambda of: of.register_forward_hook(lambda _, args, output: changed(output)),
    "forward hook in place": lambda of: of.register_forward_hook(lambda _, args, output: output.mul_(1.3)),
    "forward pre-hook": lambda of: of.register_forward_pre_hook(lambda _, args: args and (changed(args[0], 64), *args[1:])),
    "backward hook": lambda of: of.register_full_backward_hook(lambda _, of_input, of_output: halved(of_input)),
    "backward pre-hook": lambda of: of.register_full_backward_pre_hook(lambda _, of_output: halved(of_output)),
    "parametrization": lambda of: parametrize.register_parametrization(of, "weight", Halved()),
    "forward": Assigned,
}


def step(data: Any, model: Any) -> tuple[Tensor, Callable[..., Any]]:
    tokens = next(data)["tokens"][None]
    losses = outputs(model, tokens[:, :-1], tokens[:, 1:])
    return losses, lambda output: (output.sum(), torch.tensor(output.numel(), dtype=torch.int), {})


def started(spread: float = 0.2, lengths: tuple[int, ...] = LENGTHS, **settings: Any) -> tuple[Any, list[dict[str, Any]]]:
    """Return a loop whose weights have such a standard deviation, which tells cases apart, and its samples."""
    loop = begin(lengths, calculate_per_token_loss=True, **settings)
    random = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in loop.models[0].parameters():
            if weight.dim() == 2:
                weight.normal_(0, spread)
    return loop, [{"tokens": torch.randint(64, (length + 1,), generator=random)} for length in lengths]


def schedule_of(plans: Mapping[str, Any] | None) -> Any:
    return megatron_epp.wrap_samples(loss=NextToken(), **{"slices": 3, "wait_limit_seconds": 60} | dict(plans or {}))


def between_calls(
    cases: Mapping[str, Sequence[str]], plans: Mapping[str, Any] | None = None, mode: str | None = None, **settings: Any
) -> dict[str, Any]:
    """Attach each kind to its module between two calls of one schedule; return how far gradients in slices are from Megatron's,
    in one call and in a call for each sample, or what is said. All layers recompute in a mode, or none.
    """
    loop, samples = started(**settings)
    from megatron_epp.mcore.model.stage import MegatronStage

    modules = dict(loop.models[0].named_modules())
    training, schedule = DataParallel(loop, samples, step), schedule_of(plans)
    (plain, _), _ = training.whole(), training.sliced(schedule)  # which measures each mode
    if mode is not None:
        forward, recompute = MegatronStage.forward, Recompute(**{mode: 8})
        MegatronStage.forward = lambda self, context, hidden: forward(self, replace(context, recompute=recompute), hidden)

    def sliced() -> tuple[list[Tensor], list[Tensor]]:
        of_one_call, _ = training.sliced(schedule)
        training.zero()
        for number, sample in enumerate(samples, start=1):
            schedule(model=training.chunks, samples=[sample], last=number == len(samples))
        return of_one_call, training.gradients()

    found: dict[str, Any] = {}
    for path, kinds in cases.items():
        for kind in kinds:
            with attached(modules[path], kind):
                wanted, _ = training.whole()
                gradients: list[list[Tensor]] = []
                said = refusal(lambda into=gradients: into.extend(sliced()))
            away = max((apart(one, wanted) for one in gradients), default=0.0)
            has_effect = apart(wanted, plain) > 1e-3  # otherwise the case would show nothing
            found[f"{path}: {kind}"] = said or (away if has_effect else "has no effect")
    (stage,) = schedule._run.stages.values()
    with attached(stage.decoder.layers[0], "forward"):  # Megatron's own loop begins iterations without a call that asks before
        found["begin"] = refusal(lambda: stage.begin(lambda chunk: None))
    found["afterwards"] = apart(training.sliced(schedule)[0], plain)
    schedule.close()
    return found


def before_the_first(cases: Mapping[str, str], plans: Mapping[str, Any] | None = None, **settings: Any) -> float | str:
    """Attach a kind to each module before data parallelism wraps the model; return how far gradients in slices are from
    Megatron's in the first call and in the second, or what is said.
    """
    loop, samples = started(**settings)
    model, tokens = loop.models[0], samples[0]["tokens"][None]

    def losses() -> Tensor:
        return outputs(model, tokens[:, :-1], tokens[:, 1:])

    plain, modules = losses(), dict(model.named_modules())
    with ExitStack() as stack:
        for path, kind in cases.items():
            if kind == OWN_ROTARY:
                model.rotary_pos_emb = own_rotary(model)
            elif kind == "scales by length":
                model.rotary_pos_emb = own_rotary(model, by_length=True)
            elif kind == "learns":
                model.rotary_pos_emb = own_rotary(model)
                model.rotary_pos_emb.scale = torch.nn.Parameter(torch.ones(()))
            else:
                stack.enter_context(attached(modules[path], kind))
        assert (losses() - plain).abs().max() > 1e-3
        training, schedule = DataParallel(loop, samples, step), schedule_of(plans)
        wanted, _ = training.whole()
        gradients: list[list[Tensor]] = []
        said = refusal(lambda: gradients.extend(training.sliced(schedule)[0] for _ in range(2)))
        schedule.close()
        return said or max(apart(one, wanted) for one in gradients)


def own_rotary(model: Any, by_length: bool = False) -> Any:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    class Interpolated(RotaryEmbedding):
        def forward(self, length: int, *args: Any, **named: Any) -> Tensor:
            return super().forward(length, *args, **named) / (1 + length / 16 if by_length else 4)

    return Interpolated(kv_channels=model.config.kv_channels, rotary_percent=1.0, use_cpu_initialization=True)


def replaced(plans: Mapping[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """Return what a training in slices replaces of the model's modules: what stays, without `replaced.put`, and what is there
    while the output layer runs.
    """
    loop, samples = started(**settings)
    from megatron_epp.mcore.model import replaced

    model = loop.models[0]
    training, schedule = DataParallel(loop, samples, step), schedule_of(plans)

    def functions() -> dict[tuple[str, str], Any]:
        return {
            (name, attribute): value
            for name, module in model.named_modules()
            for attribute, value in (vars(module) | {"itself": module}).items()
            if callable(value) and (attribute == "itself" or not isinstance(value, torch.nn.Module))
        }

    def differing(old: Mapping[tuple[str, str], Any]) -> set[tuple[str, str]]:
        new = functions()
        return {key for key in old.keys() | new.keys() if old.get(key) is not new.get(key)}

    before, inside = functions(), set[tuple[str, str]]()
    training.sliced(schedule)
    stays = differing(before)
    marks = {name: getattr(module, replaced.MARK, replaced.NOTHING) for name, module in model.named_modules()}
    told = {(name, function) for name, mark in marks.items() for function in mark.functions}
    adopted = functions()
    model.output_layer.register_forward_pre_hook(lambda module, args: inside.update(differing(adopted)))
    training.sliced(schedule)
    schedule.close()
    return {"untold": sorted(stays - told), "told": len(told), "while it runs": sorted(inside)}


def of_microbatches() -> tuple[float, str]:
    """Return how far microbatches by a plan are from Megatron's with a hook on a layer, and what is said of a `forward`."""
    loop = begin(LENGTHS)
    schedule, layer = megatron_epp.wrap(), loop.models[0].decoder.layers[1]
    loop.run(schedule)
    with attached(layer, "forward hook"):
        away = apart(loop.run(schedule)[1], loop.run(megatrons_schedule())[1])
    with attached(layer, "forward"):
        return away, refusal(lambda: loop.run(schedule))


def collective_in_a_hook() -> None:
    """Train on two replicas, of which one has more chunks, with a collective over both where a weight gets its gradient."""
    loop, samples = started(lengths=(48, 3), replicas=2)
    training = DataParallel(loop, samples)
    schedule = schedule_of({"wait_limit_seconds": 4, "slices": 8})
    training.sliced(schedule)
    weight = loop.models[0].output_layer.weight
    weight.register_post_accumulate_grad_hook(lambda weight: torch.distributed.all_reduce(torch.ones(1)))
    training.sliced(schedule)
