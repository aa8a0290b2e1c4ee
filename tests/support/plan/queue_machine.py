"""A machine that runs lowered plans as GPUs do: hardware queues, streams, messages that meet, hosts that wait for devices.

It reads a plan's JSON and the text of `megatron-epp show PLAN --lowered`, and nothing of the package, so that it can judge it.
"""

import json
import random
import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_ACTION = re.compile(r"(\d+)([A-Z]+(?:_[A-Z]+)*)(\d+)")
_MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
_COLLECTIVES = ("SPREAD", "GATHER")

Row = list[tuple[int, str, int]]
"""Stage, operation and chunk of each launch."""


@dataclass
class Launch:
    """Work that a rank hands to its device.

    Attributes:
        text: of the action.
        stream: launches of one stream run one after the other.
        waits: launches of the rank, by number, that must have ended.
        event: what has to be there on all its sides at once; None for work of this rank alone.
    """

    text: str
    stream: object
    waits: list[int]
    event: object = None


def rows_of(lowered: str) -> list[Row]:
    """Read ``rank 0 | 0F0 0SEND_F0``, a line for each rank."""
    found = []
    for line in lowered.splitlines():
        _, _, words = line.partition("|")
        matches = [_ACTION.fullmatch(word) for word in words.split()]
        assert all(matches), line
        found.append([(int(m[1]), m[2], int(m[3])) for m in matches if m])
    return found


def launches(placement: Sequence[int], rank: int, row: Row, replica: int = 0, lockstep: bool = False) -> list[Launch]:
    made: list[Launch] = []
    last: dict[object, int] = {}
    numbers: dict[tuple[int, str, int], int] = {}
    collected: dict[int, int] = {}
    ranks = max(placement) + 1

    def launch(text: str, stream: object, waits: Sequence[int | None], event: object = None) -> int:
        made.append(Launch(text, stream, [w for w in (*waits, last.get(stream)) if w is not None], event))
        last[stream] = len(made) - 1
        return last[stream]

    for stage, op, chunk in row:
        text = f"{stage}{op}{chunk}"
        compute = last.get("compute")
        if op in _MESSAGES:
            side, kind = op.split("_")
            step = (1 if kind == "F" else -1) * (1 if side == "SEND" else -1)
            to_stage = stage + step if side == "SEND" else stage
            peer = placement[stage + step]
            link = ((rank, peer) if side == "SEND" else (peer, rank), kind)
            if side == "SEND" and link in last:  # the payload before this one goes when it has left
                compute = launch(f"end of a send before {text}", "compute", [last[link]])
            numbers[stage, op, chunk] = launch(text, link, [compute], ("message", kind, to_stage, chunk, replica))
        elif "_" in op or op in _COLLECTIVES:  # of all ranks; the chunk's next compute waits for it
            collected[chunk] = launch(text, op, [compute, collected.get(chunk)], ("collective", op, chunk, replica, ranks))
        elif len(op) == 1 and op not in "OL":
            waits = [numbers.get((stage, f"RECV_{op}", chunk)), numbers.get((stage, "L", chunk)) if op == "B" else None]
            waits.append(collected.get(chunk))
            event = ("exchange", text) if lockstep and op in "FBR" else None
            numbers[stage, op, chunk] = launch(text, "compute", waits, event)
        elif op in ("O", "L"):
            numbers[stage, op, chunk] = launch(text, op, [compute])
        elif op == "FREE":  # compute waits for the copy, then the memory goes
            launch(text, "compute", [numbers[stage, "O", chunk]])
        elif op == "REDUCE":
            launch(text, "reduce", [compute], ("reduce", stage))
    return made


