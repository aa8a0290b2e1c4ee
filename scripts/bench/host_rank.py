"""Training that counts what each action makes the host do: `python -m scripts.bench.host_rank FLAGS`.

Counts are written to the file that the environment variable `COUNTS` names, a line of JSON for each action.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

COUNTS = "EPP_HOST_COUNTS"
MEGATRON = "of Megatron"
KERNEL = "attention kernel"
_NO_LAUNCH = ("empty", "new_empty", "detach", "_unsafe_view", "alias", "lift_fresh", "_local_scalar_dense", "set_", "resize_")
"""Operations that start no kernel, besides views."""
_COUNTING = (
    *("torch/_library/simple_registry.py", "torch/_dynamo/eval_frame.py", "torch/_compile.py", "torch/compiler/__init__.py"),
    __file__,
)
"""Files with the Python by which operations come to a `TorchDispatchMode`, which is not there otherwise."""
_NO_MEMORY = ("_unsafe_view", "lift_fresh")
"""Operations whose result shares memory though their schemas do not say so."""


class Counted(TorchDispatchMode):
    """Context that counts dispatched operations by name, those that launch a kernel, and calls of Python functions.

    Attributes:
        names: number of operations of each name.
        launches: number of operations that launch a kernel.
        allocations: number of tensors with memory of their own that operations made.
        calls: number of calls of Python functions.
    """

    active: Counted | None = None

    def __init__(self) -> None:
        super().__init__()
        self.names = Counter[str]()
        self.launches = self.allocations = self.calls = 0
        self._is_paused = False

    def __enter__(self) -> Counted:
        super().__enter__()
        Counted.active = self
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        Counted.active = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sys.setprofile(None)
        try:
            if not self._is_paused:
                self._count(func)
            return func(*args, **(kwargs or {}))
        finally:
            if not self._is_paused:
                sys.setprofile(self._note)

    def _count(self, func: Any) -> None:
        name = func.overloadpacket.__name__
        self.names[name] += 1
        self.launches += not (func.is_view or name.startswith(_NO_LAUNCH))
        if name not in _NO_MEMORY:
            self.allocations += sum(
                result.alias_info is None and "Tensor" in str(result.type) for result in func._schema.returns
            )

    def figures(self) -> dict[str, Any]:
        """Return the counts by their names."""
        return {name: getattr(self, name) for name in ("names", "launches", "allocations", "calls")}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing in a block."""
        sys.setprofile(None)
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before
            if not before:
                sys.setprofile(self._note)

    def _note(self, frame: Any, event: str, argument: Any) -> None:
        self.calls += event == "call" and not frame.f_code.co_filename.endswith(_COUNTING)


def count_actions(path: Path) -> None:
    """Have executors count every action, and Megatron's schedules every pass of a microbatch. Attention kernels count as one.

    Args:
        path: file to which the counts are appended.
    """
    from megatron.core.pipeline_parallel import schedules

    from megatron_epp.runtime.attention import kernels
    from megatron_epp.runtime.executor import Executor

    kernel = replace(
        kernels.EXACT_ATTENTION,
        forward=_as_one(kernels.EXACT_ATTENTION.forward),
        backward=_as_one(kernels.EXACT_ATTENTION.backward),
    )
    kernels.choose = lambda *_, **__: kernel
    perform = Executor.perform

    def performed(self: Any, action: Any, handler: Any) -> None:
        with _written(path, str(action.op), len(self.layouts[action.chunk].table.segments)):
            perform(self, action, handler)

    Executor.perform = performed  # type: ignore[method-assign]
    for name, op in (("forward_step", f"F {MEGATRON}"), ("backward_step", f"B {MEGATRON}")):
        setattr(schedules, name, _counting(getattr(schedules, name), op, path))


def _as_one(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Make a kernel count as one operation: on a GPU it is one, however many segments it has."""

    @functools.wraps(kernel)
    def run(*rest: Any) -> Any:
        if (counted := Counted.active) is None:
            return kernel(*rest)
        counted.names[KERNEL] += 1
        counted.launches += 1
        with counted.paused():
            return kernel(*rest)

    return run


def _counting(step: Callable[..., Any], op: str, path: Path) -> Callable[..., Any]:
    @functools.wraps(step)
    def counting(*rest: Any, **named: Any) -> Any:
        with _written(path, op, 1):
            return step(*rest, **named)

    return counting


@contextmanager
def _written(path: Path, op: str, num_segments: int) -> Iterator[None]:
    with Counted() as counted:
        yield
    line = {"op": op, "segments": num_segments, **counted.figures()}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def main() -> None:
    """Train with the flags of the command line."""
    from megatron_epp.mcore import entry, pretrain_gpt

    with entry.errors_in_one_line():
        entry.prepare()
    count_actions(Path(os.environ[COUNTS]))
    pretrain_gpt.main()


if __name__ == "__main__":
    main()
