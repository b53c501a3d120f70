"""What the intervals and probabilities of linear models are worth where rows are few.

python benchmarks/linear_uncertainty.py    writes results/linear_uncertainty.json

Coverage: of new targets, by prediction ± 1.96 standard deviations, over data sets of standard
normal features with an intercept. Probabilities: the negative log-likelihood of new rows where
features exceed rows and separate the classes by chance.
"""

import argparse
import sys
import warnings
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT / "src"))

import environment  # noqa: E402
import numpy as np  # noqa: E402
from sklearn.metrics import log_loss  # noqa: E402

from zeromean import estimators  # noqa: E402

# Rows, features, relevant ones.
SIZES = ((10, 1, 0), (10, 3, 1), (20, 5, 2), (20, 10, 10), (20, 20, 3), (40, 10, 10), (100, 10, 10))
# Weights of the relevant features, and the standard deviation of the noise.
DATA = {"weights ±0.5 to ±1.5, noise 0.5": (0.5, 1.5, 0.5), "weights N(0, 1), noise 1": (0, 0, 1.0)}
DATA_SETS, NEW_ROWS = 150, 100
REGRESSORS = ("RVMRegressor", "VariationalDropoutRegressor")
CLASSIFIERS = ("RVMClassifier", "VariationalDropoutClassifier")
CLASSES_SIZE, CLASS_SETS = (60, 100, 3), 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = PROJECT / "results" / "linear_uncertainty.json"
    parser.add_argument("--output", type=Path, default=default)
    output = parser.parse_args().output
    warnings.simplefilter("ignore")  # Of few rows, and of overconfidence: what is measured here.
    coverage = []
    for data, (low, high, noise) in DATA.items():
        for rows, features, relevant in SIZES:
            row = {"data": data, "rows": rows, "features": features, "relevant": relevant}
            rng = np.random.default_rng(0)
            inside = {name: [] for name in REGRESSORS}
            for _ in range(DATA_SETS):
                weights = weights_of(rng, features, relevant, low, high)
                train, test = (draw(rng, n, weights, noise) for n in (rows, NEW_ROWS))
                for name in REGRESSORS:
                    inside[name].append(covered(getattr(estimators, name)(), train, test))
            coverage.append(row | {name: float(np.mean(v)) for name, v in inside.items()})
            print(coverage[-1], flush=True)
    classification = probabilities()
    print(classification)
    record = environment.describe("numpy", "scikit-learn", "scipy") | {
        "command": "python benchmarks/linear_uncertainty.py",
        "settings": {"data_sets": DATA_SETS, "new_rows": NEW_ROWS, "class_sets": CLASS_SETS},
        "coverage": coverage,
        "classification": classification,
    }
    environment.write(output, record)


def weights_of(rng, features: int, relevant: int, low: float, high: float) -> np.ndarray:
    weights = np.zeros(features)
    size = rng.uniform(low, high, relevant) * rng.choice([-1, 1], relevant)
    weights[:relevant] = size if high else rng.normal(size=relevant)
    return weights


def draw(rng, rows: int, weights: np.ndarray, noise: float) -> tuple[np.ndarray, np.ndarray]:
    features = rng.normal(size=(rows, len(weights)))
    return features, 1 + features @ weights + noise * rng.normal(size=rows)


def covered(model, train, test) -> float:
    mean, deviation = model.fit(*train).predict(test[0], return_std=True)
    return float(np.mean(np.abs(test[1] - mean) < 1.96 * deviation))


def probabilities() -> dict[str, object]:
    """Accuracy and negative log-likelihood of new rows, in the mean over data sets."""
    rows, features, relevant = CLASSES_SIZE
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CLASSIFIERS}
    for seed in range(CLASS_SETS):
        rng = np.random.default_rng(seed)
        weights = weights_of(rng, features, relevant, 1.0, 2.0)
        inputs = rng.normal(size=(rows + 1000, features))
        classes = (inputs @ weights + rng.logistic(size=len(inputs)) > 0).astype(int)
        for name in CLASSIFIERS:
            model = getattr(estimators, name)().fit(inputs[:rows], classes[:rows])
            proba = model.predict_proba(inputs[rows:])
            accuracy = float(np.mean(proba.argmax(1) == classes[rows:]))
            found[name].append((accuracy, float(log_loss(classes[rows:], proba, labels=[0, 1]))))
    vd, rvm = (np.array(found[name])[:, 1] for name in reversed(CLASSIFIERS))
    means = {
        name: dict(zip(("accuracy", "nll"), np.mean(v, 0), strict=True))
        for name, v in found.items()
    }
    return {"size": CLASSES_SIZE, **means, "rvm_is_better": int((rvm < vd).sum())}


if __name__ == "__main__":
    main()
