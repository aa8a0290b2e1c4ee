"""A training on documents whose second pipeline rank becomes slow when plans are made by learnt costs."""

import time

from megatron_epp.mcore import entry

SLEEP_S = 0.05


def main():
    with entry.errors_in_one_line():
        entry.prepare()
        from megatron_epp.mcore.iteration import sliced_run
        from megatron_epp.mcore.model import gpt
        from megatron_epp.mcore.model.stage import MegatronStage

        quick = MegatronStage.forward

        def forward(self, *rest):
            run = sliced_run.current()
            if run.rank == 1 and run.learnt_planner is not None and run.iteration >= run.learnt_planner.first_batch:
                time.sleep(SLEEP_S)
            return quick(self, *rest)

        MegatronStage.forward = forward
        gpt.pretrain()


if __name__ == "__main__":
    main()
