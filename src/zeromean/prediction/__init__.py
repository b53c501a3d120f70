"""Predictions from many draws: outputs, probabilities, moments, uncertainty."""

from zeromean.prediction.classification import (
    PredictiveUncertainty,
    predict_proba,
    predictive_uncertainty,
)
from zeromean.prediction.propagated import (
    PropagatedMoments,
    SampleComparison,
    propagate_moments,
)
from zeromean.prediction.regression import PredictiveMoments, predict_moments
from zeromean.prediction.samples import sample_outputs
from zeromean.prediction.sources import Source, States

__all__ = [
    "PredictiveMoments",
    "PredictiveUncertainty",
    "PropagatedMoments",
    "SampleComparison",
    "Source",
    "States",
    "predict_moments",
    "predict_proba",
    "predictive_uncertainty",
    "propagate_moments",
    "sample_outputs",
]
