"""Public measurements of training with the sizes that they were made with, for plans of the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_epp.plan.layout import even_layers
from megatron_epp.tools.advice.question import Configuration
from megatron_epp.tools.formulas.library import load_flags

NORMS, ACTIVATION, EXPERTS, UP = "norms", "activation", "experts", "projections of latents"
"""Parts of a layer that recipes recompute: norms before attention and the MLP, the nonlinearity, experts with their exchanges,
and what makes queries, keys and values of latents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measured step of training.

    Attributes:
        number: of the row.
        name: of model and machine.
        source: where it was published.
        flags: Megatron's of the model.
        config: sizes of the run.
        tokens: of a sequence.
        sequences: of a global batch.
        measured_s: of a step.
        cluster: of the machine.
        per_chunk: sequences in a microbatch.
        slices: of every sequence; 0 for whole sequences.
        dispatcher: of experts.
        again: parts that are recomputed in every layer.
        left_out: what the plan does not have, in words.
    """

    number: str
    name: str
    source: str
    flags: dict[str, Any]
    config: Configuration
    tokens: int
    sequences: int
    measured_s: float
    cluster: str = "h100x8"
    per_chunk: int = 1
    slices: int = 0
    dispatcher: str = "alltoall"
    again: tuple[str, ...] = ()
    left_out: str = ""


MIXTRAL_8X22B = load_flags("mixtral-8x7b") | {
    "num_layers": 56,
    "hidden_size": 6144,
    "ffn_hidden_size": 16384,
    "moe_ffn_hidden_size": 16384,
    "num_attention_heads": 48,
}


def _gpt(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    """Flags of the GPTs of Seq1F1B's fork: no gates, biases, rotary positions, the vocabulary of GPT-2."""
    sizes = {"num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": 4 * hidden, "num_attention_heads": heads}
    return sizes | {"vocab_size": 50257, "bf16": True, "position_embedding_type": "rope"}


def _uneven(count: int, stages: int, ends: tuple[int, int]) -> tuple[int, ...]:
    """Layers of stages that are even but for the first and the last."""
    return (ends[0], *even_layers(count - sum(ends), stages - 2), ends[1])


TRUNK_405B = _uneven(126, 128, (0, 0))
"""Layers of the 128 stages of Llama 3.1 405B: the first and the last have none."""
_LLAMA3 = "Llama 3 paper (arXiv 2407.21783), table 4"
_ZOO = "yanring/Megatron-MoE-ModelZoo, best_practice"
_CARDS = "NVIDIA-NeMo/Megatron-Bridge, examples/model_verification_cards"
_SEQ1F1B = "zwx119/Seq1F1B, docs/experiments_zh.md"
_FORK = "the fork copies its cache of keys and values for every slice"
_405B = {"name": "Llama 3.1 405B", "source": _LLAMA3, "flags": load_flags("llama3.1-405b")}
_QWEN: dict[str, Any] = {
    "name": "Qwen3-235B",
    "source": f"{_ZOO}/qwen3/readme.md",
    "flags": load_flags("qwen3-235b-a22b") | {"moe_router_dtype": "fp32"},
    "dispatcher": "deepep",
}
_LONG = _QWEN | {"sequences": 256, "again": (NORMS, EXPERTS)}


