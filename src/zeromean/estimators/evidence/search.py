"""Evidence maximisation for a quadratic data term: the solver behind the relevance vector machines.

Each weight has a prior N(0, 1 / (a β)) with a precision of its own, and a price in nats for being
in the model at all, which is the log of the prior odds against it. With V = (R + diag(a))⁻¹ and
mean V b, maximise over the set of features, their a, and the noise precision β

    ½ [count log β - β (c - bᵀ V b) + log det V + Σ log a] - prices of the features.

For a single feature, given the others, this has a closed form (Tipping & Faul, 2003): with s and q
what the others leave of its square and of its correlation with the target, it belongs to the model
if ½ (β q²/s - 1 - log(β q²/s)) exceeds the price, at a = s² / (β q² - s). Features enter, leave and
move by it, one at a time; Newton steps in all log a together make the convergence quadratic.
"""

# scipy makes its LAPACK functions at run time.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations

import numpy as np
from scipy.linalg.lapack import dpotrf, dpotrs

from zeromean.estimators.array_types import Array, Indices
from zeromean.estimators.evidence.feature_prior import FREE, Prices, lower_price
from zeromean.estimators.evidence.model import MARGIN, SMALLEST_SHARE, EvidenceModel, gain, inverse
from zeromean.estimators.likelihoods.noise_term import NoiseTerm
from zeromean.estimators.likelihoods.quadratic import (
    MOST_INVERTED,
    ROWS_A_FEATURE,
    Quadratic,
    told_apart,
)

SCORED_AT_ONCE = 4096
# Tolerances in nats: of a fit whose features alone are wanted, and of one that is only a start.
ROUGHLY = 0.01
VERY_ROUGHLY = 1.0
# With fewer rows, a model of all features together would say nothing.
FEWEST_ROWS_A_FEATURE = 1.2
# Rows beyond two a feature that are needed, so that few rows do not explain everything.
FEWEST_ROWS_LEFT = 2
# Models up to this size take no time worth saving.
MOST_QUICK = 256
# At fewer rows a feature, a larger model of wide data has to be nearly as good as the one from
# nothing, at full prices: it may be worse by so much, since it has not been pruned yet.
FEWEST_ROWS_TO_GO_ON = 3
NATS_A_ROW = 0.2
# Larger models are searched for at these parts of the full price.
LOWER_PRICES = (4, 8, 32)
# Up to so many features, and with hardly more rows, every feature and every pair is a start.
MOST_PAIRED = 8
FEW_ROWS_A_FEATURE = 3
# What keeps the matrix of all features invertible.
RIDGE = 1e-9


@dataclass
class EvidenceSolution:
    """The features in the model, in order of entry, with precision, mean and covariance (÷ β)."""

    features: Indices
    precision: Array  # a
    noise_precision: float
    mean: Array = field(default_factory=lambda: np.zeros(0))
    covariance: Array = field(default_factory=lambda: np.zeros((0, 0)))
    objective: list[float] = field(default_factory=list)
    num_iterations: int = 0
    converged: bool = False

    @classmethod
    def empty(cls, noise_precision: float) -> EvidenceSolution:
        return cls(np.zeros(0, dtype=np.intp), np.zeros(0), noise_precision)

    def restart(self) -> EvidenceSolution:
        return EvidenceSolution(self.features, self.precision.copy(), self.noise_precision)


