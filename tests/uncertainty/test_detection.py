import numpy as np
import pytest
import torch

from zeromean.uncertainty import aupr, auroc, fpr95


@pytest.fixture
def scores():
    """With ties, of different lengths."""
    generator = torch.Generator().manual_seed(2)
    inside = torch.randn(200, generator=generator).round(decimals=1)
    return inside, torch.randn(90, generator=generator).round(decimals=1) + 1


def test_areas_are_scikit_learns(scores):
    metrics = pytest.importorskip("sklearn.metrics")
    truth = torch.cat([torch.zeros(200), torch.ones(90)])
    both = torch.cat(scores)
    assert auroc(*scores) == pytest.approx(metrics.roc_auc_score(truth, both), abs=1e-12)
    assert aupr(*scores) == pytest.approx(metrics.average_precision_score(truth, both), abs=1e-12)


def test_false_alarms_are_torchmetrics(scores):
    functional = pytest.importorskip("torchmetrics.functional.classification")
    truth = torch.cat([torch.zeros(200), torch.ones(90)]).long()
    # Between 0 and 1, or torchmetrics would take a sigmoid.
    both = torch.cat(scores).double() / 10 + 0.5
    specificity, _ = functional.binary_specificity_at_sensitivity(both, truth, 0.95)
    assert fpr95(*scores) == pytest.approx(1 - specificity.item(), abs=1e-6)


def test_the_ends_of_the_scale():
    known, foreign = np.arange(10.0), np.arange(10.0, 20.0)
    assert [metric(known, foreign) for metric in (auroc, aupr, fpr95)] == [1, 1, 0]
    assert [metric(foreign, known) for metric in (auroc, fpr95)] == [0, 1]
    assert [metric(known, known) for metric in (auroc, aupr)] == pytest.approx([0.5, 0.5], abs=0.1)
    assert auroc(known, np.array([np.inf])) == 1


@pytest.mark.parametrize("metric", [auroc, aupr, fpr95])
def test_what_is_no_score_is_refused(metric):
    with pytest.raises(ValueError, match="outside must have at least one score"):
        metric([0.1], [])
    with pytest.raises(ValueError, match="inside must be numbers, got 1 NaN"):
        metric([0.1, float("nan")], [0.2])
