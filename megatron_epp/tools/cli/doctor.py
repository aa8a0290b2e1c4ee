"""The command that reports what this machine has and lacks for training, and what to do about it; or measures its costs.

Nothing is imported before it is looked at: doctor itself runs where torch or Megatron is missing or broken.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from megatron_epp.launch.machine import EXPANDABLE, TF32, allocator_setting, nccl_version, segments_expand, version_of
from megatron_epp.mcore import releases
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.reading import one_line
from megatron_epp.tools.cli import measure_profile
from megatron_epp.tools.cli.terminal import Parser, progress, say

OK, WARNING, PROBLEM = "ok", "warning", "problem"

_CHANNELS = (64, 128, 256)  # common head dimensions (channels per head), for which kernels are checked

EXAMPLE = """\
example: in a job script, before anything is started
  megatron-epp doctor || exit 1
measure a model's parts here, and plan with what was measured
  megatron-epp doctor --profile --model tiny-gpt -o profile.json
  megatron-epp plan --lengths 1200,88,4096 --costs profile.json --stages 2
"""
_LIBRARY_PATH = (
    "put the folders of torch's own libraries (nvidia/*/lib of site-packages) first in LD_LIBRARY_PATH: those of a CUDA "
    "toolkit may be found before them, whatever CUDNN_HOME says"
)


@dataclass(frozen=True, slots=True)
class Finding:
    subject: str
    status: str  # ``ok``; ``warning``: training runs, but slower or with less than it could have; ``problem``: it cannot run
    found: str  # what is there
    todo: str = ""  # about it


class _Library(NamedTuple):
    name: str
    distribution: str  # its installed name
    least: str  # version from which on it is known to work
    module: str  # to import
    use: str
    install: str
    status: str = WARNING  # of its absence
    needs_gpu: bool = False


_TORCH = _Library("torch", "torch", "2.6", "torch", "everything that trains", 'pip install "torch>=2.6"', PROBLEM)
_NUMBA = _Library("numba", "numba", "0.60", "numba", "the planner's inner loops, compiled", "pip install 'megatron-epp[fast]'")
_ENGINE = _Library(
    *("Transformer Engine", "transformer-engine", "2", "transformer_engine.pytorch"),
    "Megatron's default layers and cuDNN's attention",
    "pip install 'megatron-epp[te]', or train with --transformer-impl local",
    needs_gpu=True,
)
_APEX = _Library(
    *("NVIDIA Apex", "apex", "0", "amp_C"),  # one of its extensions: a package called apex may be something else
    "fused Adam and --gradient-accumulation-fusion",
    "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install -v --no-build-isolation . in a checkout of github.com/NVIDIA/apex",
    needs_gpu=True,
)


def add_arguments(parser: Parser) -> None:
    parser.add_argument_group("report").add_argument("--json", action="store_true", help="print the findings as JSON")
    measure_profile.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Return 1 if something prevents training, else 0."""
    if args.profile:
        return measure_profile.run(args)
    if args.output:
        raise EppError("--output is the profile that --profile writes: add --profile, or leave it out")
    with progress("looking at this machine"):
        findings = list(look())
    say(json.dumps([asdict(finding) for finding in findings], indent=1) if args.json else text(findings))
    return int(any(finding.status == PROBLEM for finding in findings))


def text(findings: list[Finding]) -> str:
    width = max(len(finding.subject) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<8} {finding.subject:<{width}}  {finding.found}")
        lines += [f"{'':<8} {'':<{width}}  -> {finding.todo}"] * bool(finding.todo)
    problems, warnings = (sum(finding.status == status for finding in findings) for status in (PROBLEM, WARNING))
    verdict = "training cannot run here" if problems else "training can run here"
    return "\n".join([*lines, "", f"{verdict}: {problems} problem(s), {warnings} warning(s)"])


def look() -> Iterator[Finding]:
    yield Finding("Python", OK, f"{platform.python_version()} ({sys.executable})")  # an older one cannot read this package
    yield _library(_TORCH)
    torch = None if _import_error("torch") else importlib.import_module("torch")
    has_gpu = torch is not None and torch.cuda.is_available()
    if torch is not None:
        yield from _gpu(torch, has_gpu)
    yield from (_library(library, has_gpu) for library in (_ENGINE, _APEX, _NUMBA))
    yield from _guarded("megatron-core", _megatron())
    if torch is not None:
        yield from _guarded("attention", _attention(torch, has_gpu))
    yield from _environment(os.environ, has_gpu)


