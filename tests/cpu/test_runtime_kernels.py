"""Variable-length attention against dense attention in float64, segment by segment; proofs of kernels are against torch's."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_epp.plan import Chunk, Segment
from megatron_epp.runtime.attention.kernels import EXACT_ATTENTION
from megatron_epp.runtime.attention.kernels.base import add_sinks, sinks_gradient
from megatron_epp.runtime.attention.segments import SegmentTable, offsets_of
from megatron_epp.runtime.upload import Uploader
from megatron_epp.tools.cli.first_run import training
from megatron_epp.tools.cli.first_run.launch import PASSED
from tests.support.runtime.dense_attention import dense_attention, relative_difference
from tests.support.runtime.kernel_proofs import prove

SCALE = 0.3
CHUNKS = {
    "whole": ([(0, 0, 37)], 37),
    "first slice": ([(0, 0, 20)], 20),
    "later slice": ([(0, 20, 37)], 17),
    "packed": ([(0, 0, 5), (1, 0, 1), (2, 0, 9)], 15),
    "hybrid": ([(0, 11, 20), (1, 0, 4), (2, 0, 1)], 14),
    "hybrid, padded": ([(0, 11, 20), (1, 0, 4)], 16),
    "one token": ([(0, 0, 1)], 1),
    "one token after a prefix": ([(0, 300, 301)], 1),
    "one token after another": ([(0, 1, 2), (1, 0, 1), (2, 0, 1)], 4),
    "several blocks of a window, padded": ([(0, 300, 460), (1, 0, 1), (2, 0, 9)], 172),
}


def table_of(name):
    segments, padded_tokens = CHUNKS[name]
    return SegmentTable.build(Chunk(tuple(Segment(*s) for s in segments)), padded_tokens)


@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "window", "has_sinks"),
    [(4, 4, None, False), (4, 2, None, True), (3, 1, None, False), (3, 1, 1, False), (4, 2, 7, True), (4, 4, 200, False)],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("name", CHUNKS)
def test_forward_and_backward_equal_dense_attention(name, dtype, tolerance, query_heads, kv_heads, window, has_sinks):
    table = replace(table_of(name), window=window)
    torch.manual_seed(0)
    q, grad = (torch.randn(table.num_tokens, query_heads, 8).to(dtype) for _ in range(2))
    k, v = (torch.randn(table.key_starts[-1], kv_heads, 8).to(dtype) for _ in range(2))
    sinks = torch.randn(query_heads).to(dtype)
    out, saved = EXACT_ATTENTION.forward(q, k, v, table, SCALE)
    if has_sinks:
        add_sinks(out, EXACT_ATTENTION.log_sums(saved), sinks)
    results = [out, *EXACT_ATTENTION.backward(grad, q, k, v, out, saved, table, SCALE)]
    assert [x.dtype for x in results] == [dtype] * 4
    if has_sinks:
        results.append(sinks_gradient(grad, out, EXACT_ATTENTION.log_sums(saved), sinks))
    exact = [x.double().requires_grad_() for x in (q, k, v, sinks)]
    parts = []
    for i in range(len(table.segments)):
        queries, keys = slice(*table.query_starts[i : i + 2]), slice(*table.key_starts[i : i + 2])
        of_segment = exact[0][queries], exact[1][keys], exact[2][keys]
        parts.append(dense_attention(*of_segment, SCALE, window, exact[3] if has_sinks else None))
    expected = torch.cat(parts)
    expected.backward(grad.double())
    # Of one token the other gradients are zero: what rounding leaves is small next to that of values.
    of_values = exact[2].grad.norm()
    for actual, wanted in zip(results, (expected, *(x.grad for x in exact)), strict=False):
        floor = 1e-2 if wanted.any() else of_values
        assert relative_difference(actual, wanted, floor) < tolerance


def test_the_table_counts_a_slices_prefix_among_its_keys_and_padding_as_a_segment_of_its_own():
    table = table_of("hybrid, padded")
    assert table.query_starts == (0, 9, 13, 16)
    assert table.key_starts == (0, 20, 24, 27)
    assert table.segments[-1].num_tokens == 3
    assert (table.max_query, table.max_key) == (9, 20)


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_ranks_that_share_a_chunks_tokens_have_its_positions_in_order(parts):
    table = table_of("hybrid, padded")
    own = table.num_tokens // parts
    pieces = [table.part([slice(index * own, (index + 1) * own)]) for index in range(parts)]
    assert [sum(piece.num_tokens for piece in own) for own in pieces] == [16 // parts] * parts

    def positions(segments):
        return [(s.sequence, token) for s in segments for token in range(s.start, s.end)]

    everything = positions(table.segments)
    assert positions(piece for own in pieces for piece in own) == everything
    assert positions(table.part([slice(12, 14), slice(2, 7)])) == everything[12:14] + everything[2:7]


def test_offsets_are_made_once_per_device():
    table = table_of("hybrid, padded")
    queries, keys = table.cu_seqlens(torch.device("cpu"))
    assert (queries.tolist(), keys.tolist()) == ([0, 9, 13, 16], [0, 20, 24, 27])
    assert queries.dtype == keys.dtype == torch.int32
    assert table.cu_seqlens(torch.device("cpu"))[0].data_ptr() == queries.data_ptr()


def test_offsets_that_were_uploaded_are_not_copied_again():
    table, cpu = table_of("hybrid, padded"), torch.device("cpu")
    uploaded = Uploader(cpu).begin([offsets_of(table)])
    table.take(cpu, *uploaded.tensors)
    queries, keys = table.cu_seqlens(cpu)
    assert (queries.tolist(), keys.tolist()) == ([0, 9, 13, 16], [0, 20, 24, 27])
    assert {each.untyped_storage().data_ptr() for each in (queries, keys)} == {uploaded.buffer.data_ptr()}
    assert all(each.data_ptr() % 16 == 0 for each in (queries, keys))


def test_offsets_within_a_window_need_no_other_copy_from_the_host():
    table, device = table_of("hybrid"), torch.device("cpu")
    table.cu_seqlens(device)
    for window in (3, 11, 40):
        within = table.within(window)
        assert within is table.within(window)
        assert within.key_starts[1] == min(11, window) + 9
        torch.testing.assert_close(within._on_device[device], offsets_of(within), rtol=0, atol=0)
        assert table.cu_seqlens(device)[1].tolist() == [0, 20, 24, 25]


def test_offsets_within_a_window_are_right_for_several_segments_with_prefixes():
    table = SegmentTable.build(Chunk((Segment(0, 11, 20), Segment(1, 0, 4), Segment(2, 2, 3), Segment(3, 7, 9))), 18)
    table.cu_seqlens(torch.device("cpu"))
    within = table.within(5)
    assert within.key_starts == (0, 14, 18, 21, 28, 30)
    torch.testing.assert_close(within._on_device[torch.device("cpu")], offsets_of(within), rtol=0, atol=0)


def test_strided_queries_keys_and_values_are_read_rightly():
    table = table_of("packed")
    torch.manual_seed(0)
    strided = torch.randn(15, 3, 2, 8, dtype=torch.float64).unbind(1)
    dense = [x.contiguous() for x in strided]
    grad = torch.randn(15, 2, 8, dtype=torch.float64)
    out, saved = EXACT_ATTENTION.forward(*strided, table, SCALE)
    grads = EXACT_ATTENTION.backward(grad.transpose(0, 1).contiguous().transpose(0, 1), *strided, out, saved, table, SCALE)
    same_out, same_saved = EXACT_ATTENTION.forward(*dense, table, SCALE)
    same_grads = EXACT_ATTENTION.backward(grad, *dense, same_out, same_saved, table, SCALE)
    for actual, wanted in zip((out, *saved, *grads), (same_out, *same_saved, *same_grads), strict=True):
        torch.testing.assert_close(actual, wanted)


def test_exact_attention_holds_in_every_type_with_grouped_and_with_own_key_heads():
    for kv_heads in (4, 2, 1):
        proofs = list(prove("cpu", 16, 4, kv_heads, 24))
        assert [one.dtype for one in proofs] == ["bfloat16", "float16", "float32"]
        assert all(one.holds and one.is_chosen for one in proofs)


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
