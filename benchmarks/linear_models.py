"""Sparse linear models compared with their peers: ratios of CPU time, and what streaming costs.

python benchmarks/linear_models.py            everything, about 5 minutes
python benchmarks/linear_models.py --quick    about a minute; fewer pairs, shorter streams

As in `run.py`, ours and a peer take turns in one process, on one thread. A ratio is the peer's time
in ours: the larger, the better for us. With --output the record is written as JSON.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

# Before numpy is imported: its BLAS reads it once.
if __name__ == "__main__" and os.environ.get("OMP_NUM_THREADS") != "1":
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"OMP_NUM_THREADS": "1"})

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import environment
import numpy as np
from harness import cpu_ratio, peak_mebibytes
from sklearn.linear_model import ARDRegression, LassoCV, LogisticRegressionCV

from zeromean.estimators import (
    RVMClassifier,
    RVMRegressor,
    VariationalDropoutClassifier,
    VariationalDropoutRegressor,
)

STREAM_CHUNK = 10_000
# Sizes of weights, some of which are hard to find.
WEAK = (0.02, 0.5)


@dataclass(frozen=True)
class Row:
    """One ratio: how many times longer the peer takes, and the bound it has to reach."""

    size: str
    ours: str
    peer: str
    fit_ours: Callable[[], Any]
    fit_peer: Callable[[], Any]
    must: float | None = None


def main() -> int:
    options = _parse()
    warnings.simplefilter("ignore")  # Peers complain about convergence and about the future.
    pairs = 3 if options.quick else 7
    results = []
    for row in _rows(options.quick):
        ratio = cpu_ratio(row.fit_peer, row.fit_ours, repeats=pairs, budget=60.0)
        results.append({"size": row.size, "ours": row.ours, "peer": row.peer, "must": row.must})
        results[-1] |= asdict(ratio)
        verdict = "" if row.must is None else f" (must reach {row.must:g})"
        print(
            f"{row.size} · {row.ours} / {row.peer}: {ratio.median:.1f} times faster"
            f" [{ratio.lower:.1f}, {ratio.upper:.1f}], {ratio.floor_ms:.1f} ms against"
            f" {ratio.subject_ms:.1f} ms{verdict}",
            flush=True,
        )
    first_fits = [_first_fit(*size) for size in ((100_000, 100), (2_000, 1_500))]
    for first in first_fits:
        print(
            f"{first['size']} · first fit of a process: {first['ratio']:.1f} times faster than"
            f" ARDRegression, {first['ours_ms']:.0f} ms against {first['peer_ms']:.0f} ms"
            " (must reach 5)",
            flush=True,
        )
    all_cores = _all_cores(100_000, 100)
    print(
        f"{all_cores['size']} · all {all_cores['cores']} cores: {all_cores['ratio']:.1f} times"
        f" faster than ARDRegression, {all_cores['ours_ms']:.0f} ms against"
        f" {all_cores['peer_ms']:.0f} ms of wall time",
        flush=True,
    )
    streams = [_stream(count) for count in _stream_sizes(options.quick)]
    for stream in streams:
        print(
            f"streaming {stream['rows']:,} rows × 100: {stream['seconds']:.2f} s without making"
            f" them, {stream['microseconds_a_row']:.2f} µs a row, peak memory"
            f" {stream['peak_mebibytes']:.0f} MiB",
            flush=True,
        )
    if options.output:
        record = environment.describe("numpy", "scipy", "scikit-learn", "sklearn-rvm", "fastrvm")
        record |= {
            "rows": results,
            "first_fits": first_fits,
            "all_cores": all_cores,
            "streams": streams,
        }
        environment.write(options.output, record)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer pairs, shorter streams")
    parser.add_argument("--output", type=Path, help="record to write")
    return parser.parse_args()


def _rows(quick: bool) -> Iterator[Row]:
    dropout, machine = VariationalDropoutRegressor(), RVMRegressor()
    classical = RVMRegressor(threshold=0)
    # At 100,000 × 100 nearly all of our time is one product XᵀX, of which ARDRegression makes one
    # an iteration, of the features that are left: its few iterations are the bound of this ratio.
    # Fewest it needs where features are independent, and most of them irrelevant.
    for (num_rows, num_features), kind, options in (
        ((100_000, 100), "weak weights", {"sizes": WEAK}),
        ((100_000, 100), "strong weights", {}),
        ((100_000, 100), "weak weights, correlated", {"sizes": WEAK, "correlation": 0.9}),
        ((100_000, 100), "all relevant", {"sizes": WEAK, "num_relevant": 100}),
        ((2_000, 1_500), "strong weights", {}),
    ):
        X, y = _rows_of(num_rows, num_features, **options)
        size = f"{num_rows:,} × {num_features:,}, {kind}"
        ard = partial(ARDRegression().fit, X, y)
        yield Row(size, "variational dropout", "ARDRegression", partial(dropout.fit, X, y), ard, 5)
        yield Row(size, "RVM", "ARDRegression", partial(machine.fit, X, y), ard, 5)
        yield Row(size, "classical RVM", "ARDRegression", partial(classical.fit, X, y), ard)
        lasso = partial(LassoCV().fit, X, y)
        yield Row(size, "variational dropout", "LassoCV", partial(dropout.fit, X, y), lasso)
    X, y = _rows_of(500, 100)
    classes = y > 0
    for name, regressor, classifier in _rvm_packages():
        must = 50 if name.startswith("sklearn-rvm") else None
        fit, peer_fit = partial(machine.fit, X, y), partial(regressor, X, y)
        yield Row("500 × 100", "RVM", name, fit, peer_fit, must)
        yield Row(
            "500 × 100",
            "RVM, classes",
            name,
            partial(RVMClassifier().fit, X, classes),
            partial(classifier, X, classes.astype(int)),
        )
    if not quick:
        X, y = _rows_of(20_000, 100)
        logistic: Any = LogisticRegressionCV
        peer = logistic(l1_ratios=(1.0,), solver="liblinear", use_legacy_attributes=False)
        yield Row(
            "20,000 × 100",
            "variational dropout, classes",
            "LogisticRegressionCV, l1",
            partial(VariationalDropoutClassifier().fit, X, y > 0),
            partial(peer.fit, X, y > 0),
        )


def _rvm_packages() -> Iterator[tuple[str, Callable[..., Any], Callable[..., Any]]]:
    """Packages that are installed: with their default kernel, and with the linear one, as ours."""
    try:
        from sklearn_rvm import EMRVC, EMRVR
    except ImportError:
        print("sklearn-rvm: not installed", file=sys.stderr)
    else:
        for name, kernel in (("sklearn-rvm", "rbf"), ("sklearn-rvm, linear kernel", "linear")):
            yield name, _fitter(EMRVR, kernel), _fitter(EMRVC, kernel)
    try:
        from fastrvm import RVC, RVR
    except ImportError:
        print("fastrvm: not installed", file=sys.stderr)
    else:
        yield "fastrvm, linear kernel", _fitter(RVR, "linear"), _fitter(RVC, "linear")


def _fitter(model: Any, kernel: str) -> Callable[..., Any]:
    return lambda X, y: model(kernel=kernel).fit(X, y)


def _rows_of(
    num_rows: int,
    num_features: int,
    sizes: tuple[float, float] = (0.5, 1.5),
    num_relevant: int = 20,
    correlation: float = 0.0,
) -> tuple[Any, Any]:
    """Normal features, each correlated with the one before it, some relevant; noise of variance 1.

    What is relevant comes first where features are independent, and anywhere otherwise.
    """
    rng = np.random.default_rng(0)
    X = rng.normal(size=(num_rows, num_features))
    for feature in range(1, num_features if correlation else 0):
        X[:, feature] *= np.sqrt(1 - correlation**2)
        X[:, feature] += correlation * X[:, feature - 1]
    weights = np.zeros(num_features)
    weights[:num_relevant] = rng.choice([-1, 1], num_relevant) * rng.uniform(*sizes, num_relevant)
    if correlation:
        rng.shuffle(weights)
    return X, X @ weights + rng.normal(size=num_rows)


def _first_fit(num_rows: int, num_features: int) -> dict[str, Any]:
    """One fit in a fresh process, as most fits are; medians of three.

    A model that copies its rows then pays for the memory, which a repeated one finds warm.
    """
    milliseconds = []
    for model in (VariationalDropoutRegressor(), ARDRegression()):
        seconds = []
        for _ in range(3):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                seconds.append(pool.apply(_seconds_of_first_fit, (model, num_rows, num_features)))
        milliseconds.append(1e3 * statistics.median(seconds))
    ours, peer = milliseconds
    size = f"{num_rows:,} × {num_features:,}"
    return {"size": size, "ours_ms": ours, "peer_ms": peer, "ratio": peer / ours}


def _seconds_of_first_fit(model: Any, num_rows: int, num_features: int) -> float:
    warnings.simplefilter("ignore")
    model.fit(*_rows_of(100, 30))  # Imports are not what is measured.
    X, y = _rows_of(num_rows, num_features, WEAK)
    start = time.process_time()
    model.fit(X, y)
    return time.process_time() - start


def _all_cores(num_rows: int, num_features: int) -> dict[str, Any]:
    """Fits that may use every core, in a process of their own; medians of seven, by turns."""
    del os.environ["OMP_NUM_THREADS"]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        ours, peer = pool.apply(_wall_milliseconds, (num_rows, num_features))
    os.environ["OMP_NUM_THREADS"] = "1"
    cores = len(os.sched_getaffinity(0))
    size = f"{num_rows:,} × {num_features:,}"
    return {"size": size, "cores": cores, "ours_ms": ours, "peer_ms": peer, "ratio": peer / ours}


def _wall_milliseconds(num_rows: int, num_features: int) -> list[float]:
    warnings.simplefilter("ignore")
    X, y = _rows_of(num_rows, num_features, WEAK)
    models = VariationalDropoutRegressor(), ARDRegression()
    seconds: list[list[float]] = [[], []]
    for _ in range(8):
        for model, times in zip(models, seconds, strict=True):
            start = time.perf_counter()
            model.fit(X, y)
            times.append(time.perf_counter() - start)
    return [1e3 * statistics.median(times[1:]) for times in seconds]


def _stream_sizes(quick: bool) -> tuple[int, ...]:
    return (100_000, 1_000_000) if quick else (100_000, 1_000_000, 10_000_000)


def _stream(count: int) -> dict[str, float]:
    seconds = _stream_seconds(count)
    return {
        "rows": count,
        "seconds": seconds,
        "microseconds_a_row": 1e6 * seconds / count,
        "peak_mebibytes": peak_mebibytes(_stream_work, count),
    }


def _stream_work(count: int) -> Callable[[], Any]:
    return partial(VariationalDropoutRegressor().fit_chunks, _chunks(count))


def _stream_seconds(count: int) -> float:
    """CPU time of a streamed fit, less that of making its rows."""
    start = time.process_time()
    for _ in _chunks(count):
        pass
    making = time.process_time() - start
    start = time.process_time()
    _stream_work(count)()
    return time.process_time() - start - making


def _chunks(count: int) -> Iterator[tuple[Any, Any]]:
    X, y = _rows_of(STREAM_CHUNK, 100)
    rng = np.random.default_rng(1)
    for _ in range(count // STREAM_CHUNK):
        # New rows at little cost: every chunk is another mixture of the first one's rows.
        order = rng.permutation(STREAM_CHUNK)
        yield X + X[order], y + y[order]


if __name__ == "__main__":
    sys.exit(main())
