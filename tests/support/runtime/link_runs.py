"""Programs of the ranks in the tests of links."""

from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist

from megatron_epp.plan import EppError
from megatron_epp.plan.communicators import Direction, directions
from megatron_epp.runtime.links.links import Links
from megatron_epp.runtime.links.objects import Groups


def cross_talk(rank, links):
    """Rank 0 sends four activations and four gradients, interleaved; rank 1 receives them in another interleaving."""
    if rank == 0:
        for i in range(4):
            links.send(torch.full((2, 3), float(i)), peer=1, gradient=False)
            links.send(torch.full((5,), 10.0 + i, dtype=torch.float64), peer=1, gradient=True)
        links.finish_sends()
        return None
    gradients = [links.post_receive((5,), torch.float64, torch.device("cpu"), 0, gradient=True) for _ in range(4)]
    activations = [links.post_receive((2, 3), torch.float32, torch.device("cpu"), 0, gradient=False) for _ in range(4)]
    return [[receive.wait().tolist() for receive in kind] for kind in (activations, gradients)]


LOOPED = directions((0, 1, 0, 1))
"""Directions of messages where two ranks have two stages each."""


def both_ways(rank, links):
    """Each rank sends before it receives."""
    links.send(torch.tensor([float(rank)]), peer=1 - rank, gradient=False)
    received = links.post_receive((1,), torch.float32, torch.device("cpu"), 1 - rank, gradient=False).wait()
    links.finish_sends()
    return received.item()


def strided_and_released(rank, links):
    """Rank 0 sends two tensors, one transposed, and lets go of the second's storage before that is received."""
    if rank == 0:
        square = torch.arange(6.0).reshape(2, 3)
        links.send(square.t(), peer=1, gradient=False)
        whole = torch.arange(1000.0)
        links.send(whole, peer=1, gradient=False)
        whole.data = torch.empty(1)
        junk = [torch.zeros(1000) for _ in range(50)]
        torch.distributed.barrier(links.figures)
        links.finish_sends()
        return len(junk)
    first = links.post_receive((3, 2), torch.float32, torch.device("cpu"), 0, gradient=False)
    torch.distributed.barrier(links.figures)
    second = links.post_receive((1000,), torch.float32, torch.device("cpu"), 0, gradient=False)
    return [receive.wait().tolist() for receive in (first, second)]


def groups(rank, links):
    """Ranks of each communicator."""
    made = links.activations, links.gradients, links.figures, *links.control.levels
    return links.ranks, [torch.distributed.get_process_group_ranks(group) for group in made]


def each_way(rank, links):
    """Send activations both ways; return which communicators are one, and the message that each rank gets from the other."""
    made = Links.create(links.ranks, links.ranks, Groups(), LOOPED)
    groups = made.activations, made.activations_down, made.gradients, made.gradients_up
    for gradient in (False, True):
        made.send(torch.tensor([rank + 10.0 * gradient]), peer=1 - rank, gradient=gradient)
    receives = [made.post_receive((1,), torch.float32, torch.device("cpu"), 1 - rank, gradient) for gradient in (False, True)]
    received = [receive.wait().item() for receive in receives]
    made.finish_sends()
    return len(set(groups)), received


def made(rank, links, several_stages):
    """Arguments that each group is made with, as ``(backend, options)``, and its time limit in seconds; options are counted."""
    numbers, made = count(), []

    def create(ranks, timeout, backend, pg_options):
        group = dist.new_group(ranks, timeout=timeout, backend=backend)
        made.append((backend, pg_options, group._get_backend(torch.device("cpu")).options._timeout.total_seconds()))
        return group

    groups = Groups(timedelta(seconds=77), create)
    Links.create(links.ranks, links.ranks, groups, LOOPED if several_stages else None, lambda: f"options {next(numbers)}")
    return made


def meet(rank, links, several_stages):
    """Messages at the start-up of a pipeline, as ``(kind, from, to)``, and that links work afterwards."""
    seen = []
    made = Links.create(links.ranks, links.ranks, Groups(), LOOPED if several_stages else None)
    send, receive = dist.send, dist.recv

    def noted_send(tensor, to, group):
        seen.append(("sent", tensor.tolist(), to, _name(made, group)))
        send(tensor, to, group=group)

    def noted_receive(tensor, source, group):
        receive(tensor, source, group=group)
        seen.append(("heard", tensor.tolist(), source, _name(made, group)))

    dist.send, dist.recv = noted_send, noted_receive
    try:
        made.connect(torch.device("cpu"))
    finally:
        dist.send, dist.recv = send, receive
    return seen, both_ways(rank, made)


def _name(links, group):
    names = ("activations", "gradients", "activations_down", "gradients_up")
    return next(name for name in names if getattr(links, name) is group)


def in_slots(rank, links):
    """Send eight messages of other sizes and receive as many in slots; return the numbers of slots, and what was received."""
    slots, cpu, received = {Direction(0, 1, False): 2, Direction(1, 0, True): 2}, torch.device("cpu"), {}
    links.open_slots(slots, 3 * 8, cpu)
    storages = [slot.data_ptr() for ring in links._rings.values() for slot in ring.free]
    for first in range(0, 8, 2):
        posted = [
            links.post_receive((1 + i % 3,), torch.float64, cpu, 1 - rank, gradient=rank == 0) for i in (first, first + 1)
        ]
        for i in (first, first + 1):
            tensor = torch.full((1 + i % 3,), 100.0 * rank + i, dtype=torch.float64)
            links.send(tensor, 1 - rank, gradient=rank == 1)
            tensor.zero_()  # it was copied
        for i in (first + 1, first):
            received[i] = posted[i - first].wait()
    links.finish_sends()
    links.open_slots(slots, 3 * 8, cpu)
    assert sorted(storages) == sorted(slot.data_ptr() for ring in links._rings.values() for slot in ring.free)
    found = {tuple(way): len(ring.free) for way, ring in links._rings.items()}
    links.open_slots({}, 1, cpu)
    return found, [received[i].tolist() for i in range(8)]


def without_slots(rank, links):
    """Errors of a message that is too large for its slot, and of one that finds no slot."""
    cpu, told = torch.device("cpu"), []
    links.open_slots({Direction(1 - rank, rank, False): 1}, 8, cpu)
    for _ in range(2):
        try:
            links.post_receive((3,), torch.float32, cpu, 1 - rank, gradient=False)
        except EppError as error:
            told.append(str(error))
    links.open_slots({}, 1, cpu)
    return tuple(told)
