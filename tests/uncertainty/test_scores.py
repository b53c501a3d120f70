import math

import numpy as np
import pytest
import torch

from zeromean import uncertainty
from zeromean.uncertainty import (
    apply_temperature,
    brier_score,
    calibrated_log_likelihood,
    calibration_error,
    fit_temperature,
    negative_log_likelihood,
    reliability,
)


@pytest.fixture
def predictions():
    """Sure of themselves, and right more often than not: probabilities and labels."""
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(600, 5, generator=generator)
    labels = (logits / 3).softmax(-1).multinomial(1, generator=generator)[:, 0]
    return logits.softmax(-1), labels


def test_scores_are_scikit_learns(predictions):
    metrics = pytest.importorskip("sklearn.metrics")
    probabilities, labels = (each.double().numpy() for each in predictions)
    labels = labels.astype(int)
    assert negative_log_likelihood(probabilities, labels) == pytest.approx(
        metrics.log_loss(labels, probabilities / probabilities.sum(1, keepdims=True)), rel=1e-6
    )
    expected = metrics.brier_score_loss(
        labels, probabilities / probabilities.sum(1, keepdims=True), scale_by_half=False
    )
    assert brier_score(probabilities, labels) == pytest.approx(expected, rel=1e-6)


def test_tensors_arrays_and_lists_give_the_same(predictions):
    probabilities, labels = predictions
    forms = [
        (probabilities.requires_grad_(), labels),
        (probabilities.detach().numpy(), labels.numpy().astype(np.int16)),
        (probabilities.tolist(), labels.tolist()),
    ]
    for metric in (negative_log_likelihood, brier_score, calibration_error, fit_temperature):
        values = [metric(*form) for form in forms]
        assert all(isinstance(value, float) for value in values)
        assert values == pytest.approx([values[0]] * 3, rel=1e-6)


def test_a_zero_counts_as_what_float32_cannot_hold():
    impossible = torch.tensor([[0.0, 1.0]])
    expected = -math.log(torch.finfo(torch.float32).tiny)
    assert negative_log_likelihood(impossible, [0]) == pytest.approx(expected)


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_calibration_error_is_torchmetrics(predictions, bins):
    functional = pytest.importorskip("torchmetrics.functional.classification")
    probabilities, labels = predictions
    expected = functional.multiclass_calibration_error(
        probabilities, labels, num_classes=5, n_bins=bins, norm="l1"
    )
    found = calibration_error(probabilities, labels, bins=bins)
    assert found == pytest.approx(expected.item(), abs=1e-6)


def test_adaptive_bins_are_scikit_learns(predictions):
    curve = pytest.importorskip("sklearn.calibration").calibration_curve
    probabilities, labels = predictions
    right = (probabilities.argmax(1) == labels).numpy()
    confidence = probabilities.amax(1).double().numpy()
    accuracy, mean = curve(right, confidence, n_bins=12, strategy="quantile")
    bins = reliability(probabilities, labels, bins=12, adaptive=True)
    assert bins.count.tolist() == [50] * 12
    np.testing.assert_allclose(bins.accuracy, accuracy, atol=1e-12)
    np.testing.assert_allclose(bins.confidence, mean, atol=1e-12)
    expected = np.abs(accuracy - mean).mean()
    error = calibration_error(probabilities, labels, bins=12, adaptive=True)
    assert error == pytest.approx(expected)


def test_adaptive_bins_keep_equal_confidences_together():
    probabilities = torch.tensor([[0.9, 0.1]] * 30 + [[0.6, 0.4]] * 10)
    labels = torch.cat([torch.zeros(27), torch.ones(3), torch.zeros(6), torch.ones(4)]).long()
    bins = reliability(probabilities, labels, adaptive=True)
    assert bins.count.tolist() == [10, 30]
    assert bins.calibration_error == pytest.approx(0, abs=1e-7)


def test_temperature_is_where_an_optimizer_ends(predictions):
    optimize = pytest.importorskip("scipy.optimize")
    probabilities, labels = predictions

    def loss(temperature):
        return negative_log_likelihood(apply_temperature(probabilities, temperature), labels)

    best = optimize.minimize_scalar(
        loss, bounds=(0.5, 10), method="bounded", options={"xatol": 1e-6}
    )
    found = fit_temperature(probabilities, labels)
    assert found == pytest.approx(best.x, abs=1e-3)
    assert 2 < found < 4  # The labels were drawn at 3.


def test_temperature_of_logits_that_are_worse_than_chance_is_the_highest():
    probabilities = torch.tensor([[0.8, 0.2], [0.2, 0.8], [0.7, 0.3]])
    assert fit_temperature(probabilities, [1, 0, 1]) == pytest.approx(100)


