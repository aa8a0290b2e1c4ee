"""The loss by blocks of tokens, in plain torch and by the kernel that is chosen and proves itself. The library is played."""

import importlib.util
import os
import re
import sys
import types
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional

from megatron_epp.plan.sizing import loss_workspace_bytes
from megatron_epp.runtime.autograd.saved import SavedTensors
from megatron_epp.runtime.loss import kernels as loss_kernels
from megatron_epp.runtime.loss import token_blocks
from megatron_epp.runtime.loss.kernels import LIGER, LossCase
from megatron_epp.runtime.loss.token_blocks import Head, block_losses, block_values
from tests.support.calls import run_python
from tests.support.package_index import release
from tests.support.runtime.allocations import peak_bytes_of
from tests.support.runtime.block_loss_runs import (
    ENTRIES,
    WIDTH,
    bf16_errors,
    exact_kernel,
    losses_and_gradients,
    plain,
    problem,
    shared_values,
)
from tests.support.runtime.rank_processes import ranks_fixture

ON_GPU = LossCase("cuda", torch.bfloat16, 1000)
WEIGHTS = {"masked": [0.0, 1.0], "of any size": [0.3, 0.0, -1.7, 2.9, 1.0]}


@pytest.fixture
def played(monkeypatch):
    """A kernel in Liger's place, without obstacles, and its proof made on this machine."""

    def play(kernel):
        loss_kernels.explain.cache_clear()
        monkeypatch.setattr(loss_kernels, "LIGER", replace(kernel, obstacle=lambda case: ""))
        here = loss_kernels.errors
        monkeypatch.setattr(loss_kernels, "errors", lambda kernel, case: here(kernel, case._replace(device="cpu")))

    yield play
    loss_kernels.explain.cache_clear()


def of_tokens(kind, tokens):
    return torch.tensor(WEIGHTS[kind]).repeat(tokens)[:tokens]


def test_a_proof_that_finds_no_memory_says_nothing_of_the_kernel(played):
    played(exact_kernel())
    case, no_memory = LossCase("cpu", torch.float32, 50), torch.OutOfMemoryError("CUDA out of memory.")
    with patch.object(loss_kernels, "errors", side_effect=no_memory), pytest.raises(torch.OutOfMemoryError):
        loss_kernels.explain(case)
    assert loss_kernels.explain(case) == (loss_kernels.LIGER, "")


@pytest.mark.parametrize("rows", [None, torch.tensor([0, 3, 4, 6, 9, 10]), torch.tensor([4])], ids=["all", "some", "one"])
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("block_tokens", [1, 4, 11])
def test_with_a_kernel_losses_and_gradients_are_those_of_plain_cross_entropy(played, kind, block_tokens, rows):
    played(exact_kernel())
    x, weight, labels = problem(tokens=11)
    assert loss_kernels.explain(LossCase("cpu", torch.float32, len(weight))) == (loss_kernels.LIGER, "")
    counted = torch.ones(11) if rows is None else torch.zeros(11).index_fill_(0, rows, 1.0)
    grad = of_tokens(kind, 11)
    expected = losses_and_gradients(plain(x.double(), weight.double(), labels) * counted, grad.double(), (x, weight))
    actual = losses_and_gradients(block_losses(x, x, weight, labels, Head(block_tokens, rows=rows)), grad, (x, weight))
    for wanted, tensor in zip(expected, actual, strict=True):
        torch.testing.assert_close(tensor.double(), wanted.double(), rtol=1e-5, atol=1e-6)
    assert not actual[1][counted == 0].any()


def test_a_kernel_keeps_nothing_of_a_token_but_its_label(played):
    played(exact_kernel())
    x, weight, labels = problem(tokens=11)
    *kept, last = block_losses(x, x, weight, labels, Head(4)).grad_fn.next_functions[0][0].saved_tensors
    assert ([t.data_ptr() for t in kept], last) == ([t.data_ptr() for t in (x, weight, labels)], None)


@pytest.mark.parametrize(("kind", "coarser"), [("masked", 1.0), ("of any size", 1.15)])
def test_in_bf16_a_kernel_rounds_no_more_than_plain_torch_where_tokens_count_or_do_not(played, kind, coarser):
    """With other weights an input's gradient is rounded three times and not twice, each time as likely up as down."""
    grad = of_tokens(kind, 512)

    def errors():
        return bf16_errors(lambda x, *others: block_losses(x, x, *others, Head(64)), grad, entries=512)[1:]

    without = errors()
    played(exact_kernel())
    assert all(error <= coarser * own for error, own in zip(errors(), without, strict=True))


