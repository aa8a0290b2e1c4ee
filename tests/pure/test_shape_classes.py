"""Attention calls fall into few classes of shapes, and libraries look up the same plan for every call of a class."""

import random

import pytest

from megatron_epp.plan.shape_classes import CallSize, ShapeClass, all_classes, segment_class, token_class
from scripts.bench.planner.suite import Case
from tests.support.plan.kernel_caches import LIBRARIES, in_class, keys, random_plans

CONTEXT, STAGES, MODEL = 131072, 8, "llama3-8b"


def random_sizes(number, seed=0):
    rng = random.Random(seed)
    for _ in range(number):
        segments = int(2 ** rng.uniform(0, 11))
        queries = segments + int(2 ** rng.uniform(0, 17))
        yield CallSize(segments, queries, queries + rng.choice((0, int(2 ** rng.uniform(0, 20)))))


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_calls_of_a_class_have_one_plan(library):
    plans = {}
    for size in random_sizes(5000):
        padded = in_class(size)
        plans.setdefault(size.shape_class, set()).add((library.forward(padded), library.backward(padded)))
    assert max(map(len, plans.values())) == 1
    bare = {library.forward(size) for size in random_sizes(5000)}
    assert library.name != LIBRARIES[0].name or len(bare) > 5 * len(plans), "without classes there are many more"


@pytest.mark.parametrize(
    ("count", "segments", "tokens"),
    [(1, 32, 1024), (32, 32, 1024), (33, 64, 1024), (1025, 2048, 2048), (32768, 32768, 32768), (32769, 65536, 65536)],
)
def test_classes_are_powers_of_two_from_a_least_one(count, segments, tokens):
    assert (segment_class(count), token_class(count)) == (segments, tokens)
    assert [token_class(n) for n in (65537, 98304, 98305)] == [98304, 98304, 131072], "of many, multiples of 32768"


def test_the_smallest_chunk_of_a_class_is_in_it_and_no_larger_than_its_calls():
    for size in random_sizes(2000):
        shape = size.shape_class
        chunk = shape.smallest()
        smallest = CallSize(len(chunk.segments), chunk.num_tokens, sum(segment.end for segment in chunk.segments))
        assert smallest.shape_class == shape
        assert smallest.queries <= max(size.queries, shape.segments // 2 + 1)


def test_all_classes_of_a_context_have_any_prefix():
    assert all_classes(1500, 5000) == {
        ShapeClass(32, tokens, keys) for tokens in (1024, 2048) for keys in (1024, 2048, 4096, 8192) if keys >= tokens
    }


# a thousand take four minutes of planning
@pytest.mark.parametrize(("number", "most"), [(12, 64), pytest.param(1000, 80, marks=pytest.mark.slow)])
def test_random_batches_make_a_rank_build_few_kernel_plans(number, most):
    shape, plans = Case("wikipedia", CONTEXT, STAGES, MODEL, 80).shape, list(random_plans(number, CONTEXT, MODEL, STAGES))

    def built(stage, library, *called):
        return len({key for plan in plans for key in keys(plan, stage, shape, library, *called)})

    for stage in range(STAGES):
        assert max(built(stage, library) for library in LIBRARIES) <= most
        assert built(stage, LIBRARIES[0]) < built(stage, LIBRARIES[0], lambda size: size)