class Machine:
    """Runs launches of all ranks until all have ended or none can go on.

    Every rank's host hands launches over in order. A launch goes into one of the rank's hardware queues, by its stream. It
    starts when it is at the head of its queue (everything ahead of it there has started) and all it waits for has ended. It
    ends some time later; where it is part of an event, that long after all sides of it have started.

    Args:
        todo: launches by rank; ranks of further replicas behind the first one's.
        queues: hardware queues of each rank; streams are mapped onto them at random.
        waits: probability that a host waits for its device before it hands over a launch.
        seed: of all that is random: the mapping, the waits, and without times the order in which launches end.
        times_us: of launches, by rank and text; what is not there takes no time. None: launches end in a random order.
    """

    def __init__(
        self,
        todo: Sequence[Sequence[Launch]],
        queues: int,
        waits: float = 0.0,
        seed: int = 0,
        times_us: Sequence[Mapping[str, float]] | None = None,
    ) -> None:
        self.todo, self.rng, self.times_us = todo, random.Random(seed), times_us
        self.handed, self.done = [0] * len(todo), [[False] * len(row) for row in todo]
        self.syncs = [[self.rng.random() < waits for _ in row] for row in todo]
        self.queue_of = [
            {stream: self.rng.randrange(queues) for stream in dict.fromkeys(launch.stream for launch in row)} for row in todo
        ]
        self.queued: list[dict[int, deque[int]]] = [defaultdict(deque) for _ in todo]
        self.ended = [0] * len(todo)
        self.running: list[tuple[int, int]] = []
        self.starts_us: dict[tuple[int, int], float] = {}
        self.ends_us: dict[tuple[int, int], float] = {}
        self.now_us = 0.0
        self.sides: dict[object, int] = defaultdict(int)
        self.there: dict[object, int] = defaultdict(int)
        for row in todo:
            for launch in row:
                self.sides[launch.event] += 1

    def run(self) -> list[str]:
        """The first launch of each rank that never ended; nothing where all did. `now_us` is then when the last one did."""
        for rank in range(len(self.todo)):
            self._start(rank)
        while able := [each for each in self.running if self._may_end(*each)]:
            rank, number = self._next(able)
            self.running.remove((rank, number))
            self.done[rank][number] = True
            self.ended[rank] += 1
            self._start(rank)
        return [row[done.index(False)].text for row, done in zip(self.todo, self.done, strict=True) if not all(done)]

    def _next(self, able: list[tuple[int, int]]) -> tuple[int, int]:
        if self.times_us is None:
            return able[self.rng.randrange(len(able))]
        for rank, number in able:
            time_us = self.times_us[rank].get(self.todo[rank][number].text, 0.0)
            self.ends_us.setdefault((rank, number), self.now_us + time_us)
        first = min(able, key=self.ends_us.__getitem__)
        self.now_us = self.ends_us[first]
        return first

    def _may_end(self, rank: int, number: int) -> bool:
        event = self.todo[rank][number].event
        kind = event[0] if isinstance(event, tuple) else None
        sides = 2 if kind == "message" else event[4] if kind == "collective" else self.sides[event]
        return event is None or self.there[event] == sides

    def _start(self, rank: int) -> None:
        """Hand over and start what can be on a rank."""
        row, done = self.todo[rank], self.done[rank]
        while self.handed[rank] < len(row):
            number = self.handed[rank]
            if self.syncs[rank][number] and self.ended[rank] < number:
                break
            self.queued[rank][self.queue_of[rank][row[number].stream]].append(number)
            self.handed[rank] += 1
        for queue in self.queued[rank].values():
            while queue and all(done[w] for w in row[queue[0]].waits):
                number = queue.popleft()
                self.running.append((rank, number))
                self.starts_us[rank, number] = self.now_us
                self.there[row[number].event] += 1


def stuck(plan_json: str, lowered: str, queues: int = 1, waits: float = 0.0, seed: int = 0) -> list[str]:
    """Run one plan; the first launch of each rank that never ended."""
    return stuck_together([(plan_json, lowered)], False, queues, waits, seed)


def stuck_together(
    replicas: Sequence[tuple[str, str]], lockstep: bool, queues: int = 1, waits: float = 0.0, seed: int = 0
) -> list[str]:
    """Run the plans of all replicas of a pipeline side by side; `lockstep` where they share experts."""
    todo = []
    for replica, (plan_json, lowered) in enumerate(replicas):
        placement = json.loads(plan_json)["placement"]
        todo += [launches(placement, rank, row, replica, lockstep) for rank, row in enumerate(rows_of(lowered))]
    return Machine(todo, queues, waits, seed).run()


def makespan_us(plan_json: str, lowered: str, queues: int) -> float | None:
    """Time that one plan takes on the machine, with the plan's own times; None where it never ends."""
    plan, times_us = json.loads(plan_json), times_of(plan_json)
    todo = [launches(plan["placement"], rank, row) for rank, row in enumerate(rows_of(lowered))]
    machine = Machine(todo, queues, times_us=times_us)
    return None if machine.run() else machine.now_us


def times_of(plan_json: str) -> list[dict[str, float]]:
    """A plan's times of the launches of every rank, by their text."""
    plan = json.loads(plan_json)
    times_us: list[dict[str, float]] = [
        {step[0]: step[1] for table in (plan["ranks"], plan["copies"]) if table for step in table[rank]}
        for rank in range(plan["num_ranks"])
    ]
    for name, kind, sender in (("activation_us", "F", 0), ("gradient_us", "B", 1)):
        for stage, row in enumerate(plan["messages"][name]):
            for chunk, time_us in enumerate(row):
                for side, at in (("SEND", stage + sender), ("RECV", stage + 1 - sender)):
                    times_us[plan["placement"][at]][f"{at}{side}_{kind}{chunk}"] = time_us
    for name, row in plan["messages"].get("collective_us", {}).items():
        for rank in range(plan["num_ranks"]):
            times_us[rank] |= {f"{rank}{name}{chunk}": time_us for chunk, time_us in enumerate(row)}
    return times_us
