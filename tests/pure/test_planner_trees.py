"""Plans of batches whose sequences share prefixes: they are sound, each token in common runs once, and that pays."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_epp.cost.blocks import HEAD, BlockCosts
from megatron_epp.cost.kv_costs import KVBytes
from megatron_epp.features.microbatch_prefixes.whole_plans import lenders_first
from megatron_epp.features.trees.choice import divisible
from megatron_epp.features.trees.readers import groups_of
from megatron_epp.features.trees.tree_cuts import cut_trees
from megatron_epp.features.trees.tree_work import work_of_tree
from megatron_epp.plan import InfeasibleError
from megatron_epp.plan.chunk import NOTHING_BORROWED, Borrowed, path_of
from megatron_epp.plan.kv_offload import host_peak_bytes
from megatron_epp.plan.proof import check
from megatron_epp.planner import Options, plan
from megatron_epp.planner.chunks.chunker import Chunker
from megatron_epp.planner.memory.breakdown import peak_items
from megatron_epp.planner.microbatches import plan_microbatches
from megatron_epp.planner.replicas import Replicas
from megatron_epp.planner.result import plan_or_refuse
from megatron_epp.planner.search import search
from megatron_epp.planner.service.replica_balance import sequence_work
from megatron_epp.tools.report.text import headline
from tests.support.plan import second_simulator
from tests.support.plan.planner_cases import GIB, least_cap_bytes, pipeline, problem
from tests.support.plan.random_forests import forest
from tests.support.plan.small_plans import chunk

COSTS = pipeline(2, 1)


def groups(count, members, prompt, response):
    """Groups of responses of falling lengths to prompts of one length."""
    lengths = [prompt + response - 7 * member for _ in range(count) for member in range(members)]
    first = (count * members) * [NOTHING_BORROWED]
    for q in range(len(lengths)):
        if q % members:
            first[q] = Borrowed(q - q % members, prompt - 1)
    return tuple(lengths), tuple(first)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from([1, 8]), st.booleans())
def test_random_forests_have_sound_plans_in_which_each_token_runs_once(seed, multiple, forward_only):
    rng = random.Random(seed)
    grown = forest(rng, trees=rng.randint(1, 4), depth=rng.randint(1, 4))
    options = Options(
        recompute=rng.choice(["auto", 1]),
        slices=rng.choice([None, None, 3]),
        chunk_tokens=rng.choice([None, None, 16]),
        split_weight=rng.random() < 0.3,
        offload=rng.random() < 0.3,
    )
    asked = problem(grown.lengths, 2, token_multiple=multiple, forward_only=forward_only)
    (made,) = plan_or_refuse((replace(asked, borrowed=grown.borrowed),), COSTS, options)
    assert (check(made), second_simulator.faults(made)) == ([], [])
    assert sum(chunk.num_tokens for chunk in made.chunks) == sum(grown.lengths) - sum(n for _, n in grown.borrowed)
    assert made.predicted.lower_bound_us <= made.predicted.makespan_us * (1 + 1e-9)


def test_keys_are_held_by_their_chunk_and_sums_of_gradients_from_the_first_reader_on():
    """A prompt of 4 tokens and its response of 2 are in one chunk, another response of 3 in the next, one of 1 in a third."""
    chunks = chunk((0, 0, 6)), chunk((1, 4, 7)), chunk((2, 4, 5))
    lengths, borrowed = (6, 7, 5), (NOTHING_BORROWED, Borrowed(0, 4), Borrowed(0, 4))
    work = work_of_tree(chunks, replace(problem(lengths, 2), borrowed=borrowed), lengths, 4)
    tenfold = [column(lambda tokens: 10 * tokens).tolist() for column in (work.opened_cache, work.released_cache)]
    assert tenfold == [[80, 40, 40], [0, 40, 40 + 80]]
    assert work.opened_gradients(lambda tokens: tokens).tolist() == [0, 8, 0]
    assert work.closed_gradients(lambda tokens: tokens).tolist() == [8, 0, 0]
    assert (work.prefix_tokens.tolist(), work.gathered_tokens.tolist()) == ([0, 4, 4], [8, 8, 8])


def test_rows_that_many_segments_read_are_planned_once():
    lengths, borrowed = groups(1, 8, 2001, 400)
    chunks = chunk((0, 0, 2001)), chunk(*((q, borrowed[q].tokens, length) for q, length in enumerate(lengths) if q))
    batch = replace(problem(lengths, 2), borrowed=borrowed)
    work, alone = (work_of_tree(own, batch, lengths) for own in (chunks, chunks[:1]))
    own = sum(lengths[1:]) - 7 * 2000
    assert (work.gathered_tokens.tolist(), work.repeated_tokens.tolist()) == ([2001, 2000 + own], [0, 6 * 2000])
    kv = KVBytes(bytes_per_token=4.0, heads=2)
    assert kv.forward_bytes(work).tolist() == [4 * 2001, 4 * (2000 + own)]
    assert kv.prefix_bytes(work).tolist() == [0, 4 * (2 * (2000 + own) - own)]
    assert kv.prefix_bytes(alone).tolist() == [0]
    latents = replace(kv, expanded_bytes_per_token=8.0, expanded_heads=2)  # of which keys and values are made for each segment
    assert latents.forward_bytes(work)[1] == 4 * (7 * 2000 + own) + 8 * (7 * 2000 + own)


def test_keys_and_values_that_a_pass_puts_in_a_row_take_a_copy_and_in_backward_four():
    chunks, borrowed = (chunk((0, 0, 6)), chunk((1, 4, 7))), (NOTHING_BORROWED, Borrowed(0, 4))
    work = work_of_tree(chunks, replace(problem((6, 7), 2), borrowed=borrowed), (6, 7))
    layers, row_bytes = COSTS.stages[0].num_caches, COSTS.stages[0].kv.bytes_per_token
    slow, free = (replace(COSTS, copy_us_per_byte=each) for each in (0.5, 0.0))
    for passes, copies in (("forward_us", 1), ("backward_us", 4), ("weight_us", 0)):
        added_us = getattr(slow, passes)(0, work) - getattr(free, passes)(0, work)
        assert added_us == pytest.approx([copies * 0.5 * layers * row_bytes * rows for rows in (6, 7)])


def test_grains_are_scanned_only_where_memory_is_short():
    lengths, borrowed = groups(16, 2, 1500, 500)
    asked, costs = replace(problem(lengths, 4), borrowed=borrowed), pipeline(4, 1)
    peaks = plan(asked, costs).predicted.peak_bytes
    for share, scans in ((1.3, False), (0.8, True)):
        capped = replace(asked, cap_bytes=tuple(int(share * peak) for peak in peaks))
        came_from = search(Replicas((capped,), costs, Options())).came_from
        starts = {(to.start, to.lead) for to, (_, word) in came_from.items() if word == "opening: "}
        assert {("longest", 3.0), ("longest", 0.0)} <= starts  # openings of one grain are tried in both
        assert (("second", 1.0) in starts) == scans


@pytest.mark.parametrize("placement", [(0, 1, 0, 1), (0, 1, 1, 0)])
def test_several_stages_per_rank_run_forests_too(placement):
    lengths, borrowed = groups(4, 4, 2000, 1000)
    asked = replace(problem(lengths, 2), placement=placement, borrowed=borrowed)
    assert check(plan(asked, pipeline(4, 1))) == []


def test_groups_with_one_prompt_take_less_time_and_memory_than_their_sequences():
    lengths, borrowed = groups(4, 8, 4000, 1000)
    asked = problem(lengths, 2)
    alone, shared = plan(asked, COSTS), plan(replace(asked, borrowed=borrowed), COSTS)
    assert alone.predicted.makespan_us > 2.5 * shared.predicted.makespan_us
    assert f" run ({28 * 3999:,} are in common with others), in " in headline(shared)[1]


def test_a_batch_runs_apart_where_that_is_faster_or_hardly_anything_is_shared():
    lengths, borrowed = groups(2, 4, 40, 4000)
    asked = problem(lengths, 2)
    assert plan(replace(asked, borrowed=borrowed), COSTS) == plan(asked, COSTS)
    lengths, borrowed = groups(2, 4, 200, 4000)
    made = plan(replace(asked, lengths=lengths, borrowed=borrowed), COSTS)
    assert made.predicted.makespan_us <= plan(replace(asked, lengths=lengths), COSTS).predicted.makespan_us


def test_without_shared_prefixes_the_plan_is_the_one_of_a_batch_that_says_nothing_of_them():
    lengths, _ = groups(2, 4, 4000, 1000)
    asked = problem(lengths, 2)
    assert plan(replace(asked, borrowed=()), COSTS) == plan(asked, COSTS)


def test_a_cap_that_is_named_has_a_plan_and_what_a_rank_holds_is_said_by_item():
    lengths, borrowed = groups(2, 4, 30000, 2000)
    asked = replace(problem(lengths, 2, 1 * GIB), borrowed=borrowed)
    with pytest.raises(InfeasibleError) as refusal:
        plan(asked, COSTS)
    made = plan(replace(asked, cap_bytes=(refusal.value.least_cap_bytes,) * 2), COSTS)
    assert check(made) == []
    assert sum(peak_items(made, COSTS).values()) == max(made.predicted.peak_bytes)


def test_what_many_read_goes_to_host_memory_where_the_device_lacks_room():
    lengths, borrowed = groups(1, 4, 120000, 500)
    costs = replace(pipeline(2, 8), host_us_per_byte=1e-5)
    asked = replace(problem(lengths, 2), borrowed=borrowed)
    least = least_cap_bytes(asked, costs, Options(offload=True, kv_offload=False, shares=True))
    static = max(map(costs.static_bytes, range(2)))
    less = replace(asked, cap_bytes=(static + 2 * (least - static) // 5,) * 2)
    with pytest.raises(InfeasibleError):
        plan(less, costs, Options(offload=True, kv_offload=False, shares=True))
    made, separate = (plan(each, costs, Options(offload=True)) for each in (less, replace(less, borrowed=())))
    assert 2 * made.predicted.makespan_us < separate.predicted.makespan_us
    assert (check(made), second_simulator.faults(made), made.borrowed) == ([], [], borrowed)
    assert {entry.sequence for entry in made.kv_offload} == {0}
    assert sum(peak_items(made, costs).values()) == max(made.predicted.peak_bytes)
    assert max(host_peak_bytes(made)) >= max(entry.cache_bytes for entry in made.kv_offload)
    unread = replace(made, kv_offload=(made.kv_offload[0]._replace(sequence=3),))
    assert "sequence 3 in host memory of stage 0: the sequence is read by no other" in str(check(unread)[0])


@pytest.mark.parametrize("offload", [False, True])
def test_under_caps_that_recompute_or_copies_meet_forests_keep_keys_and_values_on_the_device(offload):
    lengths, borrowed = groups(2, 4, 30000, 2000)
    asked = replace(problem(lengths, 2), borrowed=borrowed)
    costs = replace(COSTS, offloadable_share=0.9, host_us_per_byte=1e-5)
    static, peak = max(map(costs.static_bytes, range(2))), max(plan(asked, costs).predicted.peak_bytes)
    made = plan(replace(asked, cap_bytes=((peak + static) // 2,) * 2), costs, Options(offload=offload))
    assert (check(made), made.kv_offload) == ([], ())
    assert any(made.copies) if offload else any(sum(each) for row in made.recompute for each in row)


def test_a_tree_of_the_whole_batch_is_split_for_replicas_where_least_is_shared():
    lengths, borrowed = groups(4, 4, 1000, 500)
    joined = [Borrowed(0, 99) if q and not q % 4 else own for q, own in enumerate(borrowed)]  # all prompts begin alike
    asked = replace(problem(lengths, 2), borrowed=tuple(joined))
    assert len(asked.indivisible) == 1
    assert divisible(asked, 1) == asked
    for replicas in (2, 4):
        shared = divisible(asked, replicas)
        assert len(shared.indivisible) >= replicas
        assert sum(count > 99 for _, count in shared.borrowed) == 12  # no group was split
    assert len(divisible(asked, 8).indivisible) >= 8


@pytest.mark.parametrize(
    ("prompts", "replicas", "sizes"),
    [(1, 2, [6, 6]), (1, 4, [3] * 4), (1, 6, [2] * 6), (3, 2, [2, 2, 4, 4]), (3, 4, [2, 2, 4, 4]), (3, 6, [2] * 6)],
)
def test_prompts_are_repeated_where_that_takes_work_from_the_replica_that_has_most(prompts, replicas, sizes):
    lengths, borrowed = groups(prompts, 12 // prompts, 1000, 500)
    asked = replace(problem(lengths, 2), borrowed=borrowed)
    shared = divisible(asked, replicas)
    assert sorted(map(len, shared.indivisible)) == sizes
    assert sum(count for _, count in shared.borrowed) == (12 - len(sizes)) * 999
    assert divisible(asked, 12).borrowed == ()


def test_sequences_with_one_loss_stay_together_where_their_tree_is_split():
    lengths, borrowed = groups(1, 8, 1000, 500)
    asked = replace(problem(lengths, 2), borrowed=borrowed, loss_groups=(0, 0, 0, 0, 1, 1, 1, 1))
    assert divisible(asked, 2).indivisible == divisible(asked, 4).indivisible == ((0, 1, 2, 3), (4, 5, 6, 7))
    together = replace(asked, loss_groups=(0,) * 8)
    assert divisible(together, 4) == together


@pytest.mark.parametrize("seed", range(40))
def test_a_split_forest_shares_what_its_sequences_have_in_common_alone(seed):
    rng = random.Random(seed)
    grown, replicas = forest(rng, trees=rng.randint(1, 3), depth=4, tokens=90), rng.randint(2, 5)
    asked = replace(problem(grown.lengths, 2), borrowed=grown.borrowed)
    if rng.random() < 0.5:
        asked = replace(asked, loss_groups=tuple(rng.randint(0, 3) for _ in grown.lengths))
    shared = divisible(asked, replicas)
    for q, (lender, count) in enumerate(shared.borrowed):
        for batch in (asked, shared):
            assert path_of(q, count, batch.borrowed) == path_of(lender, count, batch.borrowed)
    least = len(replace(asked, borrowed=()).indivisible)
    assert len(shared.indivisible) >= min(replicas, least)


def test_a_part_of_a_batch_keeps_what_its_sequences_borrow():
    lengths, borrowed = groups(2, 2, 100, 50)
    asked = replace(problem(lengths, 2), borrowed=borrowed)
    assert asked.indivisible == ((0, 1), (2, 3))
    assert sequence_work(asked, COSTS)[1] < 0.5 * sequence_work(asked, COSTS)[0]  # replicas are balanced by tokens that run
    assert asked.part((2, 3)).borrowed == (NOTHING_BORROWED, Borrowed(0, 99))


def test_backwards_of_a_branch_follow_its_forwards_and_what_all_read_comes_last():
    """A prompt of two slices and its response of two more, then a response of two slices, and one in the chunk of a third's."""
    chunks = *(chunk((0, at, at + 2)) for at in (0, 2, 4, 6)), chunk((1, 4, 6)), chunk((1, 6, 8)), chunk((2, 4, 6), (3, 4, 5))
    borrowed = (NOTHING_BORROWED, *(3 * [Borrowed(0, 4)]))
    asked = replace(problem((8, 8, 6, 5), 2), borrowed=borrowed)
    assert [*map(list, groups_of(chunks, asked))] == [[2, 3], [4, 5], [0, 1, 6]]
    together = replace(asked, loss_groups=(0, 0, 1, 1))
    assert [*map(list, groups_of(chunks, together))] == [[*range(7)]]


