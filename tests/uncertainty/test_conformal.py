import numpy as np
import pytest
import torch
from torch import nn

import zeromean as zm
from zeromean.uncertainty import Interval, predict_interval

pytest.importorskip("mapie")

from mapie.classification import SplitConformalClassifier
from mapie.regression import ConformalizedQuantileRegressor, SplitConformalRegressor

from zeromean.uncertainty.conformal import (
    TorchClassifier,
    TorchRegressor,
    conformal_intervals,
    conformal_sets,
)

LEVEL, CALIBRATION, SPLITS = 0.9, 99, 60


def pools(*arrays):
    """Random halves for calibration and for the test."""
    generator = torch.Generator().manual_seed(8)
    for _ in range(SPLITS):
        order = torch.randperm(len(arrays[0]), generator=generator)
        known, test = order[:CALIBRATION], order[CALIBRATION:]
        yield tuple(each[known] for each in arrays), tuple(each[test] for each in arrays)


def holds(coverages):
    """Its expectation is at least the level, and at most 1 / (n + 1) above."""
    mean, error = np.mean(coverages), np.std(coverages, ddof=1) / np.sqrt(len(coverages))
    return LEVEL - 4 * error <= mean <= LEVEL + 1 / (CALIBRATION + 1) + 4 * error


@pytest.fixture(scope="module")
def overconfident():
    """Probabilities and labels of a network that is far too sure."""
    generator = torch.Generator().manual_seed(9)
    logits = 3 * torch.randn(900, 6, generator=generator)
    labels = (logits / 3).softmax(-1).multinomial(1, generator=generator)[:, 0]
    return logits.softmax(-1), labels


def test_sets_hold_over_repeated_splits(overconfident):
    coverages, naive = [], []
    for known, (probabilities, labels) in pools(*overconfident):
        sets = conformal_sets(probabilities, calibration=known, level=LEVEL)
        assert sets.dtype == torch.bool
        assert sets.shape == probabilities.shape
        coverages.append(sets.gather(1, labels[:, None]).double().mean().item())
        order = probabilities.sort(descending=True)
        before = order.values.cumsum(1) - order.values < LEVEL
        by_own = torch.zeros_like(sets).scatter(1, order.indices, before)
        naive.append(by_own.gather(1, labels[:, None]).double().mean().item())
    assert holds(coverages)
    # What the probabilities themselves promise does not hold.
    assert not holds(naive)


def test_sets_are_those_of_the_definition(overconfident):
    """LAC: all classes whose probability reaches a quantile of those of the labels."""
    probabilities, labels = (each[:199] for each in overconfident)
    fresh = overconfident[0][199:]
    scores = 1 - probabilities.double().gather(1, labels[:, None])[:, 0]
    bound = scores.sort().values[int(np.ceil(200 * LEVEL)) - 1]
    expected = 1 - fresh.double() <= bound
    found = conformal_sets(fresh.numpy(), calibration=(probabilities, labels), level=LEVEL)
    assert isinstance(found, np.ndarray)
    assert (found == expected.numpy()).mean() > 0.999


@pytest.mark.parametrize("score", ["aps", "raps", "top_k"])
def test_other_scores_cover_at_least_as_much(overconfident, score):
    probabilities, labels = overconfident
    sets = conformal_sets(
        probabilities[400:],
        calibration=(probabilities[:400], labels[:400]),
        level=LEVEL,
        score=score,
    )
    assert sets.gather(1, labels[400:, None]).double().mean() > LEVEL - 0.03
    assert sets.any(1).all()


class Noisy(nn.Module):
    """A regression that believes in less noise than there is."""

    def forward(self, x):
        return x * (1 + 0.1 * torch.randn(()))


def test_intervals_hold_over_repeated_splits():
    generator = torch.Generator().manual_seed(10)
    x = 3 * torch.rand(900, 1, generator=generator)
    y = x + (0.1 + 0.5 * x) * torch.randn(900, 1, generator=generator)
    interval = predict_interval(Noisy(), x, 200, level=LEVEL, seed=0)
    assert interval.coverage(y) < 0.5
    coverages = []
    for (*bounds, targets), (lower, upper, fresh) in pools(*interval, y):
        moved = conformal_intervals(
            Interval(lower, upper), calibration=(Interval(*bounds), targets), level=LEVEL
        )
        coverages.append(moved.coverage(fresh))
        assert moved.lower.shape == lower.shape
    assert holds(coverages)
    assert moved.width.max() > moved.width.min() + 0.1


@pytest.fixture
def classifier():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), zm.Linear(12, 8, posterior=zm.Additive), nn.ReLU(), nn.Linear(8, 3)
    )


