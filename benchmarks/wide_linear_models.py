"""Linear models with more features than rows: sparse rows as of texts, and dense ones.

.bench/venv/bin/python benchmarks/wide_linear_models.py            about a minute of CPU time
.bench/venv/bin/python benchmarks/wide_linear_models.py --quick    one smaller data set of each kind

Each model is fitted once to each data set, by turns with its peer, on one thread. CPU
time, so that other work on the machine matters little; the record says how loaded it was. With
--output the record is written as JSON.
"""

import argparse
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before numpy is imported: its BLAS reads it once.
if __name__ == "__main__" and os.environ.get("OMP_NUM_THREADS") != "1":
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"OMP_NUM_THREADS": "1"})

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import environment
import numpy as np
from scipy import sparse
from sklearn.linear_model import LassoCV, LogisticRegression

from zeromean.estimators import (
    RVMClassifier,
    RVMRegressor,
    VariationalDropoutClassifier,
    VariationalDropoutRegressor,
)

SEEDS = (0, 1, 2)
NEW_ROWS = 4000
# Of a text: words drawn, with repetition; the rank of a word among the most frequent ones.
WORDS_A_ROW = 80
RELEVANT_RANKS = (10, 200)


def main() -> int:
    options = _parse()
    warnings.simplefilter("ignore")  # Peers complain about convergence, and ours of separation.
    seeds = SEEDS[:1] if options.quick else options.seeds
    texts, wide = ((400, 3000), (300, 1000)) if options.quick else ((2000, 20_000), (1500, 5000))
    record = environment.describe("numpy", "scipy", "scikit-learn")
    record |= {"cores": os.cpu_count(), "load": os.getloadavg()[1], "seeds": list(seeds)}
    l1: Any = LogisticRegression(l1_ratio=1.0, solver="liblinear")
    classifiers = {
        "RVMClassifier": RVMClassifier(),
        "VariationalDropoutClassifier": VariationalDropoutClassifier(),
        "LogisticRegression, l1": l1,
    }
    regressors = {
        "RVMRegressor": RVMRegressor(),
        "VariationalDropoutRegressor": VariationalDropoutRegressor(),
        "LassoCV": LassoCV(),
    }
    record["text"] = _group(f"{texts[0]:,} × {texts[1]:,}", classifiers, _texts, texts, seeds)
    record["wide"] = _group(f"{wide[0]:,} × {wide[1]:,}", regressors, _wide, wide, seeds)
    if options.output:
        environment.write(options.output, record)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one smaller data set of each kind")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="of the data sets")
    parser.add_argument("--output", type=Path, help="record to write")
    return parser.parse_args()


def _group(
    size: str,
    models: dict[str, Any],
    make: Callable[..., Any],
    shape: tuple[int, int],
    seeds: tuple[int, ...],
) -> dict[str, Any]:
    """Medians over the data sets, and what each model had on each of them."""
    fits: dict[str, list[dict[str, float]]] = {name: [] for name in models}
    for seed in seeds:
        X, y, new_X, new_y, relevant = make(*shape, seed)
        for name, model in models.items():
            start = time.process_time()
            model.fit(X, y)
            seconds = time.process_time() - start
            found = np.ravel(model.coef_) != 0
            fit = {
                "seconds": seconds,
                "score": float(model.score(new_X, new_y)),
                "features": int(found.sum()),
                "relevant_features": int(found[relevant].sum()),
            }
            fits[name].append(fit)
            print(
                f"{size}, seed {seed} · {name}: {seconds:.2f} s, score {fit['score']:.3f},"
                f" {fit['features']} features, {fit['relevant_features']} of {len(relevant)}"
                " relevant",
                flush=True,
            )
    peer = [fit["seconds"] for fit in list(fits.values())[-1]]
    rows = []
    for name, of_model in fits.items():
        medians = {key: statistics.median(fit[key] for fit in of_model) for key in of_model[0]}
        pairs = zip(peer, (fit["seconds"] for fit in of_model), strict=True)
        times = statistics.median(theirs / ours for theirs, ours in pairs)
        rows.append({"model": name, **medians, "times_faster": times, "fits": of_model})
    return {"size": size, "num_relevant": len(relevant), "rows": rows}


def _texts(num_rows: int, num_words: int, seed: int) -> tuple[Any, ...]:
    """Logarithms of 1 + counts of words drawn by Zipf's law, 40 of which say something."""
    rng = np.random.default_rng(seed)
    count = num_rows + NEW_ROWS
    frequency = 1 / np.arange(1, num_words + 1)
    words = rng.choice(num_words, (count, WORDS_A_ROW), p=frequency / frequency.sum())
    # Indices of 32 bits: liblinear takes no others.
    places = words.ravel().astype(np.int32)
    ends = np.arange(0, places.size + 1, WORDS_A_ROW, dtype=np.int32)
    X = sparse.csr_matrix((np.ones(places.size), places, ends), shape=(count, num_words))
    X.sum_duplicates()
    X.data = np.log1p(X.data)
    relevant = rng.choice(np.arange(*RELEVANT_RANKS), 40, replace=False)
    weights = np.zeros(num_words)
    weights[relevant] = rng.choice([-1, 1], 40) * rng.uniform(1, 3, 40)
    log_odds = X @ weights
    log_odds -= np.median(log_odds)
    y = rng.uniform(size=count) < 1 / (1 + np.exp(-log_odds))
    return X[:num_rows], y[:num_rows], X[num_rows:], y[num_rows:], relevant


def _wide(num_rows: int, num_features: int, seed: int) -> tuple[Any, ...]:
    """Normal features, 22 of them relevant, with weights of 0.3 to 1.2; noise of variance 1."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(num_rows + NEW_ROWS, num_features))
    relevant = np.arange(22)
    weights = rng.choice([-1, 1], 22) * rng.uniform(0.3, 1.2, 22)
    y = X[:, relevant] @ weights + rng.normal(size=len(X))
    return X[:num_rows], y[:num_rows], X[num_rows:], y[num_rows:], relevant


if __name__ == "__main__":
    sys.exit(main())
