"""Run with some release's patched `megatron/` on the path: says what of it is known, then trains.

python -m tests.support.mcore.release_worker FOLDER, which holds the cases of `scripts/parity` in cases.json
"""

import inspect
import json
import sys
from pathlib import Path


def known() -> dict[str, object]:
    import megatron.training  # the patched file applies our patches
    from megatron.core.pipeline_parallel import schedules

    from megatron_epp.mcore import features
    from megatron_epp.mcore.patches import fingerprints, install, patching
    from megatron_epp.mcore.training.forward_backward import forward_backward_elastic

    stock = inspect.signature(schedules.forward_backward_pipelining_without_interleaving)
    applied = set(patching.applied())
    return {
        "version": features.installed_version(),
        "path": megatron.training.__path__[0],
        "unknown": patching.unknown(fingerprints.PATCHED | fingerprints.RELIED_ON | fingerprints.SHOWN),
        "not applied": [patch.target for patch in install.patches() if patch not in applied],
        "parameters": [list(stock.parameters), list(inspect.signature(forward_backward_elastic).parameters)],
    }


if __name__ == "__main__":
    print(json.dumps(known()), flush=True)
    from scripts.parity import compare as parity
    from tests.support.mcore.figures import record_figures
    from tests.support.mcore.jobs import options, recompute_modes

    folder = Path(sys.argv[1])
    code = parity.main(["--cases", str(folder / "cases.json"), "--iterations", "2", "--json"])
    record_figures(options.run(folder, ("hybrid stock", "hybrid elastic")))
    (place := folder / "levels").mkdir()
    record_figures(recompute_modes.run(place, ["dropout"]))
    sys.exit(code)
