"""`megatron-epp doctor` on the machine at hand, and next to a Megatron that is not supported."""

import json
import os
import subprocess
import sys

from megatron_epp.mcore import releases
from megatron_epp.mcore.patches import fingerprints


def doctor(path=None):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    if path is not None:
        environment["PYTHONPATH"] = f"{path}:{environment.get('PYTHONPATH', '')}"
    command = [sys.executable, "-m", "megatron_epp.tools.cli.main", "doctor", "--json"]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=180)
    return finished.returncode, {finding["subject"]: finding for finding in json.loads(finished.stdout)}


def test_the_installed_megatron_is_known_and_every_patch_fits():
    code, found = doctor()
    assert code == 0
    assert found["megatron-core"]["found"] == releases.described()
    assert found["megatron-core"]["found"].startswith(f"{releases.RECOMMENDED}, the package in /")
    assert f"{len(fingerprints.RELIED_ON)} functions are as tested" in found["patches"]["found"]
    assert "exact blocks" in found["attention in bfloat16"]["found"]


def test_an_unsupported_megatron_is_a_problem(tmp_path):
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("")
    (core / "package_info.py").write_text("__version__ = '0.17.1'\n")
    code, found = doctor(tmp_path)
    assert code == 1
    assert found["megatron-core"]["status"] == "problem"
    assert "0.17.1 is installed and megatron-epp supports" in found["megatron-core"]["found"]
    assert f"megatron-core[training]=={releases.RECOMMENDED}" in found["megatron-core"]["todo"]
