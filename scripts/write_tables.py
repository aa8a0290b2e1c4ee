"""Writes the tables of pages that repeat tables of the code: `python -m scripts.write_tables`. A test checks that they are
current.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_epp.cost import memory
from megatron_epp.cost.casts import RECIPES
from megatron_epp.cost.optimizer import OptimizerBytes
from megatron_epp.losses import ClippedRatio, ClippedValue, Distillation, NextToken, Preference, Reward, SequenceRatio
from megatron_epp.mcore.arguments.layout import AHEAD
from megatron_epp.mcore.arguments.refusals import COUNTING, OF_VOCABULARY, PARTING
from megatron_epp.mcore.arguments.rule import Rule
from megatron_epp.mcore.arguments.setting_checks import REPLAYS
from megatron_epp.mcore.model.kinds import KINDS
from megatron_epp.plan import Plan
from megatron_epp.plan.flags import flag_words
from megatron_epp.plan.layer_flags import pattern_of, whole_pattern
from megatron_epp.plan.yaml_files import shipped
from megatron_epp.tools.cli.first_run import STEPS
from megatron_epp.tools.formulas import huggingface
from megatron_epp.tools.formulas.hardware import H100, Rates
from megatron_epp.tools.formulas.library import load_flags, mixers_of, shape_of
from scripts.tables import table, with_tables
from scripts.write_flags import beyond_leaving_out

DOCS = Path(__file__).resolve().parent.parent / "docs"
TOGETHER = {
    "`--epp-vocab-parallel`": OF_VOCABULARY,
    "`--epp-batch-tokens`": COUNTING,
    "`--epp-documents stream`": PARTING,
    "`--epp-microbatches user` without `--epp-order given`": REPLAYS,
}
"""Flags of ours, and those of Megatron's that each of them does not go with."""
SYMBOLS_READ: Mapping[huggingface.Part, Iterable[str]] = {
    huggingface.gated_delta: "G",
    huggingface.extra_prediction: AHEAD,
    huggingface.hybrid: huggingface.SYMBOLS.values(),
}
"""Parts of a Hugging Face config, and the kinds of layers that they add to attention and an MLP or experts."""
OPTIMIZERS: tuple[Mapping[str, Any], ...] = (
    {"optimizer": "adam"},
    {"optimizer": "adam", "grad_reduce_in_bf16": True},
    {"use_precision_aware_optimizer": True},
    {"use_precision_aware_optimizer": True, "main_grads_dtype": "bf16", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    {"use_precision_aware_optimizer": True, "optimizer_cpu_offload": True},
    {"optimizer": "sgd"},
    {"optimizer": "dist_muon"},
    {"optimizer": "dist_muon", "muon_scalar_optimizer": "lion"},
)
OF_A_FORM = {"chunks", "recompute", "ranks", "copies", "kv_offload", "messages", "predicted", "extensions"}
"""Attributes of `Plan` whose form in a file the page shows, or that are no field of it."""
LOSSES = (
    NextToken(),
    NextToken(weight_column="weight"),
    ClippedRatio(),
    ClippedRatio(kl="k3", has_importance=True),
    SequenceRatio(),
    Distillation(),
    ClippedValue(),
    Preference(),
    Preference(has_reference=False),
    Reward(),
)
SHARING = {
    "elements": "equal parts",
    "matrices": "whole matrices; equal parts of the rest",
    "parameters": "whole matrices",
    "none": "nothing",
}


def pages() -> dict[Path, str]:
    """Return the pages with their tables as the code says."""
    fields_of_values = ((f"`{name}`", text) for name, text in attributes(Plan) if name not in OF_A_FORM)
    tables = {
        "supported.md": supported(),
        "first-hour.md": [
            table(("step", "what it does", "expect"), ((step.name, step.purpose, step.expect) for step in STEPS))
        ],
        "your-own-schedule.md": [table(("key", "what it is", "of `h100`"), rates())],
        "memory-and-speed.md": [table(("row", "what it is"), memory_items())],
        "reading-a-plan.md": [table(("field of values", "what it holds"), fields_of_values)],
        "your-loop.md": [table(("loss", "columns", "scope", "averages by"), map(loss_row, LOSSES))],
    }
    return {DOCS / name: with_tables((DOCS / name).read_text(encoding="utf-8"), rows) for name, rows in tables.items()}


def supported() -> Iterator[str]:
    yield table(
        ("models that ship", "kinds of layers"), grouped((name, symbols_of(load_flags(name))) for name in shipped("models"))
    )
    types = ((name, symbols_read(parts)) for name, parts in huggingface.ARCHITECTURES.items())
    yield table(("`model_type` of a Hugging Face config", "kinds of layers"), grouped(types))
    rows = ((kind.name, f"`{kind.symbol}`", kind.carries or "nothing") for kind in KINDS)
    yield table(("kind of layers", "in a pattern", "what a slice hands on to the next"), rows)
    yield table(("flag", "does not go with"), ((ours, "; ".join(by_advice(flags))) for ours, flags in TOGETHER.items()))
    titles = "FP8 recipe", "rows a rank's part is a multiple of", "bytes of a weight's casts", "of an input's value"
    yield table(
        titles, ((f"`{name}`", of.rows, f"{of.weight_bytes:.3g}", f"{of.input_bytes:.3g}") for name, of in RECIPES.items())
    )
    columns = "Megatron's flags", "gradient", "states", "states, matrices of layers", "ranks with the same weights share"
    yield table(columns, (optimizer_row(flags) for flags in OPTIMIZERS))


def grouped(models: Iterable[tuple[str, set[str]]]) -> list[tuple[str, str]]:
    """Return rows of models, given the symbols of their kinds of layers: those with the same kinds in one row."""
    by_kinds: dict[str, list[str]] = {}
    for name, symbols in models:
        by_kinds.setdefault(", ".join(kind.name for kind in KINDS if kind.symbol in symbols), []).append(f"`{name}`")
    return [(", ".join(names), kinds) for kinds, names in by_kinds.items()]


def symbols_read(parts: Iterable[huggingface.Part]) -> set[str]:
    """Return the symbols of the kinds of layers that a Hugging Face config is read for."""
    symbols = {symbol for part in parts for symbol in SYMBOLS_READ.get(part, "")}
    if huggingface.hybrid not in parts:
        symbols |= {"+" if huggingface.latents in parts else "*", "E" if huggingface.experts in parts else "-"}
    return symbols


def symbols_of(flags: dict[str, Any]) -> set[str]:
    """Return the symbols of the kinds of layers that a model has."""
    symbols, shape = set(mixers_of(flags)), shape_of(flags)
    if not pattern_of(flags):
        symbols |= {"E"} if shape.num_experts else {"-"}
        symbols |= {"-"} if shape.dense_layers else set()
    if flags.get("multi_latent_attention"):
        symbols = symbols - {"*"} | {"+"}
    return symbols | ({AHEAD} if shape.predictions or AHEAD in whole_pattern(flags) else set())


def by_advice(flags: Iterable[Rule]) -> list[str]:
    """Return flags with what is said of them where they are refused, those of which it is the same together."""
    names: dict[str, list[str]] = {}
    for flag in flags:
        names.setdefault(beyond_leaving_out(flag), []).append(f"`{flag.flag}`")
    return [", ".join(those) + (f" ({advice})" if advice else "") for advice, those in names.items()]


def optimizer_row(flags: Mapping[str, Any]) -> tuple[str, ...]:
    parameter = OptimizerBytes.of_flags({"bf16": True, "muon_scalar_optimizer": "adam", **flags})
    sizes = (f"{size:g}" for size in (parameter.gradient, parameter.state, parameter.matrix_state))
    return f"`{' '.join(flag_words(flags))}`", *sizes, SHARING[parameter.sharing]


def rates() -> Iterator[tuple[str, str, str]]:
    """Yield the keys of a cluster's file that are fields of `Rates`, with what its docstring says of them."""
    for name, text in attributes(Rates):
        if name not in ("name", "devices_per_node"):  # of which the second has another default in a file
            value = getattr(H100, name)
            yield f"`{name}`", text, f"{value:.4g}" if isinstance(value, float) else str(value)


def memory_items() -> Iterator[tuple[str, str]]:
    """Yield the items of a rank's memory in the order of a report, with what their docstrings say."""
    texts = dict(attributes(memory.Static))
    for assignment, text in pairwise(ast.parse(inspect.getsource(memory)).body):
        match assignment, text:
            case ast.Assign(targets=[ast.Name(name)]), ast.Expr(ast.Constant(str(said))):
                item = getattr(memory, name)
                names = item.values() if isinstance(item, dict) else [item]
                texts |= dict.fromkeys(names, said[0].lower() + " ".join(said[1:].split()).removesuffix("."))
    static = [*(field.name for field in fields(memory.Static)), memory.LOSS_BLOCK, memory.WORKING, memory.EXCHANGE]
    same: dict[str, list[str]] = {}
    for name in (*static, memory.MESSAGES, *memory.DYNAMIC):
        same.setdefault(texts[name], []).append(name)
    return ((", ".join(names), text) for text, names in same.items())


def loss_row(loss: Any) -> tuple[str, ...]:
    changed = {field.name: getattr(loss, field.name) for field in fields(loss) if getattr(loss, field.name) != field.default}
    call = ", ".join(f"{name}={value!r}" for name, value in changed.items())
    is_free = "average" in {field.name for field in fields(loss)}
    columns = ", ".join(f"`{name}`" for name in loss.columns)
    return f"`{type(loss).__name__}({call})`", columns, str(loss.scope), "any" if is_free else str(loss.average)


def attributes(record: type) -> Iterator[tuple[str, str]]:
    """Yield the attributes of a class and what its docstring says of each."""
    section = (inspect.getdoc(record) or "").partition("Attributes:\n")[2]
    for name, text in re.findall(r"^    (\w+): (.+(?:\n      .+)*)", section, re.MULTILINE):
        yield name, " ".join(text.replace("``", "`").split()).removesuffix(".")


if __name__ == "__main__":
    for path, page in pages().items():
        path.write_text(page, encoding="utf-8")