def _long(context: int) -> Configuration:
    return Configuration(4, context, 8, 8 // context, expert=8, virtual=4, layers=_uneven(94, 32, (2, 2)))


_GPT13: dict[str, Any] = {
    "name": "GPT 1.3B",
    "source": _SEQ1F1B,
    "flags": _gpt(24, 2048, 16),
    "config": Configuration(1, 1, 4, 2, layers=(6,) * 4),
    "sequences": 8,
    "cluster": "a100x8",
}
ROWS = (
    *(
        Row(
            **_405B,
            number=number,
            config=Configuration(8, 1, 16, data, virtual=8, layers=TRUNK_405B),
            tokens=8192,
            sequences=2048,
            measured_s=measured_s,
        )
        for number, data, measured_s in (("1", 64, 12.0), ("2", 128, 6.46))
    ),
    Row(
        **_405B,
        number="3",
        config=Configuration(8, 16, 16, 8, virtual=8, layers=TRUNK_405B),
        tokens=131072,
        sequences=128,
        measured_s=10.9,
        left_out="keys and values are gathered, not heads exchanged",
    ),
    Row(
        number="4",
        name="Qwen3-8B",
        source=f"{_CARDS}/qwen3-8b",
        flags=load_flags("qwen3-8b"),
        config=Configuration(1, 1, 1, 16, layers=(36,)),
        tokens=4096,
        sequences=1024,
        measured_s=25.07,
    ),
    Row(
        number="5",
        name="Moonlight 16B",
        source=f"{_CARDS}/moonlight-16b-a3b",
        flags=load_flags("moonlight-16b-a3b"),
        config=Configuration(1, 1, 1, 16, expert=8, layers=(27,)),
        tokens=4096,
        sequences=1024,
        measured_s=11.64,
        per_chunk=2,
        dispatcher="hybridep",
    ),
    Row(
        number="6",
        name="Mixtral 8x22B",
        source=f"{_ZOO}/mixtral",
        flags=MIXTRAL_8X22B,
        config=Configuration(2, 1, 8, 8, expert=8, virtual=7, layers=(1,) * 56),
        tokens=4096,
        sequences=256,
        measured_s=4.46,
        left_out="exchanges of tensor parallelism overlap",
    ),
    Row(
        number="7",
        name="DeepSeek-V3",
        source=f"{_CARDS}/deepseek-v3",
        flags=load_flags("deepseek-v3"),
        config=Configuration(2, 1, 8, 64, expert=64, virtual=4, layers=(1, *(2,) * 30, 0)),
        tokens=4096,
        sequences=16384,
        measured_s=61.76,
        dispatcher="hybridep",
        again=(UP,),
    ),
    Row(
        **_QWEN,
        number="8",
        config=Configuration(2, 1, 8, 16, expert=32, virtual=4, layers=_uneven(94, 32, (2, 2))),
        tokens=4096,
        sequences=2048,
        measured_s=19.7,
        again=(NORMS, ACTIVATION),
    ),
    Row(**_LONG, number="9", config=_long(1), tokens=16384, measured_s=11.4),
    Row(**_LONG, number="10", config=_long(2), tokens=32768, measured_s=27.5),
    Row(**_LONG, number="11", config=_long(4), tokens=65536, measured_s=77.0),
    Row(**_LONG, number="12", config=_long(8), tokens=131072, measured_s=247.6),
    *(
        Row(
            **_GPT13,
            number=f"13, {slices} slices",
            tokens=32768,
            slices=slices,
            measured_s=measured_s,
            left_out=_FORK if slices > 1 else "",
        )
        for slices, measured_s in ((1, 7.085), (2, 5.820), (4, 5.296), (8, 5.196))
    ),
    Row(
        **_GPT13 | {"name": "GPT 7B", "flags": _gpt(32, 4096, 32), "config": Configuration(2, 1, 4, 1, layers=(8,) * 4)},
        number="14",
        tokens=32768,
        slices=4,
        measured_s=15.98,
        left_out=_FORK,
    ),
    Row(
        **_GPT13 | {"name": "GPT 2.7B", "flags": _gpt(32, 2560, 32), "config": Configuration(1, 1, 4, 2, layers=(8,) * 4)},
        number="15",
        tokens=32768,
        slices=4,
        measured_s=10.21,
        left_out=f"kernels of FlashAttention-2 take heads of 80 as 96; {_FORK}",
    ),
    *(
        Row(**_GPT13, number=f"16, {tokens // 1024}K", tokens=tokens, slices=4, measured_s=measured_s, left_out=_FORK)
        for tokens, measured_s in ((4096, 0.602), (8192, 1.044), (16384, 2.183))
    ),
    Row(
        **_QWEN,
        number="17",
        config=Configuration(4, 1, 8, 8, expert=8, virtual=4, layers=_uneven(94, 32, (2, 2))),
        tokens=4096,
        sequences=2048,
        measured_s=29.0,
    ),
    Row(
        **_QWEN | {"dispatcher": "alltoall"},
        number="18",
        config=Configuration(2, 1, 32, 4, expert=8, virtual=3, layers=_uneven(94, 96, (0, 0))),
        tokens=4096,
        sequences=2048,
        measured_s=24.2,
        again=(NORMS, ACTIVATION),
    ),
)
