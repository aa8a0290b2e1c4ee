"""Trains with one setting of `memory_cases` after the other, each measuring what autograd keeps."""

import os
import shlex
from dataclasses import replace
from pathlib import Path

from megatron_epp.mcore import entry
from megatron_epp.tools.formulas import CPU, analytic_profile
from scripts.parity.planner import share_planner
from scripts.parity.runs import train
from tests.support.mcore.memory_cases import COMMON, FAST_HOST, MORE, PIPELINES, SHAPE


def run(data: str, folder: Path, more: bool = False) -> None:
    entry.prepare()
    from tests.support.mcore import local_hybrid  # imports Megatron

    local_hybrid.use_torch_norms()
    share_planner()
    ranks = int(os.environ["WORLD_SIZE"])
    folder.mkdir(exist_ok=True)
    fast = folder / f"fast{os.environ['RANK']}.json"
    fast.write_text(analytic_profile(SHAPE, replace(CPU, host_latency_us=0.0, host_bytes=1e12, linear_flops=1e9)).to_json())
    base = [*COMMON, "--pipeline-model-parallel-size", str(ranks), "--data-path", data]
    for name, flags in (MORE if more else PIPELINES[ranks]).items():
        train([*base, *shlex.split(flags.replace(FAST_HOST, str(fast))), "--epp-report-dir", str(folder / name)])