def search_evidence(
    quadratic: Quadratic,
    noise: NoiseTerm,
    noise_precision: float,
    *,
    num_rows: float,
    prices: Prices,
    max_iter: int,
    tol: float,
) -> EvidenceSolution:
    """The best of several optima: from the empty model, and from larger ones at lower prices.

    From nothing, the first of many features that are relevant together may not be worth its price,
    or may not even seem relevant: where the target is a difference of features, say.
    """
    # With hardly fewer features than rows, the noise that is learned tends to nothing.
    most_features = np.inf if noise.fixed else max(num_rows - 1, 0)
    improve = partial(maximize_evidence, quadratic, noise, max_iter=max_iter)
    fit = partial(improve, prices=prices, most_features=most_features)
    forward = fit(EvidenceSolution.empty(noise_precision), tol=ROUGHLY)
    # By their features: the same ones end in the same optimum, which is found once.
    found = {frozenset(forward.features): forward}
    tiny = len(quadratic.linear) <= MOST_PAIRED
    # Noise that is given cannot vanish, however many features explain it; but a search through all
    # of many features would take long.
    too_many = np.inf if noise.fixed and tiny else num_rows / ROWS_A_FEATURE - FEWEST_ROWS_LEFT
    improve = partial(improve, until_full=True)
    # From there on, mostly chance comes in; and it would go on to the end, which takes long.
    enough = max(num_rows / FEWEST_ROWS_TO_GO_ON, MOST_QUICK)
    wide = len(quadratic.linear) > num_rows and not noise.fixed
    enough = min(enough, too_many) if wide else too_many
    for start, lower in _larger_starts(quadratic, noise, forward, prices, num_rows):
        more = improve(start, prices=lower, tol=VERY_ROUGHLY, most_features=enough)
        if enough <= len(more.features) < too_many:
            size = len(more.features)
            at_full_price = more.objective[-1] + lower.total(size) - prices.total(size)
            if at_full_price < forward.objective[-1] - NATS_A_ROW * num_rows:
                break
            more = improve(more, prices=lower, tol=VERY_ROUGHLY, most_features=too_many)
        if len(more.features) >= too_many:
            break  # The next price is lower.
        backward = improve(more.restart(), prices=prices, tol=ROUGHLY, most_features=too_many)
        if len(backward.features) < too_many:
            found.setdefault(frozenset(backward.features), backward)
    for start in _small_starts(len(quadratic.linear), num_rows, noise_precision):
        if len(start.features) < too_many:
            small = fit(start, tol=ROUGHLY)
            if len(small.features) < too_many:
                found.setdefault(frozenset(small.features), small)
    # Of the many starts, those that are far behind now do not win in the end.
    best = max(solution.objective[-1] for solution in found.values())
    least = best - VERY_ROUGHLY if tiny else -np.inf
    return max(
        (fit(solution, tol=tol) for solution in found.values() if solution.objective[-1] >= least),
        key=lambda solution: solution.objective[-1],
    )


def _larger_starts(
    quadratic: Quadratic,
    noise: NoiseTerm,
    forward: EvidenceSolution,
    prices: Prices,
    num_rows: float,
) -> Iterator[tuple[EvidenceSolution, Prices]]:
    """Solutions to improve at lower prices."""
    num_features = len(quadratic.linear)
    if 0 < num_features <= min(num_rows / FEWEST_ROWS_A_FEATURE, MOST_INVERTED):
        # Without any price, chance would let in as many features as there are rows.
        lower = FREE if told_apart(num_features, num_rows) else lower_price(prices, 8)
        yield with_all_that_matter(quadratic, noise, forward), lower
        return
    yield forward.restart(), lower_price(prices, 2)
    if min(num_features, num_rows) <= MOST_INVERTED:
        for divisor in LOWER_PRICES:
            yield EvidenceSolution.empty(forward.noise_precision), lower_price(prices, divisor)


def _small_starts(
    num_features: int, num_rows: float, noise_precision: float
) -> Iterator[EvidenceSolution]:
    """Every feature and every pair, where that costs little and rows are few.

    There a feature can be worth its price only once the noise has shrunk by it, and two only
    together.
    """
    if num_features > MOST_PAIRED or num_rows > FEW_ROWS_A_FEATURE * num_features:
        return
    for size in (1, 2):
        for features in combinations(range(num_features), size):
            yield EvidenceSolution(np.array(features), np.ones(size), noise_precision)


def maximize_evidence(
    quadratic: Quadratic,
    noise: NoiseTerm,
    solution: EvidenceSolution,
    *,
    prices: Prices,
    max_iter: int,
    tol: float,
    most_features: float = np.inf,
    until_full: bool = False,
) -> EvidenceSolution:
    """Improve a solution in place until an iteration gains less than `tol` nats.

    Args:
        most_features: No more than these.
        until_full: Whether to stop where there are so many.
    """
    model = EvidenceModel.build(
        quadratic, noise, prices, solution.features, solution.precision, solution.noise_precision
    )
    solution.converged = False
    if not solution.objective:
        solution.objective.append(model.objective)
    best = model.features, model.precision.copy(), model.noise_precision
    while solution.num_iterations < max_iter:
        solution.num_iterations += 1
        changed = model.admit(quadratic, _candidates(quadratic, model), most_features)
        if until_full and len(model.features) >= most_features:
            model = model.rebuilt(quadratic)
            solution.objective.append(max(model.objective, solution.objective[-1]))
            best = model.features, model.precision.copy(), model.noise_precision
            break
        if changed:  # Single updates accumulate rounding errors.
            model = model.rebuilt(quadratic)
        if model.expel():
            model, changed = model.rebuilt(quadratic), True
        better = _newton_step(quadratic, model)
        if better is None:
            model.sweep()
            better = model.rebuilt(quadratic)
        model = better
        objective = model.objective
        gained = objective - solution.objective[-1]
        solution.objective.append(max(objective, solution.objective[-1]))
        if gained > -noise.rounding(objective, model.noise_precision):
            best = model.features, model.precision.copy(), model.noise_precision
        # Changes that gain nothing are rounding errors.
        if gained < tol and (not changed or gained <= 0):
            solution.converged = True
            break
    if model.features is not best[0] or not np.array_equal(model.precision, best[1]):
        model = EvidenceModel.build(quadratic, noise, prices, *best)
    solution.features, solution.precision = model.features, model.precision
    solution.mean, solution.covariance = model.mean, model.covariance
    solution.noise_precision = model.noise_precision
    return solution