def test_with_a_kernel_logits_and_their_gradient_take_their_own_size(monkeypatch):
    tokens, entries, width, block = 256, 2048, 16, 32
    x, weight, labels = problem(tokens, entries, width)
    x, weight = (t.detach().bfloat16().requires_grad_() for t in (x, weight))
    grad = of_tokens("masked", tokens)
    beside = 64 * tokens + 2 * tokens * width  # a few numbers of every token, and the input's gradient
    in_place = exact_kernel(lambda logits, labels: torch.zeros(len(logits)), lambda logits, labels: logits.zero_())
    monkeypatch.setattr(token_blocks, "explain", lambda case: (in_place, ""))
    peak = peak_bytes_of(lambda: block_losses(x, x, weight, labels, Head(block)).backward(grad))
    workspace = loss_workspace_bytes(block, entries, width, 2, in_place=True)
    assert 0.7 * workspace < peak < 1.02 * workspace + beside
    assert workspace < loss_workspace_bytes(block, entries, width, 2)


def rounded_losses(logits, labels):
    return exact_kernel().losses(logits, labels).bfloat16().float()


def rounded_twice(logits, labels):
    """As one that subtracts 1 from what it has stored."""
    gradient = logits.float().softmax(1).to(logits.dtype)
    return logits.copy_(gradient.scatter_add_(1, labels[:, None], -torch.ones_like(gradient[:, :1])))


def failing(logits, labels):
    raise RuntimeError("no kernel image")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"losses": rounded_losses}, "its losses are 2.* from exact ones, where 1e-05 may be"),
        ({"gradient": rounded_twice}, "its gradient is .* from the exact one, where 4.3e-03 may be"),
        ({"gradient": lambda logits, labels: logits}, "its gradient is .* from the exact one"),
        ({"losses": failing}, r"it fails \(RuntimeError: no kernel image\)"),
    ],
)
def test_a_kernel_that_is_coarser_wrong_or_fails_is_passed_over_and_says_so(played, caplog, changed, said):
    played(replace(exact_kernel(), **changed))
    kernel, why = loss_kernels.explain(ON_GPU)
    assert kernel is None
    assert re.match(f"played: {said}", why)
    (warning,) = (record.getMessage() for record in caplog.records)
    assert warning == f"played is not used here: {why.removeprefix('played: ')}. Losses take more memory, which plans count"


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (ON_GPU._replace(device="cpu"), "it runs on GPUs"),
        (ON_GPU._replace(is_shared=True), "vocabulary that ranks share"),
        (ON_GPU._replace(dtype=torch.float16), "range of fp16"),
        (ON_GPU._replace(dtype=torch.float32), "for bf16"),
    ],
)
def test_liger_names_what_it_cannot_do(case, reason):
    assert reason in LIGER.obstacle(case)
    assert loss_kernels.explain(case)[0] is None


class Recorded:
    def __init__(self, names):
        self.arg_names, self.launches = names, []

    def __getitem__(self, grid):
        return lambda **given: self.launches.append((grid, given))


OLD = ["X_ptr", "X_stride", "Y_ptr", "Y_stride", "loss_ptr", "loss_stride", "n_cols", "ignore_index", "BLOCK_SIZE"]
NEW = [*OLD, "HAS_GRADIENTS"]


@pytest.mark.parametrize(
    ("names", "said"), [(OLD, "older than 0.6.3"), ([*NEW, "top_k", "margin"], "not known here: top_k, margin"), (NEW, "")]
)
def test_releases_of_liger_are_told_by_what_their_kernel_takes(monkeypatch, names, said):
    monkeypatch.setattr(loss_kernels, "_liger", lambda: Recorded(names))
    found = LIGER.obstacle(ON_GPU)
    assert said in found if said else found == ""


