"""Where a rank issues offloads and loads: no later than they start, and it then holds what the simulation says."""

from hypothesis import given

from megatron_epp.plan import Action, Op, lower, simulate
from tests.support.plan.random_plans import sound_plans

COPIES = (Op.O, Op.FREE, Op.L)


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
