"""`megatron-epp doctor` says what is there, what is missing and what to do; its exit code tells whether training can run."""

import argparse
import json
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import pytest

from megatron_epp.tools.cli import doctor as cli_doctor
from megatron_epp.tools.cli.doctor import OK, PROBLEM, WARNING, Finding


def fake_torch(has_gpu):
    gpu = SimpleNamespace(name="NVIDIA H100", total_memory=80 * 2**30, major=9, minor=0)
    torch = MagicMock()  # distributed, with NCCL
    torch.version.cuda, torch.cuda.nccl.version.return_value = "13.0", (2, 29, 7)
    torch.cuda.is_available.return_value, torch.cuda.device_count.return_value = has_gpu, int(has_gpu)
    torch.cuda.get_device_name.return_value, torch.cuda.get_device_properties.return_value = gpu.name, gpu
    return torch


@pytest.fixture
def machine(monkeypatch):
    """A machine with these packages, an environment and, if asked for, a GPU. Megatron and kernels are left out."""

    def make(packages, environment=(), has_gpu=True, broken=()):
        modules = {"amp_C" if name == "apex" else name.replace("-", "_") for name in packages}
        errors = dict(broken) | ({} if "torch" in modules else {"torch": ImportError()})
        for name, value in (("version_of", packages.get), ("_import_error", errors.get), ("_megatron", lambda: iter(()))):
            monkeypatch.setattr(cli_doctor, name, value)
        monkeypatch.setattr(cli_doctor.importlib.util, "find_spec", lambda name: name if name in modules else None)
        monkeypatch.setitem(sys.modules, "torch", fake_torch(has_gpu))
        monkeypatch.setattr(cli_doctor, "_attention", lambda torch, has_gpu: iter(()))
        monkeypatch.setattr(cli_doctor.os, "environ", dict(environment))
        return findings()

    return make


def findings():
    return {finding.subject: finding for finding in cli_doctor.look()}


FULL = {"torch": "2.13.0", "transformer-engine": "2.9.0", "apex": "0.1", "numba": "0.68.1"}
SET = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def test_on_a_machine_that_has_everything_every_line_is_ok(machine):
    found = machine(FULL, SET)
    assert {finding.status for finding in found.values()} == {OK}
    assert not any(finding.todo for finding in found.values())
    assert "NVIDIA H100, 80 GiB, compute capability 9.0" in found["GPU 0"].found
    assert found["CUDA and NCCL"].found == "13.0 and 2.29.7"


def without(name):
    return {key: value for key, value in FULL.items() if key != name}


ALLOC, OLD_ALLOC, TF32 = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
TE, EXPANDABLE = "transformer-engine", "expandable_segments:True"
FINDINGS = [
    # what is missing, with what to install
    (without(TE), SET, "Transformer Engine", WARNING, "not found", "pip install 'megatron-epp[te]'", "--transformer-impl"),
    (without("apex"), SET, "NVIDIA Apex", WARNING, "not found", "pip install -v --no-build-isolation ."),
    (without("numba"), SET, "numba", WARNING, "not found", "pip install 'megatron-epp[fast]'"),
    ({"numba": "0.68.1"}, {}, "torch", PROBLEM, "not found"),
    # versions outside what is known to work; NVIDIA's container 25.01 has torch 2.6.0a0, which counts as the release
    (FULL | {"torch": "2.5.1"}, SET, "torch", PROBLEM, "2.5.1, outside >=2.6"),
    (FULL | {"torch": "2.6.0a0+ecf3bae40a.nv25.01"}, SET, "torch", OK),
    (FULL | {"torch": "2.5.0a0+872d972e41.nv24.08"}, SET, "torch", PROBLEM),
    # settings; torch 2.8 ignores the new name of the allocator's
    (FULL, {OLD_ALLOC: "max_split_size_mb:64"}, ALLOC, WARNING, "max_split_size_mb:64", f"export {ALLOC}={EXPANDABLE}"),
    (FULL, {}, "CUDA_DEVICE_MAX_CONNECTIONS", WARNING, "export CUDA_DEVICE_MAX_CONNECTIONS=1"),
    (FULL | {"torch": "2.8.0+cu128"}, SET, OLD_ALLOC, WARNING, f"export {OLD_ALLOC}={EXPANDABLE}"),
    (FULL, {OLD_ALLOC: EXPANDABLE}, OLD_ALLOC, OK),
    (FULL, SET | {TF32: "1"}, TF32, OK, "1: fp32 matrices are multiplied in TF32", "3e-4"),
]


