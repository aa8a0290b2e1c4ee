"""Programs of the ranks in the tests of agreement on a script's microbatches and their plan."""

from types import SimpleNamespace
from unittest.mock import Mock

from megatron_epp.mcore.iteration.microbatch_agreement import LocalShapes, agree_on_shapes
from megatron_epp.mcore.iteration.microbatch_run import MicrobatchRun
from megatron_epp.mcore.iteration.microbatch_shapes import Microbatch
from megatron_epp.plan import EppError, PlanError
from megatron_epp.runtime.links.objects import made_by_first

SHAPES = (Microbatch((16, 8)), Microbatch((32,)), Microbatch((8, 8), 2), Microbatch((400,)))


def shapes(rank, links, mine, problems=("", ""), num_bytes=(0, 0), replicas=(0, 0)):
    try:
        return agree_on_shapes(LocalShapes(mine[rank], problems[rank], rank, num_bytes[rank], replicas[rank]), links.control)
    except EppError as error:
        return f"refused: {error}"


def prefixed(rank, links, failing, is_learnt):
    """Shapes agreed by a run whose search for prefixes fails on one rank."""
    find = Mock(side_effect=ValueError("a prefix of 9 tokens") if rank == failing else None, return_value=None)
    run = SimpleNamespace(learning=SimpleNamespace(is_done=is_learnt), find_prefixes=find, rank=rank, replica=0, links=links)
    try:
        return MicrobatchRun.agreed(run, SHAPES, "", 0, [[]] * len(SHAPES)).here
    except EppError as error:
        return f"refused: {error}"


def results(rank, links, ways):
    """What the first rank makes for all, in the way named by `ways`; or the error of this rank."""

    make = Mock(side_effect={"fails": PlanError("no plan"), "breaks": ZeroDivisionError("a bug")}.get(ways[rank]))
    make.return_value = f"made by {rank}"
    try:
        return made_by_first(make, links.control)
    except EppError as error:
        return f"refused: {error}"
