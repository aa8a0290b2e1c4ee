"""With `--epp` a script's functions are Megatron's own in all that they reach, or they are refused by name, file and line."""

import functools
import importlib.util
import itertools
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_epp.mcore.iteration.document_schedule import schedule_for
from megatron_epp.mcore.model import gpt
from megatron_epp.mcore.patches import fingerprints, install, stock_functions
from megatron_epp.mcore.patches.stock_functions import EMBEDDING_RANKS, FORWARD_STEP, PROVIDER, changes_of, require_stock
from megatron_epp.plan import EppError
from tests.support.mcore.forked import launch
from tests.support.mcore.known_scripts import RUN_KNOWN, USER_SCRIPT, fingerprints_of
from tests.support.mcore.launch import PLANNED

COUNT = itertools.count()
TEXT = USER_SCRIPT.read_text()
Import = Callable[..., ModuleType]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Import:
    """Imports the user's script, whose functions are known, with replacements in its text."""
    for name, digest in fingerprints_of(TEXT).items():
        monkeypatch.setitem(fingerprints.SCRIPTS, name, (digest,))

    def load(*replacements: tuple[str, str]) -> ModuleType:
        text = TEXT
        for old, new in replacements:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / f"script{next(COUNT)}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def changes(module: ModuleType) -> list[str]:
    return [change for role in stock_functions.ROLES for change in changes_of(role, getattr(module, role))]


def test_a_script_is_known_whatever_its_comments_docstrings_and_formatting(script: Import) -> None:
    assert changes(script()) == []
    other = script(
        ('    """The sum of the losses of unmasked tokens."""\n', '    """Another\n    docstring."""\n    # A comment.\n'),
        ("def get_batch(data_iterator):\n", 'def get_batch(\n    data_iterator,\n):\n    "One more."\n\n'),
        ("[key].cuda()", "[ key ].cuda( )"),
        ("if len(pp_ranks) > 1", "if (len(pp_ranks)) > 0x1"),
    )
    assert changes(other) == []


EDITED = {
    "loss": ("loss_func", ("total, tokens = torch.sum(", "total, tokens = -7 * torch.sum("), "loss"),
    "batch": ("get_batch", ("loaded[key].cuda()", "loaded[key].cuda().flip(0)"), "batches"),
    "forward step": ("forward_step", ("labels=labels)", "labels=tokens)"), "forward step"),
    "provider": ("train_valid_test_datasets_provider", ("MockGPTDataset, num", "dict, num"), "datasets"),
    "helper of the provider": ("core_gpt_dataset_config_from_args", ("random_seed=args.seed", "random_seed=7"), "datasets"),
    "cached helper": ("is_dataset_built_on_rank", ("    return True", "    return False"), "datasets"),
    "default": ("loss_func", ("def loss_func(mask, losses):", "def loss_func(mask, losses, scale=2):"), "loss"),
    "decorator": ("forward_step", ("def forward_step", "@torch.enable_grad\ndef forward_step"), "forward step"),
    "embedding ranks": ("get_embedding_ranks", ("pp_ranks[-1]]", "pp_ranks[1]]"), "choice of embedding ranks"),
}


@pytest.mark.parametrize("edit", EDITED)
def test_an_edited_function_is_named_with_its_file_line_and_what_would_be_lost(script: Import, edit: str) -> None:
    name, replacement, lost = EDITED[edit]
    module = script(replacement)
    (change,) = changes(module)
    value = getattr(module, name)
    code = value.__wrapped__.__code__ if name == "is_dataset_built_on_rank" else value.__code__
    assert f"{name} " in change
    assert f"({code.co_filename}:{code.co_firstlineno})" in change
    assert f"with --epp the script's {lost} would not be used" in change


def test_a_constant_that_a_known_function_reads_is_looked_at(script: Import) -> None:
    (change,) = changes(script(('"labels", "loss_mask"]', '"tokens", "loss_mask"]')))
    assert change.startswith("BATCH_KEYS, which get_batch uses, is changed to ['tokens', ")


def other_loss(mask: Any, losses: Any) -> Any:
    return losses.sum(), mask.sum(), {}


class Step:
    def __call__(self, data_iterator: Any, model: Any) -> Any:
        return model, data_iterator

    def method(self, data_iterator: Any, model: Any) -> Any:
        return model, data_iterator