def test_keys_and_values_of_few_branches_are_alive_however_many_there_are():
    options, peaks = Options(chunk_tokens=1000), []
    for members in (4, 32):
        lengths, borrowed = groups(1, members, 4000, 6000)
        made = plan(replace(problem(lengths, 2), borrowed=borrowed), COSTS, options)
        peaks.append(max(made.predicted.peak_bytes) - max(made.static_bytes))
    assert peaks[1] < 1.1 * peaks[0]


def test_slices_of_a_branch_take_equally_long_and_end_a_chunk():
    lengths, borrowed = groups(2, 4, 4000, 3000)
    asked = replace(problem(lengths, 2), borrowed=borrowed)
    chunker = Chunker.of(asked, COSTS, None)
    chunks = cut_trees(chunker, range(8), (1.0,) * 30, 32)
    for q in range(8):
        own = [(c, segment) for c in chunks for segment in c.segments if segment.sequence == q]
        times_us = [chunker.part_us(*segment) for _, segment in own[1:]]
        assert len(own) > 1
        assert max(times_us) < 1.05 * min(times_us)
        assert own[-1][0].segments[-1] == own[-1][1]


def test_microbatches_share_inside_and_a_prefix_runs_again_in_each():
    lengths, borrowed = groups(2, 2, 400, 300)
    asked = replace(problem(lengths, 2), borrowed=borrowed, microbatches=(0, 0, 1, 1))
    made = plan(asked, COSTS, Options(shares=True))
    assert sorted(made.chunks, key=str) == [chunk((0, 0, 700), (1, 399, 693)), chunk((2, 0, 700), (3, 399, 693))]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.booleans())
