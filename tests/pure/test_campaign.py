"""Random problems of every kind are planned or refused without a fault."""

from tests.support.plan import campaign
from tests.support.plan.campaign_cases import case_of, demanding_case_of, exact_case_of
from tests.support.seeds import some_by_default


@some_by_default("first", range(1000), 2)
def test_no_problem_has_a_fault_but_that_more_memory_seldom_makes_a_plan_slower(first: int):
    """The search goes on from where it is, which other caps move: of all 10,000 that is 31, and never more than two of ten."""
    found = [campaign.judged(case_of(seed), seed) for seed in range(first, 10_000, 1000)]
    assert [faults for _, faults in found if faults] in [[[campaign.SLOWER_WITH_MORE]] * count for count in range(3)]
    assert {is_planned for is_planned, _ in found} == {True, False}


DEMANDING = [1, 6, 7, 8, 9, 12, 15, 63]


@some_by_default("seed", [*DEMANDING, *sorted({*range(200)} - {*DEMANDING})], len(DEMANDING))
def test_no_problem_with_loss_groups_spans_little_host_memory_or_replicas_has_a_fault(seed: int):
    assert campaign.judged(demanding_case_of(seed), seed)[1] == [campaign.SLOWER_WITH_MORE] * (seed == 51)


OF_SEARCH = [1304, 9064, 7468, 68, 137, 260, 661, 4630, 620, 3773, 2660, 1671, 2745, 18, 163, 1129, 4510, 4890, 198, 1351, 332]
OF_CHUNKS_AND_ROOM = [1383, 2729, 3111, 3838, 521]


@some_by_default("seed", [*OF_SEARCH, *OF_CHUNKS_AND_ROOM], 9)
def test_problems_that_once_had_a_fault_have_none(seed: int):
    """Plans that more memory made slower, orders and copies that were tried only where no other fitted, caps that were refused
    and do, and named ones that do not: for messages, or what local search, shards, exchanges and empty stages need.
    """
    assert campaign.judged(case_of(seed), seed)[1] == []


def test_plans_of_the_exact_planner_have_no_fault():
    found = [campaign.judged(case, seed) for seed in range(12) if (case := exact_case_of(seed)) is not None]
    assert any(is_planned for is_planned, _ in found)
    assert [faults for _, faults in found if faults] == []


def test_a_cap_that_the_exact_planner_names_has_room_for_messages():
    case = exact_case_of(5733)
    assert case is not None
    assert campaign.judged(case, 5733)[1] == []
