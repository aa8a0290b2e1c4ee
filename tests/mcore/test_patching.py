"""Patches are explicit, applied at most once, refused on unknown code, and undone completely; those of `--epp` are few."""

import argparse
import functools
import importlib
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.training import global_vars

from megatron_epp.mcore import cpu, releases
from megatron_epp.mcore.arguments.parser import add_epp_args
from megatron_epp.mcore.iteration.schedule_call import ScheduleCall
from megatron_epp.mcore.model.adopt import relayed
from megatron_epp.mcore.model.core_attention import RelayAttention
from megatron_epp.mcore.patches import environment, install, patching
from megatron_epp.mcore.patches.patching import Patch
from megatron_epp.mcore.start import sliced_start
from megatron_epp.plan import EppError
from tests.support.mcore import forked

LIBRARY = """
def greet(name):
    return "hello " + name

class Greeter:
    def greet(self, name):
        return greet(name)
"""
IMPORTER = """
from patched_library import greet

def use():
    return greet("you")
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "patched_library.py").write_text(LIBRARY)
    (tmp_path / "patched_importer.py").write_text(IMPORTER)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("patched_library")
    patching.revert(ours())
    for name in ("patched_library", "patched_importer"):
        sys.modules.pop(name, None)


def ours() -> tuple[Patch, ...]:
    return tuple(patch for patch in patching.applied() if patch.target.startswith("patched_library:"))


def louder(original: Callable[[str], str], name: str) -> str:
    return original(name).upper()


LOUDER = Patch("patched_library:greet", louder, "shouts", wraps=True)
BYE = Patch("patched_library:greet", lambda name: "bye " + name, "leaves")


def test_a_patch_reaches_names_that_other_modules_imported_before_and_after(library: ModuleType) -> None:
    importer = importlib.import_module("patched_importer")
    patching.apply([BYE])
    assert library.greet("you") == importer.use() == "bye you"
    late = ModuleType("late")
    exec("from patched_library import greet", vars(late))
    assert late.greet("you") == "bye you"


def test_reverting_restores_the_original_everywhere_also_where_it_was_imported_since(library: ModuleType) -> None:
    original = library.greet
    patching.apply([LOUDER])
    importer = importlib.import_module("patched_importer")
    assert importer.use() == "HELLO YOU"
    patching.revert(ours())
    assert library.greet is original
    assert importer.use() == "hello you"
    assert ours() == ()


def test_wrappers_stack_and_come_off_in_reverse_order(library: ModuleType) -> None:
    patching.apply([BYE, LOUDER])
    assert library.greet("you") == "BYE YOU"
    with pytest.raises(EppError, match="revert the later patch first"):
        patching.revert([BYE])
    patching.revert([LOUDER])
    assert library.greet("you") == "bye you"


def test_a_method_is_patched_on_its_class(library: ModuleType) -> None:
    patch = Patch("patched_library:Greeter.greet", lambda self, name: "hi " + name, "is short")
    patching.apply([patch])
    assert library.Greeter().greet("you") == "hi you"
    patching.revert([patch])
    assert library.Greeter().greet("you") == "hello you"


def test_code_with_another_fingerprint_is_refused_and_nothing_is_applied(library: ModuleType) -> None:
    known = patching.fingerprint("patched_library:greet")
    strange = Patch("patched_library:Greeter.greet", lambda self, name: name, "expects other code", fingerprints=("0" * 64,))
    with pytest.raises(EppError, match=r"Greeter\.greet .* is not the code megatron-epp knows .* --epp-allow-unknown-megatron"):
        patching.apply([Patch(BYE.target, BYE.replacement, BYE.reason, fingerprints=(known,)), strange])
    assert library.greet("you") == library.Greeter().greet("you") == "hello you"
    patching.apply([strange], allow_unknown=True)
    assert library.Greeter().greet("you") == "you"


def test_every_patch_of_ours_has_a_reason() -> None:
    patches = (*install.patches(), *environment.patches(), *environment.of_every_run(), *cpu.patches())
    assert all(patch.reason for patch in patches)


@pytest.mark.parametrize("target", ["patched_library:nothing", "patched_library:Greeter.nothing", "no_such_module:f"])
def test_a_target_that_is_not_there_is_named(library: ModuleType, target: str) -> None:
    with pytest.raises(EppError, match=re.escape(f"{target} does not exist in megatron-core {releases.installed_version()}")):
        patching.apply([Patch(target, lambda: None, "")])


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import math\nmath.no_such_name", "AttributeError: module 'math' has no attribute 'no_such_name'"),
        ("import no_such_dependency", "ModuleNotFoundError: No module named 'no_such_dependency'"),
        ("from math import no_such_name", "ImportError: cannot import name 'no_such_name' from 'math'"),
        ("raise RuntimeError('no driver')", "RuntimeError: no driver"),
    ],
)
def test_the_error_of_failing_imports_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, error: str) -> None:
    (tmp_path / "broken_library.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    installed = f"megatron-core {releases.installed_version()}"
    with pytest.raises(EppError) as raised:
        patching.apply([Patch("broken_library:f", lambda: None, "")])
    assert str(raised.value).startswith(f"broken_library of {installed} cannot be imported, {error}")
    assert raised.value.__cause__ is not None  # whose traceback is printed


@pytest.mark.parametrize(("rank", "lines"), [("0", 2), ("1", 0)])
def test_rank_0_logs_patches(
    library: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: str, lines: int
) -> None:
    monkeypatch.setenv("RANK", rank)
    with caplog.at_level(logging.INFO, logger="megatron_epp"):
        patching.apply([BYE, LOUDER])
    assert len(caplog.messages) == lines
    assert caplog.messages[:1] in ([], ["patched patched_library:greet: leaves"])


def test_all_our_patches_apply_twice_and_revert_to_megatrons_own_objects(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("""
from megatron_epp.mcore import entry
from megatron_epp.mcore.patches import fingerprints
from megatron_epp.mcore.patches import patching
import megatron.training
from megatron.training import arguments, training
patching.revert()  # this process is forked from one that has applied them
originals = [training.pretrain, arguments.validate_args]  # in a list, where no patch reaches them
assert [one.__code__.co_filename for one in originals] == [training.__file__, arguments.__file__]
entry.prepare()
first = patching.applied()
entry.prepare()
assert patching.applied() == first and len(first) > 5
assert patching.unknown(fingerprints.PATCHED | fingerprints.RELIED_ON) == []
patched = [training.pretrain, arguments.validate_args]
assert all(a is not b for a, b in zip(patched, originals))
assert megatron.training.pretrain is training.pretrain
patching.revert()
assert [training.pretrain, arguments.validate_args] == originals
assert megatron.training.pretrain is training.pretrain
print("as it was")
""")
    finished = forked.launch(1, tmp_path / "program.py")
    assert finished.output.endswith("as it was\n"), finished.output[-3000:]


def core_attention(spec):
    return spec.submodules.self_attention.submodules.core_attention


def test_the_schedule_takes_exactly_what_megatron_passes():
    ours = inspect.signature(ScheduleCall).parameters
    stock = inspect.signature(schedules.forward_backward_pipelining_without_interleaving).parameters
    assert list(ours) == list(stock)
    for name, parameter in stock.items():
        assert ours[name].kind is parameter.kind
        assert ours[name].default == parameter.default


def test_every_flag_is_added_once_and_has_help():
    parser = add_epp_args(add_epp_args(argparse.ArgumentParser()))
    ours = [action for action in parser._actions if any(o.startswith("--epp") for o in action.option_strings)]
    assert len(ours) == len({action.dest for action in ours}) > 10
    assert all(action.help for action in ours)


@pytest.mark.parametrize(("epp", "expected"), [(True, 4096), (False, 1 << 20)])
def test_compiled_functions_are_warmed_up_on_a_chunk_and_not_on_the_context(monkeypatch, epp, expected):
    sizes = {"seq_length": 1 << 20, "context_parallel_size": 2, "tensor_model_parallel_size": 1}
    args, seen, prepared = argparse.Namespace(epp=epp, **sizes), [], []
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)
    monkeypatch.setattr(sliced_start, "prepare", prepared.append)
    install._warm_up_on_a_chunk(lambda tp_size=None: seen.append(args.seq_length), tp_size=1)
    assert seen == [expected]
    assert prepared == ([args] if epp else [])
    assert args.seq_length == 1 << 20


def test_layer_specs_get_our_attention_and_the_originals_keep_their_own():
    specs = [get_gpt_layer_local_spec(normalization="RMSNorm"), get_gpt_layer_local_spec(qk_layernorm=True)]
    assert [core_attention(spec) for spec in relayed(specs)] == [RelayAttention] * 2
    assert [core_attention(spec) for spec in specs] == [DotProductAttention] * 2


class OwnAttention(DotProductAttention):
    """Somebody's own."""


def test_a_core_attention_that_is_not_megatrons_is_refused_by_name():
    specs = ModuleSpec(OwnAttention), ModuleSpec((__name__, "OwnAttention"))
    for attention in (OwnAttention, functools.partial(OwnAttention), *specs):
        spec = get_gpt_layer_local_spec()
        spec.submodules.self_attention.submodules.core_attention = attention
        with pytest.raises(EppError, match="in the place of OwnAttention, which is not Megatron's"):
            relayed(spec)
