"""The three ways into Megatron: our own script, a user's script as it is, and a patched copy of Megatron."""

import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from launch import REPOSITORY, TINY, launch

USER_SCRIPT = Path(__file__).with_name("user_script.py")
PATCH = REPOSITORY / "patches" / "megatron-core-0.19.2.patch"
TRAIN = [*TINY, "--pipeline-model-parallel-size", 2, "--train-iters", 2, "--epp-lookahead", 3]


def printed_losses(output: str) -> list[str]:
    return re.findall(r"lm loss: (\S+)", output)


@pytest.fixture(scope="module")
def losses() -> list[str]:
    finished = launch(2, "-m", "megatron_epp.mcore.pretrain_gpt", *TRAIN)
    assert finished.returncode == 0, finished.output[-5000:]
    return printed_losses(finished.output)


def test_our_own_script_trains(losses: list[str]) -> None:
    assert len(losses) == 2
    assert float(losses[1]) < float(losses[0])


def test_a_users_script_trains_unchanged_and_knows_our_flags_beside_its_own(losses: list[str]) -> None:
    finished = launch(2, "-m", "megatron_epp.run", USER_SCRIPT, *TRAIN, "--users-own-flag", 7)
    assert finished.returncode == 0, finished.output[-5000:]
    assert printed_losses(finished.output) == losses
    assert re.search(r"users_own_flag \.+ 7", finished.output)
    assert re.search(r"epp_lookahead \.+ 3", finished.output)


@pytest.mark.skipif(shutil.which("patch") is None, reason="GNU patch is not installed: apt install patch")
def test_a_patched_copy_of_megatron_needs_no_other_start(losses: list[str], tmp_path: Path) -> None:
    spec = find_spec("megatron.core")
    assert spec is not None
    assert spec.origin is not None
    shutil.copytree(Path(spec.origin).parents[1], tmp_path / "megatron")
    subprocess.run(["patch", "-p1", "-d", tmp_path], stdin=PATCH.open(), check=True, stdout=subprocess.DEVNULL)
    finished = launch(2, USER_SCRIPT, *TRAIN, env={"PYTHONPATH": str(tmp_path)})
    assert finished.returncode == 0, finished.output[-5000:]
    assert printed_losses(finished.output) == losses
    assert re.search(r"epp_lookahead \.+ 3", finished.output)


def test_a_patch_contains_only_added_lines_of_ours() -> None:
    lines = PATCH.read_text().splitlines()
    assert all(line.startswith(("+", "--- a/megatron/", "@@")) for line in lines)
    added = [line[1:] for line in lines if line.startswith("+") and not line.startswith("+++")]
    assert all("megatron_epp" in line for line in added if line)


@pytest.mark.parametrize(
    ("arguments", "complaint"), [([], "say which script to run"), (["/no/such.py"], "there is no script /no/such.py")]
)
def test_a_wrong_start_is_told_in_one_line(arguments: list[str], complaint: str) -> None:
    process = subprocess.run([sys.executable, "-m", "megatron_epp.run", *arguments], capture_output=True, text=True, timeout=60)
    assert process.returncode == 1
    assert process.stderr.startswith(f"megatron_epp, rank 0: {complaint}")
    assert process.stderr.count("\n") == 1