def test_a_liger_that_is_not_installed_or_has_no_such_kernel_is_named_with_what_to_install(monkeypatch):
    for name in ("liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for module in (None, types.ModuleType("cross_entropy")):
        monkeypatch.setitem(sys.modules, "liger_kernel.ops.cross_entropy", module)
        assert "pip install 'megatron-epp[liger]'" in LIGER.obstacle(ON_GPU)


def test_the_kernel_gets_what_it_takes_and_no_more(monkeypatch):
    kernel = Recorded(NEW)
    monkeypatch.setattr(loss_kernels, "_liger", lambda: kernel)
    logits, labels = torch.zeros(3, 50000), torch.zeros(3, dtype=torch.long)
    assert LIGER.losses(logits, labels).dtype == torch.float32
    assert LIGER.gradient(logits, labels) is logits
    (grid, forward), (_, backward) = kernel.launches
    assert grid == (3,)
    assert set(forward) == {*NEW, "num_warps"}
    assert (forward["n_cols"], forward["X_stride"], forward["BLOCK_SIZE"]) == (50000, 50000, 32768)
    assert (forward["HAS_GRADIENTS"], backward["HAS_GRADIENTS"]) == (False, True)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which torch for Linux on PyPI brings")
@pytest.mark.parametrize("version", [pytest.param("0.6.3", marks=pytest.mark.slow), "0.8.5"])  # the older one's arguments
def test_ligers_own_kernel_gives_exact_losses_and_gradients_in_tritons_interpreter(version):
    """Numbers of the real kernel without a GPU, in a process of its own: Triton asks for its interpreter at its import."""
    path = os.pathsep.join([str(release("liger-kernel", version, Path(sys.prefix) / "liger-releases")), *sys.path])
    program = "import runpy; runpy.run_module('tests.support.runtime.liger_worker', run_name='__main__')"
    finished = run_python(program, TRITON_INTERPRET="1", PYTHONPATH=path)
    assert finished.returncode == 0, finished.stderr


TOKENS = 11
MASK = (torch.arange(TOKENS) % 3 != 1).double()
SOME = pytest.mark.parametrize("rows", [None, torch.tensor([0, 2, 3, 7]), torch.tensor([10])], ids=["all", "some", "the last"])


def by_blocks(x, weight, labels, block_tokens=4):
    return block_losses(x, x, weight, labels, Head(block_tokens))


def counted_in(rows):
    """The loss's gradient of every token: masked, or 1 for the tokens that count."""
    return MASK if rows is None else torch.zeros_like(MASK).index_fill_(0, rows, 1.0)


def several(labels):
    """Three entries of every token after its label: the label again, another twice."""
    others = (7 * torch.arange(TOKENS) + 3) % ENTRIES
    return torch.stack([labels, labels, others, others], dim=1)


def plain_values(x, weight, entries, has_entropy):
    logprobs = functional.log_softmax(x @ weight.t(), dim=1)
    entropy = -(logprobs.exp() * logprobs).sum(1)[None]
    return torch.cat([-logprobs.gather(1, entries).t(), *[entropy] * has_entropy])


FACTORS = torch.tensor([[1.0], [0.7], [-0.4], [1.3], [-0.3]], dtype=torch.float64)
ENTRIES_OF = {"the label": lambda labels: labels[:, None], "several": several}


@pytest.mark.parametrize("has_entropy", [False, True], ids=["entries", "entries and entropy"])
@SOME
@pytest.mark.parametrize("block_tokens", [1, 3, TOKENS, 100])
@pytest.mark.parametrize("entries_of", ENTRIES_OF)
def test_values_of_a_token_and_their_gradients_are_those_of_the_whole_distribution(entries_of, block_tokens, rows, has_entropy):
    x, weight, labels = problem(TOKENS, dtype=torch.float64)
    entries, counted = ENTRIES_OF[entries_of](labels), counted_in(rows)
    expected = plain_values(x, weight, entries, has_entropy) * counted
    actual = block_values(x, x, weight, entries, Head(block_tokens, rows=rows, has_entropy=has_entropy)) * counted
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)
    wanted = torch.autograd.grad((FACTORS[: len(expected)] * expected).sum(), (x, weight))
    grads = torch.autograd.grad((FACTORS[: len(expected)] * actual).sum(), (x, weight))
    for grad, one in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, one, rtol=1e-11, atol=1e-13)


def test_logits_that_would_overflow_do_not():
    x, weight, labels = problem(TOKENS)
    x = (x.detach() * 1e4).requires_grad_()
    expected, actual = (losses_and_gradients(of(x, weight, labels), MASK.float(), (x, weight)) for of in (plain, by_blocks))
    for wanted, tensor in zip(expected, actual, strict=True):
        torch.testing.assert_close(tensor, wanted)


