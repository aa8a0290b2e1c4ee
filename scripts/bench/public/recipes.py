"""Public recipes of training: model, devices, sizes, schedule and recompute as they ship, and lengths as published or alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_epp.cost.optimizer import TRAINED_SHARE
from megatron_epp.tools.advice.question import Configuration
from megatron_epp.tools.formulas.library import load_flags
from scripts.bench.public.rows import TRUNK_405B
from scripts.bench.rl.rules import Rule, decreasing, padded, slime, verl


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Lengths of a batch, drawn from a log-normal distribution.

    Attributes:
        median: tokens; None for sequences that are all as long as `longest`.
        spread: of the logarithm.
        longest: most tokens of a sequence.
        remark: what is published of them, in words.
    """

    median: int | None = None
    spread: float = 0.0
    longest: int
    remark: str

    def batch(self, sequences: int, seed: int = 0) -> tuple[int, ...]:
        """Draw as many lengths; each seed has another batch of the run."""
        if self.median is None:
            return (self.longest,) * sequences
        lengths = np.random.RandomState(seed).lognormal(math.log(self.median), self.spread, sequences)
        return tuple(int(length) for length in lengths.clip(16, self.longest))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A recipe as it ships.

    Attributes:
        name: of the row.
        title: of framework, model and task.
        repository, file, commit: where it is; of a paper or a pull request its address, and what of it.
        model: name of a shipped file.
        devices: number that it takes.
        config: its sizes, and its layers of every stage.
        lengths: of its sequences.
        sequences: of one step of the optimizer.
        steps: of the optimizer in what was measured.
        rule: by which it fills microbatches.
        budget: most tokens of a microbatch, over the ranks that share a sequence.
        recomputes_all: every layer is recomputed; otherwise none is.
        dispatcher: of experts.
        optimizer: Megatron's flags of its optimizer.
        trained_share: share of the parameters that train.
        offload: it copies activations to host memory.
        measured_s: of an update or a step, where published.
        measured: what that is, in words.
        lost: what plans do without, or do not model, in words.
        fixed: sizes that `advise` does not search, by names of `Configuration`, so that it ends in minutes.
        cluster: of the machine.
    """

    name: str
    title: str
    repository: str
    file: str
    commit: str
    model: str
    devices: int
    config: Configuration
    lengths: Drawn
    sequences: int
    steps: int = 1
    rule: Rule = decreasing
    budget: int
    recomputes_all: bool = False
    dispatcher: str = "alltoall"
    optimizer: tuple[str, ...] = ()
    trained_share: float = 1.0
    offload: bool = False
    measured_s: float | None = None
    measured: str = ""
    lost: str = ""
    fixed: tuple[tuple[str, int], ...] = ()
    cluster: str = "h100x8"

    @property
    def flags(self) -> dict[str, Any]:
        """Megatron's flags of the model and its optimizer."""
        flags = load_flags(self.model) | dict.fromkeys(self.optimizer, True) | {TRAINED_SHARE: self.trained_share}
        if self.dispatcher != "alltoall":
            flags |= {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": self.dispatcher}
        return flags


_BRIDGE: dict[str, Any] = {"repository": "NVIDIA-NeMo/Megatron-Bridge", "commit": "067f987df03b"}
_SWIFT: dict[str, Any] = {"repository": "modelscope/ms-swift"}
_SLIME: dict[str, Any] = {"repository": "THUDM/slime", "commit": "624b824a898a"}
_NEMO_RL: dict[str, Any] = {"repository": "NVIDIA-NeMo/RL", "commit": "7ea279abfbeb"}
_VERL: dict[str, Any] = {"repository": "ISEEKYAN/verl_megatron_practice", "commit": "dfd811adc3e4"}
_LORA_32 = 46 * 32 * (4096 + (96 + 2 * 8) * 128 + 96 * 128 + 4096)
"""Parameters of adapters of rank 32 for the projections before and after attention in GLM-4.5-Air."""
_HOST_OPTIMIZER = "use_precision_aware_optimizer", "optimizer_cpu_offload"

RECIPES = (
    Recipe(
        **_SWIFT,
        name="7b-sft",
        title="ms-swift, Qwen2.5-7B SFT, packed to 32K",
        file="examples/megatron/long_text.sh",
        commit="15898feefaab",
        model="qwen2.5-7b",
        devices=4,
        config=Configuration(4, 1, 1, 1, layers=(28,)),
        lengths=Drawn(median=6000, spread=0.8, longest=32768, remark="LongWriter-6k, packed; its lengths are not published"),
        sequences=23,
        budget=32768,
        recomputes_all=True,
        measured_s=23.0,
        measured="step",
        cluster="a100x8",
    ),
    Recipe(
        **_BRIDGE,
        name="32b-sft",
        title="Bridge, Qwen3-32B SFT, packed to 2,048",
        file="src/megatron/bridge/recipes/qwen/h100/qwen3.py",
        model="qwen3-32b",
        devices=16,
        config=Configuration(8, 1, 2, 1, layers=(32, 32)),
        lengths=Drawn(median=180, spread=0.45, longest=2048, remark="SQuAD, packed; its lengths are not published"),
        sequences=82,
        budget=2048,
        recomputes_all=True,
    ),
    Recipe(
        **_BRIDGE,
        name="70b-sft",
        title="Bridge, Llama 3 70B SFT in FP8, packed to 4,096",
        file="docs/performance-summary-archive.md",
        model="llama3-70b",
        devices=32,
        config=Configuration(4, 1, 4, 2, virtual=5, layers=(4,) * 20),
        lengths=Drawn(median=180, spread=0.45, longest=4096, remark="SQuAD, packed; its lengths are not published"),
        sequences=675,
        budget=4096,
        optimizer=("grad_reduce_in_bf16",),
        measured_s=2.50,
        measured="step, from 1,638 tokens/s for a GPU, in FP8",
        lost="FP8 (times here are of bf16), CUDA graphs, overlap of tensor parallelism",
    ),
    Recipe(
        **_VERL,
        name="dapo-7b",
        title="verl, Qwen2.5-Math-7B DAPO",
        file="dapo7b.csv, row 12",
        model="qwen2.5-7b",
        devices=8,
        config=Configuration(4, 1, 2, 1, layers=(14, 14)),
        lengths=Drawn(median=1060, spread=0.8, longest=10240, remark="up to 2K + 8K; a mean of 1,460 follows from its MFU"),
        sequences=512,
        steps=16,
        rule=verl,
        budget=20480,
        measured_s=185.0,
        measured="update",
    ),
    Recipe(
        **_VERL,
        name="dapo-32b",
        title="verl, Qwen2.5-32B DAPO",
        file="dapo32b.csv, row 6",
        model="qwen2.5-32b",
        devices=32,
        config=Configuration(8, 1, 2, 2, layers=(32, 32)),
        lengths=Drawn(median=1190, spread=0.9, longest=22528, remark="up to 2K + 20K; published mean 1,544 without prompts"),
        sequences=512,
        steps=16,
        rule=verl,
        budget=22528,
        measured="update: 840 s, on H20s",
    ),
    Recipe(
        **_VERL,
        name="grpo-235b",
        title="verl, Qwen3-235B-A22B GRPO",
        file="dapo_moe235b.csv, row 3",
        model="qwen3-235b-a22b",
        devices=128,
        config=Configuration(1, 1, 8, 16, expert=8, virtual=2, layers=(5, *(6,) * 14, 5)),
        lengths=Drawn(median=4900, spread=0.5, longest=10240, remark="up to 2K + 8K; a mean of 5,400 follows from its MFU"),
        sequences=1024,
        rule=verl,
        budget=10240,
        recomputes_all=True,
        dispatcher="deepep",
        measured_s=39.0,
        measured="update",
        fixed=(("tensor", 1), ("context", 1), ("expert", 8)),
    ),
    Recipe(
        **_NEMO_RL,
        name="moonlight",
        title="NeMo-RL, Moonlight 16B-A3B GRPO",
        file="examples/configs/recipes/llm/grpo-moonlight-16ba3b-4n8g-megatron.yaml",
        model="moonlight-16b-a3b",
        devices=32,
        config=Configuration(1, 1, 4, 8, expert=4, layers=(7, 7, 7, 6)),
        lengths=Drawn(median=600, spread=0.7, longest=8192, remark="OpenMathInstruct-2; its lengths are not published"),
        sequences=512,
        rule=padded,
        budget=8192,
        dispatcher="deepep",
        fixed=(("expert", 4),),
    ),
    Recipe(
        **_SWIFT,
        name="glm-air",
        title="ms-swift, GLM-4.5-Air LoRA, packed to 8,192",
        file="examples/megatron/lora/glm4_5_106b.sh",
        commit="7b55a0c1507e",
        model="glm-4.5-air",
        devices=4,
        config=Configuration(4, 1, 1, 1, expert=4, layers=(46,)),
        lengths=Drawn(median=700, spread=0.7, longest=8192, remark="chats, packed; their lengths are not published"),
        sequences=132,
        budget=8192,
        recomputes_all=True,
        trained_share=_LORA_32 / 106.9e9,
        measured_s=40.0,
        measured="step, on GPUs of 80 GB that it does not name",
        lost="overlap of shared experts",
    ),
    Recipe(
        **_SLIME,
        name="kimi-k2",
        title="slime, Kimi K2 GRPO",
        file="scripts/run-kimi-k2-Instruct.sh",
        model="kimi-k2",
        devices=256,
        config=Configuration(8, 4, 8, 1, expert=32, layers=(*(8,) * 7, 5)),
        lengths=Drawn(median=4800, spread=1.0, longest=32768, remark="DAPO-Math-17k, up to 32K; its lengths are not published"),
        sequences=1024,
        rule=slime,
        budget=4 * 16384,
        recomputes_all=True,
        dispatcher="deepep",
        optimizer=_HOST_OPTIMIZER,
        fixed=(("tensor", 8), ("context", 1), ("pipeline", 32)),
    ),
    Recipe(
        repository="arXiv 2407.21783",
        file="table 4",
        commit="v3",
        name="405b-128k",
        title="Meta, Llama 3.1 405B pretraining at 128K",
        model="llama3.1-405b",
        devices=16384,
        config=Configuration(8, 16, 16, 8, virtual=8, layers=TRUNK_405B),
        lengths=Drawn(longest=131072, remark="rows of 131,072, taken as one document each"),
        sequences=128,
        budget=131072,
        measured_s=10.9,
        measured="step",
        lost="keys and values are gathered there, heads exchanged here",
        fixed=(("tensor", 8), ("context", 16)),
    ),
    Recipe(
        repository="huggingface/trl",
        file="pull request 6846",
        commit="its table",
        name="8b-1m",
        title="TRL, Qwen3-8B, one sequence of 1M",
        model="qwen3-8b",
        devices=8,
        config=Configuration(1, 8, 1, 1, layers=(36,)),
        lengths=Drawn(longest=1 << 20, remark="one of 1,048,576"),
        sequences=1,
        budget=1 << 20,
        recomputes_all=True,
        offload=True,
        measured_s=380.0,
        measured="step",
        lost="weights and gradients divided over devices (FSDP), ring attention",
    ),
)
