"""Pipelines and batches the planner tests share."""

import random
from collections.abc import Sequence
from dataclasses import replace

from megatron_epp.cost.model import PipelineCosts
from megatron_epp.plan import InfeasibleError
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem, plan
from megatron_epp.tools.formulas import CPU, H100, ModelShape, analytic_costs, analytic_profile
from megatron_epp.tools.formulas.library import load_flags, shape_of

GIB = 1 << 30
LLAMA = analytic_profile(shape_of(load_flags("llama3-8b")), H100)


def pipeline(stages: int, layers: int = 4, *, vocab_size: int = 4096, cpu: bool = False) -> PipelineCosts:
    """An 8B-like model with a small vocabulary, `layers` layers per stage."""
    sizes = {"hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32, "num_query_groups": 8}
    shape = ModelShape(num_layers=stages * layers, vocab_size=vocab_size, **sizes)
    return analytic_costs(shape, CPU if cpu else H100, [layers] * stages, state_bytes_per_parameter=8.0)


def problem(lengths: Sequence[int], stages: int, cap: int = UNLIMITED_BYTES, **rest: object) -> Problem:
    return Problem(tuple(lengths), tuple(range(stages)), (cap,) * stages, **rest)  # type: ignore[arg-type]


def web_lengths(count: int, seed: int, longest: int = 131072) -> tuple[int, ...]:
    """Like web text: a log-normal body (median 350, mean 1,000) with a Pareto tail up to `longest`."""
    draw = random.Random(seed)
    body = [draw.lognormvariate(5.85, 1.35) for _ in range(count)]
    tail = [1000 * draw.paretovariate(1.1) for _ in range(count)]
    return tuple(min(longest, 1 + int(b if draw.random() < 0.97 else t)) for b, t in zip(body, tail, strict=True))


def least_cap_bytes(asked: Problem, costs: PipelineCosts, options: Options) -> int:
    """Return the smallest cap under which there is a plan, as the refusal under one byte names it."""
    try:
        plan(replace(asked, cap_bytes=(1,) * asked.num_ranks), costs, options)
    except InfeasibleError as error:
        return error.least_cap_bytes
    raise AssertionError("a plan under one byte")
