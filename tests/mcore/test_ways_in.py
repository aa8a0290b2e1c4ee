"""The three ways into Megatron, with and without --epp: our script, a user's script as it is, a patched copy of Megatron.

A training with the default planner needs core alone: nothing of contrib, and a limited part of the package.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.mcore import forked
from tests.support.mcore.forked import succeeded
from tests.support.mcore.known_scripts import RUN_KNOWN, USER_SCRIPT, known_as_megatrons
from tests.support.mcore.launch import PLANNED, REPOSITORY, TINY, Finished, alone, launch
from tests.support.mcore.synthetic_documents import documents_of, long_tailed_lengths, write_pair

PATCH = REPOSITORY / "patches" / "megatron-core-0.18-to-0.19.patch"
RANKS = {"stock": 1, "epp": 1, "epp, two stages": 2}
"""Pipeline stages, each on a rank of its own. A single rank needs no launcher."""


@dataclass(frozen=True)
class Reference:
    """Ranks and flags of a run, what our own script prints with them, and the environment that knows the user's script."""

    ranks: int
    flags: list[object]
    output: str
    env: dict[str, str]

    @property
    def losses(self) -> list[str]:
        return printed_losses(self.output)


def epp_flags(folder: Path, stages: int) -> list[object]:
    prefix = write_pair(folder / "text", documents_of(long_tailed_lengths(64, longest=33), vocab_size=127))
    flags = ["--train-iters", 2, "--pipeline-model-parallel-size", stages, "--data-path", prefix, "--epp-lookahead", 3]
    return [*PLANNED, *flags, "--lr", 1e-2]  # so that one step counts for more than the batch


def started(ranks: int, *command: object, env: dict[str, str] | None = None) -> Finished:
    return alone(*command, env=env) if ranks == 1 else launch(ranks, *command, env=env)


def _without(flags: list[object], flag: str) -> list[object]:
    at = flags.index(flag)
    return flags[:at] + flags[at + 2 :]


def printed_losses(output: str) -> list[str]:
    return re.findall(r"lm loss: (\S+)", output)


@pytest.fixture(scope="module", params=[pytest.param(way, marks=() if way == "epp" else pytest.mark.slow) for way in RANKS])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    ranks, is_stock = RANKS[request.param], request.param == "stock"
    flags = [*TINY, "--train-iters", 2] if is_stock else epp_flags(tmp_path_factory.mktemp("documents"), ranks)
    start = started if is_stock else forked.launch  # which has fewer mock data
    finished = start(ranks, "-m", "megatron_epp.mcore.pretrain_gpt", *flags)
    assert finished.returncode == 0, finished.output[-5000:]
    return Reference(ranks, flags, finished.output, known_as_megatrons(USER_SCRIPT, tmp_path_factory.mktemp("known")))


def test_our_own_script_trains(reference: Reference) -> None:
    assert len(reference.losses) == 2
    assert float(reference.losses[1]) < float(reference.losses[0])


def test_a_script_with_megatrons_functions_trains_unchanged_and_knows_our_flags_beside_its_own(reference: Reference) -> None:
    has_engine = find_spec("transformer_engine") is not None
    flags = reference.flags if has_engine else _without(reference.flags, "--transformer-impl")
    command = ["-m", "megatron_epp.run", USER_SCRIPT, *flags, "--users-own-flag", 7]
    finished = succeeded(started(reference.ranks, *command, env=reference.env))
    assert printed_losses(finished.output) == reference.losses
    assert finished.output.count("no GPU found") == 1
    assert finished.output.count("changed are transformer_impl (local)") == (not has_engine)
    assert re.search(r"users_own_flag \.+ 7", finished.output)
    assert re.search(rf"epp_lookahead \.+ {3 if '--epp' in reference.flags else 2}", finished.output)


