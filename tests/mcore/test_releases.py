"""Every supported release is known by its fingerprints, takes the patch for forks, and trains as its own schedule does."""

import json
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megatron_epp.mcore import releases
from scripts.parity.cells import Case
from tests.support.mcore.figures import FOLDER, recorded
from tests.support.mcore.forked import command, succeeded
from tests.support.mcore.jobs.frameworks import UNEVEN
from tests.support.mcore.launch import REPOSITORY, launch, run
from tests.support.mcore.matrix import case
from tests.support.mcore.releases import OTHER_RELEASES, release
from tests.support.mcore.rows import AGAIN, ALL_STATISTICS, LATENT, OVERLAPPED, STATES

PATCH = REPOSITORY / "patches" / "megatron-core-0.18-to-0.19.patch"
HYBRID = STATES["two stages, weights apart"]
UNEVEN_SHARDS = f"{AGAIN} --epp-layout 1,3 --epp-vocab-parallel on"
SINKS = "--window-size 9,0 --window-attn-skip-freq 2 --softmax-type learnable"
CASES = {
    "weights apart, vocabulary, uneven layers": case("pp2 split", UNEVEN_SHARDS, "grouped", optimizer=OVERLAPPED),
    "padded chunks of experts": case("tp2 sp experts4", "--epp-planner 1f1b", "learned", both=ALL_STATISTICS, alone=True),
    "latent attention, multi-token prediction": case("pp2", f"{AGAIN} --epp-latents on", both=f"{LATENT} --mtp-num-layers 1"),
    "Mamba-2 and gated delta nets, windows and sinks": replace(HYBRID, both=f"{HYBRID.both} {SINKS}"),
}
MORE_CASES = {"experts by DeepEP": case("dp2 experts4 ep2", f"{AGAIN} --moe-token-dispatcher-type flex")}
"""In the set `slow`, by themselves."""


@pytest.mark.skipif(shutil.which("patch") is None, reason="GNU patch is not installed: apt install patch")
@pytest.mark.parametrize(
    ("wanted", "cases"),
    [  # the oldest differs most; the installed one is tested everywhere else
        pytest.param(OTHER_RELEASES[0], CASES, id=OTHER_RELEASES[0]),
        *(pytest.param(name, CASES | MORE_CASES, id=f"{name}, more", marks=pytest.mark.slow) for name in OTHER_RELEASES),
    ],
)
def test_a_release_is_known_and_trains_as_its_own_schedule_does(wanted: str, cases: dict[str, Case], tmp_path: Path) -> None:
    shutil.copytree(release(wanted) / "megatron", tmp_path / "megatron")
    patched = subprocess.run(["patch", "-p1", "-d", tmp_path], stdin=PATCH.open(), capture_output=True, text=True, check=True)
    assert "offset" not in patched.stdout
    (tmp_path / "cases.json").write_text(json.dumps({name: asdict(own) for name, own in cases.items()}))
    (recordings := tmp_path / "figures").mkdir()
    environment = {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment |= {FOLDER: str(recordings)}
    finished = run([sys.executable, *command("releases", {"folder": tmp_path})], environment, timeout_s=300)
    assert finished.returncode == 0, finished.output[-5000:]
    (figures,) = (json.loads(line) for line in finished.output.splitlines() if line.startswith("{"))
    (told,) = recorded(recordings)
    found = told["known"]
    assert found["version"] == wanted
    assert found["path"] == str(tmp_path / "megatron" / "training")
    assert found["unknown"] == []
    assert found["not applied"] == []
    stock, ours = found["parameters"]
    assert ours == stock
    assert all(figures["cases"][name]["parameters"]["num_tensors"] > 0 for name in cases)
    assert [name for facts in told["levels"]["dropout"] for name, differing in facts["differ"].items() if differing] == []


@pytest.mark.slow
def test_wrap_runs_on_a_megatron_core_without_its_training_loop(tmp_path: Path) -> None:
    path = {"PYTHONPATH": f"{release('0.18.2')}:{REPOSITORY}", FOLDER: str(tmp_path)}
    finished = succeeded(launch(2, *command("frameworks:of_core_alone", {"stages": 2, "lengths": UNEVEN}), env=path))
    assert finished.output.count("megatron-core 0.18.2\n") == 2
    differences = [run["worst"] for rank in recorded(tmp_path) for run in rank["runs"]]
    assert len(differences) == 12
    assert max(differences) < 1e-5


def test_every_release_tested_is_in_the_supported_range_and_the_newest_is_recommended() -> None:
    assert all(releases.matches(version, releases.SUPPORTED) for version in (*OTHER_RELEASES, releases.RECOMMENDED))
    assert releases.installed_version().split("+")[0] == releases.RECOMMENDED  # in a checkout Megatron adds its commit
