"""Differences between releases of Megatron are behind functions of one module, and the installed release is checked."""

import ast
import importlib.machinery
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_epp.mcore import releases
from megatron_epp.plan.errors import EppError

MCORE = Path(releases.__file__).parent
VERSIONS = re.compile(r"package_info|__version__|SpecifierSet|packaging|installed_version\(\) *[<>=]|parse_version")


@pytest.mark.parametrize(
    ("version", "is_clone", "said"),
    [
        ("0.19.2", False, "0.19.2, the package in {folder}; supported (>=0.18,<0.20)"),
        ("0.18.1", True, "0.18.1, the clone in {folder}; supported (>=0.18,<0.20)"),
        ("0.19.2+abc1234", True, "0.19.2+abc1234, the clone in {folder}; supported (>=0.18,<0.20)"),
        # of a repository of something else, in which the environment lies: Megatron takes its commit for its own
        ("0.19.2+abc1234", False, "0.19.2, the package in {folder}; supported (>=0.18,<0.20)"),
        ("0.20.0rc0", True, "0.20.0rc0, the clone in {folder}; not supported (>=0.18,<0.20)"),
    ],
)
def test_a_run_says_which_megatron_it_is_from_where_and_whether_it_is_supported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, is_clone: bool, said: str
) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text(f"__version__ = '{version}'\n")
    if is_clone:
        (tmp_path / ".git").mkdir()
    spec = importlib.machinery.ModuleSpec("megatron.core", None, is_package=True)
    spec.submodule_search_locations = [str(core)]
    monkeypatch.setattr(releases.importlib.util, "find_spec", lambda name: spec)
    assert releases.described() == said.format(folder=core)
    if "not supported" in said:
        with pytest.raises(EppError, match=rf"git checkout core_v0\.19\.2 in that clone, or .* \(it is in {core}\)"):
            releases.check_megatron()


def test_the_supported_range_is_0_18_and_0_19() -> None:
    versions = {"0.17.1": False, "0.18.0rc1": False, "0.18.0": True, "0.19.2": True, "0.20.0": False}
    assert {version: releases.matches(version, releases.SUPPORTED) for version in versions} == versions


def test_a_model_is_built_from_a_config_or_by_a_function_and_a_call_bound_in_any_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.training import argument_utils

    assert releases.pretrain_builds_model()
    monkeypatch.delattr(argument_utils, "gpt_config_from_args")
    assert not releases.pretrain_builds_model()
    assert releases.router_loss_scale(SimpleNamespace()) is None

    def old(model: object, data: object = None) -> None: ...
    def new(data: object, model: object) -> None: ...

    assert releases.bound(old, 1, data=2).arguments == {"model": 1, "data": 2}
    assert releases.bound(new, 2, 1).arguments == {"model": 1, "data": 2}


def release_checks(source: str) -> Iterator[str]:
    """Yield what in a module depends on Megatron's release: versions, signatures, imports that may fail, names looked up."""
    tree = ast.parse(source)
    for constant in VERSIONS.findall(source):
        yield f"compares versions ({constant})"
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imports if (node.module or "").startswith("megatron.")]
    megatrons = {alias.asname or alias.name for node in ours for alias in node.names}
    for node in ast.walk(tree):
        if "signature" in (getattr(node, "attr", None), getattr(node, "id", None)):
            yield "inspects a signature"
        if isinstance(node, ast.Try) and any("ImportError" in ast.dump(handler) for handler in node.handlers):
            imported = [part.module or "" for part in ast.walk(node) if isinstance(part, ast.ImportFrom)]
            if any(name.startswith("megatron.") for name in imported):
                yield "tries an import of Megatron's"
        looks = isinstance(node, ast.Call) and ast.unparse(node.func) in ("hasattr", "getattr")
        if looks and (holder := ast.unparse(node.args[0])) in megatrons:
            yield f"looks for a name in {holder}"


def test_only_one_module_asks_which_release_it_is() -> None:
    found = {path: list(release_checks(path.read_text())) for path in MCORE.rglob("*.py")}
    assert found.pop(MCORE / "releases.py") != []
    assert {path: checks for path, checks in found.items() if checks} == {}
