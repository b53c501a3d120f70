"""The objective, and training on Lightning: logs, checkpoints, resuming as if never interrupted.

Importing this package does not import Lightning; `fit` and `ElboModule` do.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeromean.training.collapse import CollapseWarning, CollapseWatch
    from zeromean.training.config import TrainingConfig
    from zeromean.training.continual import coreset
    from zeromean.training.distillation import Distilled, distill
    from zeromean.training.elbo_module import ElboModule
    from zeromean.training.expectation import expected_nll
    from zeromean.training.hugging_face import ElboTrainerMixin
    from zeromean.training.lightning_callback import ElboCallback
    from zeromean.training.post_hoc.add import add_uncertainty
    from zeromean.training.post_hoc.calibrated import Tempered, WithVariance
    from zeromean.training.post_hoc.report import AddedUncertainty, Candidate
    from zeromean.training.shrinking.result import Shrunk, ShrunkNetwork
    from zeromean.training.shrinking.shrink import shrink
    from zeromean.training.shrinking.target import Target, TargetMissedWarning
    from zeromean.training.student_likelihoods import (
        CategoricalLikelihood,
        DirichletLikelihood,
        SplitVarianceLikelihood,
        TotalVarianceLikelihood,
    )
    from zeromean.training.trainer import FitResult, fit

__all__ = [
    "AddedUncertainty",
    "Candidate",
    "CategoricalLikelihood",
    "CollapseWarning",
    "CollapseWatch",
    "DirichletLikelihood",
    "Distilled",
    "ElboCallback",
    "ElboModule",
    "ElboTrainerMixin",
    "FitResult",
    "Shrunk",
    "ShrunkNetwork",
    "SplitVarianceLikelihood",
    "Target",
    "TargetMissedWarning",
    "Tempered",
    "TotalVarianceLikelihood",
    "TrainingConfig",
    "WithVariance",
    "add_uncertainty",
    "coreset",
    "distill",
    "expected_nll",
    "fit",
    "shrink",
]

_MODULE_OF = {
    "AddedUncertainty": "post_hoc.report",
    "Candidate": "post_hoc.report",
    "CategoricalLikelihood": "student_likelihoods",
    "CollapseWarning": "collapse",
    "CollapseWatch": "collapse",
    "DirichletLikelihood": "student_likelihoods",
    "Distilled": "distillation",
    "ElboCallback": "lightning_callback",
    "ElboModule": "elbo_module",
    "ElboTrainerMixin": "hugging_face",
    "FitResult": "trainer",
    "Shrunk": "shrinking.result",
    "ShrunkNetwork": "shrinking.result",
    "SplitVarianceLikelihood": "student_likelihoods",
    "Target": "shrinking.target",
    "TargetMissedWarning": "shrinking.target",
    "Tempered": "post_hoc.calibrated",
    "TotalVarianceLikelihood": "student_likelihoods",
    "TrainingConfig": "config",
    "WithVariance": "post_hoc.calibrated",
    "add_uncertainty": "post_hoc.add",
    "coreset": "continual",
    "distill": "distillation",
    "expected_nll": "expectation",
    "fit": "trainer",
    "shrink": "shrinking.shrink",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("ElboCallback", "ElboModule"):
        import_module("zeromean.training.trainer").require_lightning()
    value = getattr(import_module(f"zeromean.training.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
