"""A kernel's proof is against torch's own attention: exact attention passes it, and a wrong kernel does not."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_epp.cli.first_run import training
from megatron_epp.cli.first_run.outcome import PASSED
from megatron_epp.runtime.attention import kernels
from megatron_epp.runtime.tools.kernel_proofs import prove


def test_exact_attention_holds_in_every_type_with_grouped_and_with_own_key_heads():
    for kv_heads in (4, 2, 1):
        proofs = list(prove("cpu", 16, 4, kv_heads, 24))
        assert [one.dtype for one in proofs] == ["bfloat16", "float16", "float32"]
        assert all(one.holds and one.is_chosen for one in proofs)


@pytest.mark.parametrize("damage", ["output", "gradient", "error"])
def test_a_wrong_kernel_does_not_hold(monkeypatch, damage):
    exact = kernels.EXACT_ATTENTION

    def forward(*inputs):
        out, saved = exact.forward(*inputs)
        if damage == "error":
            raise ValueError("of another version")
        return (out * 1.05 if damage == "output" else out), saved

    def backward(*inputs):
        dq, dk, dv = exact.backward(*inputs)
        return dq, (dk.roll(1, 0) if damage == "gradient" else dk), dv

    monkeypatch.setattr(kernels, "EXACT_ATTENTION", replace(exact, forward=forward, backward=backward))
    proofs = list(prove("cpu", 16, 4, 4, 24))
    assert not any(one.holds for one in proofs)
    assert all((one.error or 0) > one.tolerance for one in proofs) == (damage != "error")
    assert ("of another version" in proofs[0].obstacle) == (damage == "error")


def test_kernels_are_proven_without_tf32_and_the_setting_is_as_before(monkeypatch):
    """NVIDIA's containers begin with "high"."""
    exact, seen = kernels.EXACT_ATTENTION, []

    def forward(*inputs):
        seen.append(torch.get_float32_matmul_precision())
        return exact.forward(*inputs)

    monkeypatch.setattr(kernels, "EXACT_ATTENTION", replace(exact, forward=forward))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert all(one.holds for one in prove("cpu", 16, 4, 4, 24))
        assert set(seen) == {"highest"}
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_runs_in_fp32_are_without_tf32(monkeypatch, tmp_path):
    runs = {}

    def train(folder, ranks, settings, timeout_s, environment):
        runs[folder.name] = dict(environment)
        return SimpleNamespace(losses=[1.0])

    monkeypatch.setattr(training, "train", train)
    monkeypatch.setattr(training, "tiny_gpt", lambda **settings: {"bf16": True})
    monkeypatch.setattr(training, "_documents", lambda *_: "documents")
    assert training.parity(SimpleNamespace(folder=tmp_path, is_reduced=True)).status == PASSED
    without = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0"}
    assert runs == {"stock": {}, "elastic": {}, "stock-in-fp32": without}
