"""A framework's loop on two ranks, given input that is wrong in the way that the third argument names.

Prints `stepped` where the schedule returns, and `gradients` where a parameter has one.
"""

import sys

import torch
import torch.distributed as dist

from tests.support.mcore import wrap_worker

CASE = sys.argv[3]
IS_TENSOR_PARALLEL = CASE.startswith("tensor parallel")


def main():
    from megatron_epp.mcore import entry

    with entry.errors_in_one_line():
        models = wrap_worker.begin(tensor_parallel=2 if IS_TENSOR_PARALLEL else 1)
        import megatron_epp

        planned = megatron_epp.wrap(**({"shape_of": too_long} if CASE == "other lengths" else {}))
        wrap_worker.batches = batches(wrap_worker.batches)
        wrap_worker.forward_step = forward_step(wrap_worker.forward_step)
        optimizer = torch.optim.SGD([parameter for model in models for parameter in model.parameters()], lr=0.1)
        before = [parameter.clone() for parameter in models[0].parameters()]
        try:
            if CASE == "two iterators":
                planned(
                    forward_step_func=wrap_worker.forward_step,
                    data_iterator=[wrap_worker.batches(), wrap_worker.batches()],
                    model=models,
                    num_microbatches=1,
                    seq_length=1,
                    micro_batch_size=1,
                )
            wrap_worker.run(planned, models)
            optimizer.step()
            print(f"rank {dist.get_rank()} stepped", flush=True)
        finally:
            same = all(torch.equal(a, b) for a, b in zip(before, models[0].parameters(), strict=True))
            print(f"rank {dist.get_rank()}: weights are {'as they were' if same else 'changed'}", flush=True)


def too_long(item):
    return [2 * item["tokens"].shape[1]]


def batches(own):
    """Microbatches, of which the second is longer on rank 1 if ranks are to differ."""

    def yielded(*args):
        for number, batch in enumerate(own(*args)):
            longer = number == 1 and dist.get_rank() == 1 and "differ" in CASE
            yield {name: torch.cat([one, one], dim=1) for name, one in batch.items()} if longer else batch

    return yielded


def forward_step(own):
    """The forward step, which fails on the rank that the case names at the fourth microbatch it sees."""
    seen = []

    def step(data_iterator, model):
        seen.append(None)
        if CASE.endswith(f"fails on rank {dist.get_rank()}") and len(seen) == 4:
            raise ValueError("this sample has no image")
        output, loss_func = own(data_iterator, model)
        if CASE == "another type" and dist.get_rank() == 0:
            return output.double(), loss_func
        if CASE == "four values":
            return output, lambda losses: (*loss_func(losses), 1, 2)
        if CASE == "one number for each token":
            return output, lambda losses: (losses, {})
        return output, loss_func

    return step


if __name__ == "__main__":
    main()