def test_all_right_leaves_the_temperature_alone(predictions):
    probabilities, _ = predictions
    with pytest.warns(UserWarning, match="All 600 predictions are right"):
        assert fit_temperature(probabilities, probabilities.argmax(1)) == 1
    assert calibrated_log_likelihood(probabilities, probabilities.argmax(1)) == pytest.approx(
        -negative_log_likelihood(probabilities, probabilities.argmax(1)), abs=1e-6
    )


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.float16])
def test_temperature_is_applied_to_logits_or_probabilities_alike(predictions, kind):
    probabilities, _ = predictions
    scaled = apply_temperature(probabilities.to(kind), 2.0)
    assert scaled.dtype == kind
    torch.testing.assert_close(
        scaled.double(),
        (probabilities.double().log() / 2).softmax(-1),
        atol=4 * torch.finfo(kind).eps,
        rtol=4 * torch.finfo(kind).eps,
    )
    assert isinstance(apply_temperature(probabilities.numpy(), 2.0), np.ndarray)


def test_calibrated_log_likelihood_does_not_see_the_temperature(predictions):
    probabilities, labels = predictions
    scores = [
        calibrated_log_likelihood(apply_temperature(probabilities.double(), t), labels)
        for t in (0.5, 1.0, 5.0)
    ]
    assert scores == pytest.approx([scores[0]] * 3, abs=1e-4)
    assert scores[0] > -negative_log_likelihood(probabilities, labels)


def test_calibrated_log_likelihood_by_hand(predictions):
    probabilities, labels = predictions
    order = torch.randperm(600, generator=torch.Generator().manual_seed(3))
    total = 0.0
    for fit, test in ((order[:300], order[300:]), (order[300:], order[:300])):
        temperature = fit_temperature(probabilities[fit], labels[fit])
        scaled = apply_temperature(probabilities[test].double(), temperature)
        total -= negative_log_likelihood(scaled, labels[test]) / 2
    found = calibrated_log_likelihood(probabilities, labels, splits=1, seed=3)
    assert found == pytest.approx(total, abs=1e-9)
    given = calibrated_log_likelihood(
        probabilities[order[300:]],
        labels[order[300:]],
        calibration=(probabilities[order[:300]], labels[order[:300]]),
    )
    assert given == pytest.approx(
        -negative_log_likelihood(
            apply_temperature(
                probabilities[order[300:]].double(),
                fit_temperature(probabilities[order[:300]], labels[order[:300]]),
            ),
            labels[order[300:]],
        ),
        abs=1e-9,
    )


P = torch.tensor([[0.9, 0.1], [0.3, 0.7]])
BAD_PREDICTIONS = [
    (P * 2, [0, 1], "sum to 1 over the classes, got a sum of 2"),
    (torch.tensor([[1.2, -0.2]]), [0], "not be negative, got -0.2"),
    (P * float("nan"), [0, 1], "must be numbers, got 4 NaN"),
    (P[:, 0], [0, 1], r"shape \(examples, classes\), got \(2,\); stack"),
    (P[None], [0, 1], r"got \(1, 2, 2\); average samples first"),
    (P[:0], [], "at least one example"),
    (P.long(), [0, 1], "floating-point"),
    (P, [0, 2], "classes from 0 to 1.*got 0 to 2"),
    (P, [-1, 0], "classes from 0 to 1.*got -1 to 0"),
    (P, [0], "a label for each of 2 examples, got 1"),
    (P, P.argmax(1).double(), "whole numbers"),
    (P, [[1, 0], [0, 1]], "use labels.argmax"),
    ("0.9", [0], "tensor or an array, got '0.9'"),
    (P, np.array(["a", "b"]), "array of numbers"),
    (P * 1j, [0, 1], "real numbers"),
]


@pytest.mark.parametrize(("probabilities", "labels", "said"), BAD_PREDICTIONS)
@pytest.mark.parametrize(
    "metric",
    [
        negative_log_likelihood,
        brier_score,
        calibration_error,
        fit_temperature,
        calibrated_log_likelihood,
    ],
)
def test_what_is_no_prediction_is_refused(metric, probabilities, labels, said):
    with pytest.raises((TypeError, ValueError), match=said):
        metric(probabilities, labels)


def test_bad_calibration_is_refused():
    with pytest.raises(ValueError, match="at least two classes, got 2 of class 1"):
        fit_temperature(P, [1, 1])
    with pytest.raises(ValueError, match="at least two classes, got 2 of class 0"):
        calibrated_log_likelihood(P, [0, 1], calibration=(P, [0, 0]))
    with pytest.raises(ValueError, match="needs at least 4, got 2"):
        calibrated_log_likelihood(P, [0, 1])
    with pytest.raises(ValueError, match="positive and finite, got 0"):
        apply_temperature(P, 0)
    with pytest.raises(ValueError, match="bins must be at least 1, got 0"):
        calibration_error(P, [0, 1], bins=0)


def test_public_names_are_there():
    assert all(hasattr(uncertainty, name) for name in uncertainty.__all__)
