"""Trainings in which one function is replaced: python changed_training.py CHANGE FLAGS, with a change of `CHANGES`.

Where ``RECORD_TO`` is set, they are recorded.
"""

import functools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from unittest import mock

import torch

from megatron_epp.cost.output_layer import PASS_US
from megatron_epp.cost.work import LinearTime
from megatron_epp.mcore import entry
from megatron_epp.plan import Action, Op, Plan
from tests.support.mcore import recorded_training
from tests.support.mcore.figures import record_figures

OWN = "megatron_epp."
SCRIPT = "megatron_epp.mcore.model.gpt"
"""Forward step of the script, which brings the microbatches of `--epp-microbatches user` to the device itself."""

SHARE = 0.5
PASSES = {Op.S: LinearTime(3000.0, 40.0), Op.T: LinearTime(1000.0, 90.0)}
COLLECTIVES = {Op.SPREAD: LinearTime(700.0, 3.0), Op.GATHER: LinearTime(900.0, 5.0)}
WAIT_US = 20_000.0
"""Wait of the rank that enters a collective first, which is the one or the other."""

ODD_ITERATIONS = (2, 3, 5)
SLEEP_S = 0.05
_DIAGNOSTICS = "mcore.iteration.report", "mcore.iteration.loggers", "features.slow_stages.stage_watch", "runtime.recorder"
MODULES_OF_DIAGNOSTICS = tuple(f"megatron_epp.{name}" for name in _DIAGNOSTICS)


def with_forward_step(change):
    from megatron_epp.mcore.model import gpt

    stock = gpt.forward_step

    def forward_step(data_iterator, model):
        return change(stock, data_iterator, model)

    return mock.patch.object(gpt, "forward_step", forward_step)


def own_loss():
    """A loss of the script's own, which plans must call: Megatron's, multiplied by -7."""

    def turned(loss_func, losses):
        loss, *rest = loss_func(losses)
        return (-7.0 * loss, *rest)

    def forward_step(stock, data_iterator, model):
        output, loss_func = stock(data_iterator, model)
        return output, partial(turned, loss_func)

    return with_forward_step(forward_step)


def failing():
    """The forward step fails on the last rank in the third iteration."""
    from megatron.training import get_args

    def forward_step(stock, data_iterator, model):
        if get_args().curr_iteration == 2 and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            raise ValueError("this sample has no image")
        return stock(data_iterator, model)

    return with_forward_step(forward_step)


@contextmanager
def rerun() -> Iterator[None]:
    """Megatron's rerun machine finds the loss odd in iterations 2, 3 and 5, which therefore run twice.

    In each it is the loss of the microbatch that runs first. Plans that follow learnt costs run microbatches from the last to
    the first.
    """
    from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine
    from megatron.training import get_args

    from tests.support.mcore.trainings import reversed_orders

    def is_odd(loss):
        machine = get_rerun_state_machine()
        return get_args().curr_iteration + 1 in ODD_ITERATIONS and machine.state is RerunState.INITIAL_RUN

    def validated(loss_func, losses):
        results = loss_func(losses)
        own = {"result": results[0].detach().clone(), "rejection_func": is_odd, "message": "an odd loss"}
        get_rerun_state_machine().validate_result(**own, tolerance=0.0, fatal=False)
        return results

    def forward_step(stock, data_iterator, model):
        output, loss_func = stock(data_iterator, model)
        return output, partial(validated, loss_func)

    with with_forward_step(forward_step), reversed_orders():
        yield


def gathered():
    from megatron.core.models.gpt import GPTModel

    build = GPTModel.__init__

    @functools.wraps(build)
    def gathering(*args, **named):
        build(*args, **(named | {"parallel_output": False}))

    return mock.patch.object(GPTModel, "__init__", gathering)


