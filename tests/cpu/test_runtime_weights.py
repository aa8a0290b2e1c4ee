"""Weight gradients apart from the backward: equal to it, once, and freed when they have run."""

import contextlib

import pytest
import torch
from torch import nn

from megatron_epp.features.split_weights.deferred_gradients import WeightGradients
from megatron_epp.plan import EppError
from megatron_epp.runtime.autograd.saved import SavedTensors
from tests.support.runtime.plain_stage import linear

TOKENS, WIDTH = 7, 5


class Network:
    """Two linear layers with a nonlinearity between, and the chunks that go through it."""

    def __init__(self):
        torch.manual_seed(0)
        self.layers = [nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)]
        self.inputs = [torch.randn(TOKENS, WIDTH, requires_grad=True) for _ in range(2)]
        self.gradients = WeightGradients()

    def forward(self, chunk, apply):
        return apply(self.layers[1], torch.tanh(apply(self.layers[0], self.inputs[chunk]))).square().sum()

    def backward(self, chunk, keep=False):
        with self.gradients.keeping(chunk) if keep else contextlib.nullcontext():
            self.forward(chunk, lambda layer, x: linear(layer, self.gradients, x)).backward()

    def parameters(self):
        return [p for layer in self.layers for p in layer.parameters()]

    def found(self):
        return [t.grad for t in (*self.parameters(), *self.inputs)]


def ordinary():
    """The same, by autograd alone."""
    network = Network()
    for chunk in (0, 1):
        network.forward(chunk, lambda layer, x: layer(x)).backward()
    return network


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_computed_with_the_backward_or_later_it_is_autograds_own_to_the_last_bit():
    at_once, later, expected = Network(), Network(), ordinary()
    for chunk in (0, 1):
        at_once.backward(chunk)
        later.backward(chunk, keep=True)
    assert_equal([x.grad for x in later.inputs], [x.grad for x in expected.inputs])
    assert [layer.weight.grad for layer in later.layers] == [None, None]
    for chunk in (0, 1):
        later.gradients.run(chunk)
    for network in (at_once, later):
        assert_equal(network.found(), expected.found())


def test_hooks_of_a_weight_fire_when_its_gradient_is_computed_and_only_then():
    network, fired = Network(), []
    for number, layer in enumerate(network.layers):
        layer.weight.register_post_accumulate_grad_hook(lambda _, number=number: fired.append(number))
    network.backward(0, keep=True)
    network.backward(1)
    assert fired == [1, 0]
    network.gradients.run(0)
    assert fired == [1, 0, 1, 0]


def test_what_is_kept_is_the_layers_inputs_and_the_gradients_of_their_outputs():
    network = Network()
    kept = 4 * TOKENS * (WIDTH + 3 * WIDTH) * 2
    with SavedTensors(network.parameters()) as meter:
        for chunk in (0, 1):
            network.backward(chunk, keep=True)
            assert meter.live_bytes == (1 + chunk) * kept
        for chunk in (0, 1):
            network.gradients.run(chunk)
            assert meter.live_bytes == (1 - chunk) * kept


def test_a_gradient_that_was_not_kept_cannot_be_computed():
    network = Network()
    network.backward(0)
    with pytest.raises(EppError, match="the backward of chunk 0 has deferred no weight gradient"):
        network.gradients.run(0)


def test_what_a_layer_puts_off_is_computed_when_the_next_comes_or_the_backward_ends():
    """Never while autograd is still busy with the layer itself."""
    gradients, weight, computed = WeightGradients(), nn.Parameter(torch.zeros(1)), []

    def put_off(name):
        gradients.put_off(weight, [torch.full((2,), float(name))], lambda tensors: computed.append((name, *tensors)))

    put_off(1)
    assert computed == []
    put_off(2)
    assert [name for name, _ in computed] == [1]
    gradients.finish()
    gradients.finish()
    assert [(name, tensor.tolist()) for name, tensor in computed] == [(1, [1, 1]), (2, [2, 2])]
    with gradients.keeping(0):
        put_off(3)
        gradients.finish()
    assert len(computed) == 2
    gradients.run(0)
    assert computed[-1][0] == 3
    assert weight.grad is None
