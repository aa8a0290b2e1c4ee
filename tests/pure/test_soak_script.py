"""The soak's script samples all processes of a training, finds the growth of each, and names what failed."""

import os
import sys
from pathlib import Path

import pytest

from megatron_epp.plan.errors import EppError
from scripts.soak.samples import Memory, Sample, growth_bytes, sampled
from scripts.soak.soak import draw, growths_kb, rows_of

LEAK_BYTES = 1 << 20
"""Bytes that a rank of the stand-in training keeps per iteration."""
ITERATIONS = 8
TRAINING = """
import os, subprocess, sys
from pathlib import Path
rank = '''
import sys, time
from pathlib import Path
kept = []
for iteration in range(1, {iterations} + 1):
    kept.append(b"x" * {leak_bytes})
    print(f"iteration {{iteration}}/ 8 | elapsed time per iteration (ms): 1.0", flush=True)
    while not Path({folder!r}, str(iteration)).exists():
        time.sleep(0.001)
'''
started = subprocess.run([sys.executable, "-c", rank], env={{**os.environ, "RANK": "0"}})
sys.exit({exit_code})
"""


def samples_of(folder: Path, exit_code: int = 0) -> list[Sample]:
    """Sample a launcher with one rank, which waits at each iteration until it was sampled."""
    program = TRAINING.format(iterations=ITERATIONS, leak_bytes=LEAK_BYTES, folder=str(folder), exit_code=exit_code)
    found = []
    for sample in sampled([sys.executable, "-c", program], folder / "log", range(1, ITERATIONS + 1), os.environ):
        found.append(sample)
        (folder / str(sample.iteration)).touch()
    return found


def test_a_rank_that_keeps_memory_is_told_from_a_launcher_that_does_not(tmp_path: Path) -> None:
    samples = samples_of(tmp_path)
    assert [sample.iteration for sample in samples] == [*range(1, ITERATIONS + 1)]
    growths = growths_kb({"elastic": samples}, skip=2)["elastic"]
    assert growths.keys() == {"launcher", "rank 0"}
    assert growths["rank 0"] > 0.9 * LEAK_BYTES / 1024
    assert growths["launcher"] < 0.1 * LEAK_BYTES / 1024


def test_a_training_that_fails_is_an_error_that_names_its_log(tmp_path: Path) -> None:
    with pytest.raises(EppError, match=rf"exit code 3, see {tmp_path / 'log'}"):
        samples_of(tmp_path, exit_code=3)


def line(skip: int, growth: int) -> list[Sample]:
    """Samples of a rank whose memory jumps at the start and then grows by `growth` bytes per iteration."""
    anonymous = {i: growth * i if i >= skip else 10**8 + 999 * i for i in range(0, 900, 100)}
    return [Sample(i, {"rank 0": Memory(10**9 + growth * i, growth * i, num_bytes)}) for i, num_bytes in anonymous.items()]


def test_the_first_iterations_do_not_count() -> None:
    assert growth_bytes(line(skip=300, growth=2048), "rank 0", skip=300) == Memory(2048, 2048, 2048)


def test_growth_needs_two_samples() -> None:
    with pytest.raises(EppError, match="1 samples after iteration 800"):
        growth_bytes(line(skip=300, growth=1), "rank 0", skip=800)


def test_the_table_has_a_row_per_process_and_the_picture_a_line(tmp_path: Path) -> None:
    soak = {"elastic": line(300, 2048), "stock": line(300, 512)}
    header, elastic, stock = rows_of(soak, skip=300)
    assert header.endswith("MB at 300  MB at the end  KB per iteration  of USS  of RSS")
    assert elastic.split() == ["elastic", "rank", "0", "0.6", "1.6", "2.00", "2.00", "2.00"]
    assert stock.split() == ["stock", "rank", "0", "0.1", "0.4", "0.50", "0.50", "0.50"]
    draw(soak, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
