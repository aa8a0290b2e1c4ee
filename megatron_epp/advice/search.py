"""The search over layouts: rough plans of all, exact plans of the best, and Megatron's own 1F1B for comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from megatron_epp.advice.candidates import candidates, variants
from megatron_epp.advice.judge import Entry, Plain, Refusal, exactly, gib, misfit, plain, roughly, shares_by_work
from megatron_epp.advice.question import Layout, Question
from megatron_epp.cost.library import even_layers
from megatron_epp.plan import InfeasibleError
from megatron_epp.planner.layouts.search import choose
from megatron_epp.planner.service.replica_balance import Share

VARIED = 6
"""Number of layouts whose variants are evaluated: those with the best rough plans."""
SEARCHED = 2
"""Number of parallel sizes for which the layers of the stages are searched."""
PLANNED = 12
"""Number of layouts that are evaluated exactly."""
TIE = 0.03
"""Share by which Megatron's own 1F1B may be slower than the best layout and still be called as good."""
WORTH = 0.01
"""Share of time that several stages on a rank, or unequal layers, must save to be ranked above the same sizes without them."""
_NEAR = 8
"""Number of refused layouts among which the one nearest to fitting is searched."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Result of the search.

    Attributes:
        question: input of the search.
        best: layouts evaluated exactly, the best first; never empty.
        slower: layouts ruled out by a rough plan, the best first.
        refused: layouts that cannot run, the nearest to fitting first, then the sizes that were ruled out.
        plain: Megatron's own 1F1B at its best layout; None if it fits no layout.
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
    """No layout fits. The message names the smallest changes with which one would fit."""


def advise(question: Question, say: Callable[[str], None] = lambda _: None) -> Advice:
    """Search for the best layouts, deterministically; `say` is told the progress. Raises `NothingFitsError` if none can run."""
    layouts, refused = candidates(question)
    search = _Search(question, say)
    search.look_at(layouts, "layouts")
    for entry in sorted(search.entries, key=_speed)[:VARIED]:
        search.look_at(variants(question, entry.layout), "variants")
    search.search_layers()
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
    """State of the search: results found so far."""

    def __init__(self, question: Question, say: Callable[[str], None]) -> None:
        self.question, self.say = question, say
        self.entries: list[Entry] = []
        self.exact: list[Entry] = []
        self.refused: list[Refusal] = []
        self.plains: list[Plain | None] = []
        self._shares: dict[int, tuple[Share, ...]] = {}

    def look_at(self, layouts: Iterable[Layout], what: str) -> None:
        """Evaluate layouts by rough plans."""
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

    def search_layers(self) -> None:
        """Search for the layers of the stages, one on each rank, for the best sizes, and evaluate what is found."""
        sizes = dict.fromkeys(
            replace(entry.layout, virtual=1, placement="looped", layers=(), shards_vocabulary=False)
            for entry in sorted(self.entries, key=_speed)
            if entry.layout.pipeline > 1 and self.question.fixed.get("virtual", 1) == 1
        )
        known = {entry.layout for entry in self.entries}
        for number, layout in enumerate(list(sizes)[:SEARCHED]):
            self.say(f"layers of {number} of {min(SEARCHED, len(sizes))} layouts searched")
            try:
                found = choose(self.question.sample(layout, self._shares[layout.data]))
            except InfeasibleError:
                continue
            searched = replace(layout, layers=found.layout.layers, shards_vocabulary=found.layout.shards_vocabulary)
            self.look_at([searched] if searched not in known else [], "searched layouts")

    def plan_best(self) -> None:
        """Evaluate the best layouts exactly; if one does not fit, the next replaces it."""
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
        why = f"a replica's share of this batch needs {gib(needed)} of {cap}" if needed else error.message.rstrip()
        self.refused.append(Refusal(layout.name, why, needed, layout))


def _speed(entry: Entry) -> tuple[float, Layout]:
    return entry.parts.step_us, entry.layout


def _plainest_first(entries: list[Entry]) -> list[Entry]:
    """Sort entries by time, but put the plain layout of the fastest one's sizes first if it is at most `WORTH` slower."""
    ranked = sorted(entries, key=_speed)
    fastest = ranked[0]
    for entry in ranked:
        has_its_sizes = replace(fastest.layout, virtual=1, placement="looped", layers=entry.layout.layers) == entry.layout
        is_even = entry.layout.layers == even_layers(int(sum(entry.layout.layers)), entry.layout.pipeline)
        if has_its_sizes and is_even and entry.parts.step_us <= (1 + WORTH) * fastest.parts.step_us:
            return [entry, *(other for other in ranked if other is not entry)]
    return ranked


def _nothing_fits(question: Question, refused: list[Refusal]) -> NothingFitsError:
    """Make the error that names how much more memory, less context or how many more devices would let a layout fit."""
    tight = sorted((one for one in refused if one.layout is not None), key=lambda one: (one.needed_bytes, one.name))
    if not tight:
        lines = "; ".join(f"{one.name}: {one.why}" for one in refused[:3])
        return NothingFitsError(f"no layout of {question.devices} devices can run. {lines}")
    cap, nearest = _nearest(question, tight[:_NEAR])
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
        least_cap_bytes=cap,
    )


def _nearest(question: Question, refused: list[Refusal]) -> tuple[int, Refusal]:
    """Smallest memory cap under which one of several refused layouts fits, in bytes, and its refusal.

    Args:
        question: under whose cap none fits.
        refused: of layouts, that with the least `needed_bytes`, a lower bound of its cap, first.
    """
    found: list[tuple[int, str, Refusal]] = []
    for one in refused:
        cap = max(one.needed_bytes, question.cap_bytes + 1)
        while one.layout is not None and all(cap <= other for other, _, _ in found):
            refusal = misfit(replace(question, cap_bytes=cap), one.layout)
            if refusal is None:
                found.append((cap, one.name, one))
                break
            cap = max(refusal.needed_bytes, cap + 1)
    cap, _, nearest = min(found, key=lambda each: each[:2])
    return cap, nearest


def _context_that_fits(question: Question, layout: Layout) -> int | None:
    """Largest context, halved repeatedly, with which a layout fits; None if there is none."""
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
    """Smallest of two, four and eight times the devices for which a layout fits; None if none does."""
    for times in (2, 4, 8):
        more = replace(question, devices=times * question.devices)
        if any(misfit(more, layout) is None for layout in reversed(candidates(more)[0])):
            return more.devices
    return None
