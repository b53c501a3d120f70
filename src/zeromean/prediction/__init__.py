"""Predictions from many draws: outputs, probabilities, moments, uncertainty."""

from zeromean.prediction.classification import (
    PredictiveUncertainty,
    predict_proba,
    predictive_uncertainty,
)
from zeromean.prediction.regression import PredictiveMoments, predict_moments
from zeromean.prediction.samples import sample_outputs
from zeromean.prediction.sources import Source, States

__all__ = [
    "PredictiveMoments",
    "PredictiveUncertainty",
    "Source",
    "States",
    "predict_moments",
    "predict_proba",
    "predictive_uncertainty",
    "sample_outputs",
]
