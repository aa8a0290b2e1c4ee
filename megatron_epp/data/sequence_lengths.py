"""Deterministic samples of sequence lengths typical of corpora, for benchmarks and for advice without data."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.integer[Any]]

# Quantiles of the token counts of 250,000 Wikipedia articles (mean 1,009): most are short, a few are very long.
WIKIPEDIA = (
    (0.0, 2), (0.01, 39), (0.05, 68), (0.1, 87), (0.2, 121), (0.3, 171), (0.4, 242), (0.5, 344), (0.6, 469), (0.7, 681),
    (0.8, 1088), (0.9, 2118), (0.95, 3706), (0.98, 7009), (0.99, 10668), (0.995, 16030), (0.998, 26508), (0.999, 36977),
    (0.9995, 52158), (0.9999, 107286), (1.0, 269428),
)  # fmt: skip


def wikipedia(count: int, seed: int) -> Lengths:
    """Draw from the quantile table of Wikipedia articles, log-linear between its points."""
    shares, lengths = zip(*WIKIPEDIA, strict=True)
    return np.exp(np.interp(np.random.RandomState(seed).rand(count), shares, np.log(lengths))).astype(int)


def code(count: int, seed: int) -> Lengths:
    """Draw lengths as in code repositories: log-normal (median 2,000), and one in twenty Pareto from 16,384 up."""
    draw = np.random.RandomState(seed)
    body, tail = 2000 * np.exp(1.3 * draw.randn(count)), 16384 * (1 + draw.pareto(0.8, count))
    return np.where(draw.rand(count) < 0.95, body, tail).clip(1, 1 << 24).astype(int)


def chat(count: int, seed: int) -> Lengths:
    """Draw log-normal lengths as of public chats: median 700, mean 1,280, one in a hundred over 9,000.

    One in 10,000 is over 40,000. Published means of tokens per conversation are 580 in LMSYS-Chat-1M (arXiv 2309.11998),
    1,560 in ShareGPT and 1,870 in WildChat (turns times tokens of a turn in table 1 of 2405.01470, Llama 2's tokenizer).
    """
    return (700 * np.exp(1.1 * np.random.RandomState(seed).randn(count))).clip(1, 1 << 24).astype(int)


def agents(count: int, seed: int) -> Lengths:
    """Draw bimodal lengths: dialogues (median 600), one in sixteen an agent's history or a long document (median 60,000).

    Their mean is 6,900: these have nine tenths of all tokens. No data set was counted.
    """
    draw = np.random.RandomState(seed)
    short, long = 600 * np.exp(0.6 * draw.randn(count)), 60000 * np.exp(1.0 * draw.randn(count))
    return np.where(draw.rand(count) < 15 / 16, short, long).clip(1, 1 << 24).astype(int)
