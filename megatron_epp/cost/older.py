"""Files of costs of version 1, in which a stage is its layers, with its other work in fields of their own."""

from __future__ import annotations

from typing import Any

from megatron_epp.cost.blocks import ATTENTION, HEAD, INPUT, LAYER
from megatron_epp.plan import EppError
from megatron_epp.plan.reading import brief, number, printable

_KV = {
    "kv_bytes_per_token": "bytes_per_token",
    "kv_gradient_bytes_per_token": "gradient_bytes_per_token",
    "many_kv_gradient_bytes_per_token": "many_gradient_bytes_per_token",
    "kv_heads": "heads",
    "queries_per_key": "queries_per_key",
}
_TIMES = ("forward", "backward", "weight", "exchange", "recompute")
_SIZES = ("attended", "apart", "apart_attended", "weight", "full", "working", "first_mlp")
_LAYER = {"num_layers": "count"} | {name: name for name in (*_TIMES, *(f"{size}_bytes_per_token" for size in _SIZES))}
_LAYER |= {"layer_bytes_per_token": "bytes_per_token", "recomputed_layer_bytes_per_token": "input_bytes_per_token"}
_EXTRA = ("forward", "backward", "weight", "weight_bytes_per_token")
_ENDS = {f"extra_{name}": name for name in _EXTRA} | {"workspace_bytes": "workspace_bytes"}
_KEPT = ("extra_bytes_per_token", "head_bytes_per_token")
_KNOWN = {*_KV, *_LAYER, *_ENDS, *_KEPT, "half", "static"}
_NEEDED = {"num_layers", "forward", "backward", *(f"{name}_bytes_per_token" for name in ("layer", "recomputed_layer", "kv"))}


def of_version_1(body: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of version 2. Raises `EppError` if stages have other fields than version 1 knows, or too few."""
    stages = body.get("stages")
    if not isinstance(stages, list):
        return body
    each = [(stage, f"stages[{at}]", at == len(stages) - 1) for at, stage in enumerate(stages)]
    return body | {"stages": [stage_of(*entry) if isinstance(entry[0], dict) else entry[0] for entry in each]}


def stage_of(old: dict[str, Any], where: str, is_last: bool) -> dict[str, Any]:
    """Return the fields of a stage, of which `where` is the path in the file. Raises `EppError` if some are wrong.

    The embedding's and the head's were one: they become the head's if the stage is the last of the pipeline.
    """
    old = {name: value for name, value in old.items() if value is not None}
    for names, problem in ((old.keys() - _KNOWN, "unknown"), (_NEEDED - old.keys(), "missing")):
        if names:
            raise EppError(f"{where}.{printable(min(names))} is {problem}")
    layers, kv, ends = ({new: old[name] for name, new in names.items() if name in old} for names in (_LAYER, _KV, _ENDS))
    of_ends_bytes, of_head = (_bytes(old.get(name, 0.0), f"{where}.{name}") for name in _KEPT)
    half = old.get("half", {})
    if not isinstance(half, dict):
        raise EppError(f"{where}.half is {brief(half)}, which is not a JSON object")
    blocks = [layers | {"kind": LAYER, "kv": kv}]
    if kind := half.get("kind"):
        of_layer = {"working_bytes_per_token", "input_bytes_per_token" if kind == ATTENTION else "working_bytes_per_token"}
        more = {name: size for name, size in layers.items() if name in of_layer} | ({"kv": kv} if kind == ATTENTION else {})
        blocks.insert(kind == ATTENTION, half | more)
    of_ends = is_last and any(any(cost.values()) if isinstance(cost, dict) else cost for cost in ends.values())
    blocks.insert(0, {"kind": INPUT, "bytes_per_token": of_ends_bytes - of_head} | ({} if of_ends else ends))
    if of_head or of_ends:
        blocks.append({"kind": HEAD, "bytes_per_token": of_head} | (ends if of_ends else {}))
    return {"blocks": blocks} | ({"static": old["static"]} if "static" in old else {})


def _bytes(value: Any, where: str) -> float:
    try:
        return number(value, 0)
    except EppError as error:
        raise EppError(f"{where}: {error}") from None
