"""Messages between the ranks of one pipeline, and their process groups.

Activations and gradients travel on a communicator each, so that neither waits for the other. On each, messages between two
ranks are matched first in, first out: lowering writes both sides' order from the same plan, and shapes come from the plan too,
so there is no handshake.

Where a rank has several stages, activations may travel both ways between two ranks. Then each way has a communicator: on one of
NCCL's, a send and a receive would wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_epp.plan import EppError
from megatron_epp.plan.ways import Way, ways
from megatron_epp.runtime.links.objects import Groups, ObjectGroup, Options


@dataclass(slots=True)
class Receive:
    """Posted receive: the buffer and the work that fills it."""

    buffer: Tensor
    work: dist.Work

    def wait(self) -> Tensor:
        self.work.wait()
        return self.buffer


@dataclass(slots=True)
class Links:
    """Communicators of one pipeline.

    Attributes:
        ranks: global ranks of the pipeline, in pipeline order.
        position: of this rank among them.
        activations: group for messages to later stages.
        gradients: group for messages to earlier stages.
        figures: a CPU group of the pipeline, for reports, which only the thread of reports uses.
        control: all ranks that must run the same plan, for plans and agreements.
        activations_down: group for activations to lower ranks.
        gradients_up: group for gradients to higher ranks.
        ways: directions in which messages are sent.
    """

    ranks: tuple[int, ...]
    position: int
    activations: dist.ProcessGroup
    gradients: dist.ProcessGroup
    figures: dist.ProcessGroup
    control: ObjectGroup
    activations_down: dist.ProcessGroup
    gradients_up: dist.ProcessGroup
    ways: Sequence[Way]
    _in_flight: dict[tuple[int, dist.ProcessGroup], tuple[dist.Work, Tensor]] = field(default_factory=dict)

    @staticmethod
    def create(
        pipeline_ranks: Sequence[int],
        control_ranks: Sequence[int],
        groups: Groups,
        used: Sequence[Way] | None = None,
        options: Options | None = None,
    ) -> Links:
        """Make the groups. Every rank of the job must call this at the same point.

        Args:
            pipeline_ranks: global ranks of this rank's pipeline, in order.
            control_ranks: all ranks that must run the same plan: the pipelines of every tensor- and context-parallel rank.
            groups: makes them.
            used: directions in which messages are sent; None for those of one stage per rank, in order.
            options: of the groups that carry messages; None for the backend's defaults.

        Raises:
            EppError: messages between different ranks would wait for each other.
        """
        _check_pairs(len(pipeline_ranks))
        pipeline = tuple(pipeline_ranks)
        used = ways(range(len(pipeline))) if used is None else used
        both_ways = any(way.receiver < way.sender for way in used if not way.gradient)
        activations, gradients = (groups.of(pipeline, options=options) for _ in range(2))
        return Links(
            ranks=pipeline,
            position=pipeline.index(dist.get_rank()),
            activations=activations,
            gradients=gradients,
            activations_down=groups.of(pipeline, options=options) if both_ways else activations,
            gradients_up=groups.of(pipeline, options=options) if both_ways else gradients,
            figures=groups.of(pipeline, backend="gloo"),
            control=ObjectGroup.create(control_ranks, groups),
            ways=used,
        )

    def connect(self, device: torch.device) -> None:
        """Send a tiny message on `device` every way that messages will go. All ranks must call this at the same point.

        On NCCL the first message between two ranks on a communicator keeps both waiting for each other. Inside a plan, where
        first messages come in every rank's own order, ranks could wait in a circle; here they come in one order for all. Raises
        `EppError` if another rank's message came.
        """
        for way in self.ways:
            group = self._group(way.gradient, up=way.receiver > way.sender)
            if self.position == way.sender:
                dist.send(torch.full((1,), way.sender, device=device), self.ranks[way.receiver], group=group)
            elif self.position == way.receiver:
                heard = torch.full((1,), -1, device=device)
                dist.recv(heard, self.ranks[way.sender], group=group)
                if heard.item() != way.sender:
                    raise EppError(f"pipeline rank {self.position} expects rank {way.sender} and hears {heard.item()}")

    def send(self, tensor: Tensor, peer: int, gradient: bool) -> None:
        """Start sending to pipeline rank `peer`.

        The payload's storage is kept until the next send on the same communicator and to the same rank, or `finish_sends`. That
        send runs after this one in any case, so waiting there for this one costs nothing, and the memory of messages
        does not depend on how far the host is ahead of the device.
        """
        group = self._group(gradient, up=peer > self.position)
        if (before := self._in_flight.pop((peer, group), None)) is not None:
            before[0].wait()  # on NCCL the current stream waits, not the host
            del before
        payload = tensor.detach().contiguous()  # its own reference: the caller may drop the storage of `tensor`
        work = dist.isend(payload, self.ranks[peer], group=group)
        self._in_flight[peer, group] = self._started(work), payload

    def post_receive(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, peer: int, gradient: bool
    ) -> Receive:
        """Start receiving from pipeline rank `peer` into a fresh buffer."""
        buffer = torch.empty(tuple(shape), dtype=dtype, device=device)
        work = dist.irecv(buffer, self.ranks[peer], group=self._group(gradient, up=peer < self.position))
        return Receive(buffer, self._started(work))

    def finish_sends(self) -> None:
        """Wait until every message has left."""
        for work, _ in self._in_flight.values():
            work.wait()
        self._in_flight.clear()

    def _group(self, gradient: bool, up: bool) -> dist.ProcessGroup:
        """Return the group for a message to a higher rank (`up`) or to a lower one."""
        if gradient:
            return self.gradients_up if up else self.gradients
        return self.activations if up else self.activations_down

    def _started(self, work: dist.Work | None) -> dist.Work:
        if work is None:  # returned by torch to ranks that are not in the group
            raise EppError(f"rank {dist.get_rank()} is not in the pipeline of ranks {self.ranks}")
        return work


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
