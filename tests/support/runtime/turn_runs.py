"""Programs of two ranks that share layers: a forward and a backward in one step, which take turns at their exchanges."""

import threading

import torch
import torch.distributed as dist

from megatron_epp.contrib.overlap.turns import Collective, exchanges_of, run_together

LAYERS = 3


class Reduced(torch.autograd.Function):
    """Sum over the ranks in the forward, and in the backward too, which waits for it later."""

    @staticmethod
    def forward(ctx, x, group, launched):
        ctx.group, ctx.launched = group, launched
        total = x.clone()
        launched.append("forward")
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone()
        ctx.launched.append("backward")
        dist.all_reduce(total, group=ctx.group, async_op=True).wait()
        return total, None, None


def layers(x, group, launched):
    for number in range(LAYERS):
        x = Reduced.apply(torch.tanh(x * (number + 1)), group, launched)
    return x


def forward_with_backward(rank, links, together):
    """Return the order of launches, the forward's result and the backward's gradient, together or one after the other."""
    group, launched, outputs = dist.new_group([0, 1]), [], []
    kept = torch.linspace(-1.0, 1.0, 5).mul(rank + 1).requires_grad_()
    output = layers(kept, group, launched)
    launched.clear()

    def forward():
        outputs.append(layers(torch.full((4,), 0.3 + rank), group, launched))

    def backward():
        output.backward(torch.ones_like(output))

    if together:
        original = dist.all_reduce
        run_together(forward, backward, exchanges_of([Collective(dist, "all_reduce")], group))
        assert dist.all_reduce is original
    else:
        forward()
        backward()
    assert threading.current_thread() is threading.main_thread()
    return launched, outputs[0].tolist(), kept.grad.tolist()
