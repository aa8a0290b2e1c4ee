"""Trains with several kinds of parallelism and notes through which process groups the collectives of training go.

Returns by training and rank the groups in use and those that were seen.
"""

from collections import defaultdict
from unittest import mock

import torch.distributed as dist
from megatron.training import training

from megatron_epp.mcore.iteration import sliced_run
from megatron_epp.mcore.training import nccl_settings
from scripts.parity.cells import OPTIMIZERS, PLANS, Case, Cell
from tests.support.mcore.jobs.common import flags_of, write, written

NAMES = "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast", "barrier"


def run(folder):
    common = flags_of(folder, 2, 64, 4)
    note_collectives()
    trainings = {}
    layers, experts = Cell(tp=2, sp=True, pp=2), Cell(pp=2, dp=2, ep=2, experts=4)
    for name, cell, optimizer in (("layers shared", layers, "plain"), ("experts shared", experts, "distributed")):
        case = Case(cell, "gpt2", PLANS["sliced"], OPTIMIZERS[optimizer])
        trainings[name] = cell.num_processes, case.elastic_flags(common)
    return written(trainings, folder)


def note_collectives():
    """The groups of all collectives of steps, written at the end of each.

    torch is as it was between steps: the functions of a script are looked at before the first, with what they use of torch.
    """
    step = training.train_step
    by_folder = defaultdict(list)  # a process trains several times

    def ranks(group):
        return dist.get_process_group_ranks(group)

    def noting(seen, name, function):
        def collective(*args, **named):
            group = named.get("group") or next((arg for arg in args if isinstance(arg, dist.ProcessGroup)), None)
            seen.append((name, group or dist.group.WORLD))
            return function(*args, **named)

        return collective

    def train_step(*args, **named):
        seen = by_folder[sliced_run.current().args.epp_report_dir]
        with mock.patch.multiple(dist, **{name: noting(seen, name, getattr(dist, name)) for name in NAMES}):
            answer = step(*args, **named)
        ours = sliced_run.current()
        in_use = nccl_settings.groups_in_use(ours.args)
        held = [*(getattr(ours.links, name) for name in type(ours.links).__slots__), *vars(ours).values()]
        kept = [each for each in held if isinstance(each, dist.ProcessGroup)]
        known = [*in_use, *kept, dist.group.WORLD]
        strange = [(name, ranks(group)) for name, group in seen if group not in known and len(ranks(group)) > 1]
        used = [ranks(group) for group in in_use if group in [group for _, group in seen]]
        record = {"strange": strange, "used": used, "in_use": [ranks(group) for group in in_use]}
        write(ours.args, record)
        return answer

    training.train_step = train_step
