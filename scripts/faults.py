"""Asks whether the tests of training notice twenty faults that matter: wrong gradients, losses, random masks, messages, copies.

    python -m scripts.faults                 all of them
    python -m scripts.faults --only "loss"   those with this in their names
    python -m scripts.faults --show          lists them, runs nothing

Where `scripts/mutants.py` draws changes at random and asks all tests of a package, each of these is written down: what breaks
in `mcore/` or `runtime/`, and the tests that have to notice, which alone are run, in a temporary copy of the tracked files. A
fault counts as killed where one of them fails or takes too long; without a fault they have to pass. The exit code is 1 where
one survives.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.mutants import PACKAGE, ROOT, Copy

PYTEST = "-x -q -m 'not slow' -p no:cacheprovider --no-header --tb=line"
LIMIT_S = 600.0
"""Longest time that the tests of a fault may take."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A change to one place of a file of the package.

    Attributes:
        name: what breaks.
        path: file, relative to the package.
        was: text that is in the file once.
        now: what is written there instead.
        tests: arguments of pytest, for the tests that have to notice.
    """

    name: str
    path: str
    was: str
    now: str
    tests: str

    def applied(self, source: str) -> str:
        """Return the source with the fault. Raises ValueError unless its place is there once."""
        if (count := source.count(self.was)) != 1:
            raise ValueError(f"{self.path} has {self.was!r} {count} times, not once: rewrite the fault {self.name!r}")
        return source.replace(self.was, self.now)


SHORT = "tests/mcore/test_parity_short.py"
MATRIX = "tests/mcore/test_matrix.py -k"
FAULTS = (
    Fault(
        "gradients are divided by twice the number of tokens",
        "mcore/iteration/base_run.py",
        "counted = num_tokens if config.calculate_per_token_loss else None",
        "counted = 2 * num_tokens if config.calculate_per_token_loss else None",
        SHORT,
    ),
    Fault(
        "labels that are masked count in the loss",
        "mcore/model/losses.py",
        "loss = torch.sum(losses.reshape(-1).float() * mask)",
        "loss = torch.sum(losses.reshape(-1).float())",
        f"{MATRIX} 'masked and labels'",
    ),
    Fault(
        "gradients are reduced over replicas before the last of them is there",
        "runtime/executor.py",
        "if self._last_gradient[action.stage] == action:",
        "if self._last_gradient[action.stage] != action:",
        "tests/mcore/test_reduction.py tests/cpu/test_runtime_executor.py",
    ),
    Fault(
        "a batch in tokens advances the consumed samples too far",
        "mcore/iteration/document_schedule.py",
        "batch.consumed_samples - count * run.replicas",
        "batch.consumed_samples - count",
        "tests/mcore/test_batch_tokens.py",
    ),
    Fault(
        "every slice has the rotary angles of the sequence's first tokens",
        "mcore/model/adopt.py",
        "zip(*(self._angles(piece.start, piece.num_tokens) for piece in pieces), strict=True)",
        "zip(*(self._angles(0, piece.num_tokens) for piece in pieces), strict=True)",
        SHORT,
    ),
    Fault(
        "recompute does not restore the random state",
        "mcore/model/layer_recompute.py",
        "return checkpoint(call, False, *tensors)",
        "from torch.utils.checkpoint import checkpoint as again\n\n"
        "    return again(call, *tensors, use_reentrant=True, preserve_rng_state=False)",
        "tests/mcore/test_options.py -k same_dropout_again",
    ),
    Fault(
        "a recomputed forward takes padding for tokens of experts",
        "mcore/patches/routers.py",
        "        with chunk(real):\n            return function(*args)",
        "        with chunk(None):\n            return function(*args)",
        f"{MATRIX} 'padding and invisible'",
    ),
    Fault(
        "routers see one token of padding",
        "mcore/patches/routers.py",
        "(torch.arange(real.rows, device=logits.device) >= real.on_rank)",
        "(torch.arange(real.rows, device=logits.device) > real.on_rank)",
        f"{MATRIX} 'padding and invisible'",
    ),
    Fault(
        "tensor-parallel ranks add up the gradient of shared tokens twice",
        "mcore/model/trained_rows.py",
        "tensor_parallel_output_grad=False",
        "tensor_parallel_output_grad=True",
        f"{MATRIX} 'answers and sequence'",
    ),
    Fault(
        "of a tied embedding's gradients the last chunk's alone is kept",
        "mcore/model/tied_table.py",
        "self._gradient.add_(weight.grad)",
        "self._gradient.copy_(weight.grad)",
        f"{MATRIX} 'vocabulary and tied and uneven'",
    ),
    Fault(
        "each group of replicas learns costs from its own ranks",
        "mcore/iteration/base_run.py",
        "complete(made_by_first(lambda: fitted_costs(before, everyone, keeps_weights=keeps_weights)))",
        "complete(fitted_costs(before, everyone[dist.get_rank() :], keeps_weights=keeps_weights))",
        "tests/mcore/test_matrix.py tests/mcore/test_learnt_costs.py -k learnt",
    ),
    Fault(
        "memory caps of a pipeline rank are those of its roomiest replica",
        "mcore/training/caps.py",
        "tuple(min(cap for at, cap in everyone if at == number)",
        "tuple(max(cap for at, cap in everyone if at == number)",
        "tests/mcore/test_caps.py",
    ),
    Fault(
        "context-parallel ranks take each other's tokens",
        "runtime/attention/context_parallel.py",
        "return tuple((slice(index * num_tokens // size, (index + 1) * num_tokens // size),) for index in range(size))",
        "return tuple((slice(index * num_tokens // size, (index + 1) * num_tokens // size),) for index in range(size))[::-1]",
        f"{MATRIX} 'cp2 and pp2 and v2'",
    ),
    Fault(
        "a slice takes out the gradient of the sequence's first keys",
        "runtime/attention/kv_cache.py",
        "mine, uncached = of_heads[view.start : view.stop].to(grad.dtype)",
        "mine, uncached = of_heads[: view.stop - view.start].to(grad.dtype)",
        SHORT,
    ),
    Fault(
        "gradients of later slices are lost where an earlier one adds its own",
        "runtime/attention/kv_cache.py",
        "of_heads[: view.stop] += grad[: view.stop]",
        "of_heads[: view.stop] = grad[: view.stop]",
        SHORT,
    ),
    Fault(
        "the last deferred weight gradient of a chunk is not computed",
        "runtime/autograd/weights.py",
        "        while deferred:\n            deferred.pop(0).run()",
        "        while len(deferred) > 1:\n            deferred.pop(0).run()",
        SHORT,
    ),
    Fault(
        "of the output layer's weight gradient the last block's alone is kept",
        "runtime/loss/token_blocks.py",
        "self._sum.addmm_(grad.t(), x)",
        "self._sum = grad.t() @ x",
        f"{SHORT} tests/cpu/test_runtime_block_loss.py",
    ),
    Fault(
        "the last stage has the gradient of its own vocabulary shard alone",
        "runtime/loss/pipeline_shards.py",
        "dist.reduce(part, groups.root, group=groups.gather)",
        "pass",
        f"{MATRIX} 'vocabulary and tied and blocks'",
    ),
    Fault(
        "backward does not wait for the activations that are copied back",
        "runtime/offload/activations.py",
        "        moved = self._moved.pop(owner, None)\n        if moved is not None:\n"
        "            self._host.streams.wait(moved.mark)",
        "        self._moved.pop(owner, None)",
        "tests/cpu/test_runtime_offload.py",
    ),
    Fault(
        "messages go by the communicator of the other direction",
        "runtime/links/links.py",
        "group = self._group(gradient, up=peer > self.position)",
        "group = self._group(gradient, up=peer < self.position)",
        "tests/cpu/test_runtime_links.py",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    faults = [fault for fault in FAULTS if args.only in fault.name]
    sources = {fault.path: (ROOT / PACKAGE / fault.path).read_text() for fault in faults}
    changed = {fault.name: fault.applied(sources[fault.path]) for fault in faults}
    if args.show:
        for fault in faults:
            print(f"{fault.name}\n    {PACKAGE}/{fault.path}: {fault.tests}")
        return 0
    survivors = []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        tree = Copy(Path(folder))
        for tests in dict.fromkeys(fault.tests for fault in faults):
            failure, output = tree.run(f"{PYTEST} {tests}", None)
            if failure is not None:
                print(f"{tests} fails without a fault: {failure}\n{output}")
                return 2
        for number, fault in enumerate(faults, start=1):
            start_s, path = time.monotonic(), f"{PACKAGE}/{fault.path}"
            tree.write(path, changed[fault.name].encode())
            failure, _ = tree.run(f"{PYTEST} {fault.tests}", LIMIT_S)
            tree.write(path, sources[fault.path].encode())
            if failure is None:
                survivors.append(fault)
            verdict = "survived" if failure is None else "killed  "
            print(f"{number:3} {verdict} {time.monotonic() - start_s:4.0f} s  {fault.name}", flush=True)
            if failure is not None:
                print(f"      {failure[:110]}", flush=True)
    print(f"\nkilled {len(faults) - len(survivors)} of {len(faults)}")
    return int(bool(survivors))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="faults with this text in their names (default: all)")
    parser.add_argument("--show", action="store_true", help="list the faults and run nothing")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
