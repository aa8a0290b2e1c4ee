"""Trains a small GPT with Megatron's own schedule and with elastic plans, and prints how far they differ.

    python -m scripts.parity --tp 2 --sp --cp 2 --pp 2                    one cell, the documents below
    python -m scripts.parity --dp 2 --pp 2 --lengths FILE --iterations 3  documents of these lengths, all in every iteration
    python -m scripts.parity --matrix                                     rows in which every two choices meet
    python -m scripts.parity --matrix full                                every cell

In fp32 on CPU, processes of this machine over gloo, dropout off. "Stock" is Megatron's schedule and attention, one document per
microbatch, with --context-parallel-size 1. Where one cell is compared, or stages are placed as stock cannot place them, stock
saves a checkpoint ahead of its first step and the run with plans loads it. Prints the largest relative differences of losses
(reported, and on held-out documents), gradients (first and last iteration) and parameters; the exit code is 1 where one exceeds
1e-5 or a run fails, 2 for what cannot be run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scripts.parity.cells import (
    CONTEXT,
    LENGTHS,
    MODELS,
    PLANS,
    VOCABULARY,
    Case,
    Cell,
    common_flags,
    covering_rows,
    full_rows,
)

TOLERANCE = 1e-5
BATCH = 8
COLUMNS = ("losses", "validation", "gradients", "last_gradients", "parameters")


@dataclass(frozen=True)
class Setting:
    """Lengths of the documents and settings of training, the same for all cases of a call."""

    lengths: tuple[int, ...]
    iterations: int
    context: int = CONTEXT
    batch: int = BATCH
    validates: bool = True
    checkpoint: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if missing := _missing(args):
        print(f"parity cannot run {missing} yet", file=sys.stderr)
        return 2
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # before torch is imported
    cases, setting = _what(args)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that forked processes are ended
    start_s = time.perf_counter()
    results = compare_all(cases, setting, args.limit_seconds)
    report = {"seconds": time.perf_counter() - start_s, "tolerance": TOLERANCE, "cases": results}
    if args.json:
        print(json.dumps(report))
    else:
        print(table(report))
    return 0 if all(within(figures) for figures in results.values()) else 1


def _parser() -> argparse.ArgumentParser:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m scripts.parity", description=__doc__, formatter_class=about)
    cell = parser.add_argument_group("the cell")
    for name, what in (("tp", "tensor"), ("cp", "context"), ("dp", "data"), ("pp", "pipeline")):
        cell.add_argument(f"--{name}", type=int, default=1, metavar="N", help=f"{what}-parallel size")
    cell.add_argument("--sp", action="store_true", help="sequence parallelism, with --tp")
    cell.add_argument("--virtual", type=int, default=1, metavar="N", help="stages per rank")
    cell.add_argument("--placement", choices=["looped", "v"], default="looped", help="of several stages per rank")
    cell.add_argument("--split-weight-gradient", action="store_true", help="run weight gradients as actions of their own")
    cell.add_argument("--experts", type=int, default=0, metavar="N", help="experts per layer (default: a dense model)")
    cell.add_argument("--ep", type=int, default=1, metavar="N", help="expert-parallel size, a divisor of --dp x --cp x --tp")
    run = parser.add_argument_group("the run")
    run.add_argument("--model", choices=list(MODELS), default="llama")
    run.add_argument("--plan", default=PLANS["sliced"], metavar="FLAGS", help="flags of the plans (default: %(default)s)")
    run.add_argument("--lengths", metavar="FILE|N,N,...", help="tokens of the documents, as `megatron-epp plan` takes them")
    run.add_argument("--iterations", type=int, default=3, metavar="N")
    run.add_argument("--batch", type=int, default=BATCH, metavar="N", help="documents of a batch (default: %(default)s)")
    run.add_argument("--limit-seconds", type=float, default=600.0, metavar="S", help="longest a run may take")
    run.add_argument("--json", action="store_true", help="print all figures as JSON")
    many = parser.add_argument_group("many cells")
    many.add_argument("--matrix", nargs="?", const="pairs", choices=["pairs", "full"], help="rows of the matrix, not one cell")
    many.add_argument("--cases", type=Path, metavar="FILE", help="JSON of several: {name: {cell, model, plan, optimizer}}")
    return parser


def _missing(args: argparse.Namespace) -> str | None:
    asked = {
        f"--ep {args.ep} on --dp {args.dp} --cp {args.cp} --tp {args.tp}": args.dp * args.cp * args.tp % args.ep != 0,
        f"--experts {args.experts} with --tp {args.tp} and without --sp": args.experts > 0 and args.tp > 1 and not args.sp,
    }
    return ", ".join(name for name, wanted in asked.items() if wanted) or None


def _what(args: argparse.Namespace) -> tuple[dict[str, Case], Setting]:
    setting = Setting(LENGTHS, args.iterations, batch=args.batch)
    if args.cases is not None:
        cases = json.loads(args.cases.read_text())
        return {name: Case(**(case | {"cell": Cell(**case["cell"])})) for name, case in cases.items()}, setting
    if args.matrix is not None:
        rows = covering_rows() if args.matrix == "pairs" else full_rows()
        return {str(row): row.case for row in rows}, setting
    names = ("tp", "sp", "cp", "dp", "pp", "virtual", "placement", "experts", "ep")
    sizes = {name: getattr(args, name) for name in names}
    cell = Cell(**sizes, split=args.split_weight_gradient)
    if args.lengths is not None:
        lengths = _lengths(args.lengths)
        # Megatron wants a context that the ranks which share tokens can divide, ours in two even.
        multiple = 2 * cell.cp * cell.tp
        context = -(-max(lengths) // multiple) * multiple
        setting = Setting(lengths, args.iterations, context, len(lengths) // cell.dp * cell.dp, validates=False)
    return {f"{cell}: {args.model}": Case(cell, args.model, args.plan)}, replace(setting, checkpoint=True)


def _lengths(source: str) -> tuple[int, ...]:
    from megatron_epp.plan import EppError
    from megatron_epp.tools.cli.lengths import lengths_of

    try:
        return lengths_of(argparse.Namespace(lengths=source, context=None, batch_size=None, seed=0)).lengths
    except EppError as error:
        raise SystemExit(f"parity: {error}") from None


def compare_all(cases: dict[str, Case], setting: Setting, limit_s: float) -> dict[str, dict[str, Any]]:
    """Run every case both ways.

    Returns:
        by name, what `runs.compare` says, or ``{"error": ...}`` where a run failed.
    """
    from scripts.parity.runs import compare
    from scripts.parity.worlds import load_megatron, train_all

    load_megatron()
    with tempfile.TemporaryDirectory() as folder:
        stock_of, elastic_of = _trainings(cases, setting, Path(folder))
        runs = train_all([*stock_of.values(), *elastic_of.values()], Path(folder), limit_s)
    results: dict[str, dict[str, Any]] = {}
    for name, case in cases.items():
        both = [runs[training] for training in (stock_of[name], elastic_of[name])]
        if errors := [
            f"{kind}: {run}" for kind, run in zip(("stock", "with plans"), both, strict=True) if isinstance(run, str)
        ]:
            results[name] = {"error": "\n".join(errors)}
        else:
            results[name] = compare(*both) | {"num_processes": case.cell.num_processes}
    return results


def _trainings(cases: dict[str, Case], setting: Setting, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Per case the run with Megatron's schedule, often shared, and the run with plans."""
    from scripts.parity.worlds import Training
    from scripts.random_documents import write_documents

    common = common_flags(setting.iterations, setting.context, setting.batch, setting.validates)
    common += ["--data-path", write_documents(folder / "documents", setting.lengths, VOCABULARY)]
    stock_flags = {name: case.stock_flags(common) for name, case in cases.items()}
    loading = dict.fromkeys(stock_flags[name] for name, case in cases.items() if setting.checkpoint or case.loads)
    saved = {flags: folder / f"checkpoint{number}" for number, flags in enumerate(loading)}
    stock, elastic = {}, {}
    for name, case in cases.items():
        flags, cell = stock_flags[name], case.cell
        stock[name] = Training(case.stock.num_processes, flags, saved.get(flags))
        load = ("--load", str(saved[flags]), "--finetune") if setting.checkpoint or case.loads else ()
        elastic[name] = Training(cell.num_processes, (*case.elastic_flags(common), *load))
    return stock, elastic


