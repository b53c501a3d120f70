import numpy as np
import pytest
import torch

from zeromean.uncertainty import (
    GaussianMixture,
    Interval,
    plot_coverage,
    plot_ensemble_equivalent,
    plot_intervals,
    plot_pit,
    plot_reliability,
    plot_risk_coverage,
    plot_scores,
    reliability,
    risk_coverage,
)

pytest.importorskip("matplotlib")


@pytest.fixture
def predictions():
    probabilities = (2 * torch.randn(300, 4)).softmax(-1)
    return probabilities, probabilities.multinomial(1)[:, 0]


def lines(figure, panel=0):
    return [np.asarray(line.get_xydata()) for line in figure.axes[panel].lines]


def words(figure):
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def test_reliability_shows_the_bins(predictions):
    bins = reliability(*predictions)
    figure = plot_reliability({"one": bins, "other": bins})
    _, drawn, _ = lines(figure)
    np.testing.assert_allclose(drawn, torch.stack([bins.confidence, bins.accuracy], 1))
    assert words(figure) == ["one", "other"]
    np.testing.assert_allclose(lines(figure, 1)[0][:, 1], bins.count)
    # Wilson's intervals hold the share, and are wide where there is one example.
    low, high = figure.axes[0].collections[0].get_segments()[0][:, 1]
    assert -1e-9 <= low <= bins.accuracy[0] <= high <= 1 + 1e-9


def test_risk_coverage_shows_curve_and_area(predictions):
    curve = risk_coverage(*predictions)
    figure = plot_risk_coverage(curve)
    (drawn,) = lines(figure)
    np.testing.assert_allclose(drawn, torch.stack([curve.coverage, curve.risk], 1))
    assert words(figure) == [f"area {curve.area:.4f}"]


def test_scores_show_where_a_twentieth_is():
    inside = torch.arange(101.0)
    figure = plot_scores(inside, {"noise": inside + 50, "others": inside - 50})
    assert words(figure) == ["known", "noise", "others"]
    assert lines(figure)[0][0, 0] == 95


def test_ensembles_are_a_line_and_others_go_through_it():
    figure = plot_ensemble_equivalent([-0.3, -0.2, -0.1], {"dropout": -0.15})
    np.testing.assert_allclose(lines(figure)[0], [[1, -0.3], [2, -0.2], [3, -0.1]])
    assert words(figure) == ["deep ensemble", "dropout"]


def test_transform_shows_how_many_are_expected():
    figure = plot_pit(torch.linspace(0.001, 0.999, 400), bins=10)
    assert [bar.get_height() for bar in figure.axes[0].patches] == pytest.approx([40] * 10, abs=1)
    low, high = (line[0, 1] for line in lines(figure))
    assert low < 40 < high
    with pytest.raises(ValueError, match=r"between 0 and 1, got 2 to 3; use mixture\.cdf"):
        plot_pit([2.0, 3.0])


def test_coverage_is_that_of_the_intervals():
    mixture = GaussianMixture(torch.randn(5, 200), torch.ones(()))
    targets = torch.randn(200)
    drawn = lines(plot_coverage(mixture, targets))[1]
    for level, inside in drawn[10:100:20]:
        assert inside == pytest.approx(mixture.interval(level).coverage(targets), abs=1e-6)


def test_intervals_show_who_is_outside():
    interval = Interval(torch.zeros(10), torch.ones(10))
    figure = plot_intervals(interval, torch.tensor([0.5] * 8 + [2.0, -1.0]))
    assert [len(line) for line in lines(figure)] == [8, 2]
    assert figure.axes[0].get_title() == "80.0% of all targets inside"
    assert len(figure.axes[0].collections[0].get_segments()) == 10
    assert len(plot_intervals(interval, [0.5] * 10, most=4).axes[0].lines[0].get_xdata()) == 4


def test_what_cannot_be_drawn_is_refused(predictions):
    with pytest.raises(TypeError, match="needs a Reliability, or several by name, got RiskCov"):
        plot_reliability(risk_coverage(*predictions))
    with pytest.raises(ValueError, match=r"shape of the predictions, \(2,\), got \(3,\)"):
        plot_intervals(Interval(torch.zeros(2), torch.ones(2)), [0, 1, 2])


def test_without_matplotlib_a_sentence_says_what_to_install(predictions, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"Plots need matplotlib.*\[cli\]"):
        plot_risk_coverage(risk_coverage(*predictions))