@pytest.mark.parametrize(("packages", "environment", "subject", "status", "facts"), [(*row[:4], row[4:]) for row in FINDINGS])
def test_what_is_missing_too_old_or_costs_memory_is_told_with_what_to_do(
    machine, packages, environment, subject, status, facts
):
    found = machine(packages, environment)[subject]
    assert found.status == status
    assert [fact for fact in facts if fact not in f"{found.found} {found.todo}"] == [], found


@pytest.mark.parametrize(
    ("error", "todo"),
    [
        (ModuleNotFoundError("No module named 'triton.language'", name="triton.language"), "pip install triton"),
        (OSError("libcudnn_graph.so.9: undefined symbol: cudnnGetVersion"), "first in LD_LIBRARY_PATH"),
        (AssertionError("Could not find `transformer_engine_torch`."), "install it again: pip install 'megatron-epp[te]'"),
    ],
)
def test_a_library_that_is_there_and_cannot_be_imported_is_told_with_what_it_lacks(machine, error, todo):
    found = machine(FULL, SET, broken={"transformer_engine.pytorch": error})["Transformer Engine"]
    assert (found.status, found.found) == (WARNING, f"2.9.0, but its import fails: {error}")
    assert todo in found.todo


def test_what_is_not_there_or_not_allowed_is_not_asked_for(machine):
    assert "CUDA and NCCL" not in machine({"numba": "0.68.1"}), "without torch"
    found = machine({"torch": "2.13.0", "numba": "0.68.1"}, has_gpu=False)
    assert [finding.subject for finding in found.values() if finding.status != OK] == ["GPU"]
    assert TF32 not in machine(FULL, SET | {TF32: "0"})


def test_a_torch_whose_import_fails_is_a_problem_not_a_crash(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("raise RuntimeError('operator is registered twice')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(cli_doctor, "_megatron", lambda: iter(()))
    found = findings()
    assert found["torch"].status == PROBLEM
    assert found["torch"].found.endswith("but its import fails: operator is registered twice")
    assert "CUDA and NCCL" not in found


def test_a_library_that_breaks_while_it_is_looked_at_is_a_problem_not_a_crash(machine, monkeypatch):
    machine(FULL, SET)
    broken = Mock(side_effect=RuntimeError("undefined symbol"))
    monkeypatch.setattr(cli_doctor, "_megatron", lambda: map(broken, "a"))
    expected = Finding("megatron-core", PROBLEM, "RuntimeError: undefined symbol", "install it again")
    assert findings()["megatron-core"] == expected


@pytest.mark.parametrize(("status", "code"), [(OK, 0), (WARNING, 0), (PROBLEM, 1)])
def test_the_exit_code_is_1_only_where_training_cannot_run(monkeypatch, capsys, status, code):
    finding = Finding("torch", status, "2.13.0", "do this" if status != OK else "")
    monkeypatch.setattr(cli_doctor, "look", lambda: iter([finding]))
    assert cli_doctor.run(argparse.Namespace(profile=False, output=None, json=False)) == code
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0], "-> do this" in lines[1]) == (f"{status:<8} torch  2.13.0", status != OK)
    assert lines[-1].startswith("training cannot run here" if code else "training can run here")
    assert cli_doctor.run(argparse.Namespace(profile=False, output=None, json=True)) == code
    assert json.loads(capsys.readouterr().out)[0]["status"] == status
