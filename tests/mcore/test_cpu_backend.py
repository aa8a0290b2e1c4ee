"""Megatron's own loop, with its own schedules, on a machine without a GPU.

Megatron gives each pipeline stage another seed, so runs are compared from a checkpoint that one process wrote.
"""

import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.mcore.forked import launch, train
from tests.support.mcore.launch import Finished

MODELS = {
    "llama": shlex.split(
        "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
        "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2"
    ),
    "gpt2": ["--position-embedding-type", "learned_absolute"],
}
CUT, END = 2, 5
RECOMPUTE = "--recompute-granularity full --recompute-num-layers 1 --recompute-method"


@dataclass(frozen=True)
class Reference:
    """A run by one process to iteration END that saved a checkpoint at iteration CUT."""

    run: Finished
    checkpoints: Path
    flags: list[str]

    def resume(self, folder: Path, num_processes: int, *flags: object) -> Finished:
        return train(folder, num_processes, *self.flags, "--load", self.checkpoints, *flags, iterations=END)


def save_at_cut(folder: Path, num_processes: int, *flags: object) -> Finished:
    checkpoints = folder / "checkpoints"
    run = train(folder / "run", num_processes, *flags, "--save", checkpoints, "--save-interval", CUT, iterations=END)
    (checkpoints / "latest_checkpointed_iteration.txt").write_text(str(CUT))
    return run


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    made = {}
    for name, flags in MODELS.items():
        folder = tmp_path_factory.mktemp(name)
        made[name] = Reference(save_at_cut(folder, 1, *flags), folder / "checkpoints", flags)
    return made


def after_cut(run: Finished, key: str = "loss") -> list[float]:
    return [run.steps[i][key] for i in range(CUT + 1, END + 1)]


def test_outside_megatron_torch_goes_on_telling_the_truth(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("""
import torch
from megatron_epp.mcore import cpu
assert cpu.activate() and cpu.activate()
assert torch.zeros(2, device="cuda").cuda().device == torch.cuda.current_device() == torch.device("cpu")
assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
ask = "answer = torch.zeros(1).type(), torch.compile(ask)"
for name, answer in (("a.user", "torch.FloatTensor"), ("megatron.core", "torch.cuda.FloatTensor")):
    module = {"__name__": name, "torch": torch, "ask": lambda: None}
    exec(ask, module)
    assert module["answer"][0] == answer
    assert (module["answer"][1] is module["ask"]) == (name == "megatron.core")
print("true")
""")
    finished = launch(1, tmp_path / "program.py")
    assert finished.output == "true\n", finished.output[-3000:]


def test_tensors_are_on_the_device_that_is_asked_for() -> None:
    """CUDA alone becomes the CPU, and nothing is pinned; torch's contexts and default leave `empty_like` alone."""
    code = """
import torch
from megatron_epp.mcore import cpu
replaced = {name: getattr(torch, name) for name in cpu._FACTORIES}
assert cpu.activate()
assert all(getattr(torch, name) is not function for name, function in replaced.items())
likes = {device: torch.rand(2).to(device) for device in ("cpu", "meta")}
asked = {"cpu": "cpu", "cuda": "cpu", "cuda:0": "cpu", "meta": "meta"}

def in_context(device, make):
    with torch.device(device):
        return make()

def by_default(device, make):
    torch.set_default_device(device)
    try:
        return make()
    finally:
        torch.set_default_device(None)

for name in cpu._FACTORIES:
    make = getattr(torch, name)
    for device, used in asked.items():
        for like, source in likes.items():
            argument, followed, none = (source, like, like) if name == "empty_like" else (2, used, "cpu")
            for tensor, expected in (
                (make(argument, device=device), used),
                (make(argument, device=device, pin_memory=True), used),
                (make(argument, device=torch.device(device)), used),
                (in_context(device, lambda: make(argument)), followed),
                (by_default(device, lambda: make(argument)), followed),
                (in_context("meta", lambda: make(argument, device=device)), used),
                (make(argument), none),
            ):
                assert tensor.device.type == expected, (name, device, like)

assert in_context("meta", lambda: torch.nn.Linear(2, 2)).to_empty(device="cuda").weight.device.type == "cpu"
module = {"__name__": "megatron.core", "torch": torch, "meta": likes["meta"]}
exec("answer = meta.type()", module)
assert module["answer"] == likes["meta"].type() == "torch.meta.FloatTensor"
assert not torch.cuda.is_available() and likes["meta"].cuda().device.type == "meta"
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_it_trains_and_evaluates(references: dict[str, Reference]) -> None:
    for reference in references.values():
        losses = reference.run.losses
        assert losses[END] < losses[1] - 0.1
        assert reference.run.output.count("validation loss at iteration") == 2  # validation set, test set


@pytest.mark.parametrize(
    ("model", "num_processes", "flags"),
    [
        ("llama", 2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
        pytest.param("llama", 2, "--tensor-model-parallel-size 2", marks=pytest.mark.slow),
        ("gpt2", 2, f"--pipeline-model-parallel-size 2 --calculate-per-token-loss {RECOMPUTE} block"),  # a shared embedding
        ("llama", 4, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"),
    ],
)
def test_losses_do_not_depend_on_ranks(
    references: dict[str, Reference], tmp_path: Path, model: str, num_processes: int, flags: str
) -> None:
    spread = references[model].resume(tmp_path, num_processes, *flags.split())
    for key in ("loss", "grad_norm"):
        found, expected = after_cut(spread, key), after_cut(references[model].run, key)
        difference = max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))
        print(f"{model} {flags}: largest relative difference of {key} {difference:.1e}")
        assert difference < 1e-5


def test_two_replicas_with_the_distributed_optimizer_resume_exactly(references: dict[str, Reference], tmp_path: Path) -> None:
    flags = [*MODELS["llama"], "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    whole = save_at_cut(tmp_path, 2, *flags)
    for iteration, loss in references["llama"].run.losses.items():
        assert whole.losses[iteration] == pytest.approx(loss, rel=1e-5)
    resumed = train(tmp_path / "resumed", 2, *flags, "--load", tmp_path / "checkpoints", iterations=END)
    assert after_cut(resumed) == after_cut(whole)
    assert resumed.weights == whole.weights


def test_with_dropout_recomputation_repeats_the_same_masks_and_a_resumed_run_draws_the_same_ones(tmp_path: Path) -> None:
    flags = ["--pipeline-model-parallel-size", "2", "--bf16", "--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
    plain = save_at_cut(tmp_path, 2, *flags)
    assert train(tmp_path / "recomputed", 2, *flags, *RECOMPUTE.split(), "uniform", iterations=END).losses == plain.losses
    resumed = train(tmp_path / "resumed", 2, *flags, "--load", tmp_path / "checkpoints", iterations=END)
    assert after_cut(resumed) == after_cut(plain)
    assert resumed.weights == plain.weights


def test_megatron_is_not_imported_before_its_compilation_is_switched_off() -> None:
    """Its decorators compile when they are imported, and on a CPU a rank would compile for longer than it trains."""
    code = "import sys, megatron_epp.mcore.entry; sys.exit(any(name.startswith('megatron.core') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=False).returncode == 0
