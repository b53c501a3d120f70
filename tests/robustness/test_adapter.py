"""The adapter: log mean probabilities that can be differentiated, with shared work done once."""

import math
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import zeromean as zm
from zeromean.ensembles import Ensemble
from zeromean.robustness import MeanClassifier

X = torch.rand(6, 5)


def network():
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), zm.Linear(8, 3))


def test_it_is_the_log_of_the_mean_probability():
    model = network()
    expected = zm.predict_proba(model, X, 30, seed=4, sampler=zm.weight, chunk_size=30)
    adapter = MeanClassifier(model, 30, noise="fixed", seed=4)
    assert torch.allclose(adapter(X).exp(), expected, atol=1e-6)
    returning = nn.Sequential(network(), nn.Softmax(-1))
    found = MeanClassifier(returning, 30, noise="fixed", seed=4, outputs="probabilities")(X)
    expected = MeanClassifier(returning[0], 30, noise="fixed", seed=4)(X)
    assert torch.allclose(found, expected, atol=1e-5)
    with pytest.raises(ValueError, match=r"ends in nn\.Softmax"):
        MeanClassifier(returning)(X)


def test_fixed_noise_is_the_same_networks_whatever_the_batch():
    adapter = MeanClassifier(network(), 8, noise="fixed")
    assert torch.allclose(adapter(X)[2:5], adapter(X[2:5]), atol=1e-6)


def test_fresh_noise_differs_from_call_to_call_and_is_reproducible():
    model = network()
    state = torch.get_rng_state()
    first, second = (MeanClassifier(model, 3, seed=1) for _ in range(2))
    calls = [first(X), first(X)]
    assert not torch.equal(*calls)
    assert torch.equal(calls[0], second(X))
    assert torch.equal(calls[1], second(X))
    assert torch.equal(torch.get_rng_state(), state)
    unseeded = MeanClassifier(model, 3)
    assert not torch.equal(unseeded(X), unseeded(X))


def test_gradients_are_those_of_finite_differences():
    adapter = MeanClassifier(network().double(), 4, noise="fixed")
    assert torch.autograd.gradcheck(adapter, X.double().requires_grad_())


def test_members_and_states_are_averaged_with_their_gradients():
    members = [nn.Linear(5, 3) for _ in range(3)]
    x = X.clone().requires_grad_()
    expected = torch.stack([m(x).softmax(-1) for m in members]).mean(0).log()
    (gradient,) = torch.autograd.grad(expected[:, 0].sum(), x)
    states = zm.States(members[0], [m.state_dict() for m in members])
    for source in (members, Ensemble(members), states, (m for m in members)):
        found = MeanClassifier(source, 1)(x)
        assert torch.allclose(found, expected, atol=1e-6)
        assert torch.allclose(torch.autograd.grad(found[:, 0].sum(), x)[0], gradient, atol=1e-6)
    with pytest.raises(ValueError, match="must agree"):
        MeanClassifier([nn.Linear(5, 3), nn.Linear(5, 4)])(X)


def test_networks_that_are_very_sure_keep_a_finite_logarithm():
    scaled = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        scaled.weight.copy_(torch.tensor([[1000.0, 0.0], [0.0, 0.0]]))
    log = MeanClassifier(scaled, 2)(torch.ones(1, 2))
    assert log[0, 1].item() == pytest.approx(-1000)
    assert math.isfinite(log[0, 0].item())


def test_modes_are_left_as_they_were_and_dropout_is_on():
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    model.train()
    adapter = MeanClassifier(model, 2)
    assert not torch.equal(adapter(X), adapter(X))
    assert model[1].num_batches_tracked == 0
    assert model.training


class Count(TorchDispatchMode):
    """How often each operation is computed, backward passes included."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_samples", [20, 400])
def test_what_no_noise_has_reached_is_differentiated_once(num_samples):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), zm.Linear(4 * 36, 3))
    model.requires_grad_(False)
    adapter = MeanClassifier(model, num_samples)
    x = torch.rand(200, 1, 8, 8, requires_grad=True)
    with Count() as count:
        torch.autograd.grad(adapter(x)[:, 0].sum(), x)
    assert count.calls["convolution"] == 1
    assert count.calls["convolution_backward"] == 1
