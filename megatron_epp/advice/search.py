"""The search: all layouts roughly, the best of them exactly, and Megatron's own 1F1B beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from megatron_epp.advice.candidates import candidates, variants
from megatron_epp.advice.judge import Entry, Plain, Refusal, exactly, gib, misfit, plain, roughly, shares_by_work
from megatron_epp.advice.layout import Layout
from megatron_epp.advice.question import Question
from megatron_epp.cost.library import even_layers
from megatron_epp.plan import InfeasibleError
from megatron_epp.planner.service.replica_balance import Share

VARIED = 6
"""Layouts whose variants are judged: those with the best rough plans."""
PLANNED = 12
"""Layouts that are judged exactly."""
TIE = 0.03
"""Megatron's own 1F1B is as good where it takes no longer than this share more."""
WORTH = 0.01
"""What several stages on a rank, or unequal layers, must gain to go before the same sizes without."""
_NEAR = 8
"""Refused layouts among which the nearest to fitting is looked for."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What came of it.

    Attributes:
        question: that was asked.
        best: layouts judged exactly, the best first; never empty.
        slower: those that a rough plan ruled out, the best first.
        refused: those that cannot run, the nearest to running first.
        plain: Megatron's own 1F1B at its best layout; None where it fits nowhere.
    """

    question: Question
    best: tuple[Entry, ...]
    slower: tuple[Entry, ...]
    refused: tuple[Refusal, ...]
    plain: Plain | None

    @property
    def plain_is_as_good(self) -> bool:
        return self.plain is not None and self.plain.step_us <= (1 + TIE) * self.best[0].parts.step_us

    def tokens_per_s(self, step_us: float) -> float:
        return self.question.tokens / (step_us * 1e-6)


class NothingFitsError(InfeasibleError):
    """No layout fits. The message says the smallest change that would let one through."""


def advise(question: Question, say: Callable[[str], None] = lambda _: None) -> Advice:
    """Search. Equal questions get equal advice.

    Args:
        question: what is asked.
        say: told how far it has got.

    Raises:
        NothingFitsError: no layout can run.
    """
    layouts, refused = candidates(question)
    search = _Search(question, say)
    search.look_at(layouts, "layouts")
    for entry in sorted(search.entries, key=_speed)[:VARIED]:
        search.look_at(variants(question, entry.layout), "variants")
    search.plan_best()
    if not search.exact:
        raise _nothing_fits(question, [*refused, *search.refused])
    best = min(filter(None, search.plains), key=lambda one: (one.step_us, one.layout), default=None)
    planned = {entry.layout for entry in search.exact}
    slower = [entry for entry in search.entries if entry.layout not in planned]
    return Advice(
        question=question,
        best=tuple(_plainest_first(search.exact)),
        slower=tuple(sorted(slower, key=_speed)),
        refused=(*sorted(search.refused, key=lambda one: one.needed_bytes), *refused),
        plain=best,
    )


class _Search:
    """What was found so far."""

    def __init__(self, question: Question, say: Callable[[str], None]) -> None:
        self.question, self.say = question, say
        self.entries: list[Entry] = []
        self.exact: list[Entry] = []
        self.refused: list[Refusal] = []
        self.plains: list[Plain | None] = []
        self._shares: dict[int, tuple[Share, ...]] = {}

    def look_at(self, layouts: Iterable[Layout], what: str) -> None:
        """Judge roughly."""
        listed = list(layouts)
        for number, layout in enumerate(listed):
            self.say(f"{number} of {len(listed)} {what}")
            if (refusal := misfit(self.question, layout)) is not None:
                self.refused.append(refusal)
                continue
            if layout.data not in self._shares:
                self._shares[layout.data] = shares_by_work(self.question, layout)
            shares = self._shares[layout.data]
            try:
                self.entries.append(roughly(self.question, layout, shares))
            except InfeasibleError as error:
                self._refuse(layout, error)
            if layout.virtual == 1:
                self.plains.append(plain(self.question, layout, shares))

    def plan_best(self) -> None:
        """Judge the best exactly; where one turns out not to fit, the next takes its place."""
        for entry in sorted(self.entries, key=_speed):
            if len(self.exact) == PLANNED:
                break
            self.say(f"{len(self.exact)} of {PLANNED} layouts planned")
            try:
                self.exact.append(exactly(self.question, entry.layout))
            except InfeasibleError as error:
                self.entries.remove(entry)
                self._refuse(entry.layout, error)

    def _refuse(self, layout: Layout, error: InfeasibleError) -> None:
        needed, cap = error.least_cap_bytes, gib(self.question.cap_bytes)
        why = f"a replica's share of this batch needs {gib(needed)} of {cap}" if needed else str(error)
        self.refused.append(Refusal(layout.name, why, needed, layout))


