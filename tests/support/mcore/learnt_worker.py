"""A loop of a framework's own that keeps what its schedule has learnt: arguments as of `wrap_worker`.

Prints, for a schedule that learns, one that takes its state, and one that takes the state of another machine: whether it
learns, and its costs.
"""

import json

import torch.distributed as dist

from tests.support.mcore import wrap_worker
from tests.support.mcore.figures import record_figures


def main():
    models = wrap_worker.begin()
    import megatron_epp
    from megatron_epp.cost.learning import RECORDED, WARM_UP
    from megatron_epp.plan import EppError

    def state_after(calls, loaded=None):
        schedule = megatron_epp.wrap()
        if loaded is not None:
            schedule.load_state_dict(loaded)
        for _ in range(calls):
            wrap_worker.run(schedule, models)
        learns = not schedule._pipelines[0].learner.is_done
        record_figures({"rank": dist.get_rank(), "learns": learns, "state": schedule.state_dict()})
        return schedule

    learnt = state_after(WARM_UP + RECORDED)
    state = json.loads(json.dumps(learnt.state_dict()))
    state_after(1, state)
    state["pipelines"][0]["learnt_with"]["the device"] = "another one"
    state_after(1, state)
    try:
        learnt.load_state_dict(state)
    except EppError as error:
        record_figures({"rank": dist.get_rank(), "error": str(error)})


if __name__ == "__main__":
    main()