def test_whole_microbatches_share_with_each_other_and_those_that_lend_run_first(seed, forward_only):
    rng, prompts = random.Random(seed), {}
    lengths, borrowed, count = [], [], rng.randint(2, 12)
    for q in range(count):
        group = rng.randrange(4)
        tokens = 100 * (1 + group)
        lengths.append(tokens + rng.randint(1, 300))
        borrowed.append(Borrowed(prompts[group], tokens) if group in prompts else NOTHING_BORROWED)
        prompts.setdefault(group, q)
    ends = [*sorted(rng.sample(range(1, count), rng.randint(1, count - 1))), count]
    microbatches = tuple(tuple(lengths[start:end]) for start, end in pairwise([0, *ends]))
    shares = any(tokens for _, tokens in borrowed)
    asked = replace(problem((), 2, forward_only=forward_only), borrowed=tuple(borrowed) if shares else ())
    made, order = plan_microbatches(microbatches, asked, COSTS, Options(shares=True))
    assert (check(made), second_simulator.faults(made)) == ([], [])
    assert sorted(order) == [*range(len(microbatches))]
    numbers = [number for number, each in enumerate(microbatches) for _ in each]
    assert [{numbers[part.sequence] for part in own.segments} for own in made.chunks] == [{number} for number in order]
    assert sum(own.num_tokens for own in made.chunks) == sum(lengths) - sum(tokens for _, tokens in borrowed)