def test_in_bf16_many_blocks_round_hardly_more_than_one():
    """Parts of the weight's gradient are rounded, their sum is not: a sum in bf16 would be four times as far off."""
    mask = (torch.arange(512) % 3 != 1).float()
    ordinary = bf16_errors(plain, mask, ENTRIES)
    blocks = bf16_errors(lambda *inputs: by_blocks(*inputs, block_tokens=8), mask, ENTRIES)
    assert all(mine < 1.3 * theirs for mine, theirs in zip(blocks, ordinary, strict=True)), (blocks, ordinary)


def test_a_weight_or_an_input_without_gradient_gets_none():
    x, weight, labels = problem(TOKENS, dtype=torch.float64)
    (grad,) = losses_and_gradients(by_blocks(x, weight.detach(), labels), MASK, (x,))[1:]
    (expected,) = losses_and_gradients(plain(x, weight, labels), MASK, (x,))[1:]
    torch.testing.assert_close(grad, expected)
    with torch.no_grad():
        assert torch.equal(by_blocks(x, weight, labels), by_blocks(*(t.detach() for t in (x, weight)), labels))


def test_kept_are_the_input_and_two_numbers_of_every_token():
    x, weight, labels = problem(TOKENS)
    with SavedTensors([weight]) as meter:
        losses = by_blocks(x, weight, labels)
        assert meter.live_bytes == TOKENS * (4 * WIDTH + 8 + 4)  # a label, as it came, is eight bytes
        losses.backward(MASK.float())
        assert meter.live_bytes == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_workspace_is_what_there_is_beside_inputs_and_their_gradients(dtype):
    tokens, entries, width, block = 256, 2048, 16, 32
    x, weight, labels = problem(tokens, entries, width, dtype)
    mask = (torch.arange(tokens) % 3 != 1).float()
    workspace = loss_workspace_bytes(block, entries, width, dtype.itemsize)
    beside = 64 * tokens + tokens * width * dtype.itemsize  # a few numbers of every token, and the input's gradient
    for run in (lambda: by_blocks(x, weight, labels, block), lambda: by_blocks(x, weight, labels, block).backward(mask)):
        assert 0.5 * workspace < peak_bytes_of(run) < 1.02 * workspace + beside
        x.grad = weight.grad = None
    assert peak_bytes_of(lambda: plain(x, weight, labels).backward(mask)) > 3 * (workspace + beside)


ranks = ranks_fixture(2)


@pytest.mark.parametrize("has_entropy", [False, True], ids=["entries", "entries and entropy"])
@SOME
@pytest.mark.parametrize("entries_of", ENTRIES_OF)
def test_ranks_that_share_the_vocabulary_get_the_same(ranks, entries_of, rows, has_entropy):
    x, weight, labels = problem(TOKENS, dtype=torch.float64)
    entries, counted = ENTRIES_OF[entries_of](labels), counted_in(rows)
    expected = plain_values(x, weight, entries, has_entropy)
    grad = FACTORS[: len(expected)] * counted
    values, grad_x, grad_weight = losses_and_gradients(expected, grad, (x, weight))
    results = ranks.run(shared_values, x.detach(), weight.detach(), entries, grad, rows, has_entropy)
    for own, _, _ in results:
        torch.testing.assert_close(own, values if rows is None else values * counted, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(sum(part for _, part, _ in results), grad_x, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(torch.cat([part for _, _, part in results]), grad_weight, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("kernel", [None, exact_kernel()], ids=["torch", "kernel"])
def test_blocks_may_add_to_a_main_gradient_themselves_and_read_only_tokens_that_count(kernel, monkeypatch):
    monkeypatch.setattr(token_blocks, "explain", lambda case: (kernel, ""))
    x, weight, labels = problem(TOKENS)
    rows, grad = torch.tensor([0, 3, 4, 6, 9, 10]), torch.linspace(-1.7, 2.9, TOKENS)
    counted = torch.zeros_like(grad).index_fill_(0, rows, 1.0)
    (expected,) = losses_and_gradients(plain(x, weight, labels), grad * counted, (weight,))[1:]
    unread = torch.where(counted[:, None] > 0, x.detach(), torch.nan)
    main, num_tokens, stand_in = torch.zeros_like(weight), [], torch.full_like(weight, 7.0)

    def accumulate(part, of_logits):
        num_tokens.append(len(part))
        main.add_(of_logits.t() @ part)
        return stand_in

    losses = block_losses(unread, unread, weight, labels, Head(3, accumulate=accumulate, rows=rows))
    assert torch.equal(losses_and_gradients(losses, grad, (weight,))[1], stand_in)
    torch.testing.assert_close(main, expected)
    assert (sum(num_tokens), max(num_tokens)) == (len(rows), 3)
