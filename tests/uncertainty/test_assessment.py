import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zeromean as zm
from zeromean import uncertainty
from zeromean.uncertainty import report


@pytest.fixture(scope="module")
def classifier():
    """Random, but not without knowledge: its labels are drawn from its own predictions."""
    torch.manual_seed(0)
    layers = zm.Linear(4, 20, posterior=zm.Additive), nn.ReLU(), nn.Linear(20, 3)
    model = nn.Sequential(*layers)
    x = 3 * torch.randn(200, 4)
    return model, x, zm.predict_proba(model, x, 50, seed=0).square().multinomial(1)[:, 0]


def test_numbers_are_those_of_the_functions(classifier):
    model, x, y = classifier
    foreign = 30 * torch.randn(50, 4)
    found = report(model, (x, y), foreign={"far": foreign}, num_samples=20, seed=3)
    metrics = found.metrics["value"]
    proba = zm.predict_proba(model, x, 20, seed=3)
    assert metrics["NLL"] == pytest.approx(uncertainty.negative_log_likelihood(proba, y))
    assert metrics["temperature"] == pytest.approx(uncertainty.fit_temperature(proba, y))
    assert metrics["ECE"] == pytest.approx(uncertainty.calibration_error(proba, y))
    kept = proba.amax(1).argsort(descending=True)[:180]
    wrong = (proba.argmax(1) != y)[kept].double().mean().item()
    assert metrics["errors in the surest 90%"] == pytest.approx(wrong)
    scores = [
        zm.predictive_uncertainty(model, inputs, 20, seed=3).predictive_entropy
        for inputs in (x, foreign)
    ]
    assert metrics["AUROC, far"] == pytest.approx(uncertainty.auroc(*scores))
    assert "200 examples" in str(found).splitlines()[0]
    assert f"{metrics['accuracy']:.4f}" in str(found)


def test_networks_are_compared_and_loaders_read(classifier):
    model, x, y = classifier
    loader = DataLoader(TensorDataset(x, y), batch_size=64)
    models = {"one": model, "two as one": [model, model]}
    calibration = (x[:100], y[:100])
    found = report(models, loader, calibration=calibration, num_samples=10)
    assert list(found.metrics) == ["one", "two as one"]
    alone = report(model, (x, y), calibration=calibration, num_samples=10)
    assert found.metrics["one"] == pytest.approx(alone.metrics["value"], abs=1e-5)
    proba = zm.predict_proba(model, x, 10, seed=0, batch_size=500)
    expected = uncertainty.fit_temperature(proba[:100], y[:100])
    assert alone.metrics["value"]["temperature"] == pytest.approx(expected, rel=0.05)


def test_page_needs_no_other_file(classifier, tmp_path):
    pytest.importorskip("matplotlib")
    model, x, y = classifier
    found = report({"<plain>": model}, (x, y), foreign=2 * x, num_samples=10)
    found.save(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text("utf-8")
    assert page.count("<img") == page.count('src="data:image/svg+xml;base64,') == 3
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert "&lt;plain&gt;" in page
    assert "<plain>" not in page
    for key, value in found.metrics["<plain>"].items():
        assert f"<td>{key}</td><td>{value:.4f}</td>" in page
    assert "FPR95</dt>" in page
    assert "CRPS" not in page
    found.save(tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text("utf-8") == page


class RandomLine(nn.Module):
    def forward(self, x):
        return x * (1 + 0.5 * torch.randn(()))


def test_regression_has_intervals(tmp_path):
    x = torch.linspace(-2, 2, 150)[:, None]
    y = x + (0.25 * x.square() + 0.04).sqrt() * torch.randn(150, 1)
    likelihood = zm.GaussianLikelihood(noise_variance=0.04)
    found = report(RandomLine(), (x, y), likelihood=likelihood, foreign=x + 9, num_samples=100)
    metrics = found.metrics["value"]
    assert metrics["RMSE"] == pytest.approx((y - x).square().mean().sqrt().item(), rel=0.1)
    assert metrics["90% interval: inside"] == pytest.approx(0.9, abs=4 * (0.09 / 150) ** 0.5)
    assert metrics["AUROC, foreign"] == 1
    interval = uncertainty.predict_interval(
        RandomLine(), x, 100, likelihood=likelihood, seed=0, batch_size=500
    )
    assert metrics["90% interval: width"] == pytest.approx(interval.width.mean().item())
    pytest.importorskip("matplotlib")
    found.save(tmp_path / "page.html")
    assert "90% interval: width" in (tmp_path / "page.html").read_text("utf-8")


def test_bad_data_are_refused(classifier):
    model, x, y = classifier
    with pytest.raises(ValueError, match="one target for each input, got 200 inputs and 199"):
        report(model, (x, y[1:]))
    with pytest.raises(TypeError, match=r"data must be \(inputs, targets\) or a Data"):
        report(model, x)
    with pytest.raises(ValueError, match="calibration must have at least one example, got none"):
        report(model, (x, y), calibration=(x[:0], y[:0]))
    with pytest.raises(ValueError, match="at least two classes, got 5 of class 1"):
        report(model, (x, y), calibration=(x[:5], [1] * 5))
    with pytest.raises(ValueError, match="labels must be classes from 0 to 2"):
        report(model, (x, y + 1))
    with pytest.raises(ValueError, match="at least one network, got an empty mapping"):
        report({}, (x, y))
    with pytest.raises(ValueError, match="regression has no temperature"):
        report(RandomLine(), (x, x), calibration=(x, x))
    with pytest.raises(ValueError, match="density needs noise on the targets"):
        report(RandomLine(), (x, x))
