"""Reasons for which a layout is slower than the best, in words with numbers."""

from __future__ import annotations

from dataclasses import fields

from megatron_epp.advice.judge import Entry, Parts
from megatron_epp.advice.question import Question

CLOSE = 0.02
"""Share of the best step's time by which a layout may be slower and still be called as good."""
_NOTICED = 0.005
"""Share of the best step's time that a part must take longer to be named as the reason."""


def why_slower(question: Question, entry: Entry, best: Entry) -> str:
    """Describe the part of a step that contributes most to a layout's extra time over the best one."""
    slower = entry.parts.step_us / best.parts.step_us
    name = max((part.name for part in fields(Parts)), key=lambda name: _excess_us(entry, best, name))
    about = "" if entry.is_exact else "about "
    if slower <= 1 + CLOSE:
        return f"as good within {CLOSE * 100:.0f} %"
    head = f"{about}{slower:.2f}x the time"
    if _excess_us(entry, best, name) <= _NOTICED * best.parts.step_us:
        return head
    share, of_best = (f"{_share(one, name):.0%}".replace("%", " %") for one in (entry, best))
    return f"{head}: {_words(question, entry, name)} {share} of a step (best: {of_best}){_cause(question, entry, name)}"


def _excess_us(entry: Entry, best: Entry, name: str) -> float:
    return float(getattr(entry.parts, name) - getattr(best.parts, name))


def _share(entry: Entry, name: str) -> float:
    return float(getattr(entry.parts, name) / entry.parts.step_us)


def _words(question: Question, entry: Entry, name: str) -> str:
    layout = entry.layout
    sharing = [f"TP {layout.tensor}"] * (layout.tensor > 1) + [f"CP {layout.context}"] * (layout.context > 1)
    sharing += [f"EP {layout.expert}"] * (layout.expert > 1)
    crosses = layout.tensor * max(layout.context, layout.expert) > question.cluster.devices_per_node
    return {
        "compute_us": "compute takes",
        "exchange_us": f"exchange within {' x '.join(sharing)}{' across nodes' if crosses else ''} takes",
        "recompute_us": "recompute takes",
        "bubble_us": f"the bubble of a pipeline of {layout.pipeline} is",
        "waiting_us": f"{layout.data} replicas wait for the slowest for",
        "reduction_us": f"reducing gradients over {layout.context * layout.data} ranks takes",
    }[name]


def _cause(question: Question, entry: Entry, name: str) -> str:
    layout, made = entry.layout, entry.plan
    if name == "bubble_us":
        return f", with {sum(made.lengths):,} tokens for each replica"
    if name == "waiting_us":
        return (
            f": one document has {max(question.lengths):,} of {question.tokens // layout.data:,} tokens that a fair share has"
        )
    if name == "recompute_us":
        room = min(cap - static for cap, static in zip(made.cap_bytes, made.static_bytes, strict=True))
        return f", as weights and optimizer leave {room / 2**30:,.1f} GiB for activations"
    if name == "compute_us":
        return f": each of {len(made.chunks)} chunks is shared by {layout.tensor * layout.context}, and short kernels are slow"
    return ""
