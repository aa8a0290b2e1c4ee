"""Trains a small GPT with Megatron's own schedule and with elastic plans, and prints how far they are apart.

    python scripts/parity.py --tp 2 --sp --cp 2 --pp 2                    one cell, the documents below
    python scripts/parity.py --dp 2 --pp 2 --lengths FILE --iterations 3  documents of these lengths, all in every iteration
    python scripts/parity.py --matrix                                     rows in which every two choices meet
    python scripts/parity.py --matrix full                                every cell

In fp32 on CPU, processes of this machine over gloo, dropout off. "Stock" is Megatron's schedule and attention, one document per
microbatch, with --context-parallel-size 1. Where one cell is compared, stock saves a checkpoint ahead of its first step and the
run with plans loads it. Prints the largest relative differences of losses (reported, and on held-out documents), gradients
(first and last iteration) and parameters; the exit code is 1 where one exceeds 1e-5 or a run fails, 2 for what cannot be run.
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

os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # before torch is imported

from parity_cells import (
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
    """What all cases of a call share: the lengths of the documents, and how they are trained."""

    lengths: tuple[int, ...]
    iterations: int
    context: int = CONTEXT
    batch: int = BATCH
    validates: bool = True
    checkpoint: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if missing := _missing(args):
        print(f"parity.py cannot run {missing} yet", file=sys.stderr)
        return 2
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    cell = parser.add_argument_group("the cell")
    for name, what in (("tp", "tensor"), ("cp", "context"), ("dp", "data"), ("pp", "pipeline")):
        cell.add_argument(f"--{name}", type=int, default=1, metavar="N", help=f"{what}-parallel size")
    cell.add_argument("--sp", action="store_true", help="sequence parallelism, with --tp")
    cell.add_argument("--virtual", type=int, default=1, metavar="N", help="stages per rank")
    cell.add_argument("--placement", choices=["looped", "v"], default="looped", help="of several stages per rank")
    cell.add_argument("--split-weight-gradient", action="store_true", help="run weight gradients as actions of their own")
    cell.add_argument("--experts", type=int, default=0, metavar="N", help="experts per layer (default: a dense model)")
    cell.add_argument("--ep", type=int, default=1, metavar="N", help="expert-parallel size")
    run = parser.add_argument_group("the run")
    run.add_argument("--model", choices=list(MODELS), default="llama")
    run.add_argument("--plan", default=PLANS["sliced"], metavar="FLAGS", help="flags of the plans (default: %(default)s)")
    run.add_argument("--lengths", metavar="FILE|N,N,...", help="tokens of the documents, as `megatron-epp plan` takes them")
    run.add_argument("--iterations", type=int, default=3, metavar="N")
    run.add_argument("--limit-seconds", type=float, default=600.0, metavar="S", help="longest a run may take")
    run.add_argument("--json", action="store_true", help="print all figures as JSON")
    many = parser.add_argument_group("many cells")
    many.add_argument("--matrix", nargs="?", const="pairs", choices=["pairs", "full"], help="rows of the matrix, not one cell")
    many.add_argument("--cases", type=Path, metavar="FILE", help="JSON of several: {name: {cell, model, plan, optimizer}}")
    return parser


def _missing(args: argparse.Namespace) -> str | None:
    asked = {
        f"--virtual {args.virtual}": args.virtual > 1,
        f"--placement {args.placement}": args.placement != "looped",
        "--split-weight-gradient": args.split_weight_gradient,
        f"--experts {args.experts}": args.experts > 0,
        f"--ep {args.ep}": args.ep > 1,
    }
    return ", ".join(name for name, wanted in asked.items() if wanted) or None


def _what(args: argparse.Namespace) -> tuple[dict[str, Case], Setting]:
    setting = Setting(LENGTHS, args.iterations)
    if args.cases is not None:
        given = json.loads(args.cases.read_text())
        return {name: Case(**(case | {"cell": Cell(**case["cell"])})) for name, case in given.items()}, setting
    if args.matrix is not None:
        rows = covering_rows() if args.matrix == "pairs" else full_rows()
        return {str(row): row.case for row in rows}, setting
    cell = Cell(tp=args.tp, sp=args.sp, cp=args.cp, dp=args.dp, pp=args.pp)
    if args.lengths is not None:
        from megatron_epp.cli_lengths import read_lengths
        from megatron_epp.schedule import EppError

        try:
            lengths = read_lengths(args.lengths)
        except EppError as error:
            raise SystemExit(f"parity.py: {error}") from None
        # Megatron wants a context that the ranks which share tokens can divide, ours in two even.
        multiple = 2 * cell.cp * cell.tp
        context = -(-max(lengths) // multiple) * multiple
        setting = Setting(lengths, args.iterations, context, len(lengths) // cell.dp * cell.dp, validates=False)
    return {f"{cell}: {args.model}": Case(cell, args.model, args.plan)}, replace(setting, checkpoint=True)


def compare_all(cases: dict[str, Case], setting: Setting, limit_s: float) -> dict[str, dict[str, Any]]:
    """Run every case both ways. Returns the figures of each, or ``{"error": ...}``."""
    import parity_worlds
    from parity_runs import compare

    parity_worlds.load_megatron()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        common = [*common_flags(setting.iterations, setting.context, setting.batch, setting.validates)]
        common += ["--data-path", write_documents(folder / "documents", setting.lengths)]
        trainings: dict[tuple[str, ...], parity_worlds.Training] = {}
        stock_of, elastic_of = {}, {}
        for name, case in cases.items():
            flags, more = case.stock_flags(common), case.elastic_flags(common)
            checkpoint = None
            if setting.checkpoint:
                checkpoint = folder / f"checkpoint{len(trainings)}"
                more += ("--load", str(checkpoint), "--finetune")
            training = parity_worlds.Training(len(trainings), case.cell.stock.num_processes, flags, checkpoint)
            stock_of[name] = trainings.setdefault(flags, training).number
            elastic_of[name] = len(trainings)
            trainings[more] = parity_worlds.Training(elastic_of[name], case.cell.num_processes, more)
        runs = parity_worlds.train_all(list(trainings.values()), folder, limit_s)
    results: dict[str, dict[str, Any]] = {}
    for name in cases:
        stock, elastic = runs[stock_of[name]], runs[elastic_of[name]]
        if isinstance(stock, str) or isinstance(elastic, str):
            results[name] = {"error": f"stock failed: {stock}" if isinstance(stock, str) else f"with plans: {elastic}"}
        else:
            results[name] = compare(stock, elastic) | {"num_processes": cases[name].cell.num_processes}
    return results
