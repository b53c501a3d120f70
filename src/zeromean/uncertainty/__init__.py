"""From probabilities and samples of any source to uncertainty that one can act on."""

from zeromean.uncertainty.acquisition import (
    Acquired,
    active_learning,
    at_random,
    bald,
    batch_bald,
    entropy,
    variation_ratios,
)
from zeromean.uncertainty.assessment import UncertaintyReport, report
from zeromean.uncertainty.calibration import (
    Reliability,
    apply_temperature,
    calibrated_log_likelihood,
    calibration_error,
    fit_temperature,
    reliability,
)
from zeromean.uncertainty.detection import aupr, auroc, fpr95
from zeromean.uncertainty.ensemble_equivalent import deep_ensemble_equivalent
from zeromean.uncertainty.mixture import (
    GaussianMixture,
    Interval,
    predict_interval,
    predict_mixture,
)
from zeromean.uncertainty.plots import (
    plot_coverage,
    plot_ensemble_equivalent,
    plot_intervals,
    plot_pit,
    plot_reliability,
    plot_risk_coverage,
    plot_scores,
)
from zeromean.uncertainty.rejection import (
    Rejection,
    RiskCoverage,
    area_under_risk_coverage,
    reject,
    risk_coverage,
)
from zeromean.uncertainty.scores import brier_score, negative_log_likelihood

__all__ = [
    "Acquired",
    "GaussianMixture",
    "Interval",
    "Rejection",
    "Reliability",
    "RiskCoverage",
    "UncertaintyReport",
    "active_learning",
    "apply_temperature",
    "area_under_risk_coverage",
    "at_random",
    "aupr",
    "auroc",
    "bald",
    "batch_bald",
    "brier_score",
    "calibrated_log_likelihood",
    "calibration_error",
    "deep_ensemble_equivalent",
    "entropy",
    "fit_temperature",
    "fpr95",
    "negative_log_likelihood",
    "plot_coverage",
    "plot_ensemble_equivalent",
    "plot_intervals",
    "plot_pit",
    "plot_reliability",
    "plot_risk_coverage",
    "plot_scores",
    "predict_interval",
    "predict_mixture",
    "reject",
    "reliability",
    "report",
    "risk_coverage",
    "variation_ratios",
]
