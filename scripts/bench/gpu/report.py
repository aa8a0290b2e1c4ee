"""The report of `bench/gpu` in Markdown. Every number comes from the report's JSON."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from megatron_epp.tools.cli.first_run.training import TIMES
from scripts.tables import table

Part = dict[str, Any]
GOALS = {"speed": 0.95, "peak": 0.05, "parity": TIMES, "loss_floor": 1e-4, "norm_floor": 1e-2}
"""Least ratio of tokens per second; most relative error of a peak; most times as far from fp32 as Megatron's own bf16 is, and
how far is near enough anyway, of the loss and of the gradients' norm, which Megatron logs with three decimals."""


def text(args: Namespace, parts: Sequence[Part]) -> str:
    sections = []
    for part in parts:
        section = f"Failed: {part['failed']}" if "failed" in part else _SECTIONS.get(part["case"], str)(part)
        sections.append(f"## {part['case']}\n\n{section}\n\n{part['seconds']:.0f} s.")
    return "\n\n".join(sections)


def _parity(part: Part) -> str:
    rows = [[name, *(f"{row[key]:.1e}" for key in ("theirs", "ours", "allowed"))] for name, row in part["rows"].items()]
    what = f"Largest relative difference to Megatron's own run in fp32 over {part['iterations']} iterations."
    distances = table(["", "Megatron in bf16", "sliced, in bf16", "allowed"], rows)
    return (
        f"{what}\n\n{distances}\n\nAllowed: {GOALS['parity']:g} times as far as Megatron's own, or a little anyway{_met(part)}."
    )


def _slices(part: Part) -> str:
    what = f"{part['context']:,} tokens in slices of {part['slice_tokens']:,}, every layer recomputed"
    ratio = f"Sliced over unsliced: {part['sliced_over_unsliced']:.3f}; the goal is {GOALS['speed']:g}{_met(part)}."
    return f"{what}.\n\n{_speeds(part)}\n\n{ratio}"


def _long(part: Part) -> str:
    what = f"{part['context']:,} tokens in slices of {part['slice_tokens']:,}, every layer recomputed.\n\n{_speeds(part)}"
    unsliced = part.get("unsliced")
    return what + (f"\n\nUnsliced it does not fit: `{unsliced}`" if unsliced else "\n\nUnsliced it fits too.")


def _speeds(part: Part) -> str:
    rows = [
        [name, f"{speed:,.0f}", _gib(part["device_peak_bytes"][name]), f"{part['losses'][name][-1]:.6f}"]
        for name, speed in part["tokens_per_second"].items()
    ]
    return table(["run", "tokens/s", "peak of the device (GiB)", "last loss"], rows)


def _peaks(part: Part) -> str:
    rows = [
        [name, _gib(row["planned_bytes"]), _gib(row["measured_bytes"]), f"{row['error']:+.1%}", f"{row['recompute_share']:.1%}"]
        for name, row in part["rows"].items()
    ]
    peaks = table(["run", "planned (GiB)", "measured (GiB)", "planned over measured, less one", "recompute"], rows)
    return f"{peaks}\n\nThe goal is {GOALS['peak']:.0%} either way{_met(part)}."


def _copies(part: Part) -> str:
    share = part["hidden_share"]
    rows = [
        ["share of activations that leave the device", f"{part['offload_share']:.1%}"],
        ["all copies (ms)", f"{part['copies_us'] / 1e3:.1f}"],
        ["of them overlapped with compute", "-" if share is None else f"{share:.1%}"],
        ["time of an iteration over that without cap and copies", f"{part['times_as_long']:.3f}"],
    ]
    return table(["", ""], rows)


def _race(part: Part) -> str:
    ours = part["tokens_per_second"].get("plans")
    ratios = [
        f"Plans are {ours / speed:.2f}x as fast as {name}."
        for name, speed in part["tokens_per_second"].items()
        if ours and name != "plans"
    ]
    failed = [f"{name}: {reason}" for name, reason in part["failures"].items()]
    what = f"{part['layers']} layers, one stage, cap {part['cap_gb']:g} GB. A peak above the cap makes a row invalid."
    return "\n\n".join([what, _speeds(part), *ratios, *failed])


def _ranks(part: Part) -> str:
    rows = []
    for name, row in part["rows"].items():
        failed = "failed" in row
        figures = ["", "", row["failed"]] if failed else [f"{row['ours']:.1e}", f"{row['allowed']:.1e}", _verdict(row["holds"])]
        rows.append([name, *figures])
    return table(["training in slices", "largest relative difference of a loss", "allowed", ""], rows)


def _loops(part: Part) -> str:
    rows = [
        [f"{ranks}, {name}", f"{far:.1e}", f"{row['allowed']:.1e}", _verdict(far <= row["allowed"])]
        for ranks, row in part["rows"].items()
        for name, far in row["gradients"].items()
    ]
    return table(["loop", "largest relative distance of gradients", "allowed", ""], rows)


def _verdict(holds: bool) -> str:
    return "" if holds else "**does not hold**"


def _gib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 2**30:.3g}"


def _met(part: Part) -> str:
    return ", met" if part["met"] else ", **missed**"


_SECTIONS: dict[str, Callable[[Part], str]] = {
    "parity": _parity,
    "slices": _slices,
    "long": _long,
    "peaks": _peaks,
    "copies": _copies,
    "race": _race,
    **dict.fromkeys(("ranks-1", "ranks-2", "ranks-4"), _ranks),
    "loops": _loops,
}
