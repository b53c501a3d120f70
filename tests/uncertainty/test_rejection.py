import math

import numpy as np
import pytest
import torch

from zeromean.uncertainty import (
    area_under_risk_coverage,
    deep_ensemble_equivalent,
    reject,
    risk_coverage,
)
from zeromean.uncertainty.rejection import _probability_of_so_few


def draw(count, generator, classes=4):
    """Calibrated predictions: labels are drawn from the probabilities."""
    probabilities = (2 * torch.randn(count, classes, generator=generator)).softmax(-1)
    return probabilities, probabilities.multinomial(1, generator=generator)[:, 0]


@pytest.fixture
def predictions():
    return draw(300, torch.Generator().manual_seed(4))


def test_curve_is_that_of_a_loop(predictions):
    probabilities, labels = predictions
    order = probabilities.amax(1).argsort(descending=True)
    wrong = (probabilities.argmax(1) != labels)[order].double()
    curve = risk_coverage(probabilities, labels)
    for kept in (1, 10, 299, 300):
        assert curve.coverage[kept - 1] == pytest.approx(kept / 300)
        assert curve.risk[kept - 1] == pytest.approx(wrong[:kept].mean().item())
    by_loop = np.mean([wrong[:kept].mean() for kept in range(1, 301)])
    assert area_under_risk_coverage(probabilities, labels) == pytest.approx(by_loop)


def test_area_is_the_one_of_a_perfect_order_in_closed_form(predictions):
    """With k errors at the end: Σ_{j=1}^{k} j / (n − k + j), divided by n."""
    probabilities, labels = predictions
    wrong = probabilities.argmax(1) != labels
    errors = int(wrong.sum())
    expected = sum(j / (300 - errors + j) for j in range(1, errors + 1)) / 300
    found = area_under_risk_coverage(probabilities, labels, scores=wrong.double())
    assert found == pytest.approx(expected)


def test_equal_scores_give_the_average_over_orders(predictions):
    probabilities, labels = predictions
    flat = risk_coverage(probabilities, labels, scores=np.zeros(300))
    error = (probabilities.argmax(1) != labels).double().mean()
    assert flat.risk.tolist() == pytest.approx([error.item()] * 300)
    coarse = probabilities.amax(1).round(decimals=1)
    generator = torch.Generator().manual_seed(0)
    areas = [
        area_under_risk_coverage(
            probabilities, labels, scores=-coarse + 1e-6 * torch.rand(300, generator=generator)
        )
        for _ in range(200)
    ]
    found = area_under_risk_coverage(probabilities, labels, scores=-coarse)
    assert found == pytest.approx(np.mean(areas), abs=4 * np.std(areas) / math.sqrt(200))


def test_coverage_keeps_the_surest(predictions):
    probabilities, _ = predictions
    found = reject(probabilities.numpy(), coverage=0.96)
    assert isinstance(found.rejected, np.ndarray)
    assert found.rejected.sum() == 12
    assert found.coverage == pytest.approx(0.96)
    sure = probabilities.amax(1)
    assert sure[found.rejected].max() < found.threshold <= sure[~found.rejected].min()
    assert found.risk == pytest.approx((1 - sure[~found.rejected]).mean().item())
    assert not reject(probabilities, coverage=1).rejected.any()
    # 0.07 · 100 is a little more than 7 in floating point.
    assert int((~reject(probabilities[:100], coverage=0.07).rejected).sum()) == 7


def test_risk_that_the_probabilities_admit(predictions):
    probabilities, _ = predictions
    found = reject(probabilities, risk=0.05)
    assert found.risk <= 0.05
    sure = probabilities.amax(1).sort(descending=True).values
    kept = int((~found.rejected).sum())
    assert (1 - sure[: kept + 1]).mean() > 0.05
    nothing = reject(torch.full((5, 2), 0.5), risk=0.1)
    assert nothing.rejected.all()
    assert nothing.coverage == 0


