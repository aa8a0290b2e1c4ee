"""The parts that plan and report run where there is no torch and no Megatron."""

import os
import subprocess
import sys
from pathlib import Path

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


def imported(*packages, path=None):
    """Modules of packages, all imported in a fresh interpreter, and which heavy packages came along."""
    env = os.environ | ({"PYTHONPATH": str(path)} if path else {})
    run = subprocess.run([sys.executable, "-c", IMPORT_ALL, *packages], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr
    found, heavy = run.stdout.splitlines()[-2:]
    return found.split(), heavy.split()


def test_pure_packages_import_no_torch():
    packages = [f"megatron_epp.{name}" for name in ("plan", "cost", "planner", "report", "advice", "cli")]
    found, heavy = imported(*packages)
    assert set(packages) < set(found)
    assert heavy == []


def test_an_import_deep_in_a_package_would_be_noticed(tmp_path):
    (tmp_path / "torch.py").touch()
    (tmp_path / "megatron.py").touch()
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "outer" / "__init__.py").touch()
    (inner / "__init__.py").write_text("import megatron")
    (inner / "deep.py").write_text("import torch")
    assert imported("outer", path=tmp_path) == (["outer", "outer.inner", "outer.inner.deep"], ["megatron", "torch"])


def test_these_tests_import_no_torch_either():
    """Or running one of them would take as long as importing torch does."""
    here = Path(__file__).parent
    run = subprocess.run([sys.executable, "-c", TESTS, here], capture_output=True, text=True, cwd=here.parents[1])
    assert run.returncode == 0, run.stderr[-1000:]
