"""Tensors that autograd saves for backward, counted on any device.

Of nested hooks on saved tensors torch calls the innermost only, so what does more with them than count is a subclass.

Under hooks a function's backward gets a copy of a saved tensor that shares its memory, whatever a hook returns
(`SavedVariable::unpack`), and not the object itself. A copy lacks what Megatron and Transformer Engine read from a weight in
backward (`main_grad`), or set on it (`grad_added_to_main_grad`). So leaves are given back as the objects they are: the copy of
a leaf has the leaf's gradient accumulator, which refers to the leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter


class Storage:
    """Storage that saved tensors share, counted once."""

    __slots__ = ("memory", "num_bytes", "num_held")

    def __init__(self, memory: torch.UntypedStorage) -> None:
        self.memory: torch.UntypedStorage | None = memory  # None while a subclass of `SavedTensors` has moved it away
        self.num_bytes = memory.nbytes()  # on the device
        self.num_held = 0


class _Held:
    """One saved tensor, as a view of a storage. Autograd releases the tensor by dropping this object.

    It holds no tensor: an output refers to its own node, so holding it would keep a dropped graph alive for ever.
    """

    __slots__ = ("_dtype", "_saved", "_shape", "_start", "_storage", "_strides")

    def __init__(self, tensor: Tensor, storage: Storage, saved: SavedTensors | None) -> None:
        self._dtype, self._start = tensor.dtype, tensor.storage_offset()
        self._shape, self._strides = tensor.shape, tensor.stride()
        self._storage, self._saved = storage, saved
        storage.num_held += 1

    def tensor(self) -> Tensor:
        memory = self._storage.memory
        assert memory is not None  # it was loaded ahead of its backward
        return torch.empty(0, dtype=self._dtype, device=memory.device).set_(memory, self._start, self._shape, self._strides)

    def __del__(self) -> None:
        self._storage.num_held -= 1
        if self._saved is not None and self._storage.num_held == 0:
            self._saved._release(self._storage)


class _HeldWhole:
    """Saved parameter, which autograd would keep as well without hooks, or tensor of another kind than a view of a storage. It
    is neither counted nor offloaded.
    """

    __slots__ = ("_accumulator", "_tensor")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        # Parameters refer to theirs weakly, and a function need not be given what it saves.
        self._accumulator: Node | None = get_gradient_edge(tensor).node if tensor.requires_grad else None

    def tensor(self) -> Tensor:
        return self._tensor


def _is_view(tensor: Tensor) -> bool:
    """True if dtype, shape, strides and an offset into a storage are all that a tensor is.

    Not so subclasses (jagged ones, among others, have symbolic sizes), other layouts, and lazy conjugates and negatives.
    """
    is_strided = type(tensor) is Tensor and tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)
    return is_strided and not (tensor.is_conj() or tensor.is_neg())


class SavedTensors:
    """Live and peak bytes of saved tensors, while active as a context manager: each storage counted once, parameters and
    tensors that are no plain views of a storage not at all.

    `others` returns the bytes held in addition (KV caches). It is called whenever saved tensors are added or released, which is
    often enough to see every peak: caches grow between the two.
    """

    def __init__(self, parameters: Iterable[Tensor] = (), others: Callable[[], int] = lambda: 0) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self._others = others
        # Storages go by weak references, which keep their identity (not their memory) from being taken by another storage.
        self._ignored = {ref.cdata: ref for ref in (StorageWeakRef(p.untyped_storage()) for p in parameters)}
        self._storages: dict[int, Any] = {}  # of `Storage`, or a subclass's kind of it
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._hold, lambda held: held.tensor())

    def __enter__(self) -> Self:
        # Makes `saved_tensors` of Python's autograd functions return leaves themselves, as without hooks on saved tensors.
        function, saved_tensors = cast(Any, BackwardCFunction), cast(Any, torch._C._FunctionBase.saved_tensors)
        function.saved_tensors = property(lambda context: tuple(map(_itself, saved_tensors.__get__(context))))
        _active.append(self)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        _active.remove(self)
        self.observe()

    @property
    def held_bytes(self) -> int:
        return self.live_bytes + self._others()

    def observe(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def _hold(self, tensor: Tensor) -> _Held | _HeldWhole:
        if isinstance(tensor, Parameter) and tensor.is_leaf:
            return _HeldWhole(tensor)
        if not _is_view(tensor):
            return _HeldWhole(tensor.detach())  # an output refers to its own node
        memory = tensor.untyped_storage()
        if memory._cdata in self._ignored:
            return _Held(tensor, Storage(memory), None)
        held = _Held(tensor, self._storage_of(memory), self)
        self.observe()
        return held

    def _storage_of(self, memory: torch.UntypedStorage) -> Storage:
        return self._storages.get(memory._cdata) or self._count(Storage(memory), memory)

    def _count[S: Storage](self, storage: S, memory: torch.UntypedStorage) -> S:
        self._storages[memory._cdata] = storage
        self.live_bytes += storage.num_bytes
        return storage

    def _release(self, storage: Storage) -> None:
        assert storage.memory is not None
        self.observe()
        del self._storages[storage.memory._cdata]
        self.live_bytes -= storage.num_bytes

    def _resized(self, memory: torch.UntypedStorage) -> None:
        storage = self._storages.get(memory._cdata)
        if storage is not None:
            self.observe()
            self.live_bytes += memory.nbytes() - storage.num_bytes
            storage.num_bytes = memory.nbytes()
            self.observe()


def _itself(tensor: Tensor | None) -> Tensor | None:
    """Return the leaf that a tensor is a copy of; other tensors unchanged."""
    if tensor is None or not tensor.is_leaf or not tensor.requires_grad:
        return tensor
    with torch.enable_grad():  # as in `get_gradient_edge`, which fails where there is no accumulator
        view: Any = tensor.view_as(tensor)
    ((accumulator, _),) = view.grad_fn.next_functions
    # A view that a function's forward takes of its input requires gradients as the input does, and belongs to no graph.
    return tensor if accumulator is None else accumulator.variable


_active: list[SavedTensors] = []


def tracking_in_this_thread() -> AbstractContextManager[Any]:
    """Return a context manager in which the innermost active `SavedTensors` also sees what this thread saves."""
    return _active[-1]._hooks if _active else nullcontext()


def observe() -> None:
    """Have all active `SavedTensors` count, where `others` have more bytes than when tensors are saved or released next."""
    for saved in _active:
        saved.observe()


def resize(memory: torch.UntypedStorage, num_bytes: int) -> None:
    """Resize memory that saved tensors may share, and update the counts of all active `SavedTensors`."""
    memory.resize_(num_bytes)
    for saved in _active:
        saved._resized(memory)


def bytes_of(memory: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)