def with_all_that_matter(
    quadratic: Quadratic, noise: NoiseTerm, solution: EvidenceSolution
) -> EvidenceSolution:
    """A solution, and all features that have evidence given all the others."""
    num_features = len(quadratic.linear)
    everything = np.arange(num_features)
    matrix = quadratic.block(everything, everything)
    matrix[everything, everything] += RIDGE  # Else copies of a feature make it singular.
    covariance, _ = inverse(matrix)
    variance, mean = covariance.diagonal(), covariance @ quadratic.linear
    noise_precision = solution.noise_precision
    if not noise.fixed:
        misfit = noise.square - float(quadratic.linear @ mean)
        noise_precision = max(noise.count - num_features, 0.0) / misfit
    ratio = noise_precision * mean**2 / variance
    matters = ratio > 1 + MARGIN
    others = ~matters[solution.features]
    return EvidenceSolution(
        np.concatenate([everything[matters], solution.features[others]]),
        np.concatenate([1 / variance[matters] / (ratio[matters] - 1), solution.precision[others]]),
        solution.noise_precision,
    )


def _candidates(quadratic: Quadratic, model: EvidenceModel) -> Indices:
    """Features outside the model that are worth their price, the best first."""
    residual = quadratic.linear - quadratic.product(model.features, model.mean)
    num_features = len(residual)
    ratio = np.zeros(num_features)
    everything = np.arange(num_features)
    for start in range(0, num_features, SCORED_AT_ONCE):
        some = everything[start : start + SCORED_AT_ONCE]
        columns = quadratic.block(model.features, some)
        square = quadratic.diagonal[some]
        s = square - np.einsum("ij,ij->j", columns, model.covariance @ columns)
        safe = s > SMALLEST_SHARE * square
        ratio[some[safe]] = model.noise_precision * residual[some[safe]] ** 2 / s[safe]
    ratio[model.features] = 0
    gains = gain(ratio)
    price = model.prices.of_one_more(len(model.features))
    worthy = np.flatnonzero((gains > price) & (ratio > 1 + MARGIN))
    # Each that enters lowers the gains of the others: ask the rest again next time.
    limit = max(10, len(model.features))
    return worthy[np.argsort(-gains[worthy])[:limit]]


def _newton_step(quadratic: Quadratic, model: EvidenceModel) -> EvidenceModel | None:
    """One step in all log a, with the noise at its optimum; None where it does not help.

    In log a the gradient is ½ (1 - a V_jj - β a m²) and the Hessian's off-diagonal part is
    a_i a_j (½ V_ij² + β m_i m_j V_ij).
    """
    if not len(model.features):
        return model
    beta, a, mean = model.noise_precision, model.precision, model.mean
    covariance = model.covariance
    spread = a * (covariance.diagonal() + beta * mean**2)
    slope = 0.5 * (1 - spread)
    hessian = np.outer(a, a) * covariance * (0.5 * covariance + beta * np.outer(mean, mean))
    hessian.flat[:: len(hessian) + 1] -= 0.5 * spread
    if not model.noise.fixed:
        # The noise follows: β = count / misfit, d misfit / d log a = a m².
        pull = beta * a * mean**2
        hessian += 0.5 * np.outer(pull, pull) / model.noise.count
    objective = model.objective
    factor, failed = dpotrf(-hessian, lower=True)
    if failed:
        return None
    move, _ = dpotrs(factor, slope, lower=True)
    # A precision that runs away is a feature on its way out, which `expel` decides.
    trial = model.rebuilt(quadratic, a * np.exp(np.clip(move, -6, 6)))
    # Near the optimum, Newton's step is more exact than the objective by which it is judged.
    return trial if trial.objective > objective - model.noise.rounding(objective, beta) else None
