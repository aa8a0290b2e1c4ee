"""Frameworks switch plans on by one environment variable, and where it is not set nothing of this package does anything."""

import importlib
import sys
from argparse import Namespace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

import megatron_epp
from megatron_epp import callers
from megatron_epp.plan import EppError


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("", None), ("0", None), ("off", None), ("1", {}), ("on", {}),
        ("memory_cap_gb=60,offload=on", {"memory_cap_gb": 60.0, "offload": "on"}),
        ("memory-cap-gb=0.5 order=given", {"memory_cap_gb": 0.5, "order": "given"}),
        ("split_weight_gradient", {"split_weight_gradient": "on"}),
    ],
)  # fmt: skip
def test_settings_are_there_where_the_variable_says_so_and_have_the_types_of_flags(
    monkeypatch: pytest.MonkeyPatch, text: str, given: dict[str, Any] | None
) -> None:
    monkeypatch.setenv(callers.VARIABLE, text)
    assert callers.settings() == given


@pytest.mark.parametrize("text", ["memory_cap=60", "memory_cap_gb=much", "order=random"])
def test_a_wrong_setting_is_told_with_the_variable(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(callers.VARIABLE, text)
    with pytest.raises(EppError, match=f"environment variable MEGATRON_EPP={text}: "):
        callers.settings()


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module of a framework that can be imported and has not been."""
    package = tmp_path / "some_framework"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "others.py").touch()
    (package / "engine.py").write_text("schedule = 'stock'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith("some_framework")]:
        monkeypatch.delitem(sys.modules, name)
    return "some_framework.engine"


def test_a_function_is_called_behind_a_modules_import_once(engine: str) -> None:
    seen: list[str] = []
    callers.when_imported(engine, lambda: seen.append(sys.modules[engine].schedule))
    hooks = len(sys.meta_path)
    importlib.import_module("some_framework.others")
    assert not seen
    importlib.import_module(engine)
    importlib.import_module(engine)
    assert (seen, len(sys.meta_path)) == (["stock"], hooks - 1)
    callers.when_imported(engine, lambda: seen.append("at once"))
    assert seen[-1] == "at once"


def test_a_module_that_is_missing_is_missing_as_ever(engine: str) -> None:
    seen: list[str] = []
    callers.when_imported(f"{engine}_of_another_version", lambda: seen.append("never"))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{engine}_of_another_version")
    assert not seen


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(megatron_epp, "install", lambda **given: found.append(given))
    return found


@pytest.mark.parametrize("text", [None, "memory_cap_gb=60", "0"])
def test_plans_are_installed_behind_a_frameworks_module_where_the_variable_says_so(
    engine: str, monkeypatch: pytest.MonkeyPatch, installed: list[dict[str, Any]], text: str | None
) -> None:
    monkeypatch.setenv(callers.VARIABLE, text or "")
    callers.install_behind(engine, shape_of=len)
    assert installed == []
    importlib.import_module(engine)
    assert installed == ([{"shape_of": len, "memory_cap_gb": 60.0}] if text == "memory_cap_gb=60" else [])


def test_a_wrong_setting_ends_the_import_of_the_frameworks_module(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A framework may pass over errors of plugins, and would train without plans."""
    monkeypatch.setenv(callers.VARIABLE, "memory_cap=60")
    callers.install_behind(engine)
    with pytest.raises(EppError, match="MEGATRON_EPP=memory_cap=60"):
        importlib.import_module(engine)


@pytest.mark.parametrize(
    ("caller", "module"),
    [("verl", "verl.workers.engine.megatron.transformer_impl"), ("plugin", "megatron.core.pipeline_parallel.schedules")],
)
def test_a_caller_names_the_module_that_only_training_processes_import(
    monkeypatch: pytest.MonkeyPatch, caller: str, module: str
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(callers, "when_imported", lambda name, run: asked.append(name))
    monkeypatch.setenv(callers.VARIABLE, "1")
    monkeypatch.delitem(sys.modules, f"megatron_epp.callers.{caller}", raising=False)
    importlib.import_module(f"megatron_epp.callers.{caller}")
    assert asked == [module]


@pytest.mark.parametrize(("lengths", "padding"), [([5, 300], 207), ([256], 0)])
def test_slime_pads_the_sequences_of_a_microbatch_together(
    monkeypatch: pytest.MonkeyPatch, installed: list[dict[str, Any]], lengths: list[int], padding: int
) -> None:
    from megatron_epp.callers import slime

    args = Namespace(tensor_model_parallel_size=4, data_pad_size_multiplier=64)
    monkeypatch.delenv(callers.VARIABLE, raising=False)
    slime.init(args)
    assert installed == []
    monkeypatch.setenv(callers.VARIABLE, "order=given")
    slime.init(args)
    assert installed[0]["order"] == "given"
    assert installed[0]["shape_of"]({"total_lengths": lengths}) == [*lengths, padding]


def test_the_package_brings_verl_its_entry_point() -> None:
    (found,) = [one for one in entry_points(group="verl.plugins") if one.value.startswith("megatron_epp")]
    assert found.value == "megatron_epp.callers.verl:load"
