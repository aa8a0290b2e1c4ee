"""Trains with some release's patched `megatron/` on the path, and says what of it is known."""

import inspect
from pathlib import Path
from typing import Any
from unittest import mock


def run(folder: Path) -> dict[str, Any]:
    """Compare the cases of `scripts/parity` in a folder's cases.json, whose figures are printed, and train with every level of
    recompute.
    """
    found = known()  # ahead of all that could prepare Megatron
    from scripts.parity import compare as parity
    from scripts.parity import worlds
    from scripts.parity.worlds import load_megatron
    from tests.support.mcore.jobs import recompute_modes

    load_megatron()
    from tests.support.mcore import local_hybrid, trainings  # they import Megatron, which has to be prepared

    local_hybrid.use_torch_norms()
    with mock.patch.object(worlds, "record", trainings.recorded):
        assert parity.main(["--cases", str(folder / "cases.json"), "--iterations", "2", "--json"]) == 0
    (place := folder / "levels").mkdir()
    return {"known": found, "levels": recompute_modes.run(place, ["dropout"])}


def known() -> dict[str, object]:
    import megatron.training  # the patched file applies our patches
    from megatron.core.pipeline_parallel import schedules

    from megatron_epp.mcore import releases
    from megatron_epp.mcore.iteration.schedule_call import ScheduleCall
    from megatron_epp.mcore.patches import fingerprints, install, patching

    stock = inspect.signature(schedules.forward_backward_pipelining_without_interleaving)
    applied = set(patching.applied())
    return {
        "version": releases.installed_version(),
        "path": megatron.training.__path__[0],
        "unknown": patching.unknown(fingerprints.PATCHED | fingerprints.RELIED_ON),
        "not applied": [patch.target for patch in install.patches() if patch not in applied],
        "parameters": [list(stock.parameters), list(inspect.signature(ScheduleCall).parameters)],
    }
