"""Training scripts that a run takes for Megatron's own, since theirs are in no wheel and may not be copied."""

import json
import runpy
from pathlib import Path

from tests.support.mcore.launch import REPOSITORY

USER_SCRIPT = Path(__file__).with_name("user_script.py")
RUN_KNOWN = Path(__file__).with_name("run_known_script.py")
"""Program for forked ranks, whose first argument is the script."""
fingerprints_of = runpy.run_path(str(REPOSITORY / "scripts" / "fingerprint_script.py"))["fingerprints_of"]

_ADD = """
import json
from megatron_epp.mcore.patches.fingerprints import SCRIPTS

for name, found in json.loads({known!r}).items():
    SCRIPTS[name] = (*SCRIPTS.get(name, ()), found)
"""


def known_as_megatrons(script: Path, folder: Path) -> dict[str, str]:
    """The environment of a run that adds a script's fingerprints, from an empty folder, to Megatron's when Python starts."""
    (folder / "sitecustomize.py").write_text(_ADD.format(known=json.dumps(fingerprints_of(script.read_text()))))
    return {"PYTHONPATH": f"{folder}:{REPOSITORY}"}