def test_a_network_is_a_classifier_to_mapie_and_scikit_learn(classifier):
    x = torch.randn(300, 3, 4)
    face = TorchClassifier(classifier, classes=["a", "b", "c"], num_samples=5, temperature=2.0)
    expected = zm.predict_proba(classifier, x, 5, seed=0).double().sqrt()
    expected = expected / expected.sum(1, keepdim=True)
    np.testing.assert_allclose(face.predict_proba(x.double().numpy()), expected, atol=1e-6)
    labels = np.array(["a", "b", "c"])[expected.multinomial(1)[:, 0]]
    assert 0 < face.score(x, labels) < 1
    conformal = SplitConformalClassifier(face, confidence_level=0.8)
    conformal.conformalize(x[:150].numpy(), labels[:150])
    predicted, sets = conformal.predict_set(x[150:].numpy())
    assert set(predicted) <= {"a", "b", "c"}
    covered = sets[np.arange(150), np.searchsorted(["a", "b", "c"], labels[150:]), 0]
    assert covered.mean() > 0.7


def test_a_network_is_a_regressor_to_mapie():
    x = torch.linspace(0, 3, 400)[:, None]
    y = (x + 0.3 * torch.randn(400, 1))[:, 0].numpy()
    order = np.random.default_rng(0).permutation(400)
    known, test = order[:200], order[200:]
    likelihood = zm.GaussianLikelihood(noise_variance=0.01)
    mean = TorchRegressor(Noisy(), likelihood=likelihood)
    exact = zm.predict_moments(Noisy(), x, 50, seed=0).mean[:, 0]
    np.testing.assert_allclose(mean.predict(x.numpy()), exact, atol=1e-6)
    split = SplitConformalRegressor(mean, confidence_level=LEVEL)
    split.conformalize(x[known].numpy(), y[known])
    _, bounds = split.predict_interval(x[test].numpy())
    inside = (bounds[:, 0, 0] <= y[test]) & (y[test] <= bounds[:, 1, 0])
    assert inside.mean() > LEVEL - 0.06
    faces = [TorchRegressor(Noisy(), likelihood=likelihood, quantile=q) for q in (0.05, 0.95, 0.5)]
    quantiles = ConformalizedQuantileRegressor(faces, confidence_level=LEVEL, prefit=True)
    quantiles.conformalize(x[known].numpy(), y[known])
    _, bounds = quantiles.predict_interval(x[test].numpy(), symmetric_correction=True)
    both = [
        predict_interval(Noisy(), x[each], likelihood=likelihood, seed=0) for each in (known, test)
    ]
    targets = torch.from_numpy(y[known])[:, None]
    moved = conformal_intervals(both[1], calibration=(both[0], targets))
    np.testing.assert_allclose(bounds[:, 0, 0], moved.lower[:, 0], atol=1e-5)
    np.testing.assert_allclose(bounds[:, 1, 0], moved.upper[:, 0], atol=1e-5)


def test_bad_calibration_is_refused(classifier, overconfident):
    probabilities, labels = overconfident
    known = probabilities[:99], labels[:99]
    with pytest.raises(ValueError, match=r"level of 0.99 needs at least 99 .* got 98"):
        conformal_sets(probabilities, calibration=(probabilities[:98], labels[:98]), level=0.99)
    with pytest.raises(ValueError, match=r"level must lie in \(0, 1\), got 1"):
        conformal_sets(probabilities, calibration=known, level=1)
    with pytest.raises(ValueError, match="at least two classes, got 20 of class 3"):
        conformal_sets(probabilities, calibration=(probabilities[:20], [3] * 20))
    with pytest.raises(ValueError, match="calibration probabilities must be of at least one"):
        conformal_sets(probabilities, calibration=(probabilities[:0], labels[:0]))
    with pytest.raises(ValueError, match="as many classes as the probabilities, 6, got 2"):
        conformal_sets(probabilities, calibration=([[0.5, 0.5]] * 20, [0, 1] * 10))
    with pytest.raises(ValueError, match="score must be one of lac, aps"):
        conformal_sets(probabilities, calibration=known, score="best")
    interval = Interval(torch.zeros(20), torch.ones(20))
    with pytest.raises(ValueError, match=r"shape of their intervals, \(20,\), got \(20, 1\)"):
        conformal_intervals(interval, calibration=(interval, torch.zeros(20, 1)))
    with pytest.raises(TypeError, match=r"must be an Interval\(lower, upper\)"):
        conformal_intervals(torch.zeros(20), calibration=(interval, torch.zeros(20)))
    several = Interval(torch.zeros(2, 3), torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"of one target, got shape \(2, 3\)"):
        conformal_intervals(several, calibration=(interval, torch.zeros(20)))
    with pytest.raises(RuntimeError, match=r"trained already.*prefit=True"):
        TorchClassifier(classifier, classes=3).fit(None, None)
    with pytest.raises(RuntimeError, match=r"trained already.*prefit=True"):
        TorchRegressor(Noisy()).fit(None, None)
    with pytest.raises(ValueError, match="returns 3 classes, but classes= says 4"):
        TorchClassifier(classifier, classes=4).predict_proba(torch.randn(5, 12))
