"""Run a Megatron script with this package in it, the script unchanged:

torchrun ... -m megatron_epp.run /path/to/Megatron-LM/pretrain_gpt.py <its flags> --epp

With `--epp`, functions of the script that plans replace must be Megatron's own (`mcore.patches.stock_functions`).
"""

import runpy
import sys
from pathlib import Path

from megatron_epp.mcore import entry
from megatron_epp.plan.errors import EppError


def main() -> None:
    """Prepare Megatron as the script will see it, then run the script as `__main__` with the rest of the command line."""
    with entry.errors_in_one_line():
        script = _script(sys.argv[1:])
        sys.argv = [str(script), *sys.argv[2:]]
        sys.path.insert(0, str(script.parent))  # as python does for a script; a clone's megatron lies there
        entry.prepare()
        runpy.run_path(str(script), run_name="__main__")


def _script(arguments: list[str]) -> Path:
    if not arguments:
        raise EppError("say which script to run: torchrun ... -m megatron_epp.run /path/to/pretrain_gpt.py <its flags> --epp")
    script = Path(arguments[0]).resolve()
    if not script.is_file():
        raise EppError(f"there is no script {script}; it comes first, its flags after it")
    return script


if __name__ == "__main__":
    main()
