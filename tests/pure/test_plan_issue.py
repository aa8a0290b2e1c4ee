"""Where a rank issues offloads and loads: no later than they start, and it then holds what the simulation says."""

from hypothesis import given

from megatron_epp.plan import Action, Op, lower, simulate
from tests.support.plan.random_plans import sound_plans
from tests.support.plan.small_plans import make_plan, offload, whole

COPIES = (Op.O, Op.FREE, Op.L)


def text(row):
    return " ".join(str(action) for action in row if "_" not in action.op)


def most_held(plan, rank, row):
    """Most bytes live when the row's actions run one after the other, the static ones included."""
    steps = {step.action: step for step in (*plan.ranks[rank], *(plan.copies[rank] if plan.copies else ()))}
    live = most = plan.static_bytes[rank]
    for action in row:
        if action in steps:
            live += steps[action].alloc_bytes
            most = max(most, live)
        if action.op is Op.FREE:
            live -= steps[action._replace(op=Op.O)].free_bytes
        elif action in steps and action.op is not Op.O:
            live -= steps[action].free_bytes
    assert live == plan.static_bytes[rank]
    return most


def test_copies_are_issued_ahead_of_what_they_run_beside():
    assert text(lower(offload())[0]) == "0F0 0O0 0F1 0FREE0 0L0 0F2 0B0 0B1 0B2 0REDUCE2"


def test_a_load_does_not_wait_for_memory_that_an_offload_gives_back_beside_the_same_action():
    """0O1 ends at 25 and 0L0 starts then, both next to 0F2: while that runs, the rank holds the bytes of both."""
    plan = make_plan(["0F0 0F1 0F2 0B2 0B0 0B1"], whole(2, 2, 2), copies=["0O0 0O1 0L0 0L1"], offload_share=0.5)
    assert text(lower(plan)[0]) == "0F0 0O0 0F1 0FREE0 0O1 0L0 0F2 0FREE1 0L1 0B2 0B0 0B1 0REDUCE1"
    assert [live for time_us, live in simulate(plan).live_bytes(0) if time_us == 20.0][-1] == 100 + 3 * 20


def test_a_load_stands_behind_its_own_offload_even_beside_the_same_action():
    """0O0 and 0L0 both lie within 0F1: they save nothing while that runs."""
    plan = make_plan(["0F0 0F1 0B0 0B1"], whole(4, 4), copies=["0O0 0L0"], offload_share=0.5)
    assert text(lower(plan)[0]) == "0F0 0O0 0F1 0FREE0 0L0 0B0 0B1 0REDUCE1"
    assert simulate(plan).peak_bytes == (100 + 2 * 40,)


@given(sound_plans(shared=True))
def test_copies_stand_in_their_order_between_forward_and_backward(plan):
    for rank, row in enumerate(lower(plan)):
        place = {action: at for at, action in enumerate(row)}
        copies = [step.action for step in plan.copies[rank]] if plan.copies else []
        assert {action for action in row if action.op in COPIES} == {
            *copies,
            *(action._replace(op=Op.FREE) for action in copies if action.op is Op.O),
        }
        for _, stage, chunk in (action for action in copies if action.op is Op.O):
            order = [place[Action(op, stage, chunk)] for op in (Op.F, Op.O, Op.FREE, Op.L, Op.B)]
            assert order == sorted(order)


@given(sound_plans(shared=True))
def test_a_rank_holds_in_the_order_of_issue_what_it_holds_in_the_simulation(plan):
    peaks = simulate(plan).peak_bytes
    for rank, row in enumerate(lower(plan)):
        assert most_held(plan, rank, row) == peaks[rank]


@given(sound_plans(shared=True, min_time=1))
def test_copies_are_issued_before_the_action_they_start_beside_and_freed_behind_the_one_they_end_beside(plan):
    line = simulate(plan)
    for rank, row in enumerate(lower(plan)):
        place = {action: at for at, action in enumerate(row)}
        for step, start_us, end_us in zip(plan.ranks[rank], line.start_us[rank], line.end_us[rank], strict=True):
            here, freed, waits = place[step.action], {}, False
            for (action, *_), *times_us in zip(
                plan.copies[rank], line.copy_start_us[rank], line.copy_end_us[rank], strict=True
            ):
                _, stage, chunk = action
                if action.op is Op.O:
                    freed[stage, chunk] = times_us[1] <= start_us
                    assert (place[Action(Op.FREE, stage, chunk)] < here) == freed[stage, chunk]
                waits = waits or (action.op is Op.L and not freed[stage, chunk])  # and all behind it with it
                assert (place[action] < here) == (times_us[0] < end_us and not waits)
