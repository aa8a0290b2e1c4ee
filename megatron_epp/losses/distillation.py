"""Distillation from the most probable tokens of a teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import log_softmax

from megatron_epp.losses.loss import Average, Rows, Scope, check_settings

TOKENS, LOGPROBS = "teacher_tokens", "teacher_logprobs"
"""Columns of width `Distillation.top_k`: for every label, the teacher's most probable tokens in its place, and the logarithms
of their probabilities."""


@dataclass(frozen=True, slots=True)
class Distillation:
    """Divergence between the distributions of a teacher and of the model, over the teacher's `top_k` tokens.

    Both distributions are divided by their sums over these tokens, as NeMo-RL's `DistillationLossFn` does by default
    (``zero_outside_topk=False``): the model is free in how much it gives to all others. With ``renormalizes=False`` they are
    taken as they are, and what is outside is left out of the sum, as in verl's recipe for GKD; this is no divergence then, and
    can be below 0.

    Attributes:
        top_k: tokens for every label.
        reverse: the divergence is ``sum p log(p / q)`` with `p` the model's and `q` the teacher's probabilities, which seeks
            one mode of the teacher; otherwise ``sum q log(q / p)``.
        renormalizes: see above.
        average: divisor of the batch's sum.
        temperature: logits are divided by it; the teacher's log-probabilities are given at the same.
    """

    name: ClassVar[str] = "distillation"
    scope: ClassVar[Scope] = Scope.TOKEN
    columns: ClassVar[tuple[str, ...]] = (TOKENS, LOGPROBS)
    candidates: ClassVar[str] = TOKENS
    logged: ClassVar[tuple[str, ...]] = ("teacher's mass", "model's mass")

    top_k: int = 64
    reverse: bool = False
    renormalizes: bool = True
    average: Average = Average.TOKENS
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_settings(self, at_least={"top_k": 1}, above={"temperature": 0})

    @property
    def widths(self) -> dict[str, int]:
        return {TOKENS: self.top_k, LOGPROBS: self.top_k}

    def __call__(self, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        assert rows.candidate_logprobs is not None  # which the loss asks for
        teacher, model = rows.columns[LOGPROBS], rows.candidate_logprobs
        masses = {"teacher's mass": teacher.exp().sum(1), "model's mass": model.exp().sum(1)}
        if self.renormalizes:
            teacher, model = log_softmax(teacher, dim=1), log_softmax(model, dim=1)
        of, other = (model, teacher) if self.reverse else (teacher, model)
        divergence = (of.exp() * (of - other)).sum(1)
        return (rows.weights * divergence).sum(), {name: (rows.weights * mass).sum() for name, mass in masses.items()}