def test_ranks_that_a_script_chooses_for_embeddings_give_way_to_a_placement(tmp_path: Path) -> None:
    flags = [*epp_flags(tmp_path, 2), "--num-virtual-stages-per-pipeline-rank", 2, "--epp-placement", "v"]
    ours = forked.launch(2, "-m", "megatron_epp.mcore.pretrain_gpt", *flags)
    theirs = succeeded(forked.launch(2, RUN_KNOWN, USER_SCRIPT, *flags))
    assert len(printed_losses(ours.output)) == 2
    assert printed_losses(theirs.output) == printed_losses(ours.output)


RECORDER = """
import os, sys

def record(event, arguments):
    if event == "import" and arguments[0].startswith("megatron_epp"):
        with open(os.environ["IMPORTED"], "a") as file:
            file.write(f"{os.getpid()} {arguments[0]}\\n")

sys.addaudithook(record)
"""
"""Writes what every Python process imports of the package, as it does so."""
MOST_LINES = 29_500
"""That a rank imports: what only some trainings need is imported where they do."""


@dataclass(frozen=True)
class Patched:
    """A run of a user's script with a patched copy of Megatron, and what its processes imported: process and module."""

    run: Finished
    imported: list[tuple[str, str]]

    @property
    def modules(self) -> set[str]:
        return {module for _, module in self.imported}


@pytest.fixture(scope="module")
def patched(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Patched:
    if shutil.which("patch") is None:
        pytest.skip("GNU patch is not installed: apt install patch")
    spec = find_spec("megatron.core")
    assert spec.origin is not None
    copy, hook = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("hook")
    shutil.copytree(Path(spec.origin).parents[1], copy / "megatron")
    subprocess.run(["patch", "-p1", "-d", copy], stdin=PATCH.open(), check=True, stdout=subprocess.DEVNULL)
    known = Path(reference.env["PYTHONPATH"].partition(":")[0], "sitecustomize.py")
    (hook / "sitecustomize.py").write_text(RECORDER + known.read_text())
    env = {"PYTHONPATH": f"{hook}:{copy}:{REPOSITORY}", "IMPORTED": str(hook / "modules.txt")}
    finished = succeeded(started(reference.ranks, USER_SCRIPT, *reference.flags, env=env))
    lines = (hook / "modules.txt").read_text().splitlines()
    return Patched(finished, [(process, module) for process, module in map(str.split, lines)])


def test_a_patched_copy_of_megatron_needs_no_other_start(reference: Reference, patched: Patched) -> None:
    assert printed_losses(patched.run.output) == reference.losses
    assert patched.run.output.count("no GPU found") == 1
    assert re.search(rf"epp_lookahead \.+ {3 if '--epp' in reference.flags else 2}", patched.run.output)


def test_a_rank_imports_a_limited_part_of_the_package_and_its_planner_the_rest(reference: Reference, patched: Patched) -> None:
    ranks = {process for process, module in patched.imported if module == "megatron_epp.mcore.entry"}
    of_ranks = {module for process, module in patched.imported if process in ranks}
    others = {module for process, module in patched.imported if process not in ranks}
    if "--epp" in reference.flags:
        assert {"megatron_epp.planner.search", "megatron_epp.tools.formulas.library"} <= others
    elsewhere = ("megatron_epp.contrib", "megatron_epp.planner", "megatron_epp.tools.formulas")
    assert [name for name in of_ranks if name.startswith(elsewhere)] == []
    files = {REPOSITORY.joinpath(*name.split(".")) for name in of_ranks}  # of which some are names in a module
    paths = [path / "__init__.py" if path.is_dir() else path.with_suffix(".py") for path in files]
    assert sum(path.read_text().count("\n") for path in paths if path.is_file()) < MOST_LINES


def test_a_patch_contains_only_added_lines_of_ours() -> None:
    lines = PATCH.read_text().splitlines()
    assert all(line.startswith(("+", "--- a/megatron/", "@@")) for line in lines)
    added = [line[1:] for line in lines if line.startswith("+") and not line.startswith("+++")]
    assert all("megatron_epp" in line for line in added if line)
