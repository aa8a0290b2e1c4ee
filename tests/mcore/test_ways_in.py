"""The three ways into Megatron, with and without --epp: our script, a user's script as it is, a patched copy of Megatron.

A training with the default planner needs core alone: nothing of contrib, and a limited part of the package. Every supported
release trains, and Megatron's own loop on a machine without a GPU. Megatron gives each pipeline stage another seed, so runs are
compared from a checkpoint that one process wrote.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_epp.mcore import releases
from scripts.parity.cells import Case
from tests.support.mcore import forked
from tests.support.mcore.figures import FOLDER, recorded
from tests.support.mcore.forked import command, succeeded, train
from tests.support.mcore.jobs.frameworks import UNEVEN
from tests.support.mcore.known_scripts import RUN_KNOWN, USER_SCRIPT, known_as_megatrons
from tests.support.mcore.launch import PLANNED, REPOSITORY, TINY, Finished, alone, launch, run
from tests.support.mcore.matrix import case
from tests.support.mcore.releases import OTHER_RELEASES, release
from tests.support.mcore.rows import AGAIN, ALL_STATISTICS, LATENT, OVERLAPPED, STATES
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


HYBRID = STATES["two stages, weights apart"]
UNEVEN_SHARDS = f"{AGAIN} --epp-layout 1,3 --epp-vocab-parallel on"
SINKS = "--window-size 9,0 --window-attn-skip-freq 2 --softmax-type learnable"
CASES = {
    "weights apart, vocabulary, uneven layers": case("pp2 split", UNEVEN_SHARDS, "grouped", optimizer=OVERLAPPED),
    "padded chunks of experts": case("tp2 sp experts4", "--epp-planner 1f1b", "learned", both=ALL_STATISTICS, alone=True),
    "latent attention, multi-token prediction": case("pp2", f"{AGAIN} --epp-latents on", both=f"{LATENT} --mtp-num-layers 1"),
    "Mamba-2 and gated delta nets, windows and sinks": replace(HYBRID, both=f"{HYBRID.both} {SINKS}"),
}
MORE_CASES = {"experts by DeepEP": case("dp2 experts4 ep2", f"{AGAIN} --moe-token-dispatcher-type flex")}
"""In the set `slow`, by themselves."""


@pytest.mark.skipif(shutil.which("patch") is None, reason="GNU patch is not installed: apt install patch")
@pytest.mark.parametrize(
    ("wanted", "cases"),
    [  # the oldest differs most; the installed one is tested everywhere else
        pytest.param(OTHER_RELEASES[0], CASES, id=OTHER_RELEASES[0]),
        *(pytest.param(name, CASES | MORE_CASES, id=f"{name}, more", marks=pytest.mark.slow) for name in OTHER_RELEASES),
    ],
)
def test_a_release_is_known_and_trains_as_its_own_schedule_does(wanted: str, cases: dict[str, Case], tmp_path: Path) -> None:
    shutil.copytree(release(wanted) / "megatron", tmp_path / "megatron")
    patched = subprocess.run(["patch", "-p1", "-d", tmp_path], stdin=PATCH.open(), capture_output=True, text=True, check=True)
    assert "offset" not in patched.stdout
    (tmp_path / "cases.json").write_text(json.dumps({name: asdict(own) for name, own in cases.items()}))
    (recordings := tmp_path / "figures").mkdir()
    environment = {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment |= {FOLDER: str(recordings)}
    finished = run([sys.executable, *command("releases", {"folder": tmp_path})], environment, timeout_s=300)
    assert finished.returncode == 0, finished.output[-5000:]
    (figures,) = (json.loads(line) for line in finished.output.splitlines() if line.startswith("{"))
    (told,) = recorded(recordings)
    found = told["known"]
    assert found["version"] == wanted
    assert found["path"] == str(tmp_path / "megatron" / "training")
    assert found["unknown"] == []
    assert found["not applied"] == []
    stock, ours = found["parameters"]
    assert ours == stock
    assert all(figures["cases"][name]["parameters"]["num_tensors"] > 0 for name in cases)
    assert [name for facts in told["levels"]["dropout"] for name, differing in facts["differ"].items() if differing] == []


@pytest.mark.slow
def test_wrap_runs_on_a_megatron_core_without_its_training_loop(tmp_path: Path) -> None:
    path = {"PYTHONPATH": f"{release('0.18.2')}:{REPOSITORY}", FOLDER: str(tmp_path)}
    finished = succeeded(launch(2, *command("frameworks:of_core_alone", {"stages": 2, "lengths": UNEVEN}), env=path))
    assert finished.output.count("megatron-core 0.18.2\n") == 2
    differences = [run["worst"] for rank in recorded(tmp_path) for run in rank["runs"]]
    assert len(differences) == 12
    assert max(differences) < 1e-5


def test_every_release_tested_is_in_the_supported_range_and_the_newest_is_recommended() -> None:
    assert all(releases.matches(version, releases.SUPPORTED) for version in (*OTHER_RELEASES, releases.RECOMMENDED))
    assert releases.installed_version().split("+")[0] == releases.RECOMMENDED  # in a checkout Megatron adds its commit


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
class Saved:
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
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    made = {}
    for name, flags in MODELS.items():
        folder = tmp_path_factory.mktemp(name)
        made[name] = Saved(save_at_cut(folder, 1, *flags), folder / "checkpoints", flags)
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
    finished = forked.launch(1, tmp_path / "program.py")
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


def test_it_trains_and_evaluates(references: dict[str, Saved]) -> None:
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
    references: dict[str, Saved], tmp_path: Path, model: str, num_processes: int, flags: str
) -> None:
    spread = references[model].resume(tmp_path, num_processes, *flags.split())
    for key in ("loss", "grad_norm"):
        found, expected = after_cut(spread, key), after_cut(references[model].run, key)
        difference = max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))
        print(f"{model} {flags}: largest relative difference of {key} {difference:.1e}")
        assert difference < 1e-5


def test_two_replicas_with_the_distributed_optimizer_resume_exactly(references: dict[str, Saved], tmp_path: Path) -> None:
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
