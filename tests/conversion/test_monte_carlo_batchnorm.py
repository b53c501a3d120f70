"""Predictions with the statistics of one training batch after the other."""

import copy

import pytest
import torch
from torch import nn

import zeromean as zm


@pytest.fixture
def model():
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)
    return nn.Sequential(*layers)


def test_each_network_normalizes_as_training_on_that_batch_does(model):
    batches = list(torch.randn(5, 16, 4))
    before = copy.deepcopy(model.state_dict())
    source = zm.monte_carlo_batchnorm(model, batches)
    assert len(source) == 5
    for batch, network in zip(batches, source, strict=True):
        expected = copy.deepcopy(model).train()(batch)
        # Running variances are the unbiased ones.
        network[1].running_var.mul_(15 / 16)
        torch.testing.assert_close(network.eval()(batch), expected)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_predictions_average_over_the_batches(model):
    batches = [(x, torch.zeros(16)) for x in torch.randn(7, 16, 4)]
    x = torch.randn(6, 4)
    source = zm.monte_carlo_batchnorm(model, batches, max_batches=3)
    expected = torch.stack([network.eval()(x).softmax(-1) for network in source]).mean(0)
    torch.testing.assert_close(zm.predict_proba(source, x), expected.detach())
    assert zm.predictive_uncertainty(source, x).mutual_information.min() > 0


def test_what_does_not_fit_is_refused(model):
    with pytest.raises(TypeError, match=r"several training batches.*got a Tensor"):
        zm.monte_carlo_batchnorm(model, torch.randn(16, 4))
    with pytest.raises(ValueError, match="at least one batch, got none"):
        zm.monte_carlo_batchnorm(model, [])
    with pytest.raises(ValueError, match="no BatchNorm with running statistics"):
        zm.monte_carlo_batchnorm(nn.Linear(4, 3), [torch.randn(16, 4)])
    with pytest.raises(ValueError, match="max_batches must be at least 1"):
        zm.monte_carlo_batchnorm(model, [torch.randn(16, 4)], max_batches=0)
