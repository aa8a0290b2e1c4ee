"""Trains while no module of diagnostics finds memory for a tensor, from the first iteration on."""

from contextlib import ExitStack
from functools import wraps

from megatron_epp.mcore import pretrain_gpt
from megatron_epp.mcore.iteration.report import IterationReport
from tests.support.runtime.failing_buffers import failing

MODULES = tuple(
    f"megatron_epp.{name}"
    for name in ("mcore.iteration.report", "mcore.iteration.loggers", "mcore.costs.watch", "report.", "runtime.recorder")
)


def main() -> None:
    with ExitStack() as stack:
        begin = IterationReport.begin

        @wraps(begin)
        def begin_without_memory(*given: object) -> IterationReport:
            IterationReport.begin = begin
            stack.enter_context(failing(1, *MODULES))
            return begin(*given)

        IterationReport.begin = begin_without_memory
        pretrain_gpt.main()
        assert IterationReport.begin is begin, "no iteration was reported"


if __name__ == "__main__":
    main()
