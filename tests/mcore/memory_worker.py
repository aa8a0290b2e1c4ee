"""Trains with one setting of `memory_cases` after the other, each measuring what autograd keeps."""

import os
import shlex
import sys
from pathlib import Path

from memory_cases import COMMON, PIPELINES

from megatron_epp.mcore import entry

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from parity_runs import train


def main() -> None:
    entry.prepare()
    ranks = int(os.environ["WORLD_SIZE"])
    reports = Path(os.environ["MEMORY_REPORTS"])
    base = [*COMMON, "--pipeline-model-parallel-size", str(ranks), "--data-path", os.environ["MEMORY_DATA"]]
    for name, flags in PIPELINES[ranks].items():
        train([*base, *shlex.split(flags), "--epp-report-dir", str(reports / name)])


if __name__ == "__main__":
    main()
