"""torch's Dropout becomes noise with a rate."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import zeromean as zm


def network():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.Dropout2d(0.2),
        nn.Flatten(),
        nn.Linear(16, 8),
        nn.ReLU(),
        nn.Dropout(0.4),
        nn.Linear(8, 3),
    )


IMAGES = torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "noise",
    [
        zm.BinaryDropout,
        lambda units, p: zm.BinaryDropout(units, p, learn="concrete"),
        lambda units, p: zm.BinaryDropout(units, p, learn="reinforce", share="unit"),
        partial(zm.GaussianDropout, learn=False),
    ],
)
def test_rates_and_units_are_kept(noise):
    model = network().eval()
    expected = model(IMAGES)
    assert zm.replace_dropout_(model, noise, inputs=IMAGES) == ["1", "5"]
    for place, units, p in ((1, 4, 0.2), (5, 8, 0.4)):
        assert model[place].num_features == units
        alpha = model[place].log_alpha.detach().exp()
        torch.testing.assert_close(alpha, torch.full_like(alpha, p / (1 - p)))
    with zm.sampling(model, zm.mean):
        assert torch.equal(model(IMAGES), expected)
    assert zm.sample_outputs(model, IMAGES, 3).std(0).max() > 0


def test_predictions_are_distributed_as_before():
    torch.manual_seed(0)
    model = network()
    ours = copy.deepcopy(model)
    zm.replace_dropout_(ours, zm.BinaryDropout, inputs=IMAGES)
    drawn = [zm.sample_outputs(m, IMAGES, 4000, seed=1) for m in (model, ours)]
    error = sum(d.var(0) / len(d) for d in drawn).sqrt()
    assert ((drawn[0].mean(0) - drawn[1].mean(0)).abs() < 5 * error).all()
    assert ((drawn[0].var(0) / drawn[1].var(0)).log().abs() < 0.3).all()


def test_some_are_left_out():
    model = network()
    only = {"where": lambda name, module: name == "5"}
    assert zm.replace_dropout_(model, zm.BinaryDropout, inputs=IMAGES, **only) == ["5"]
    assert isinstance(model[1], nn.Dropout2d)


def test_what_cannot_be_replaced_is_named_and_left():
    sequences = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3))
    with pytest.raises(ValueError, match=r"1 is a Dropout.*2 dimensions, got shape \(2, 5, 8\)"):
        zm.replace_dropout_(sequences, zm.BinaryDropout, inputs=torch.randn(2, 5, 4))
    assert isinstance(sequences[1], nn.Dropout)
    assert not sequences[1]._forward_pre_hooks
    with pytest.raises(ValueError, match="no Dropout to replace"):
        zm.replace_dropout_(nn.Linear(2, 2), zm.BinaryDropout, inputs=torch.randn(2, 2))
    with pytest.raises(TypeError, match="noise must be a function of the number of units"):
        zm.replace_dropout_(network(), "binary", inputs=IMAGES)
    with pytest.raises(TypeError, match="noise must make noise on units, but made a Dropout"):
        zm.replace_dropout_(network(), lambda units, p: nn.Dropout(p), inputs=IMAGES)
    certain = nn.Sequential(nn.Linear(4, 8), nn.Dropout(1.0))
    with pytest.raises(ValueError, match=r"p must lie in \[0, 1\), got 1\.0"):
        zm.replace_dropout_(certain, zm.BinaryDropout, inputs=torch.randn(2, 4))

    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return x

    with pytest.raises(ValueError, match="drop was not called with these inputs"):
        zm.replace_dropout_(Unused(), zm.BinaryDropout, inputs=torch.randn(2, 4))
