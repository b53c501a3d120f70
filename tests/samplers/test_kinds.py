"""Samplers say what they draw: partials, wrappers and one's own behave like the plain ones."""

from functools import partial, wraps

import pytest
import torch
from torch import nn

import zeromean as zm
from zeromean.samplers import SAMPLERS, Draws, draws
from zeromean.samplers.kinds import drawn_by, needs_normal_noise


def wrapped(sampler):
    @wraps(sampler)
    def inner(op, x, posterior, bias=None):
        return sampler(op, x, posterior, bias)

    return inner


def said(sampler):
    """One's own, which says what it draws."""

    @draws(drawn_by(sampler), needs_normal_noise=needs_normal_noise(sampler))
    def own(op, x, posterior, bias=None):
        return sampler(op, x, posterior, bias)

    return own


DISGUISES = {"partial": partial, "nested": lambda s: partial(partial(s)), "wrapped": wrapped}
DISGUISES["own"] = said


@pytest.fixture(params=DISGUISES.values(), ids=DISGUISES)
def disguise(request):
    return request.param


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_what_is_drawn_is_said_through_any_disguise(disguise, sampler):
    assert drawn_by(disguise(sampler)) is drawn_by(sampler) is not Draws.UNKNOWN
    assert needs_normal_noise(disguise(sampler)) == needs_normal_noise(sampler)


def test_a_sampler_that_says_nothing_is_unknown():
    assert drawn_by(lambda op, x, posterior, bias=None: x) is Draws.UNKNOWN


class Twice(nn.Module):
    """One layer, called twice: with one weight both outputs are the same."""

    def __init__(self, sampler):
        super().__init__()
        self.layer = zm.Linear(3, 2, sampler=sampler)

    def forward(self, x):
        return self.layer(x) - self.layer(x)


def test_predictions_draw_a_weight_once_however_often_it_is_used(disguise):
    outputs = zm.sample_outputs(Twice(disguise(zm.weight)), torch.ones(4, 3), 5)
    assert not outputs.any()
    assert zm.sample_outputs(Twice(disguise(zm.local)), torch.ones(4, 3), 5).any()


def test_predictions_are_those_of_the_plain_sampler(disguise):
    torch.manual_seed(0)
    model = nn.Sequential(zm.Linear(3, 8), nn.ReLU(), zm.Linear(8, 2))
    x = torch.randn(5, 3)
    for sampler in SAMPLERS.values():
        expected = zm.sample_outputs(model, x, 4, sampler=sampler, seed=0)
        assert zm.sample_outputs(model, x, 4, sampler=disguise(sampler), seed=0).equal(expected)


def test_means_silence_dropout_and_noise_of_units(disguise):
    model = nn.Sequential(nn.Dropout(0.5), zm.GaussianDropout(3), nn.Linear(3, 2))
    x = torch.randn(5, 3)
    with zm.sampling(model, disguise(zm.mean)):
        assert model(x).equal(model(x))
    with zm.sampling(model, zm.mean):
        expected = model(x)
    with zm.sampling(model, disguise(zm.mean)):
        assert model(x).equal(expected)


def test_noise_of_units_is_drawn_once_for_a_batch_where_weights_are(disguise):
    model = zm.GaussianDropout(3)
    with zm.sampling(model, disguise(zm.weight)):
        rows = model(torch.ones(6, 3))
    assert rows.equal(rows[:1].expand(6, -1))


def test_recurrent_layers_propagate_means(disguise):
    model = zm.LSTM(3, 4)
    x = torch.randn(5, 2, 3)
    with zm.sampling(model, disguise(zm.mean)):
        assert model(x)[0].equal(model(x)[0])
    with zm.sampling(model, disguise(zm.weight)):
        assert not model(x)[0].equal(model(x)[0])


@pytest.mark.parametrize("sampler", [zm.local, zm.moment_matched, zm.weight, zm.flipout])
def test_certificates_are_those_of_the_plain_sampler(disguise, sampler):
    def bound(chosen):
        torch.manual_seed(0)
        posterior = partial(zm.Multiplicative, log_alpha=8.0)
        model = nn.Sequential(zm.Linear(3, 4, posterior=posterior, sampler=chosen))
        return zm.zero_mean_(model, inputs=torch.randn(6, 3), seed=0).per_input

    assert bound(disguise(sampler)).equal(bound(sampler))


def test_local_reparameterization_is_refused_for_other_noise(disguise):
    posterior = partial(zm.ZeroMean, noise=zm.rademacher)
    with pytest.raises(ValueError, match="needs normal noise"):
        zm.Linear(3, 2, posterior=posterior, sampler=disguise(zm.local))


def test_auto_keeps_what_another_sampler_has_trained(disguise):
    layer = zm.Linear(3, 2, sampler=zm.flipout)
    with zm.sampling(layer, disguise(zm.auto)):
        assert layer.sampler is zm.flipout
    layer = zm.Linear(3, 2, sampler=disguise(zm.local))
    with zm.sampling(layer, disguise(zm.auto)):
        assert drawn_by(layer.sampler) is Draws.CHEAPER