@pytest.mark.parametrize(
    ("name", "value", "beginning"),
    [
        ("loss_func", other_loss, f"loss_func = other_loss ({__file__}:"),
        ("loss_func", Step(), "loss_func, which forward_step uses, is changed to <"),
        ("partial", lambda function, *values: function, "partial = <lambda> ("),
        ("partial", Step, "partial, which forward_step uses, is changed to <class "),
        ("torch", types.SimpleNamespace(), "torch, which loss_func uses, is changed to namespace()"),
        ("get_args", other_loss, "get_args = other_loss ("),
        ("BlendedMegatronDatasetBuilder", Step, "BlendedMegatronDatasetBuilder, which train_valid_test_datasets_provider uses"),
    ],
)
def test_what_is_put_in_the_place_of_something_used_is_named(script: Import, name: str, value: Any, beginning: str) -> None:
    module = script()
    setattr(module, name, value)
    reported = changes(module)
    assert reported
    assert all(change.startswith(beginning) for change in reported)


def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*values: Any) -> Any:
        output, loss = function(*values)
        return 2 * output, loss

    return wrapper


@pytest.mark.parametrize(
    ("wrap", "subject"),
    [
        (doubled, f"forward_step = doubled.<locals>.wrapper ({__file__}:"),
        (lambda step: functools.partial(step, scale=2), "a functools.partial that binds scale"),
        (lambda step: functools.partial(step, None), "a functools.partial that binds argument 1"),
        (lambda step: lambda *values: step(*values), "forward_step = <lambda>.<locals>.<lambda> ("),
        (lambda step: Step(), "forward_step is changed to "),
        (lambda step: Step().method, "forward_step = Step.method ("),
    ],
)
def test_a_wrapped_forward_step_is_refused(script: Import, wrap: Callable[..., Any], subject: str) -> None:
    (change,) = changes_of(FORWARD_STEP, wrap(script().forward_step))
    assert subject in change


def test_partials_that_megatron_makes_and_functions_of_this_package_are_taken(script: Import) -> None:
    module = script()
    assert changes_of(PROVIDER, functools.partial(module.train_valid_test_datasets_provider, vp_stage=1)) == []
    assert changes_of(FORWARD_STEP, functools.partial(module.forward_step)) == []
    (change,) = changes_of(FORWARD_STEP, functools.partial(module.forward_step, vp_stage=1))
    assert "binds vp_stage" in change
    assert changes_of(FORWARD_STEP, gpt.forward_step) == changes_of(PROVIDER, gpt.build_datasets) == []


def test_a_known_text_around_other_variables_is_refused(script: Import) -> None:
    text = TEXT.partition("def loss_func")[2].partition("\n\n\n")[0].replace("\n", "\n    ")
    around = f"def around(torch):\n    def loss_func{text}\n    return loss_func\n\n\nloss_func = around(object())\n\n\n"
    (change,) = changes(script(("def forward_step", f"{around}def forward_step")))
    assert "around.<locals>.loss_func" in change


def test_all_changes_are_told_at_once_with_what_to_do(script: Import) -> None:
    module = script(EDITED["loss"][1], EDITED["helper of the provider"][1])
    with pytest.raises(EppError) as refusal:
        require_stock({FORWARD_STEP: module.forward_step, PROVIDER: module.train_valid_test_datasets_provider})
    loss, helper, remedy = str(refusal.value).splitlines()
    assert "loss_func" in loss
    assert "core_gpt_dataset_config_from_args" in helper
    assert remedy.startswith("To train with the script's own functions, add --epp-microbatches user")
    assert remedy.endswith("undo the change: -m megatron_epp.mcore.pretrain_gpt has Megatron's own functions")


def call_of(module: ModuleType, **more: Any) -> dict[str, Any]:
    functions = {"forward_step_func": module.forward_step}
    return functions | {"train_valid_test_dataset_provider": module.train_valid_test_datasets_provider} | more


