"""The parts that plan and report run where there is no torch and no Megatron."""

import subprocess
import sys
from pathlib import Path

from tests.support import ROOT

TESTS = """
import importlib.util, pathlib, sys
for path in sorted(pathlib.Path(sys.argv[1]).glob("test_*.py")):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    heavy = {module.partition(".")[0] for module in sys.modules} & {"torch", "megatron", "transformer_engine"}
    assert not heavy, f"{path.name} imports {heavy}"
"""
IMPORT_ALL = """
import importlib, pkgutil, sys
found = []
for name in sys.argv[1:]:
    package = importlib.import_module(name)
    found += [name, *(m.name for m in pkgutil.walk_packages(package.__path__, name + "."))]
for module in found:
    importlib.import_module(module)
print(*found)
print(*sorted({module.partition(".")[0] for module in sys.modules} & {"torch", "megatron", "transformer_engine"}))
"""


TOOLS = [f"tools.{room}" for room in ("advice", "cli", "formulas", "launch", "layouts", "report")]
"""All but `tools.machine`, which measures on devices."""


def test_pure_packages_import_no_torch():
    """All modules of them, in a fresh interpreter."""
    packages = [f"megatron_epp.{name}" for name in ("plan", "cost", "port", "planner", *TOOLS)]
    run = subprocess.run([sys.executable, "-c", IMPORT_ALL, *packages], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    imported, heavy = run.stdout.splitlines()[-2:]
    files = [path for package in packages for path in (ROOT / package.replace(".", "/")).rglob("*.py")]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files}
    assert names <= set(imported.split())
    assert heavy == ""


def test_these_tests_import_no_torch_either():
    """Or running one of them would take as long as importing torch does."""
    here = Path(__file__).parent
    run = subprocess.run([sys.executable, "-c", TESTS, here], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr[-1000:]
