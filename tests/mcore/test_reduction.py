"""When gradient reduction starts: once per stage, after its last gradients."""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_epp.mcore.iteration import reduction as reduction_module
from megatron_epp.mcore.iteration.reduction import Reduction
from megatron_epp.plan import Plan
from tests.support.runtime.launch_recorder import COMPUTE, REDUCTION, SEND, RecordedStage, record
from tests.support.runtime.runtime_plans import looped, two_ranks, v_shape


class Chunk:
    """A model chunk as Megatron's data parallelism wraps it; notes what is asked of it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        yield
        self.log.append(f"{self.name} open")

    def start_grad_sync(self, *_: Any) -> None:
        self.log.append(f"{self.name} start")

    def parameters(self) -> list[Any]:
        return []


def run(names: str, ends: str, *, overlap: bool = True, align: bool = True, splits: bool = False, first: bool = True) -> list:
    """Return the events if the chunks get their last gradients in the order of `ends`; ``!`` marks the last of each."""
    log: list[str] = []
    chunks = [Chunk(name, log) for name in names]
    many = len(chunks) > 1
    no_sync, start = [c.no_sync for c in chunks], [c.start_grad_sync for c in chunks]
    config = SimpleNamespace(no_sync_func=None, grad_sync_func=None)
    if overlap:
        config.no_sync_func = no_sync if many else no_sync[0]
        config.grad_sync_func = (start if many else start[0]) if align else None
    with Reduction(config, chunks, first, splits) as reduction:
        for name in ends:
            reduction.before_last_gradient(names.index(name))
            log.append(f"{name}!")
            reduction.reduce(names.index(name))
    return log


HOOKS = ["a open", "a!"]
AT_ONCE = ["a!", "a start", "a open"]


@pytest.mark.parametrize("align", [True, False])
@pytest.mark.parametrize(
    ("options", "events"),
    [
        pytest.param({}, HOOKS, id="the first rank's only stage, by hooks during its last backward"),
        pytest.param({"first": False}, AT_ONCE, id="a stage further down, behind its last message"),
        pytest.param({"splits": True}, AT_ONCE, id="split weight gradients, after the last"),
    ],
)
def test_a_rank_of_one_stage_reduces_when_nothing_waits(options: dict[str, bool], events: list[str], align: bool) -> None:
    assert run("a", "a", align=align, **options) == events


def test_stages_of_a_rank_start_when_the_plan_says_so_and_without_overlap_nothing_is_started() -> None:
    assert run("abc", "cba") == ["c!", "c start", "b!", "b start", "a!", "a start", "c open", "b open", "a open"]
    assert run("ab", "ba", overlap=False, splits=True) == ["b!", "a!"]
    assert run("a", "a", overlap=False) == ["a!"]


@pytest.mark.parametrize("names", ["a", "ab"])
def test_where_a_framework_holds_reductions_back_until_later_nothing_is_started_here(names: str) -> None:
    log: list[str] = []
    chunks = [Chunk(name, log) for name in names]
    config = SimpleNamespace(no_sync_func=contextlib.nullcontext, grad_sync_func=None)
    with contextlib.ExitStack() as held:
        for chunk in chunks:
            held.enter_context(chunk.no_sync())
        with Reduction(config, chunks, False, False) as reduction:  # type: ignore[arg-type]
            for index in reversed(range(len(chunks))):
                reduction.before_last_gradient(index)
                reduction.reduce(index)
        assert log == []


class TrainedStage(RecordedStage):
    """A stage in the data parallelism of Megatron: its hooks reduce in a backward outside of `no_sync`."""

    syncs = True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.syncs = False
        yield
        self.syncs = True

    def start_grad_sync(self, *_: Any) -> None:
        self.start_reduction()

    def parameters(self) -> list[Any]:
        return []

    def backward(self, *args: Any) -> None:
        super().backward(*args)
        if self.syncs:
            self.start_reduction()


def reductions_of_training(stages: list[TrainedStage]) -> Reduction:
    """As `forward_backward` makes them, with `--overlap-grad-reduce`."""
    config = SimpleNamespace(no_sync_func=[stage.no_sync for stage in stages], grad_sync_func=None)
    return Reduction(config, stages, may_use_hooks=stages[0].number == 0, splits_weights=False)


@pytest.mark.parametrize("make_plan", [two_ranks, v_shape, looped])
def test_a_rank_launches_one_reduction_for_each_stage_behind_all_that_the_stage_computes_and_sends(
    make_plan: Callable[[], Plan],
) -> None:
    plan = make_plan()
    for rank in range(plan.num_ranks):
        launches = record(plan, rank, 0, TrainedStage, reductions_of_training).launches
        reduced = [one.event[1] for one in launches if one.kind == REDUCTION]
        assert sorted(reduced, reverse=True) == reduced
        assert set(reduced) == {stage for stage, where in enumerate(plan.placement) if where == rank}
        for number, one in enumerate(launches):
            if one.kind == REDUCTION:
                later = [after.text for after in launches[number:] if after.kind in (COMPUTE, SEND)]
                assert not [text for text in later if text.startswith(str(one.event[1]))]


class Machine:
    """Megatron's checks of results; notes when it reads one from the device."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def validate_result(self, result: str, fatal: bool) -> None:
        self.log.append(f"{result} read")
        if result == "b" and fatal:
            raise RuntimeError("found NaN in local grad norm")


class CheckedChunk(Chunk):
    machine: Machine
    fatal: bool

    def start_grad_sync(self, *_: Any) -> None:
        self.machine.validate_result(result=self.name, fatal=self.fatal)
        super().start_grad_sync()


@pytest.mark.parametrize("fatal", [False, True])
def test_the_host_reads_whether_gradients_are_nan_behind_all_compute(monkeypatch: pytest.MonkeyPatch, fatal: bool) -> None:
    log: list[str] = []
    CheckedChunk.machine, CheckedChunk.fatal = Machine(log), fatal
    monkeypatch.setattr(reduction_module, "get_rerun_state_machine", lambda: CheckedChunk.machine)
    chunks = [CheckedChunk(name, log) for name in "abc"]
    config = SimpleNamespace(no_sync_func=[c.no_sync for c in chunks], grad_sync_func=[c.start_grad_sync for c in chunks])
    allowed = pytest.raises(RuntimeError, match="found NaN") if fatal else contextlib.nullcontext()
    with allowed, Reduction(config, chunks, True, False) as reduction:
        for index in (2, 1, 0):
            log.append(f"compute of {chunks[index].name}")
            reduction.reduce(index)
    compute = [("compute of c", "c start"), ("compute of b", "b start"), ("compute of a", "a read", "a start")]
    assert [text for text in log if "open" not in text] == [text for texts in compute for text in texts] + ["c read", "b read"]
    assert CheckedChunk.machine.validate_result == Machine.validate_result.__get__(CheckedChunk.machine)
