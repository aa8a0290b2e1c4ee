"""Transformer Engine's own layers train in slices as under Megatron's schedule: its Python as installed, on a CPU.

`tests/support/transformer_engine/extension.py` has its compiled functions in plain torch.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_epp.cost.casts import RECIPES
from megatron_epp.tools.formulas import ModelShape
from scripts.parity.runs import compare
from tests.support.mcore import worker
from tests.support.mcore.forked import job, of_ranks
from tests.support.mcore.jobs.samples import LENGTHS
from tests.support.mcore.matrix import Matrix, Row, case, cell_of, parameters, train
from tests.support.mcore.parity_figures import check_closeness
from tests.support.mcore.rows import kinds_of, plans_of, splits_weights
from tests.support.mcore.script_rows import ScriptRow
from tests.support.seeds import some_by_default
from tests.support.transformer_engine.forked import VERSIONS, is_installed, ranks_with_engine
from tests.support.transformer_engine.rows import BACK, DELTA, ENGINE, EXPERTS, FP8, GROUPED, ROWS, SCRIPT_ROWS, SHARED

NEWEST, OLD = VERSIONS
MISSING = [version for version in VERSIONS if not is_installed(version)]
pytestmark = [
    pytest.mark.te,
    pytest.mark.skipif(bool(MISSING), reason=f"needs the Python of Transformer Engine {MISSING}: bash scripts/te.sh"),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[None]:
    with ranks_with_engine(NEWEST):
        yield


@pytest.fixture(scope="module")
def matrix(ranks: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix.of(request, tmp_path_factory)


@pytest.mark.parametrize("row", parameters(ROWS))
def test_its_layers_train_as_under_the_stock_schedule(matrix: Matrix, row: Row) -> None:
    matrix.check(row)


@pytest.mark.parametrize("script", parameters(SCRIPT_ROWS))
def test_a_scripts_own_microbatches_train_on_its_layers(ranks: None, script: ScriptRow) -> None:
    script.check()


@pytest.mark.slow  # imports Megatron once more
def test_an_old_release_trains_as_under_the_stock_schedule(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    with ranks_with_engine(OLD):
        matrix = Matrix(tmp_path, [])
        for row in ROWS[:3]:
            matrix.check(row)


def _engine_and_local(row: Row, documents: Path) -> tuple[list[str], list[str]]:
    """Flags of a run with plans on layers of the engine, and of the same on local ones."""
    flags = list(row.case.elastic_flags(row.common(documents)))
    at = max(index for index, flag in enumerate(flags) if flag == "--transformer-impl")
    return flags, [*flags[:at], *flags[at + 2 :]]


def test_checkpoints_go_from_its_layers_to_local_ones_and_back_and_both_train_alike(ranks: None, tmp_path: Path) -> None:
    """Dense ones: Megatron names a norm ahead of experts differently in local layers."""
    row = ROWS[0]
    flags = _engine_and_local(row, tmp_path)
    runs = []
    for number, own in enumerate((*flags, flags[0])):
        load = ["--load", str(tmp_path / f"{number - 1}"), "--finetune"] if number else []
        runs.append(train(row.num_processes, [*own, *load], tmp_path / str(number)))
    for run in runs[1:]:
        losses = [[loss for rank in one for loss in (*rank.losses, *rank.validation)] for one in (runs[0], run)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)


WHOLE = {"some recompute": "--epp-planner 1f1b --epp-recompute 1"}
APART = {"weights apart": "--epp-planner zb-h1 --epp-split-weight-gradient"}
SLICES = {"slices": "--epp-chunk-tokens 32 --epp-recompute 1"}
SLICES_APART = {"slices, weights apart": f"{SLICES['slices']} --epp-split-weight-gradient"}
OF_128 = "--seq-length 128 --max-position-embeddings 128"
LONGER = {"slices": "--epp-chunk-tokens 64 --epp-recompute 1"}
WIDE = f"--hidden-size 64 {OF_128}"
LITTLE = "--epp-slices 2 --epp-memory-cap-gb 0.0006 --epp-recompute auto"
OFFLOAD = {"slices, offload, weights apart": f"{LITTLE} --epp-offload --epp-split-weight-gradient"}
PACKS = {"packs": "--epp-slices 1 --epp-recompute 1"}
CONTEXT = "cp2 pp2"
MAMBA = (
    "--spec tests.support.transformer_engine.hybrid stack_spec --mamba-num-heads 32 --mamba-head-dim 2 --mamba-num-groups 2 "
    "--mamba-state-dim 8"
)
IN_FP8: dict[str, dict[str, Any]] = {
    "mxfp8": {"recipe": "mxfp8", "plans": WHOLE | SLICES_APART},
    "mxfp8, weights apart": {"recipe": "mxfp8", "plans": APART | SLICES},
    "tensor and sequence parallel": {"recipe": "mxfp8", "both": WIDE, "cell": SHARED, "batch": 16, "plans": LONGER},
    "experts": {"recipe": "mxfp8", "both": GROUPED, "cell": EXPERTS, "plans": SLICES},
    "tensorwise": {"recipe": "tensorwise", "both": "--first-last-layers-bf16", "plans": WHOLE},
    "tensorwise, one sequence": {"recipe": "tensorwise", "batch": 1, "plans": APART},
    "tensorwise, tensor and sequence parallel": {"recipe": "tensorwise", "cell": SHARED, "plans": WHOLE},
    "tensorwise, context parallel": {"recipe": "tensorwise", "cell": CONTEXT, "stock": CONTEXT, "plans": WHOLE},
    "tensorwise, experts": {"recipe": "tensorwise", "both": GROUPED, "cell": EXPERTS, "batch": 2, "plans": PACKS},
    "tensorwise, 20 iterations": {"recipe": "tensorwise", "iterations": 20, "batch": 1, "plans": APART},
    "blockwise": {"recipe": "blockwise", "both": OF_128, "plans": WHOLE | APART},
    "context parallel": {"recipe": "mxfp8", "both": OF_128, "cell": CONTEXT, "batch": 16, "plans": LONGER},
    "offload": {"recipe": "mxfp8", "plans": OFFLOAD},
    "multi-token prediction": {"recipe": "mxfp8", "both": "--mtp-num-layers 1", "plans": SLICES},
    "gated delta nets": {"recipe": "mxfp8", "both": f"{DELTA} --linear-num-value-heads 16", "plans": SLICES},
    "Mamba-2": {"recipe": "mxfp8", "both": f"{MAMBA} --hybrid-layer-pattern M-*-|M-M-", "plans": SLICES | APART},
    "blockwise, tensor and sequence parallel": {
        "recipe": "blockwise",
        "both": "--hidden-size 256 --seq-length 512 --max-position-embeddings 512",
        "cell": SHARED,
        "plans": WHOLE,
    },
    "looped": {"recipe": "mxfp8", "cell": "pp2 looped2", "plans": SLICES},
    "there and back": {"recipe": "mxfp8", "cell": BACK, "plans": SLICES},
}
"""Recipes, with more flags, sequences of a batch, plans, and another cell for Megatron's schedule, as ranks have own scales.

