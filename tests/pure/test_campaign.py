"""Random problems of every kind are planned or refused without a fault."""

from tests.support.plan import campaign
from tests.support.plan.campaign_cases import case_of, demanding_case_of, exact_case_of
from tests.support.seeds import some_by_default

SLOWER = {400, 503, 546, 1293, 2682, 2774, 2825, 3386, 3489, 3703, 3925, 4160, 4415, 4496, 4825, 5213, 5745, 6232, 6748, 7117}
SLOWER |= {7346, 7467, 7627, 7701, 7907, 8752, 9083, 9095, 9567, 9574, 9830}
"""Seeds of plans that more memory makes slower, since other caps move where the search begins. No other may be added."""


@some_by_default("first", range(1000), 2)
def test_no_problem_has_a_fault_but_known_plans_that_more_memory_makes_slower(first: int):
    found = {seed: campaign.judged(case_of(seed), seed) for seed in range(first, 10_000, 1000)}
    slower = {seed: [campaign.SLOWER_WITH_MORE] for seed in found.keys() & SLOWER}
    assert {seed: faults for seed, (_, faults) in found.items() if faults} == slower
    assert {is_planned for is_planned, _ in found.values()} == {True, False}


DEMANDING = [1, 6, 7, 8, 9, 12, 15, 63]


@some_by_default("seed", [*DEMANDING, *sorted({*range(200)} - {*DEMANDING})], len(DEMANDING))
def test_no_problem_with_loss_groups_spans_little_host_memory_or_replicas_has_a_fault(seed: int):
    assert campaign.judged(demanding_case_of(seed), seed)[1] == [campaign.SLOWER_WITH_MORE] * (seed == 51)


OF_SEARCH = [1304, 9064, 7468, 68, 137, 260, 661, 4630, 620, 3773, 2660, 1671, 2745, 18, 163, 1129, 4510, 4890, 198, 1351, 332]
OF_CHUNKS_AND_ROOM = [1383, 2729, 3111, 3838, 521]


@some_by_default("seed", [*OF_SEARCH, *OF_CHUNKS_AND_ROOM], 9)
def test_problems_that_once_had_a_fault_have_none(seed: int):
    """Plans slower with more memory, orders and copies that were tried too late, caps refused that do and named that do not."""
    assert campaign.judged(case_of(seed), seed)[1] == []


def test_plans_of_the_exact_planner_have_no_fault():
    cases = {seed: exact_case_of(seed) for seed in (*range(12), 5733)}
    assert cases[5733] is not None  # whose messages need more than the cap that is named first
    found = [campaign.judged(case, seed) for seed, case in cases.items() if case is not None]
    assert any(is_planned for is_planned, _ in found)
    assert [faults for _, faults in found if faults] == []