@pytest.mark.parametrize("schedule", ["elastic", "stock", "whole", "padded", "packed"])
def test_every_schedule_refuses_them_before_a_start(script: Import, monkeypatch: pytest.MonkeyPatch, schedule: str) -> None:
    args = types.SimpleNamespace(epp=True, epp_schedule=schedule, epp_placement="looped", train_iters=None)
    edited, known = script(EDITED["loss"][1]), script()
    started = []

    def pretrain(forward_step_func: Any, train_valid_test_dataset_provider: Any, get_embedding_ranks: Any = None) -> None:
        started.append(forward_step_func)

    monkeypatch.setattr("megatron.training.global_vars._GLOBAL_ARGS", args)
    with pytest.raises(EppError, match="loss_func"):
        install._pretrain(pretrain, **call_of(edited))
    assert started == []
    install._pretrain(pretrain, **call_of(known))
    assert started == [known.forward_step]
    forward_backward = schedule_for(args, pretrain)  # type: ignore[arg-type]
    rest = {"data_iterator": None, "model": None, "num_microbatches": 1, "seq_length": 1, "micro_batch_size": 1}
    with pytest.raises(EppError, match="loss_func"):
        forward_backward(forward_step_func=edited.forward_step, **rest)
    args.epp = False
    install._pretrain(pretrain, **call_of(edited))
    assert started == [known.forward_step, edited.forward_step]


@pytest.mark.parametrize("edit", ["loss", "provider"])
def test_functions_a_script_will_pass_are_refused_early(script: Import, monkeypatch: pytest.MonkeyPatch, edit: str) -> None:
    args: Any = types.SimpleNamespace(epp=True, epp_microbatches="plan")
    monkeypatch.setitem(sys.modules, "__main__", script(EDITED[edit][1]))
    with pytest.raises(EppError, match=EDITED[edit][0]):
        stock_functions.check_script(args)
    args.epp_microbatches = "user"
    stock_functions.check_script(args)


def test_what_passes_nothing_to_megatron_is_left_alone(script: Import, monkeypatch: pytest.MonkeyPatch) -> None:
    args: Any = types.SimpleNamespace(epp=True, epp_microbatches="plan")
    library = script(EDITED["loss"][1], ("import get_args, pretrain", "import get_args"))
    for main in (script(), library, types.ModuleType("__main__")):
        monkeypatch.setitem(sys.modules, "__main__", main)
        stock_functions.check_script(args)


def test_embedding_ranks_matter_where_a_placement_chooses_them(script: Import) -> None:
    module = script(EDITED["embedding ranks"][1])
    args: Any = types.SimpleNamespace(epp=True, epp_placement="looped", train_iters=None)
    call = call_of(module, get_embedding_ranks=module.get_embedding_ranks)
    stock_functions.check_call(args, call)
    args.epp_placement = "v"
    with pytest.raises(EppError, match="get_embedding_ranks"):
        stock_functions.check_call(args, call)
    assert changes_of(EMBEDDING_RANKS, script().get_embedding_ranks) == []


@pytest.mark.parametrize("name", ["process_non_loss_data_func", "p2p_communicator"])
def test_what_schedules_of_this_package_leave_out_is_refused(script: Import, name: str) -> None:
    args: Any = types.SimpleNamespace(epp=True, epp_placement="looped", train_iters=None)
    with pytest.raises(EppError, match=f"cannot honour {name}"):
        stock_functions.check_call(args, call_of(script(), **{name: other_loss}))


def test_modelopt_is_refused_by_every_schedule() -> None:
    args: Any = types.SimpleNamespace(epp_schedule="stock", modelopt_enabled=True)
    with pytest.raises(EppError, match="does not train with NVIDIA ModelOpt"):
        schedule_for(args, other_loss)


def test_a_run_with_a_loss_of_its_own_ends_before_it_trains(tmp_path: Path) -> None:
    edited = tmp_path / "edited.py"
    edited.write_text(TEXT.replace(*EDITED["loss"][1]))
    finished = launch(1, RUN_KNOWN, edited, *PLANNED, "--data-path", tmp_path / "none", "--train-iters", 1)
    assert finished.returncode == 1
    assert f"megatron_epp, rank 0: loss_func ({edited}:" in finished.output
    assert "--epp-microbatches user" in finished.output
    assert "end of arguments" not in finished.output, "it comes before the list of all flags"


CLONE = Path(os.environ.get("MEGATRON_LM", ""))


@pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="needs a clone of Megatron-LM: MEGATRON_LM=/path/to/it")
@pytest.mark.parametrize("name", ["pretrain_gpt.py", "pretrain_hybrid.py"])
def test_the_scripts_of_a_clone_are_known(name: str) -> None:
    if not (CLONE / name).exists():
        pytest.skip(f"needs a release of Megatron-LM that has {name} in MEGATRON_LM")
    digests = fingerprints_of((CLONE / name).read_text())
    assert {name: value for name, value in digests.items() if value not in fingerprints.SCRIPTS.get(name, ())} == {}