def test_probability_of_few_errors_is_scipys():
    binom = pytest.importorskip("scipy.stats").binom
    for errors, count, rate in ((0, 20, 0.05), (3, 50, 0.01), (120, 5000, 0.03)):
        expected = binom.cdf(errors, count, rate)
        assert _probability_of_so_few(errors, count, rate) == pytest.approx(expected, rel=1e-6)


def test_bounded_risk_holds_as_often_as_it_says():
    """Also for a network that is far too sure of itself."""
    generator = torch.Generator().manual_seed(5)

    def draw_sure(count):
        logits = 8 * torch.randn(count, 4, generator=generator)
        labels = (logits / 2).softmax(-1).multinomial(1, generator=generator)[:, 0]
        return logits.softmax(-1), labels

    fresh, labels = draw_sure(20_000)
    right = fresh.argmax(1) == labels

    def error(found):
        return 1 - right[~found.rejected].double().mean().item()

    found = [
        reject(fresh, risk=0.1, calibration=draw_sure(400), confidence=0.8) for _ in range(100)
    ]
    assert sum(error(each) > 0.1 for each in found) <= 20
    coverage = np.array([each.coverage for each in found])
    best = (risk_coverage(fresh, labels).risk <= 0.1).double().mean().item()
    assert 0.5 * best < coverage.mean() < best
    # What the probabilities admit is far from the truth here.
    assert error(reject(fresh, risk=0.1)) > 0.12


def test_bad_rejections_are_refused(predictions):
    probabilities, labels = predictions
    for coverage in (0, 1.5, -0.1):
        with pytest.raises(ValueError, match=rf"coverage must lie in \(0, 1\], got {coverage}"):
            reject(probabilities, coverage=coverage)
    with pytest.raises(ValueError, match=r"risk must lie in \(0, 1\), got 1"):
        reject(probabilities, risk=1)
    with pytest.raises(TypeError, match=r"one of coverage=.* and risk="):
        reject(probabilities)
    with pytest.raises(TypeError, match=r"one of coverage=.* and risk="):
        reject(probabilities, coverage=0.9, risk=0.1)
    with pytest.raises(TypeError, match=r"coverage must be a number, got '0.9'"):
        reject(probabilities, coverage="0.9")
    with pytest.raises(TypeError, match="coverage needs no calibration"):
        reject(probabilities, coverage=0.9, calibration=predictions)
    with pytest.raises(ValueError, match=r"20 calibration examples cannot show a risk of 0.01"):
        reject(probabilities, risk=0.01, calibration=(probabilities[:20], labels[:20]))
    with pytest.raises(ValueError, match="calibration probabilities must be of at least one"):
        reject(probabilities, risk=0.01, calibration=(probabilities[:0], labels[:0]))
    with pytest.raises(ValueError, match="for each of 300 examples, got 299 calibration labels"):
        reject(probabilities, risk=0.1, calibration=(probabilities, labels[1:]))
    with pytest.raises(ValueError, match="one number for each of 300 examples, got 3"):
        risk_coverage(probabilities, labels, scores=[1, 2, 3])


def test_deep_ensemble_equivalent():
    ensembles = [-0.30, -0.20, -0.16, -0.15]
    assert deep_ensemble_equivalent(-0.30, ensembles) == 1
    assert deep_ensemble_equivalent(-0.50, ensembles) == 1
    assert deep_ensemble_equivalent(-0.25, ensembles) == pytest.approx(1.5)
    assert deep_ensemble_equivalent(-0.17, np.array(ensembles)) == pytest.approx(2.75)
    assert deep_ensemble_equivalent(-0.15, ensembles) == pytest.approx(4)
    assert deep_ensemble_equivalent(-0.10, ensembles) == math.inf
    # One that gets worse on the way counts from where it is first as good.
    assert deep_ensemble_equivalent(-0.25, [-0.3, -0.2, -0.4]) == pytest.approx(1.5)
    with pytest.raises(ValueError, match="begin with the score of one member"):
        deep_ensemble_equivalent(-0.1, [])
    with pytest.raises(ValueError, match="score must be a number, got NaN"):
        deep_ensemble_equivalent(float("nan"), [0.1])
