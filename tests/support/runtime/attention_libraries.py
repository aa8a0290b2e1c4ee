"""Stand-ins for the libraries of attention kernels: functions that take what a release's take, computed in exact blocks.

Like the libraries they know a chunk by its offsets alone, and skip segments without queries.
"""

import types

import torch

from megatron_epp.plan import Segment
from megatron_epp.runtime.attention.kernels import EXACT_ATTENTION, flash, transformer_engine
from megatron_epp.runtime.attention.segments import SegmentTable
from tests.support.runtime.signatures import SIGNATURES, signature

LIBRARIES = {
    "flash-attn": (flash.FLASH_ATTN, flash, "_flash_attn"),
    "flash-attn-3": (flash.FLASH_ATTN_3, flash, "_flash_attn_3"),
    "transformer-engine": (transformer_engine.TRANSFORMER_ENGINE, transformer_engine, "_fused"),
}
"""The kernel of each library, and the function that imports it."""
TYPES = {"kFloat32": torch.float32, "kBFloat16": torch.bfloat16}
LAYOUT = "thd_thd_thd"
MASKS = {
    "causal": (False, True), "is_causal": (False, True), "bottom_right_diagonal": (False, True),
    "attn_mask_type": ("padding", "padding_causal_bottom_right"),
}  # fmt: skip
"""Arguments that every call must give where the release has them, without the causal mask and with it."""
EXPECTED = {
    "dropout": 0.0, "dropout_p": 0.0, "qkv_layout": LAYOUT, "dqkv_layout": LAYOUT, "o_format": "thd", "do_format": "thd",
}  # fmt: skip
"""Arguments that are the same in all calls, likewise."""


def releases_of(library):
    return [release for releases, _ in next(iter(SIGNATURES[library].values())) for release in releases]


def install(monkeypatch, library, release="main"):
    """Put a release in the place of a library; return its kernel, and the calls of its functions, by names of arguments."""
    module, calls = types.SimpleNamespace(FusedAttnBackend={"F16_arbitrary_seqlen": 1}, TORCH_DType=TYPES), []
    for name, rows in SIGNATURES[library].items():
        if "." not in name:
            taken = signature(next(names for releases, names in rows if release in releases))
            setattr(module, name, _function(taken, _backward if {"dq", "d_o"} & taken.parameters.keys() else _forward, calls))
    kernel, where, imports = LIBRARIES[library]
    monkeypatch.setattr(where, imports, lambda: module)
    return kernel, calls


def _function(taken, compute, calls):
    def function(*args, **named):
        given = taken.bind(*args, **named).arguments
        expected = {name: value for name, value in EXPECTED.items() if name in taken.parameters}
        assert {name: given.get(name) for name in expected} == expected
        assert MASKS.keys() & taken.parameters.keys() <= given.keys()
        calls.append(given)
        return compute(given)

    function.__signature__ = taken
    return function


def lengths_of(given):
    """Offsets of queries and keys, and the largest numbers of both."""
    cu_k, most_k = (_first(given, f"{name}_k", f"{name}_kv") for name in ("cu_seqlens", "max_seqlen"))
    return given["cu_seqlens_q"].tolist(), cu_k.tolist(), given["max_seqlen_q"], most_k


def _first(given, *names):
    return next(given[name] for name in names if name in given)


def _table(given):
    """The segments between offsets that have queries, and the window by its left side, as libraries take it."""
    cu_q, cu_k, *_ = lengths_of(given)
    rows = [(q, end - q, k, stop - k) for q, end, k, stop in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False) if end > q]
    segments = tuple(Segment(number, keys - n, keys) for number, (_, n, _, keys) in enumerate(rows))
    starts = ((*(row[at] for row in rows), cu[-1]) for at, cu in ((0, cu_q), (2, cu_k)))
    (is_causal,) = {masks.index(given[name]) for name, masks in MASKS.items() if name in given}
    window, right = given.get("window_size") or (given.get("window_size_left", -1), is_causal - 1)
    assert right == is_causal - 1
    return SegmentTable(segments, *starts, None if window < 0 else window, bool(is_causal))


def _inputs(given):
    return *(given[name] for name in "qkv"), _table(given), _first(given, "softmax_scale", "attn_scale")


def _forward(given):
    if "rng_gen" in given:  # of which a forward draws without dropout, too
        torch.rand(1, generator=given["rng_gen"])
    out, (lse,) = EXACT_ATTENTION.forward(*_inputs(given))
    return (out, [lse.t().unsqueeze(-1), torch.zeros(2)]) if "fake_dtype" in given else (out, lse, None, None)


def _backward(given):
    (q, k, v, table, scale), grad, out = _inputs(given), _first(given, "dout", "d_o"), _first(given, "out", "o")
    lse = given["aux_ctx_tensors"][0][..., 0].t() if "aux_ctx_tensors" in given else given["softmax_lse"]
    results = EXACT_ATTENTION.backward(grad, q, k, v, out, (lse,), table, scale)
    if "fake_dtype" in given:
        assert all(x.is_contiguous() for x in (q, k, v, out, grad)), "it sees addresses only"
        assert TYPES.get(given.get("dqkv_dtype"), q.dtype) == given["fake_dtype"] == q.dtype
        return *results, None
    for target, value in zip((given["dq"], given["dk"], given["dv"]), results, strict=True):
        target.copy_(value)
    return torch.empty(0)
