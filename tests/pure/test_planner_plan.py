"""The planner as a whole: sound, deterministic, never slower than plain 1F1B, and open to new schedules."""

from dataclasses import replace

import pytest

from megatron_epp.plan import InfeasibleError, PlanError
from megatron_epp.plan.document import digest
from megatron_epp.plan.proof import check
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.tools.formulas import H100, ModelShape, analytic_costs
from tests.support.calls import run_python
from tests.support.plan.planner_cases import GIB, least_cap_bytes, pipeline, problem, web_lengths

BATCH = (60000, *web_lengths(40, seed=2))


def test_equal_problems_give_equal_plans_whatever_the_hash_seed():
    program = (
        "from tests.support.plan.planner_cases import pipeline, problem; from megatron_epp.planner import plan; "
        "from megatron_epp.plan.document import digest; "
        f"print(digest(plan(problem({BATCH!r}, 4, {25 * GIB}, token_multiple=8), pipeline(4))))"
    )
    own = digest(plan(problem(BATCH, 4, 25 * GIB, token_multiple=8), pipeline(4)))
    assert run_python(program, PYTHONHASHSEED="4242").stdout == f"{own}\n"


def test_one_whole_sequence_per_chunk_is_the_choice_where_nothing_is_gained_by_cutting_or_packing():
    """Equal sequences on a machine whose passes cost more than the bubble that cutting would save."""
    given, costs = problem((256,) * 64, 2), pipeline(2, cpu=True)
    made, plain = plan(given, costs, Options(slices=1)), plan(given, costs, Options(planner="1f1b"))
    assert made.chunks == plain.chunks
    assert made.predicted.makespan_us == pytest.approx(plain.predicted.makespan_us)


def test_tiny_sequences_are_packed_and_a_whale_is_cut_because_that_is_faster():
    tiny, whale = problem((100,) * 128, 4), problem((100000, *(500,) * 20), 8)
    packed, cut = plan(tiny, pipeline(4)), plan(whale, pipeline(8))
    assert len(packed.chunks) < 64
    assert cut.predicted.bubble_fraction < 0.1
    for made, given, share in ((packed, tiny, 0.7), (cut, whale, 0.2)):
        plain = plan(given, pipeline(given.num_stages), Options(planner="1f1b"))
        assert made.predicted.makespan_us < share * plain.predicted.makespan_us


def test_the_baseline_is_1f1b_over_whole_sequences_in_batch_order():
    made = plan(problem((50, 900, 70), 2), pipeline(2), Options(planner="1f1b", slices=9))
    assert [chunk.segments for chunk in made.chunks] == [((0, 0, 50),), ((1, 0, 900),), ((2, 0, 70),)]
    assert [str(step.action) for step in made.ranks[0]] == ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]