def _guarded(subject: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """Yield findings; if a library fails while it is looked at, the failure is one."""
    try:
        yield from findings
    except Exception as error:  # whatever a broken installation raises
        yield Finding(subject, PROBLEM, f"{type(error).__name__}: {error}", "install it again")


def _import_error(module: str) -> Exception | None:
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a broken installation raises
        return error
    return None


def _library(library: _Library, has_gpu: bool = False) -> Finding:
    from packaging.version import Version

    version = version_of(library.distribution)
    if library.needs_gpu and not has_gpu:
        return Finding(library.name, OK, f"{version or 'not found'}; it needs a GPU to be of use")
    if importlib.util.find_spec(library.module.partition(".")[0]) is None:
        return Finding(library.name, library.status, f"not found; it is for {library.use}", library.install)
    if (error := _import_error(library.module)) is not None:
        state, todo = f"{version or 'found'}, but its import fails: {one_line(error)}", f"install it again: {library.install}"
        if isinstance(error, ModuleNotFoundError) and error.name:
            todo = f"pip install {error.name.partition('.')[0]}"
        elif isinstance(error, OSError) or ".so" in str(error) or "cuDNN" in str(error):
            todo = _LIBRARY_PATH
        return Finding(library.name, library.status, state, todo)
    if version is None:
        return Finding(library.name, OK, "found, of an unknown version")
    # NVIDIA's containers have builds from before a release: torch 2.6.0a0+... is as good as 2.6.
    if Version(version).release < Version(library.least).release:
        return Finding(library.name, library.status, f"{version}, outside >={library.least}", library.install)
    return Finding(library.name, OK, f"{version} (>={library.least})")


def _gpu(torch: Any, has_gpu: bool) -> Iterator[Finding]:
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    nccl = ".".join(map(str, nccl_version() or torch.cuda.nccl.version())) if has_nccl else "not in this build of torch"
    yield Finding("CUDA and NCCL", OK, f"{torch.version.cuda or 'not in this build of torch'} and {nccl}")
    if not has_gpu:
        lacks_cuda = torch.version.cuda is None and os.path.exists("/proc/driver/nvidia/version")
        todo = "this machine has an NVIDIA driver, but torch was built without CUDA: install a CUDA build of torch"
        yield Finding("GPU", WARNING, "none: Megatron runs on the CPU with gloo, for development", todo * lacks_cuda)
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        memory = f"{device.total_memory / 2**30:.0f} GiB, compute capability {device.major}.{device.minor}"
        yield Finding(f"GPU {index}", OK, f"{device.name}, {memory}")


def _megatron() -> Iterator[Finding]:
    try:
        releases.check_megatron()
    except EppError as error:
        yield Finding("megatron-core", PROBLEM, str(error), releases.INSTALL * (releases.INSTALL in str(error)))
        return
    yield Finding("megatron-core", OK, releases.described())
    if importlib.util.find_spec("megatron.training") is None:
        todo = f"{releases.INSTALL}, or put a clone of Megatron-LM on PYTHONPATH"
        yield Finding("megatron.training", PROBLEM, "not found", todo)
        return
    from megatron_epp.mcore import entry

    needed = []
    for fit in entry.fits():
        if fit.fits:
            needed.append(fit.needed)
        elif fit.needed:
            yield Finding("patch", PROBLEM, f"{fit.target}: {fit.what}", "--epp-allow-unknown-megatron tries it all the same")
        else:
            yield Finding("Megatron's code", WARNING, f"{fit.target}: {fit.what}", "compare losses with --epp-schedule stock")
    yield Finding("patches", OK, f"{sum(needed)} fit; {len(needed) - sum(needed)} functions are as tested")


def _attention(torch: Any, has_gpu: bool) -> Iterator[Finding]:
    from megatron_epp.runtime.attention import kernels

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        channels_by: dict[tuple[kernels.Kernel, tuple[str, ...]], list[str]] = {}
        for channels in _CHANNELS:
            kernel, obstacles = kernels.explain(kernels.AttentionCase("cuda" if has_gpu else "cpu", dtype, channels, 8, 8))
            assert kernel is not None  # exact attention serves every case
            channels_by.setdefault((kernel, tuple(obstacles)), []).append(str(channels))
        for (kernel, passed_over), channels_of in channels_by.items():
            slow = has_gpu and kernel is kernels.EXACT_ATTENTION and dtype is not torch.float32
            chosen = f"{kernel.name} ({', '.join(channels_of)} channels; whole, packed and sliced sequences alike)"
            chosen += f"; not {'; '.join(passed_over)}" * bool(passed_over)
            todo = "install one of the kernels that were passed over" * slow
            yield Finding(f"attention in {str(dtype).removeprefix('torch.')}", WARNING if slow else OK, chosen, todo)


def _environment(environment: Mapping[str, str], has_gpu: bool) -> Iterator[Finding]:
    version = version_of("torch") or "0.0"
    name, setting = allocator_setting(environment, version)
    if wastes := has_gpu and not segments_expand(environment, version):
        name, _ = allocator_setting({}, version)
    todo = f"export {name}={EXPANDABLE}: chunks differ in size, and fixed segments leave gaps"
    yield Finding(name, WARNING if wastes else OK, "not set" if setting is None else setting, todo * wastes)
    if (value := environment.get(TF32, "0")) != "0":
        yield Finding(TF32, OK, f"{value}: fp32 matrices are multiplied in TF32, with errors of 3e-4 (0 to compare in fp32)")
    value = environment.get(name := "CUDA_DEVICE_MAX_CONNECTIONS") or "not set"
    several = has_gpu and value != "1"
    todo = f"export {name}=1: Megatron asks for it with tensor or context parallelism before Blackwell"
    yield Finding(name, WARNING if several else OK, value, todo * several)
