"""Random forests: sequences that share prefixes at any depth, with chunk tables and orders that respect them."""

import random
from dataclasses import replace
from typing import NamedTuple

from megatron_epp.plan import Action, Chunk, Op, Plan, Recompute, Segment, Step
from megatron_epp.plan.chunk import NOTHING_BORROWED, Borrowed, path_of
from megatron_epp.plan.relations import deps
from tests.support.plan.small_plans import plan_of

WORDS = 29


class Forest(NamedTuple):
    """Texts, each one token longer than its inputs, and what these borrow: texts that begin with the same ``n + 1`` tokens
    share ``n`` inputs with their labels.
    """

    texts: list[list[int]]
    borrowed: tuple[Borrowed, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(len(text) - 1 for text in self.texts)


def forest(rng: random.Random, trees: int = 2, depth: int = 3, tokens: int = 9) -> Forest:
    """Grow trees whose nodes have up to so many `tokens`."""
    texts: list[list[int]] = []
    borrowed: list[Borrowed] = []

    def grow(prefix: list[int], level: int, lender: Borrowed) -> None:
        text = [*prefix, *(rng.randrange(WORDS) for _ in range(rng.randint(2, tokens)))]
        first = len(texts)
        if level == depth:
            texts.append(text)
            borrowed.append(lender)
            return
        for number, token in enumerate(rng.sample(range(WORDS), rng.randint(1, 3))):
            # The first child goes on with the sequence that has the prefix; others borrow it.
            grow([*text, token], level + 1, Borrowed(first, len(text) - 1) if number else lender)

    for _ in range(trees):
        grow([], 1, NOTHING_BORROWED)
    return Forest(texts, tuple(borrowed))


def table(
    rng: random.Random, lengths: tuple[int, ...], borrowed: tuple[Borrowed, ...], joins: float = 0.4
) -> tuple[Chunk, ...]:
    """Cut all sequences anywhere, and join segments to chunks, each behind those that it reads."""
    left: dict[int, list[Segment]] = {}
    for sequence, length in enumerate(lengths):
        first = borrowed[sequence].tokens
        cuts = sorted(rng.sample(range(first + 1, length), min(rng.randint(0, 3), length - first - 1)))
        left[sequence] = [Segment(sequence, *ends) for ends in zip([first, *cuts], [*cuts, length], strict=True)]
    done, chunks = dict.fromkeys(left, 0), list[list[Segment]]()

    def may_run(sequence: int, start: int, _: int) -> bool:
        return start == 0 or done[path_of(sequence, start, borrowed)[-1].sequence] >= start

    while any(left.values()):
        segment = rng.choice([parts[0] for parts in left.values() if parts and may_run(*parts[0])])
        left[segment.sequence].pop(0)
        done[segment.sequence] = segment.end
        if chunks and rng.random() < joins:
            chunks[-1].append(segment)
        else:
            chunks.append([segment])
    return tuple(Chunk(tuple(segments)) for segments in chunks)


def forest_plan(rng: random.Random, grown: Forest, multiple: int = 1, forward_only: bool = False, joins: float = 0.4) -> Plan:
    """A plan of two stages on one rank in a random order, with random recompute; every chunk keeps 10 bytes."""
    chunks = table(rng, grown.lengths, grown.borrowed, joins)
    ops = (Op.F,) if forward_only else (Op.F, Op.B)
    actions = [Action(op, stage, c) for op in ops for stage in range(2) for c in range(len(chunks))]
    needs, left, row = deps(chunks, 2, borrowed=grown.borrowed), dict.fromkeys(actions), list[Action]()
    while left:
        action = rng.choice([action for action in left if not any(need in left for need in needs(action))])
        del left[action]
        row.append(action)
    plan = plan_of([row], chunks, (0, 0), static_bytes=0, forward_only=forward_only)
    return replace(
        plan,
        borrowed=grown.borrowed,
        num_layers=(2, 2),
        ranks=(tuple(Step(action, 1.0, 10 * (action.op is Op.F), 10 * (action.op is ops[-1])) for action in row),),
        recompute=tuple(tuple(Recompute(full=rng.randint(0, 2)) for _ in chunks) for _ in range(2)),
        token_multiple=multiple,
    )
