"""Messages between the ranks of one pipeline, and their process groups.

Activations and gradients travel on a communicator each, so that neither waits for the other. On each, messages between two
ranks are matched first in, first out; order and shapes come from the plan, so there is no handshake. Where activations may
travel both ways, since a rank has several stages, each direction has a communicator: on one of NCCL's, a send and a receive
would wait for each other.

On GPUs messages travel in slots, which are kept from one to the next. The memory of a tensor that NCCL has sent or received
goes back to torch's allocator when all has run that was launched on NCCL's stream before the tensor was dropped, posted
receives among it, so what tensors of their own would need grows with the host's lead over the device.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_epp.plan import EppError
from megatron_epp.plan.communicators import Direction, directions
from megatron_epp.runtime.links.objects import GroupOptions, Groups, ObjectGroup


@dataclass(slots=True)
class _Ring:
    """Slots ``[num_bytes]`` of uint8 for messages of one direction, at one end: free ones, and those being sent, in order."""

    free: list[Tensor]
    sent: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque)

    @property
    def shape(self) -> tuple[int, int]:
        """Number of slots, and the bytes of each."""
        return len(self.free) + len(self.sent), max((slot.numel() for slot in self.free), default=0)


@dataclass(slots=True)
class Receive:
    """Posted receive: the buffer, the work that fills it, and the slot that the buffer is in, with its ring."""

    buffer: Tensor
    work: dist.Work
    slot: Tensor | None = None
    ring: _Ring | None = None

    def wait(self) -> Tensor:
        """Return the message, behind whose arrival the current stream goes on. May be called once."""
        self.work.wait()  # on NCCL the current stream waits, not the host; on gloo the host
        if self.ring is None or self.slot is None:
            return self.buffer
        # On the current stream. The communicator's stream waits for it at every launch, so the next message comes into the slot
        # only behind this copy, though the host returns the slot now.
        message = self.buffer.clone()
        self.ring.free.append(self.slot)
        return message


@dataclass(slots=True)
class Links:
    """Communicators of one pipeline."""

    ranks: tuple[int, ...]  # global ranks of the pipeline, in pipeline order
    position: int  # of this rank among them
    # activations, activations_down: groups for messages to later stages, the second to lower ranks
    activations: dist.ProcessGroup
    # gradients, gradients_up: groups for messages to earlier stages, the second to higher ranks
    gradients: dist.ProcessGroup
    figures: dist.ProcessGroup  # a CPU group of the pipeline, for reports, which only the thread of reports uses
    control: ObjectGroup  # all ranks that must run the same plan, for plans and agreements
    activations_down: dist.ProcessGroup
    gradients_up: dist.ProcessGroup
    directions: Sequence[Direction]
    slots_on_cpu: bool = False  # use slots on a CPU too, where tensors need none
    _in_flight: dict[tuple[int, dist.ProcessGroup], tuple[dist.Work, Tensor]] = field(default_factory=dict)
    _rings: dict[Direction, _Ring] = field(default_factory=dict)

    @staticmethod
    def create(
        pipeline_ranks: Sequence[int],
        control_ranks: Sequence[int],
        groups: Groups,
        used: Sequence[Direction] | None = None,
        options: GroupOptions | None = None,
        slots_on_cpu: bool = False,
    ) -> Links:
        """Make the groups. Every rank of the job must call this at the same point.

        Global `pipeline_ranks` are in order; `control_ranks` must run the same plan: the pipelines of every tensor- and
        context-parallel rank. By default messages are between neighbours of one stage per rank. Raises `EppError` if messages
        between different ranks would wait for each other.
        """
        _check_pairs(len(pipeline_ranks))
        pipeline = tuple(pipeline_ranks)
        used = directions(range(len(pipeline))) if used is None else used
        both_ways = any(direction.receiver < direction.sender for direction in used if not direction.gradient)
        # `used` is the same on all ranks, and so is the order of groups here: torch makes a group on all ranks together.
        activations, gradients = (groups.of(pipeline, options=options) for _ in range(2))
        return Links(
            ranks=pipeline,
            position=pipeline.index(dist.get_rank()),
            activations=activations,
            gradients=gradients,
            activations_down=groups.of(pipeline, options=options) if both_ways else activations,
            gradients_up=groups.of(pipeline, options=options) if both_ways else gradients,
            figures=groups.of(pipeline, backend="gloo"),  # a group of its own, since another thread uses it
            control=ObjectGroup.create(control_ranks, groups),
            directions=used,
            slots_on_cpu=slots_on_cpu,
        )

    def connect(self, device: torch.device) -> None:
        """Send a tiny message on `device` in every direction that messages will go. All ranks must call this at the same point.

        On NCCL the first message between two ranks on a communicator keeps both waiting for each other. Inside a plan, where
        first messages come in every rank's own order, ranks could wait in a circle; here they come in one order for all. Raises
        `EppError` if another rank's message came.
        """
        for direction in self.directions:
            group = self._group(direction.gradient, up=direction.receiver > direction.sender)
            if self.position == direction.sender:
                dist.send(torch.full((1,), direction.sender, device=device), self.ranks[direction.receiver], group=group)
            elif self.position == direction.receiver:
                heard = torch.full((1,), -1, device=device)
                dist.recv(heard, self.ranks[direction.sender], group=group)
                if heard.item() != direction.sender:
                    raise EppError(f"pipeline rank {self.position} expects rank {direction.sender} and hears {heard.item()}")

    def open_slots(self, slots: Mapping[Direction, int], num_bytes: int, device: torch.device) -> None:
        """Keep messages in so many slots of each direction from now on. All messages before have been sent and received."""
        for direction in [
            direction for direction, ring in self._rings.items() if ring.shape != (slots.get(direction), num_bytes)
        ]:
            del self._rings[direction]
        for direction, count in slots.items():
            if direction not in self._rings:
                self._rings[direction] = _Ring([torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(count)])

    def send(self, tensor: Tensor, peer: int, gradient: bool) -> None:
        """Start sending to pipeline rank `peer`.

        With slots the tensor is copied, and the caller may drop it; where all slots of the direction are in use, the current
        stream, not the host, first waits for the message in the first of them. Without slots its storage is kept until the next
        send on the same communicator and to the same rank, or `finish_sends`; that send runs after this one in any case.
        """
        group = self._group(gradient, up=peer > self.position)
        ring = self._rings.get(Direction(self.position, peer, gradient))
        if ring is not None:
            if not ring.free:
                work, slot = ring.sent.popleft()
                work.wait()  # on NCCL the current stream waits, not the host
                ring.free.append(slot)
            slot = ring.free.pop()
            payload = _part(slot, tensor.shape, tensor.dtype).copy_(tensor.detach())
            ring.sent.append((self._started(dist.isend(payload, self.ranks[peer], group=group)), slot))
            return
        if (before := self._in_flight.pop((peer, group), None)) is not None:
            before[0].wait()
            del before  # ahead of the next payload: only one is alive for each rank and communicator
        payload = tensor.detach().contiguous()  # its own reference: the caller may drop the storage of `tensor`
        work = self._started(dist.isend(payload, self.ranks[peer], group=group))
        self._in_flight[peer, group] = work, payload

    def post_receive(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, peer: int, gradient: bool
    ) -> Receive:
        """Start receiving from pipeline rank `peer`. Raises `EppError` where every slot holds a message not waited for."""
        group, ring = self._group(gradient, up=peer < self.position), self._rings.get(Direction(peer, self.position, gradient))
        if ring is None:
            buffer, slot = torch.empty(tuple(shape), dtype=dtype, device=device), None
        elif ring.free:
            slot = ring.free.pop()
            buffer = _part(slot, shape, dtype)
        else:
            raise EppError(f"pipeline rank {self.position} has no slot left for a message of rank {peer}")
        # Posted where lowering put it, ahead of the compute that needs the message, which arrives meanwhile.
        # No tag: the n-th receive on a communicator takes the n-th message of that rank, in the order of lowering.
        return Receive(buffer, self._started(dist.irecv(buffer, self.ranks[peer], group=group)), slot, ring)

    def finish_sends(self) -> None:
        for work, _ in self._in_flight.values():
            work.wait()
        self._in_flight.clear()
        for ring in self._rings.values():
            while ring.sent:
                work, slot = ring.sent.popleft()
                work.wait()
                ring.free.append(slot)

    def _group(self, gradient: bool, up: bool) -> dist.ProcessGroup:
        """Return the group for a message to a higher rank (`up`) or to a lower one."""
        if gradient:
            return self.gradients_up if up else self.gradients
        return self.activations if up else self.activations_down

    def _started(self, work: dist.Work | None) -> dist.Work:
        if work is None:  # returned by torch to ranks that are not in the group
            raise EppError(f"rank {dist.get_rank()} is not in the pipeline of ranks {self.ranks}")
        return work


def _part(slot: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor in the first bytes of a slot. Raises `EppError` where the slot is smaller."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes > slot.numel():
        raise EppError(f"a message of {num_bytes} bytes does not fit a slot of {slot.numel()}")
    return slot[:num_bytes].view(dtype).view(tuple(shape))


def _check_pairs(num_ranks: int) -> None:
    """Raise `EppError` if the pairs of ranks of a group share one communicator.

    On NCCL every pair of ranks has a communicator of its own in each group, unless a device was bound at initialization: then
    all messages of a group run one after the other, and a send may wait for a message that its rank receives later.
    """
    bound = getattr(dist.group.WORLD, "bound_device_id", None)
    if num_ranks > 2 and bound is not None:
        raise EppError(
            f"torch.distributed was initialised with device_id={bound}: messages of {num_ranks} pipeline ranks would wait for "
            "each other. Leave device_id out of init_process_group"
        )