@contextmanager
def attached() -> Iterator[None]:
    """Every chunk that Megatron has built gets what ``ATTACH`` names, kinds by module, before it is wrapped."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.utils import unwrap_model

    from tests.support.mcore.jobs import attachments

    wrap, stack = DistributedDataParallel.__init__, ExitStack()

    @functools.wraps(wrap)
    def wrapping(self, config, ddp_config, module, *rest, **named):
        model = unwrap_model(module)
        modules = dict(model.named_modules())
        for path, kind in json.loads(os.environ["ATTACH"]).items():
            if kind == attachments.OWN_ROTARY:
                model.rotary_pos_emb = attachments.own_rotary(model)
            elif path in modules:
                stack.enter_context(attachments.attached(modules[path], kind))
        wrap(self, config, ddp_config, module, *rest, **named)

    with stack, mock.patch.object(DistributedDataParallel, "__init__", wrapping):
        yield


def slow():
    """The second pipeline rank becomes slow when plans are made by learnt costs."""
    from megatron_epp.features.learnt_costs.learn_costs import first_batch
    from megatron_epp.mcore.iteration import sliced_run
    from megatron_epp.mcore.model.stage import MegatronStage

    quick = MegatronStage.forward

    def forward(self, *rest):
        run = sliced_run.current()
        if run.rank == 1 and run.iteration >= first_batch(run.args.epp_lookahead):
            time.sleep(SLEEP_S)
        return quick(self, *rest)

    return mock.patch.object(MegatronStage, "forward", forward)


def standing_still_in_save():
    """The second rank stands still while the first checkpoint is saved."""
    from megatron.core import dist_checkpointing

    original = dist_checkpointing.save

    def save(*rest, **named):
        if os.environ["RANK"] == "1":
            time.sleep(600)
        return original(*rest, **named)

    return mock.patch.object(dist_checkpointing, "save", save)


@contextmanager
def diagnostics_without_memory() -> Iterator[None]:
    """No module of diagnostics finds memory for a tensor, from the first iteration on."""
    from megatron_epp.mcore.iteration.report import IterationReport
    from tests.support.runtime.failing_buffers import failing

    begin = IterationReport.begin
    with ExitStack() as stack:

        @functools.wraps(begin)
        def begin_without_memory(*args):
            IterationReport.begin = begin
            stack.enter_context(failing(1, *MODULES_OF_DIAGNOSTICS))
            return begin(*args)

        IterationReport.begin = begin_without_memory
        yield
        assert IterationReport.begin is begin, "no iteration was reported"


@contextmanager
def counted() -> Iterator[None]:
    """Counts the copies to the device that this package makes in every iteration, by what makes them: the figures of a rank.

    On a CPU nothing is copied, but the calls that copy are made all the same.
    """
    from megatron.training import training

    from megatron_epp.runtime.upload import Uploader

    counts, by_iteration = Counter(), []
    begin, train_step = Uploader.begin, training.train_step

    def counting(name):
        copy = getattr(torch.Tensor, name)

        @functools.wraps(copy)
        def counted_copy(self, *args, **kwargs):
            caller = sys._getframe(1).f_globals.get("__name__", "")
            moves = name != "to" or any(isinstance(value, torch.device | str) for value in (*args, *kwargs.values()))
            if moves and caller.startswith(OWN) and caller != SCRIPT:
                counts[f"{name} in {caller}"] += 1
            return copy(self, *args, **kwargs)

        return counted_copy

    def counted_begin(self, tensors):
        upload = begin(self, tensors)
        counts.update(uploads=1, tensors=len(tensors))
        return upload

    def counted_step(*args, **kwargs):
        if not by_iteration:
            counts.clear()  # of building the model
        answer = train_step(*args, **kwargs)
        by_iteration.append(dict(counts))
        return answer

    for name in ("to", "cuda", "pin_memory"):
        setattr(torch.Tensor, name, counting(name))
    Uploader.begin, training.train_step = counted_begin, counted_step
    yield
    record_figures(by_iteration)


class Given:
    """Recorder of an iteration of a plan with given times of shards."""

    def __init__(self, plan, recorder, rank):
        self._plan, self._recorder, self._rank = plan, recorder, rank

    def events(self):
        events = []
        for text, start_us, end_us, cpu_us in self._recorder.events():
            action = Action.parse(text)
            if action.op in PASSES:
                end_us = start_us + pass_us(self._plan, action)
            events.append((text, start_us, end_us, cpu_us))
        return events

    def collectives(self):
        actions = [action for action, _ in self._recorder.collectives()]
        waits_us = (WAIT_US if (action.chunk + self._rank) % 2 else 0.0 for action in actions)
        return [(action, collective_us(self._plan, action) + wait) for action, wait in zip(actions, waits_us, strict=True)]


def pass_us(plan: Plan, action: Action) -> float:
    return PASS_US + SHARE * PASSES[action.op].time_us(plan.padded_tokens(action.chunk), 0)


def collective_us(plan: Plan, action: Action) -> float:
    return COLLECTIVES[action.op].time_us(plan.padded_tokens(action.chunk), 0)


def given_times():
    """Times measured of vocabulary shards are replaced by given ones; what was recorded, and of which chunks, is the run's."""
    import torch.distributed as dist

    from megatron_epp.features.learnt_costs.learn_costs import CostLearning

    after = CostLearning.after

    def with_given_times(self, plan, recorder, measured):
        after(self, plan, Given(plan, recorder, dist.get_rank()), measured)

    return mock.patch.object(CostLearning, "after", with_given_times)


_OF_RUNS = own_loss, failing, rerun, gathered, attached, slow
_OF_RECORDS = standing_still_in_save, diagnostics_without_memory, counted, given_times
CHANGES: dict[str, Callable[[], AbstractContextManager[object]]] = {own.__name__: own for own in (*_OF_RUNS, *_OF_RECORDS)}


def main():
    change = CHANGES[sys.argv.pop(1)]
    with entry.errors_in_one_line():
        entry.prepare()
        from megatron_epp.mcore.model import gpt

        with change():
            (recorded_training.main if "RECORD_TO" in os.environ else gpt.pretrain)()


if __name__ == "__main__":
    main()