def test_the_plan_records_what_it_was_made_from():
    made = plan(problem((900, 80), 2, 50 * GIB, token_multiple=4), pipeline(2), Options(seed=7))
    assert (made.lengths, made.placement, made.cap_bytes, made.token_multiple) == ((900, 80), (0, 1), (50 * GIB,) * 2, 4)
    assert (made.costs, made.planner, made.seed, made.num_layers) == ("analytic:h100", "greedy", 7, (4, 4))
    assert made.static_bytes == tuple(stage.static_bytes for stage in pipeline(2).stages)


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        (Problem((5,), (0, 1, 0), (1,) * 3), Options(), "a stage on each of 3 ranks"),
        (Problem((5,), (1, 0), (1,) * 2), Options(planner="1f1b"), "one stage on each rank, in order"),
        (Problem((5,), (0, 2), (1,) * 2), Options(), "a stage on each of 2 ranks"),
        (Problem((5,), (0, 1), (1,)), Options(), "1 caps"),
        (Problem((5,), (0, 1, 2), (1,) * 3), Options(), "costs are of 2"),
        (Problem((), (0, 1), (1,) * 2), Options(), "at least one token"),
        (Problem((5, 0), (0, 1), (1,) * 2), Options(), "at least one token"),
        (Problem((5,), (0, 1), (1,) * 2, token_multiple=0), Options(), "token multiple 0"),
        (Problem((5,), (0, 1), (1,) * 2), Options(slices=0), "slices 0"),
        (Problem((5,), (0, 1), (1,) * 2), Options(recompute=-1), "recompute -1"),
        (Problem((5,), (0, 1), (1,) * 2), Options(planner="best"), "no planner 'best'; there are 1f1b, .*greedy"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(given: Problem, options: Options, words: str):
    with pytest.raises(PlanError, match=words):
        plan(given, pipeline(2), options)


@pytest.mark.parametrize(
    "options", [Options(), Options(slices=4, chunk_tokens=20_000), Options(offload=True)], ids=["", "cut", "offload"]
)
@pytest.mark.parametrize("stages", [2, 8])
def test_microbatches_run_whole_each_in_a_chunk_of_its_own(options: Options, stages: int):
    lengths, numbers = (300, 4000, 60, 9000, 90, 2000), (4, 0, 4, 2, 2, 7)
    free = Problem(lengths, tuple(range(stages)), (1 << 50,) * stages, microbatches=numbers)
    made = plan(free, pipeline(stages), options)
    for asked in (free, replace(free, cap_bytes=(int(0.9 * max(made.predicted.peak_bytes)),) * stages)):
        made = plan(asked, pipeline(stages), options)
        whole = {tuple((part.sequence, part.start, part.end) for part in chunk.segments) for chunk in made.chunks}
        assert whole == {((1, 0, 4000),), ((0, 0, 300), (2, 0, 60)), ((3, 0, 9000), (4, 0, 90)), ((5, 0, 2000),)}
        assert check(made) == []
    least = least_cap_bytes(free, pipeline(stages), options)
    assert len(plan(replace(free, cap_bytes=(least,) * stages), pipeline(stages), options).chunks) == 4


def test_a_planner_that_makes_chunks_of_its_own_refuses_microbatches():
    with pytest.raises(PlanError, match="'seq1f1b' makes chunks of its own, and the batch has microbatches"):
        plan(Problem((5, 6), (0, 1), (1 << 50,) * 2, microbatches=(0, 1)), pipeline(2), Options(planner="seq1f1b"))


LONG = (100_000, 30_000, 20_000, *[700] * 80)
"""More than are tried whole in every order anyway."""
STAGES = 4
SHAPE = ModelShape(num_layers=48, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, vocab_size=4096)
MANY_HEADS = analytic_costs(SHAPE, H100, [12] * STAGES, state_bytes_per_parameter=2.0)
"""Many layers with as many key heads as query heads: caches of all of them are larger than one layer's activations."""


def test_whole_sequences_fit_where_their_slices_do_not():
    cap, of_slices = (least_cap_bytes(problem(LONG, STAGES), MANY_HEADS, Options(slices=slices)) for slices in (None, 8))
    assert cap < of_slices
    made = plan(problem(LONG, STAGES, cap), MANY_HEADS, Options())
    assert not check(made)
    assert any(chunk.segments == ((0, 0, LONG[0]),) for chunk in made.chunks)


def test_such_plans_are_no_slower_than_1f1b_of_whole_sequences():
    rising = tuple(sorted(LONG))
    cap = int(1.5 * least_cap_bytes(problem(rising, STAGES), MANY_HEADS, Options(planner="1f1b")))
    made = plan(problem(LONG, STAGES, cap), MANY_HEADS, Options())
    plain = plan(problem(rising, STAGES, cap), MANY_HEADS, Options(planner="1f1b"))
    assert any(chunk.segments == ((0, 0, LONG[0]),) for chunk in made.chunks)
    assert made.predicted.makespan_us <= plain.predicted.makespan_us


def test_an_error_of_a_planner_that_cuts_nothing_does_not_advise_smaller_chunks():
    with pytest.raises(InfeasibleError, match="no plan of '1f1b' fits a memory cap") as refused:
        plan(problem(LONG, STAGES, 8 * GIB), MANY_HEADS, Options(planner="1f1b"))
    said = str(refused.value)
    assert ", or set planner to greedy, or lower context, " in said
    assert "chunk_tokens" not in said
