"""A kernel's proof is against torch's own attention: exact attention passes it, and a wrong kernel does not."""

from dataclasses import replace

import pytest

from megatron_epp.runtime.attention import kernels
from megatron_epp.runtime.tools.kernel_proofs import prove


def test_exact_attention_holds_in_every_type_with_grouped_and_with_own_key_heads():
    for kv_heads in (4, 2, 1):
        proofs = list(prove("cpu", 16, 4, kv_heads, 24))
        assert [one.dtype for one in proofs] == ["bfloat16", "float16", "float32"]
        assert all(one.holds and one.is_chosen for one in proofs)


@pytest.mark.parametrize("damage", ["output", "gradient", "error"])
def test_a_wrong_kernel_does_not_hold(monkeypatch, damage):
    exact = kernels.EXACT

    def forward(*inputs):
        out, saved = exact.forward(*inputs)
        if damage == "error":
            raise ValueError("of another version")
        return (out * 1.05 if damage == "output" else out), saved

    def backward(*inputs):
        dq, dk, dv = exact.backward(*inputs)
        return dq, (dk.roll(1, 0) if damage == "gradient" else dk), dv

    monkeypatch.setattr(kernels, "EXACT", replace(exact, forward=forward, backward=backward))
    proofs = list(prove("cpu", 16, 4, 4, 24))
    assert not any(one.holds for one in proofs)
    assert all((one.error or 0) > one.tolerance for one in proofs) == (damage != "error")
    assert ("of another version" in proofs[0].obstacle) == (damage == "error")
