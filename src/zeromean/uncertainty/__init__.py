"""From probabilities and samples of any source to uncertainty that one can act on."""

from zeromean.uncertainty.calibration import (
    Reliability,
    apply_temperature,
    calibrated_log_likelihood,
    calibration_error,
    fit_temperature,
    reliability,
)
from zeromean.uncertainty.detection import aupr, auroc, fpr95
from zeromean.uncertainty.scores import brier_score, negative_log_likelihood

__all__ = [
    "Reliability",
    "apply_temperature",
    "aupr",
    "auroc",
    "brier_score",
    "calibrated_log_likelihood",
    "calibration_error",
    "fit_temperature",
    "fpr95",
    "negative_log_likelihood",
    "reliability",
]
