"""The classes of DeepEP (with HybridEP) that Megatron's flex dispatcher calls, on gloo: its kernels run on GPUs only.

They take what the releases' own take, which is recorded (`scripts/write_signatures.py`), and keep their rules. A dispatch has a
handle of its own, with which its chunk's combine and the two exchanges of its backward run once each. A buffer has one size: it
refuses what is larger, where HybridEP's would grow by a collective. All ranks give HybridEP equally many tokens.

`installed` is a context in which Megatron finds them. Imports Megatron.
"""

import functools
import importlib
import sys
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from tests.support.runtime.signatures import SIGNATURES, signature

_MODULES = ("deep_ep", "deep_ep.utils")
_IMPORTED = ("fused_dispatch", "fused_combine", "set_deepep_num_sms", "hybrid_ep_dispatch", "hybrid_ep_combine")
"""What Megatron's dispatchers import of the module that imports DeepEP."""

_ALIGNMENT = 4
"""Tokens of which exchanges by HybridEP have a multiple: 64 for its kernels, with which all chunks of tests would be alike."""
_MEASURED = 4
"""Tokens of the chunk whose bytes are measured: its buffer is smaller than that of any plan."""


def as_recorded(library):
    """Return a decorator of methods, whose calls must be ones that every recorded release of a library takes."""

    def decorate(method):
        known = [signature(names) for _, names in SIGNATURES[library][method.__qualname__]]

        @functools.wraps(method)
        def call(self, *args, **named):
            *_, bound = (own.bind(self, *args, **named) for own in known)
            return method(**bound.arguments)

        return call

    return decorate


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes, num_ranks):
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes, num_ranks):
        return 0


class Handle(SimpleNamespace):
    def use(self, buffer, purpose):
        """Note an exchange by the handle: one of each kind, by the buffer that made it."""
        assert self.buffer is buffer, "the handle is of another buffer"
        assert purpose not in self.used, f"a second {purpose} with one handle"
        self.used.add(purpose)


class Buffer:
    num_sms = 20

    @as_recorded("deep-ep")
    def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0, **_):
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes
        _assert_equal((num_nvl_bytes, num_rdma_bytes), group)

    @staticmethod
    def set_num_sms(new_num_sms):
        assert new_num_sms % 2 == 0
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks):
        return Config()

    get_combine_config = get_dispatch_config

    @as_recorded("deep-ep")
    def get_dispatch_layout(self, topk_idx, num_experts, **_):
        """Return what ranks and experts the tokens are for; `topk_idx` is ``[tokens, chosen]``."""
        assert topk_idx.dtype == torch.int64
        ranks, own = self.group.size(), num_experts // self.group.size()
        is_for = torch.nn.functional.one_hot(topk_idx, num_experts).sum(1)
        in_rank = is_for.view(-1, ranks, own).sum(-1) > 0
        return in_rank.sum(0).int(), None, is_for.sum(0).int(), in_rank, None

    @as_recorded("deep-ep")
    def dispatch(self, x, handle=None, topk_idx=None, topk_weights=None, is_token_in_rank=None, num_tokens_per_expert=(), **_):
        """Send ``[tokens, hidden]`` to ranks: a token once to each that has one of its experts."""
        self._check(x)
        if handle is not None:
            assert topk_idx is None
            handle.use(self, "dispatch of gradients")
            return self._there(x, handle), None, None, None, None, EventOverlap()
        assert topk_weights.dtype == torch.float32
        rank, own = self.group.rank(), len(num_tokens_per_expert) // self.group.size()
        sent = is_token_in_rank.sum(0)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        rows = is_token_in_rank.t().nonzero()[:, 1]
        handle = Handle(buffer=self, used=set(), rows=rows, sent=sent.tolist(), received=received.tolist(), num_tokens=len(x))
        index = self._there(topk_idx, handle) - rank * own
        is_own = (index >= 0) & (index < own)
        weights = self._there(topk_weights, handle).masked_fill(~is_own, 0)
        counts = torch.bincount(index[is_own], minlength=own).tolist()
        return self._there(x, handle), index.masked_fill(~is_own, -1), weights, counts, handle, EventOverlap()

    @as_recorded("deep-ep")
    def combine(self, x, handle, topk_weights=None, **_):
        """Add up ``[received tokens, hidden]`` on the ranks where the tokens came from."""
        self._check(x)
        assert len(x) == sum(handle.received), "the handle is of another dispatch"
        handle.use(self, "combine" if topk_weights is None else "combine of gradients")
        return self._back(x, handle), (None if topk_weights is None else self._back(topk_weights, handle)), EventOverlap()

    def _check(self, x):
        assert x.is_contiguous()
        assert x.shape[1] * max(x.element_size(), 2) * self.group.size() <= self.num_nvl_bytes, "the buffer is too small"

    def _there(self, x, handle):
        assert len(x) == handle.num_tokens, "the handle is of another dispatch"
        out = x.new_empty(sum(handle.received), *x.shape[1:])
        dist.all_to_all_single(out, x[handle.rows], handle.received, handle.sent, group=self.group)
        return out

    def _back(self, x, handle):
        back = x.new_empty(sum(handle.sent), *x.shape[1:])
        dist.all_to_all_single(back, x.contiguous(), handle.sent, handle.received, group=self.group)
        return x.new_zeros(handle.num_tokens, *x.shape[1:]).index_add_(0, handle.rows, back)


