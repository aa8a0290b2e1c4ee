"""Transformer Engine's linear layers give the same gradients whether their weights' wait for W, in any order, or not."""

import contextlib
import functools
import importlib.util

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and importlib.util.find_spec("transformer_engine")),
    reason="needs a CUDA GPU and Transformer Engine 2.7 or newer: pip install transformer-engine[pytorch]",
)
CHUNKS, TOKENS, WIDTH = 3, 64, 128


class Model:
    """Layers of Transformer Engine, with hooks as Megatron's data parallelism has them."""

    def __init__(self, delays, fused):
        import transformer_engine.pytorch as te

        torch.manual_seed(0)
        options = {
            "bias": False,
            "params_dtype": torch.bfloat16,
            "fuse_wgrad_accumulation": fused,
            "delay_wgrad_compute": delays,
        }
        self.layers = [te.LayerNormLinear(WIDTH, 2 * WIDTH, **options), te.Linear(2 * WIDTH, WIDTH, **options)]
        self.model = torch.nn.Sequential(*self.layers).cuda()
        self.accumulators = []
        for parameter in self.model.parameters():
            parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros_like(parameter, dtype=torch.float32), False
        for layer in self.layers:
            for parameter in layer.parameters():
                self._register(layer, parameter)
        self.inputs = [torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(CHUNKS)]

    def _register(self, layer, parameter):
        hook = functools.partial(self._accumulate, parameter)
        if getattr(parameter, "skip_backward_post_hook", False):
            layer.register_wgrad_accumulation_and_reduce_hooks(hook)
            return
        accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        accumulator.register_hook(hook)
        self.accumulators.append(accumulator)

    @staticmethod
    def _accumulate(parameter, *_):
        assert parameter.grad is not None
        if not parameter.grad_added_to_main_grad:
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None

    def backward(self, chunk, within):
        with within:
            self.model(self.inputs[chunk]).float().square().sum().backward()


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_the_same(fused):
    from megatron_epp.features.split_weights.linear_layers import split_where_possible

    joint, split = Model(delays=False, fused=fused), Model(delays=True, fused=fused)
    for chunk in range(CHUNKS):
        joint.backward(chunk, contextlib.nullcontext())
    split_where_possible(split.model)
    gradients = split.model.weight_gradients
    split.backward(0, gradients.keeping(0))
    split.backward(1, gradients.keeping(1))
    split.backward(2, contextlib.nullcontext())
    gradients.finish()
    gradients.run(1)
    gradients.run(0)
    for parameter, wanted in zip(split.model.parameters(), joint.model.parameters(), strict=True):
        assert wanted.main_grad.norm() > 0
        assert (parameter.main_grad - wanted.main_grad).norm() <= 1e-6 * wanted.main_grad.norm()  # of sums in another order