def test_microbatches_keep_their_order_but_for_those_that_lend():
    """The third borrows of the second, the first of none."""
    lengths, borrowed = (300, 200, 250, 100), (NOTHING_BORROWED, NOTHING_BORROWED, Borrowed(1, 150), NOTHING_BORROWED)
    asked = replace(problem(lengths, 2), borrowed=borrowed)
    rows = [chunk((0, 0, 300)), chunk((1, 0, 200)), chunk((2, 150, 250)), chunk((3, 0, 100))]
    assert lenders_first(rows, asked) == tuple(rows)
    assert lenders_first([rows[3], rows[2], rows[0], rows[1]], asked) == (rows[3], rows[0], rows[1], rows[2])


def test_logits_of_all_tokens_of_microbatches_take_memory_and_time_and_unread_ones_only_memory():
    lengths, borrowed = groups(1, 6, 4000, 200)
    microbatches, asked = tuple((length,) for length in lengths), replace(problem((), 2), borrowed=borrowed)
    costs = replace(COSTS, stages=(COSTS.stages[0], with_head(COSTS.stages[1])))
    unread = replace(asked, trained=tuple((length,) for length in lengths))
    cases = (asked, costs), (unread, costs), (asked, COSTS)
    read, zeros, headless = (plan_microbatches(microbatches, *case, Options(shares=True)).plan for case in cases)
    separate, _ = plan_microbatches(microbatches, replace(asked, borrowed=()), costs, Options())
    assert read.borrowed == zeros.borrowed == borrowed
    own_tokens = sum(lengths) - sum(tokens for _, tokens in borrowed)
    peaks = [max(each.predicted.peak_bytes) for each in (read, zeros, headless)]
    assert peaks[0] == peaks[1] > peaks[2] + 1.5 * HEAD_BYTES * own_tokens
    assert 1.5 * zeros.predicted.makespan_us < read.predicted.makespan_us < separate.predicted.makespan_us


def test_what_microbatches_read_of_each_other_stays_on_the_device():
    lengths, borrowed = groups(1, 4, 120000, 500)
    asked, costs = replace(problem((), 2), borrowed=borrowed), replace(pipeline(2, 8), host_us_per_byte=1e-5)
    microbatches = tuple((length,) for length in lengths)
    free = plan_microbatches(microbatches, asked, costs, Options(shares=True)).plan
    static, peak = max(free.static_bytes), max(free.predicted.peak_bytes)
    capped = replace(asked, cap_bytes=(static + (peak - static) // 5,) * 2)
    at_host = plan(replace(capped, lengths=lengths, microbatches=tuple(range(4))), costs, Options(shares=True, offload=True))
    assert at_host.kv_offload
    with pytest.raises(InfeasibleError):
        plan_microbatches(microbatches, capped, costs, Options(shares=True, offload=True))


HEAD_BYTES = 100_000.0


def with_head(stage):
    """Return a stage whose output layer keeps many bytes of a token, and takes as long as all its layers."""
    line = stage.line("forward")
    return replace(
        stage, blocks=(*stage.blocks, BlockCosts(kind=HEAD, bytes_per_token=HEAD_BYTES, forward=line, backward=line))
    )
