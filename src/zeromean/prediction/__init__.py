"""Predictions from many draws of the noise: outputs, probabilities, moments, uncertainty."""

from zeromean.prediction.predictive import (
    PredictiveMoments,
    PredictiveUncertainty,
    predict_moments,
    predict_proba,
    predictive_uncertainty,
    sample_outputs,
)

__all__ = [
    "PredictiveMoments",
    "PredictiveUncertainty",
    "predict_moments",
    "predict_proba",
    "predictive_uncertainty",
    "sample_outputs",
]
