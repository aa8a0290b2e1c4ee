"""An installed wheel is all a user needs: everything it ships is there, and it plans and trains far from the source tree."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import megatron_epp

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "megatron_epp", "configs", "patches")
SHIPPED = {"configs": (".yaml", ".json"), "patches": (".patch", ".md")}
KERNELS = "megatron_epp/planner/kernels"
PAGE_SUFFIXES = (".html", ".css", ".js")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy: building leaves files behind, and finds those of builds before."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    succeeds([sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", built, source], source)
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The folder of the commands of an environment that has the wheel, and of this one the packages but not the source tree."""
    folder = tmp_path_factory.mktemp("environment")
    site = install(wheel, folder)
    others = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (site / "packages_of_this_environment.pth").write_text("".join(f"{path}\n" for path in others))
    share_compiled_loops(site / KERNELS)
    return folder / "bin"


def install(wheel, folder):
    """Make an environment that has the wheel and nothing else, and return where its packages are."""
    venv.create(folder, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--no-deps", "--no-index", "--quiet"]
    succeeds([*pip, wheel], folder)
    (site,) = (folder / "lib").glob("python*/site-packages")
    return site


def share_compiled_loops(kernels):
    """Copy the planner's compiled loops, which take a minute of a core to compile. They are known by a file's size and time."""
    for path in (ROOT / KERNELS).glob("*.py"):
        os.utime(kernels / path.name, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    (kernels / "__pycache__").mkdir(exist_ok=True)
    for path in (ROOT / KERNELS / "__pycache__").glob("*.nb?"):
        shutil.copy(path, kernels / "__pycache__")


def succeeds(command, folder):
    """Return a command's output. It runs in `folder` and knows no source tree."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [*map(str, command)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return done.stdout


def test_without_torch_and_megatron_plans_are_made_and_what_trains_says_what_is_missing(wheel, tmp_path):
    site = install(wheel, tmp_path / "bare")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        needs = re.findall(r"^Requires-Dist: ([\w-]+)$", archive.read(metadata).decode(), re.MULTILINE)
    assert sorted(needs) == ["numpy", "packaging", "pyyaml"]
    for package in ("numpy", "packaging", "yaml", "numpy.libs", "_yaml"):
        if (source := Path(sysconfig.get_path("purelib"), package)).exists():
            (site / package).symlink_to(source)
    command = tmp_path / "bare" / "bin" / "megatron-epp"
    planned = succeeds([command, "plan", "--lengths", "900,300,40", "--model", "tiny-gpt", "--stages", "2"], tmp_path)
    assert "planner greedy" in planned
    for words in (["train", "-c", "recipes/tiny-cpu"], ["first-run"], ["quickstart"], ["profile", "-o", "profile.json"]):
        refused = subprocess.run([command, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert refused.returncode == 2
        (line,) = refused.stderr.strip().splitlines()
        needs = rf"megatron-epp {words[0]} needs (torch|omegaconf\S*), which is not installed here: pip install"
        assert re.search(needs, line), line
    looked = subprocess.run([command, "doctor"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert looked.returncode == 1
    assert "Megatron is not installed, and training needs it: pip install" in looked.stdout


def test_the_wheel_has_every_module_every_shipped_file_and_the_one_version(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    wanted = {path.relative_to(ROOT) for path in (ROOT / "megatron_epp").rglob("*.py")}
    pages = {path.relative_to(ROOT) for path in (ROOT / "megatron_epp").rglob("*") if path.suffix in PAGE_SUFFIXES}
    assert pages
    wanted |= pages
    for folder, suffixes in SHIPPED.items():
        files = (path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)
        wanted |= {Path("megatron_epp") / path.relative_to(ROOT) for path in files}
    assert {str(path) for path in wanted} <= names
    assert "megatron_epp/py.typed" in names
    assert wheel.name.startswith(f"megatron_epp-{megatron_epp.__version__}-")


def test_commands_run_from_anywhere(installed, tmp_path):
    where = "import megatron_epp; print(megatron_epp.__file__)"
    assert Path(succeeds([installed / "python", "-c", where], tmp_path).strip()).is_relative_to(installed.parent)
    command = installed / "megatron-epp"
    assert succeeds([command, "--version"], tmp_path) == f"megatron-epp {megatron_epp.__version__}\n"
    batch = ["--lengths", "131072,9000,800,90,70000", "--model", "llama3-8b", "--cluster", "h100x8", "--stages", "8"]
    assert "planner greedy, costs analytic:h100x8" in succeeds([command, "plan", *batch, "-o", "plan.json"], tmp_path)
    assert succeeds([command, "check", "plan.json"], tmp_path)
    succeeds([command, "show", "plan.json", "-o", "plan.html"], tmp_path)
    assert "</html>" in (tmp_path / "plan.html").read_text()


@pytest.mark.slow  # `test_readme.py` runs it from this checkout
def test_the_quickstart_trains(installed, tmp_path):
    succeeds([installed / "megatron-epp", "quickstart", "--rounds", 1, "--context", 256, "-o", "here"], tmp_path)
