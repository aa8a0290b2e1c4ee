"""Runs of `bench/gpu`: model and lengths at full size or reduced, and the launches of a part, each of them once."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

from megatron_epp.launch.machine import NO_TF32
from megatron_epp.plan import Plan
from megatron_epp.plan.measured import Measured
from megatron_epp.plan.serialize import load
from megatron_epp.tools.cli.terminal import progress
from megatron_epp.tools.launch.runs import RecordedRun, TrainingError, tiny_gpt, train
from scripts.random_documents import write_documents

Settings = dict[str, Any]

_GIB = 2**30
_LAYER = {
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "group_query_attention": True,
    "num_query_groups": 8,
    "untie_embeddings_and_output_weights": True,
}
"""Layers of Llama 3 8B."""
RACE = (32768, 20000, 9000, 7000, 6000, 5000, 4096, 4000, 2500, 2000, 1800, 1500, 900, 700, 400, 300, 120)
"""Lengths that fill three rows of 32,768 tokens to 99.8 %: nothing is lost to padding in packed rows."""
_SMALL_LAYER = {"hidden_size": 64, "num_attention_heads": 4, "group_query_attention": True, "num_query_groups": 2}
_PLAIN = (
    "transformer_impl",
    "no_persist_layer_norm",
    "no_gradient_accumulation_fusion",
    "no_masked_softmax_fusion",
    "no_bias_gelu_fusion",
    "no_bias_swiglu_fusion",
    "no_bias_dropout_fusion",
    "no_rope_fusion",
)
"""Kernels for the tiny GPT: those that need torch alone."""
_GRAD_NORM = re.compile(r"grad norm: ([\d.]+)")
_ITERATION = re.compile(r"iteration\s+(\d+)/")
_OUT_OF_MEMORY = re.compile(r".*(?:out of memory|OutOfMemory).*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Extent of the runs.

    Attributes:
        layers: of the model; of its long sequence's, `long_layers`.
        context: tokens of the sequence that is run sliced and unsliced.
        slice_tokens: of a slice.
        long_context: tokens of the sequence that is too long to be run unsliced.
        mixed: lengths of documents, of which batches are skewed.
        short: the same, short enough for attention in fp32, which no fused kernel computes.
        iterations: of a run; of the long one `long_iterations`.
        model: Megatron's flags.
        raced: layers, lengths of documents and cap in GB of the race.
        narrow: flags of a model of which several ranks' share has room on a GPU.
    """

    layers: int
    context: int
    slice_tokens: int
    long_layers: int
    long_context: int
    mixed: tuple[int, ...]
    short: tuple[int, ...]
    iterations: int
    long_iterations: int
    model: Settings
    raced: tuple[int, tuple[int, ...], float]
    narrow: Settings

    @staticmethod
    def full(device_bytes: int) -> Sizes:
        """For a GPU: sequences of 128K and 1M tokens in slices of 8K; as many layers of an 8B model as it can train."""
        layers, long_layers = (4, 3) if device_bytes > 100 * _GIB else (2, 1)
        short = (4096, 2500, 1800, 900, 700, 400, 300, 120)
        mixed, raced = (32768, 20000, 9000, 6000, *short), (8, RACE, 52.0)
        narrow = {"hidden_size": 512, "ffn_hidden_size": 1408, "num_attention_heads": 8, "num_query_groups": 4}
        return Sizes(layers, 1 << 17, 1 << 13, long_layers, 1 << 20, mixed, short, 6, 3, _gpu_model(), raced, narrow)

    @staticmethod
    def small() -> Sizes:
        """For a GPU, in a few minutes: sequences of 16K tokens and layers of half the width, which still fill its kernels."""
        full = Sizes.full(0)
        narrow = {"hidden_size": 2048, "ffn_hidden_size": 5632, "num_attention_heads": 16, "num_query_groups": 4}
        model, context = full.model | narrow, 1 << 14
        mixed, raced = (context, *full.short), (4, (context, *full.short), 20.0)
        return replace(full, layers=4, context=context, slice_tokens=1 << 12, mixed=mixed, model=model, raced=raced)

    @staticmethod
    def reduced() -> Sizes:
        """For any machine, in a minute or two: the same, tiny. What differs in size only is run once."""
        lengths = (512, 300, 90, 40, 30, 20)
        model = tiny_gpt(**_SMALL_LAYER, bf16=True)
        return Sizes(2, 512, 128, 2, 512, lengths, lengths, 3, 3, model, (2, lengths, 0.05), {})

    def settings(self, context: int, **changes: Any) -> Settings:
        """Flags of a run over sequences of so many tokens."""
        lengths = {"seq_length": context, "max_position_embeddings": context}
        return self.model | {"num_layers": self.layers, "train_iters": self.iterations} | lengths | changes


