"""The classical relevance vector machine: sinc, and breast cancer compared with support vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import ours
from zeromean.experiments.runs.figure import bars, figure, trace
from zeromean.experiments.runs.log import RunLog

TITLE = "Kernel relevance vector machines"
SOURCE = "Tipping (2001); Molchanov & Ashuha (2016), talk: relevance vector machine"
NEEDS: tuple[str, ...] = ()
COVERS = ("talk: relevance vector machine",)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Radial basis functions at every training example."""

    num_train: int = 100
    """Noisy values of sinc."""
    noise: float = 0.1
    """Standard deviation of that noise."""
    gamma: float = 0.1
    """Inverse squared width of the basis functions on sinc."""
    cancer_gamma: float = 0.01
    """The same for breast cancer, whose features have unit variance."""
    cancer_train: int = 379
    """Training examples of breast cancer, of 569."""
    seed: int = 0
    """Seed of the noise and of the split."""


QUICK = Config()
SMOKE = Config(num_train=50, cancer_train=100)
CLAIMS = [
    Claim(
        "sinc.vector_ratio",
        0.5,
        ours("the comparison is Tipping's (2001), the bound is ours"),
        0,
        "at most",
        "sinc: relevance vectors, in support vectors",
    ),
    Claim(
        "sinc.error_ratio",
        1.0,
        ours("the comparison is Tipping's (2001), the bound is ours"),
        0.05,
        "at most",
        "sinc: error divided by that of the support vector machine",
    ),
    Claim(
        "breast cancer.vector_ratio",
        0.5,
        ours("the comparison is Tipping's (2001), the bound is ours"),
        0,
        "at most",
        "breast cancer: relevance vectors, in support vectors",
    ),
    Claim(
        "breast cancer.error_difference",
        0.0,
        ours("the comparison is Tipping's (2001), the bound is ours"),
        0.01,
        "at most",
        "breast cancer: error less that of the support vector machine",
    ),
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    results = {
        "sinc": log.once("sinc", lambda: _sinc(config)),
        "breast cancer": log.once("breast cancer", lambda: _cancer(config)),
    }
    log.metrics(**results)
    return results


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    metrics = [record["metrics"] for record in records]
    curve = metrics[0]["sinc"]["curve"]
    sinc = figure(
        "sinc, with the uncertainty of the machine",
        "x",
        "sinc(x)",
        [
            trace("training objects", curve["x"], curve["y"], kind="scatter"),
            trace("truth", curve["x"], curve["truth"]),
            trace("RVM", curve["x"], curve["mean"], error=curve["std"]),
            trace("relevance vectors", curve["vectors"], curve["at_vectors"], kind="scatter"),
        ],
    )
    vectors = bars(
        "Vectors",
        "data",
        {"rvm_vectors": "relevance vectors", "svm_vectors": "support vectors"},
        metrics,
        y_label="vectors",
    )
    errors = bars(
        "Test error",
        "data",
        {"rvm_error": "RVM", "svm_error": "SVM"},
        metrics,
        y_label="root mean square, or share of wrong classes",
    )
    return [sinc, vectors, errors]


def _sinc(config: Config) -> dict[str, Any]:
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline
    from sklearn.svm import SVR

    from zeromean.estimators import RBFBasis, RVMRegressor

    rng = np.random.default_rng(config.seed)
    X = np.linspace(-10, 10, config.num_train)[:, None]
    truth = np.sinc(X[:, 0] / np.pi)
    y = truth + config.noise * rng.normal(size=len(X))
    # Redundant basis functions crowd each other out without a price.
    machine: Any = make_pipeline(RBFBasis(gamma=config.gamma), RVMRegressor(threshold=0)).fit(X, y)
    grid = {"C": [0.1, 1.0, 10.0], "epsilon": [0.05, 0.1, 0.2]}
    support: Any = SVR
    peer = GridSearchCV(support(gamma=config.gamma), grid).fit(X, y)
    mean, std = machine.predict(X, return_std=True)
    vectors = machine[-1].relevance_
    errors = {
        "rvm_error": float(np.sqrt(np.mean((mean - truth) ** 2))),
        "svm_error": float(np.sqrt(np.mean((peer.predict(X) - truth) ** 2))),
    }
    counts = {
        "rvm_vectors": int(vectors.sum()),
        "svm_vectors": len(peer.best_estimator_.support_),
    }
    return {
        **errors,
        **counts,
        "error_ratio": errors["rvm_error"] / errors["svm_error"],
        "vector_ratio": counts["rvm_vectors"] / counts["svm_vectors"],
        "noise": float(1 / np.sqrt(machine[-1].noise_precision_)),
        "curve": {
            "x": X[:, 0],
            "y": y,
            "truth": truth,
            "mean": mean,
            "std": std,
            "vectors": X[vectors, 0],
            "at_vectors": y[vectors],
        },
    }


def _cancer(config: Config) -> dict[str, Any]:
    from sklearn.datasets import load_breast_cancer
    from sklearn.model_selection import GridSearchCV, train_test_split
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVC

    from zeromean.estimators import RBFBasis, RVMClassifier

    rows, classes = load_breast_cancer(return_X_y=True)
    X, test_X, y, test_y = train_test_split(
        rows, classes, train_size=config.cancer_train, stratify=classes, random_state=config.seed
    )
    machine: Any = make_pipeline(
        StandardScaler(), RBFBasis(gamma=config.cancer_gamma), RVMClassifier(threshold=0)
    )
    machine.fit(X, y)
    support: Any = SVC
    peer: Any = make_pipeline(
        StandardScaler(),
        GridSearchCV(support(gamma=config.cancer_gamma), {"C": [0.1, 1.0, 10.0, 100.0]}),
    ).fit(X, y)
    errors = {
        "rvm_error": float(1 - machine.score(test_X, test_y)),
        "svm_error": float(1 - peer.score(test_X, test_y)),
    }
    counts = {
        "rvm_vectors": int(machine[-1].relevance_.sum()),
        "svm_vectors": len(peer[-1].best_estimator_.support_),
    }
    return {
        **errors,
        **counts,
        "error_difference": errors["rvm_error"] - errors["svm_error"],
        "vector_ratio": counts["rvm_vectors"] / counts["svm_vectors"],
    }