class HybridEPBuffer:
    @as_recorded("hybrid-ep")
    def __init__(self, group, hidden_dim, max_num_of_tokens_per_rank, num_local_experts, **_):
        self.group, self.hidden_dim, self.num_local_experts = group, hidden_dim, num_local_experts
        self.most = max_num_of_tokens_per_rank
        _assert_equal(self.most, group)

    @as_recorded("hybrid-ep")
    def dispatch_with_permute(self, hidden, routing_map=None, probs=None, handle=None, num_permuted_tokens=None, **_):
        """Send ``[tokens, hidden]`` to the ranks of their experts, a copy for each of these, in the order of experts."""
        _assert_equal(len(hidden), self.group)
        assert len(hidden) <= self.most, f"{len(hidden)} tokens are more than the buffer's {self.most}"
        assert hidden.shape[1] == self.hidden_dim
        everything = _gathered(hidden, self.group).flatten(0, 1)
        if handle is not None:
            handle.use(self, "dispatch of gradients")
            assert handle.num_tokens == len(hidden), "the handle is of another dispatch"
            assert num_permuted_tokens == len(handle.rows)
            return everything[handle.rows], None, None, None, handle
        assert len(routing_map) == len(hidden)
        own = slice(self.group.rank() * self.num_local_experts, (self.group.rank() + 1) * self.num_local_experts)
        experts, rows = _gathered(routing_map, self.group).flatten(0, 1)[:, own].t().nonzero().unbind(1)
        handle = Handle(buffer=self, used=set(), rows=rows, experts=experts + own.start, num_tokens=len(hidden))
        weights = _gathered(probs, self.group).flatten(0, 1)[rows, handle.experts]
        return everything[rows], weights, None, torch.bincount(experts, minlength=self.num_local_experts), handle

    @as_recorded("hybrid-ep")
    def combine_with_unpermute(self, hidden, probs=None, handle=None, **_):
        """Add up ``[copies, hidden]`` on the ranks where the tokens came from."""
        handle.use(self, "combine" if probs is None else "combine of gradients")
        assert len(hidden) == len(handle.rows), "the handle is of another dispatch"
        ranks = self.group.size()
        total = hidden.new_zeros(ranks * handle.num_tokens, hidden.shape[1]).index_add_(0, handle.rows, hidden)
        weights = None
        if probs is not None:
            weights = probs.new_zeros(ranks * handle.num_tokens, ranks * self.num_local_experts)
            weights[handle.rows, handle.experts] = probs
        return self._own(total, handle), None if weights is None else self._own(weights, handle)

    def _own(self, total, handle):
        dist.all_reduce(total, group=self.group)
        return total[self.group.rank() * handle.num_tokens :][: handle.num_tokens].clone()


class EventHandle:
    pass


class EventOverlap:
    def __init__(self, event=None):
        pass

    def current_stream_wait(self):
        pass


def _gathered(x, group):
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.stack(parts)


def _assert_equal(value, group):
    everyone = [None] * group.size()
    dist.all_gather_object(everyone, value, group=group)
    assert len(set(everyone)) == 1, f"ranks disagree: {everyone}"


def install():
    package, utils = (ModuleType(name) for name in _MODULES)
    package.__spec__ = ModuleSpec("deep_ep", None)
    package.Buffer, package.HybridEPBuffer = Buffer, HybridEPBuffer
    utils.EventHandle, utils.EventOverlap = EventHandle, EventOverlap
    sys.modules |= {"deep_ep": package, "deep_ep.utils": utils}
    _import_again()


@contextmanager
def installed():
    """Return a context in which Megatron finds these classes, and behind which it has no buffer of theirs."""
    from megatron_epp.mcore.costs import memory_probe

    try:
        with mock.patch.object(memory_probe, "_TOKENS", _MEASURED):
            install()
            yield
    finally:
        for name in _MODULES:
            del sys.modules[name]
        _import_again()


def _import_again():
    from megatron.core.transformer.moe import fused_a2a, token_dispatcher

    importlib.reload(fused_a2a)
    fused_a2a.HYBRIDEP_TOKEN_ALIGNMENT = token_dispatcher.HYBRIDEP_TOKEN_ALIGNMENT = _ALIGNMENT
    for name in _IMPORTED:
        setattr(token_dispatcher, name, getattr(fused_a2a, name))
