"""Profilers see every action as an NVTX range: a tool of NVTX's own kind is compiled and listens. NVTX needs no GPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import ROOT

TOOL = ROOT / "tests" / "support" / "runtime" / "nvtx_tool.c"
RUN = """
import torch
torch.cuda.is_initialized = lambda: True  # ranges are for programs that use a GPU
from megatron_epp.runtime.recorder import Recorder
from megatron_epp.plan import Action, Op
recorder = Recorder(enabled=False)
with recorder.action(Action(Op.F, 0, 1)):
    print("inside", flush=True)
try:
    with recorder.waiting(Action(Op.RECV_B, 0, 1)):
        raise ValueError
except ValueError:
    print("failed", flush=True)
"""


@pytest.fixture(scope="module")
def tool(tmp_path_factory):
    headers = next(iter(Path(torch.__file__).parent.parent.glob("nvidia/*/include/nvtx3")), None)
    if headers is None:
        pytest.skip("NVTX's headers are not here: they come with torch built for CUDA")
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler: install cc")
    library = tmp_path_factory.mktemp("nvtx") / "tool.so"
    subprocess.run(["cc", "-shared", "-fPIC", f"-I{headers.parent}", "-o", library, TOOL], check=True)
    return library


def test_actions_and_waits_are_ranges_that_end_even_when_they_fail(tool):
    ran = subprocess.run(
        [sys.executable, "-c", RUN], env=os.environ | {"NVTX_INJECTION64_PATH": str(tool)}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["push 0F1", "inside", "pop", "push 0RECV_B1", "pop", "failed"]