def _speed(entry: Entry) -> tuple[float, Layout]:
    return entry.parts.step_us, entry.layout


def _plainest_first(entries: list[Entry]) -> list[Entry]:
    """The fastest first, or before it the plain layout of the same sizes where that takes hardly longer."""
    ranked = sorted(entries, key=_speed)
    fastest = ranked[0]
    for entry in ranked:
        has_its_sizes = replace(fastest.layout, virtual=1, placement="looped", layers=entry.layout.layers) == entry.layout
        is_even = entry.layout.layers == even_layers(sum(entry.layout.layers), entry.layout.pipeline)
        if has_its_sizes and is_even and entry.parts.step_us <= (1 + WORTH) * fastest.parts.step_us:
            return [entry, *(other for other in ranked if other is not entry)]
    return ranked


def _nothing_fits(question: Question, refused: list[Refusal]) -> NothingFitsError:
    """Says how much more memory, how much less context, or which size to change would let a layout through."""
    tight = sorted((one for one in refused if one.layout is not None), key=lambda one: (one.needed_bytes, one.name))
    if not tight:
        lines = "; ".join(f"{one.name}: {one.why}" for one in refused[:3])
        return NothingFitsError(f"no layout of {question.devices} devices can run. {lines}")
    needs = [(_least_cap(question, one.layout), one) for one in tight[:_NEAR] if one.layout is not None]
    cap, nearest = min(needs, key=lambda each: (each[0], each[1].name))
    assert nearest.layout is not None
    gb, device_gb = -(-cap // 2**30), question.cluster.device_memory_gb
    changes = [f"--memory-cap-gb {gb}"] if device_gb is None or gb <= device_gb else []
    if (context := _context_that_fits(question, nearest.layout)) is not None:
        changes.append(f"--context {context}")
    if (devices := _enough_devices(question)) is not None:
        changes.append(f"--devices {devices}")
    return NothingFitsError(
        f"nothing fits {gib(question.cap_bytes)} per device on {question.devices} devices. Nearest is {nearest.name}: "
        f"{nearest.why}.\nAny of these would do: {', or '.join(changes) or f'devices of {gb} GiB or more'}",
        cap,
    )


def _least_cap(question: Question, layout: Layout) -> int:
    """Bytes that would do for a layout."""
    while (refusal := misfit(question, layout)) is not None:
        question = replace(question, cap_bytes=max(refusal.needed_bytes, question.cap_bytes + 1))
    return question.cap_bytes


def _context_that_fits(question: Question, layout: Layout) -> int | None:
    """The context halved as often as it takes, at the layout that is nearest to fitting."""
    context = question.context
    while (context := context // 2) >= layout.tensor * layout.context:
        shorter = replace(question, context=context, lengths=tuple(min(length, context) for length in question.lengths))
        refusal = misfit(shorter, layout)
        if refusal is None:
            return context
        if refusal.is_static:
            return None
    return None


def _enough_devices(question: Question) -> int | None:
    """The least of two, four, eight times as many that have a layout that fits."""
    for times in (2, 4, 8):
        more = replace(question, devices=times * question.devices)
        if any(misfit(more, layout) is None for layout in reversed(candidates(more)[0])):
            return more.devices
    return None