def within(figures: dict[str, Any]) -> bool:
    """True if a case ran and no difference exceeds its tolerance."""
    return "error" not in figures and all(value <= TOLERANCE for value in _row(figures).values())


def _row(figures: dict[str, Any]) -> dict[str, float]:
    values = {name: figures[name] if name in ("losses", "validation") else figures[name]["relative"] for name in COLUMNS}
    return {name: value for name, value in values.items() if value is not None}


def table(report: dict[str, Any]) -> str:
    """The figures of every case, one a row."""
    width = max(map(len, report["cases"]), default=4)
    lines = ["  ".join((" " * width, "processes", *(f"{name.replace('_', ' '):>14}" for name in COLUMNS)))]
    failures = []
    for name, figures in report["cases"].items():
        if "error" in figures:
            lines.append(f"{name:{width}}  failed")
            failures.append(f"\n{name} failed\n{figures['error']}")
            continue
        values = _row(figures)
        cells = (f"{values[column]:14.1e}" if column in values else f"{'':>14}" for column in COLUMNS)
        verdict = "" if within(figures) else f"  above {TOLERANCE:.0e}"
        lines.append("  ".join((f"{name:{width}}", f"{figures['num_processes']:9}", *cells)) + verdict)
    return "\n".join((*lines, *failures, f"{len(report['cases'])} cases in {report['seconds']:.0f} s"))