def _gpu_model() -> Settings:
    """Megatron's default layers where Transformer Engine is installed; a small vocabulary, for it is not about logits."""
    model = tiny_gpt(**_LAYER, vocab_size=8191, lr=1e-4, min_lr=1e-5)
    if find_spec("transformer_engine") is None:
        return model
    return {name: value for name, value in model.items() if name not in _PLAIN} | {"transformer_impl": "transformer_engine"}


class OutOfMemory(Exception):
    """A run found no memory. The message is the first line of its log that says so."""


@dataclass(frozen=True, slots=True)
class Launched:
    """A finished run, and what it left in its folder."""

    run: RecordedRun
    folder: Path

    @property
    def grad_norms(self) -> list[float]:
        """Values of every iteration, as Megatron logs them."""
        return [float(text) for text in _GRAD_NORM.findall((self.folder / "train.log").read_text(encoding="utf-8"))]

    @property
    def device_peak_bytes(self) -> int | None:
        """`torch.cuda.max_memory_allocated` at the end; None without a GPU."""
        peaks = [peak[0] for line in self.run.lines for peak in line["device_peak_bytes"] if peak is not None]
        return max(peaks, default=None)

    @property
    def activation_peak_bytes(self) -> int | None:
        """Bytes that autograd kept, where they were counted."""
        peaks = [peak for line in self.run.lines for peak in line["peak_activation_bytes"] if peak is not None]
        return max(peaks, default=None)

    @property
    def planned_activation_bytes(self) -> int:
        """The largest peak of any iteration, without what is held throughout."""
        return max(peak for line in self.run.lines for peak in line["planned_peak_activation_bytes"])

    def traces(self) -> list[tuple[Plan, Measured]]:
        """Plan and times of every iteration, where all were traced."""
        pairs = (
            (self.folder / f"plan-{i}.json", self.folder / f"measured-{i}.json") for i in range(1, len(self.run.lines) + 1)
        )
        return [(load(plan), Measured.load(measured)) for plan, measured in pairs]


@dataclass
class Launches:
    """Runs of training, made when first asked for.

    Args:
        limit_s: longest time that one may take.
    """

    folder: Path
    limit_s: float
    _done: dict[str, Launched | OutOfMemory] = field(default_factory=dict)
    _locks: defaultdict[str, Lock] = field(default_factory=lambda: defaultdict(Lock))

    def run(self, name: str, settings: Settings, lengths: tuple[int, ...], num_ranks: int = 1) -> Launched:
        """Train, on documents of these lengths, one batch of all of them again and again.

        Raises:
            OutOfMemory: there was not enough.
            TrainingError: it failed in another way.
        """
        data = self._documents(lengths, settings)
        batch = {"data_path": data, "global_batch_size": len(lengths), "split": "100,0,0"}
        key = json.dumps([num_ranks, settings | batch], sort_keys=True)
        with self._locks[key]:
            if key not in self._done:
                self._done[key] = self._launch(name, settings | batch, num_ranks)
        launched = self._done[key]
        if isinstance(launched, OutOfMemory):
            raise launched
        return launched

    def _launch(self, name: str, settings: Settings, num_ranks: int) -> Launched | OutOfMemory:
        folder = self.folder / name.replace(",", "").replace(" ", "-")
        variables = {} if settings.get("bf16") else NO_TF32
        print(f"  {name}: {settings['train_iters']} iterations", flush=True)
        log = folder / "train.log"
        log.unlink(missing_ok=True)
        try:
            with progress("training", lambda: _reached(log)):
                return Launched(train(folder, num_ranks, settings, self.limit_s, environment=variables), folder)
        except TrainingError:
            if shortage := _OUT_OF_MEMORY.search(log.read_text(encoding="utf-8", errors="replace")):
                return OutOfMemory(shortage[0].strip()[:300])
            raise

    def _documents(self, lengths: tuple[int, ...], settings: Settings) -> str:
        copies = settings["train_iters"] + 1  # Megatron asks for more than it trains on
        prefix = self.folder / "documents" / f"{len(lengths)}-of-{max(lengths)}-{copies}-times"
        with self._locks[str(prefix)]:
            if not prefix.with_suffix(".idx").exists():
                write_documents(prefix, lengths * copies, min(256, settings["vocab_size"]))
        return str(prefix)


def _reached(log: Path) -> str:
    """Progress of a run, read from its log."""
    iterations = _ITERATION.findall(log.read_text(encoding="utf-8", errors="replace")) if log.exists() else []
    return f"{f'iteration {iterations[-1]}' if iterations else 'starting'} ({log})"