Scales of mxfp8 and blockwise are powers of two here, so other chunks, of slices or packs, change no value but the smallest.
Tensorwise scales are of a chunk, so chunks are those of Megatron's schedule: with a planner that packs, of one sequence.
"""
QUANTIZERS = {"mxfp8": "MXFP8Quantizer", "tensorwise": "Float8CurrentScalingQuantizer", "blockwise": "Float8BlockQuantizer"}


@some_by_default("name", [*IN_FP8], 1)  # other recipes and layouts only change which values are cast together
def test_in_fp8_chunks_with_the_same_casts_train_as_microbatches_of_megatrons_schedule(
    ranks: None, name: str, tmp_path: Path
) -> None:
    """That of `--epp-schedule whole`, with the same attention: where it rounds otherwise, values fall to other sides in FP8.

    Weights are cast anew after the optimizer's step, and what runs again is cast as before, or a run is far from the others.
    """
    given = IN_FP8[name]
    both, cell = f"{ENGINE} {FP8} {given['recipe']} {given.get('both', '')}", given.get("cell", "pp2")
    runs, saved = {}, tmp_path / "saved"
    for kind, plan in {"stock": "--epp-schedule whole", **given["plans"]}.items():
        own = case(cell, plan, both=both)
        if kind == "stock":
            own = replace(own, cell=cell_of(given["stock"]) if "stock" in given else own.stock)
        sizes = {"iterations": given.get("iterations", 2), "batch": given.get("batch", 8)}
        row = Row(name=kind, case=own, check=lambda *_: None, **sizes)
        flags = [*own.elastic_flags(row.common(tmp_path)), *(["--load", str(saved), "--finetune"] if own.loads else [])]
        runs[kind] = train(row.num_processes, flags, saved if kind == "stock" else None)
    quantizer, num_processes = QUANTIZERS[given["recipe"]], cell_of(cell).num_processes
    assert all(casts[quantizer] for casts in worker.call(num_processes, "tests.support.transformer_engine.rows:casts_by"))
    for kind, plan in given["plans"].items():
        figures = compare(runs["stock"], runs[kind])
        check_closeness(figures, "RelayAttention")
        assert splits_weights(figures) == ("split-weight" in plan)
        plans = plans_of(figures)
        assert any(one["recompute"] != ["none"] for one in plans) == ("recompute" in plan)
        assert any(one["copies"] for one in plans) == ("offload" in plan)
        assert ("split" in kinds_of(figures)) == ("slices" in kind)


@pytest.mark.parametrize("name", RECIPES)
def test_casts_have_the_bytes_that_formulas_count(ranks: None, name: str) -> None:
    """But for the scale of a whole tensor, 4 bytes."""
    rows, columns, casts = 512, 512, RECIPES[name]
    for sizes in worker.call(2, "tests.support.transformer_engine.rows:bytes_of_casts", name=name, shape=[rows, columns]):
        for size, counted in zip(sizes, (casts.weight_bytes, casts.input_bytes), strict=True):
            assert size - rows * columns * counted == 4 * (name == "tensorwise")


@pytest.mark.slow  # four trainings
def test_layers_in_fp8_keep_less_by_what_formulas_count(ranks: None, tmp_path: Path) -> None:
    sizes = {"num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 512, "num_attention_heads": 4}
    peaks = {}
    for name in ("", *RECIPES):
        wide = f"--hidden-size 128 --ffn-hidden-size 512 {OF_128} --epp-documents stream"  # so no chunk is padded
        both = f"{ENGINE} {wide} {f'{FP8} {name}' if name else ''}"
        own = case("pp2", "--epp-planner 1f1b --epp-recompute 0", both=both)
        row = Row(name=name, case=own, check=lambda *_: None, iterations=1)
        folder = tmp_path / name / "report"
        measured = ["--epp-measure-memory", "--epp-report-dir", str(folder)]
        train(row.num_processes, [*own.elastic_flags(row.common(tmp_path)), *measured])
        (line,) = map(json.loads, (folder / "iterations.jsonl").read_text().splitlines())
        peaks[name] = line["peak_activation_bytes"][-1]  # of one chunk, on the last stage
        assert line["planned_peak_activation_bytes"][-1] == pytest.approx(peaks[name], rel=0.03)
    for name, casts in RECIPES.items():
        shape = ModelShape(**sizes, vocab_size=96, bytes_per_value=4, casts=casts)
        assert peaks[""] - peaks[name] == pytest.approx(2 * 128 * shape.saved_bytes_per_token, rel=0.03)


LESS_THAN_PLANNED = {"experts with grouped products", "windows and sinks, experts", "attention on other ranks"}
"""Rows of which plans count up to an eighth more than is kept, whosever layers they are."""


def _kept_of_planned(row: Row, flags: list[str], folder: Path) -> list[float]:
    """Train, and return what autograd kept at the peak over what was planned, of every iteration and stage."""
    train(row.num_processes, [*flags, "--epp-measure-memory", "--epp-report-dir", str(folder)])
    lines = [json.loads(line) for line in (folder / "iterations.jsonl").read_text().splitlines()]
    keys = ("peak_activation_bytes", "planned_peak_activation_bytes")
    return [measured / planned for line in lines for measured, planned in zip(*(line[key] for key in keys), strict=True)]


@some_by_default("name", [row.name for row in ROWS], 1)
def test_its_layers_keep_the_bytes_that_the_plan_says(ranks: None, name: str, tmp_path: Path) -> None:
    row = next(row for row in ROWS if row.name == name)
    flags, local = _engine_and_local(row, tmp_path)
    ratios = _kept_of_planned(row, flags, tmp_path / "engine")
    assert len(ratios) == row.iterations * row.case.cell.pp
    assert max(ratios) <= 1.03
    if name in LESS_THAN_PLANNED:
        assert ratios == pytest.approx(_kept_of_planned(row, local, tmp_path / "local"), abs=0.03)
    else:
        assert min(ratios) >= 0.97


def test_its_adam_updates_the_weights(ranks: None) -> None:
    assert worker.call(1, "tests.support.transformer_engine.rows:optimizer") == ["FusedAdam"]


def test_a_loop_of_ones_own_trains_samples_in_slices_on_its_layers(ranks: None) -> None:
    for one in of_ranks(job(2, "samples:grpo")):
        assert max(one["worst"], one["afterwards"], one["evaluated"], *one["logprobs"]) <= 1e-5
        assert one["chunks"] > len(LENGTHS)
