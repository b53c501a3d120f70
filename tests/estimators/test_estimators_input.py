"""Input that is awkward, or wrong: the answer that it should have, or the error users expect."""

import numpy as np
import pandas as pd
import pytest
from scipy import sparse
from sklearn.base import clone, is_classifier
from sklearn.datasets import load_iris

from zeromean.estimators import (
    RBFBasis,
    RVMClassifier,
    RVMRegressor,
    VariationalDropoutClassifier,
    VariationalDropoutRegressor,
)

REGRESSORS = [VariationalDropoutRegressor(), RVMRegressor()]
CLASSIFIERS = [VariationalDropoutClassifier(), RVMClassifier()]
names = {"ids": lambda m: type(m).__name__}
more_features_than_rows = pytest.mark.filterwarnings(
    "ignore:VariationalDropoutClassifier separates all"
)
every = pytest.mark.parametrize("model", REGRESSORS + CLASSIFIERS, **names)
every_regressor = pytest.mark.parametrize("model", REGRESSORS, **names)
every_classifier = pytest.mark.parametrize("model", CLASSIFIERS, **names)


@pytest.fixture
def rows():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(120, 12))
    return X, X @ np.r_[2, -1, 0.5, np.zeros(9)] + 1 + 0.5 * rng.normal(size=120)


def targets(model, y):
    return y if model in REGRESSORS else np.where(y > 1, "b", "a")


@more_features_than_rows
@every
@pytest.mark.parametrize("num_rows", [120, 10])
def test_sparse_columns_with_a_large_offset_cost_no_digits(model, rows, num_rows):
    X, y = rows[0][:num_rows], targets(model, rows[1])[:num_rows]
    dense = clone(model).fit(X, y)
    other = clone(model).fit(sparse.csr_array(X + 1e8), y)
    np.testing.assert_array_equal(other.relevance_, dense.relevance_)
    np.testing.assert_allclose(other.coef_, dense.coef_, rtol=1e-5, atol=1e-7)


@more_features_than_rows
@every
@pytest.mark.parametrize("form", [np.asarray, sparse.csr_array])
@pytest.mark.parametrize("num_rows", [120, 10])
def test_constant_columns_change_nothing(model, rows, form, num_rows):
    X, y = rows[0][:num_rows], targets(model, rows[1])[:num_rows]
    plain = clone(model).fit(X, y)
    constants = np.broadcast_to([0.1, 1 / 3, -1e8, 0, 7e-9], (num_rows, 5))
    other = clone(model).fit(form(np.column_stack([X, constants])), y)
    assert not other.relevance_[12:].any()
    np.testing.assert_allclose(
        np.atleast_2d(other.coef_)[:, :12], np.atleast_2d(plain.coef_), rtol=1e-8, atol=1e-12
    )


@every
@pytest.mark.parametrize("num_rows", [120, 10])
def test_squares_beyond_floats_are_refused(model, rows, num_rows):
    X, y = rows[0][:num_rows], targets(model, rows[1])[:num_rows]
    with pytest.raises(ValueError, match=r"Squares of X.* too large for float64; rescale them"):
        clone(model).fit(1e200 * X, y)


@every
@pytest.mark.parametrize("form", [np.asarray, sparse.csr_array])
@pytest.mark.parametrize("num_rows", [120, 10])
@pytest.mark.parametrize("fit_intercept", [True, False])
def test_missing_values_are_refused(model, rows, form, num_rows, fit_intercept):
    X, y = rows[0][:num_rows].copy(), targets(model, rows[1])[:num_rows]
    X[3, 4] = np.nan
    with pytest.raises(ValueError, match="X contains NaN"):
        clone(model).set_params(fit_intercept=fit_intercept).fit(form(X), y)


@every_regressor
@pytest.mark.parametrize("num_rows", [120, 10])
def test_targets_beyond_floats_are_refused(model, rows, num_rows):
    X, y = rows[0][:num_rows], rows[1][:num_rows]
    with pytest.raises(ValueError, match="Squares of X or y are too large for float64"):
        clone(model).fit(X, 1e200 * y)


@every
def test_iterations_are_whole(model, rows):
    with pytest.raises(ValueError, match=r"'max_iter' parameter .* must be an int"):
        clone(model).set_params(max_iter=2.5).fit(rows[0], targets(model, rows[1]))


@every
def test_path_of_the_objective_has_a_value_for_each_iteration(model, rows):
    X, y = rows
    model = clone(model).fit(X, targets(model, y))
    assert model.elbo_.shape == (np.ravel(model.n_iter_)[0] + 1,)


@every
def test_sample_weights_are_repetitions_to_rounding(model, rows):
    X, y = rows[0], targets(model, rows[1])
    weight = np.random.default_rng(1).integers(0, 4, size=120)
    weighted = clone(model).fit(X, y, sample_weight=weight)
    repeated = clone(model).fit(np.repeat(X, weight, axis=0), np.repeat(y, weight))
    np.testing.assert_allclose(weighted.coef_, repeated.coef_, rtol=1e-8, atol=1e-12)


@every
def test_chunks_without_rows_are_passed_over(model, rows):
    X, y = rows[0], targets(model, rows[1])
    whole = clone(model).fit(X, y)
    chunks = [
        (X[:0], y[:0]),
        (X[:50], y[:50]),
        (X[:9], y[:9], np.zeros(9)),
        (X[50:], y[50:]),
        (X[:0], y[:0], np.zeros(0)),
    ]
    np.testing.assert_allclose(
        clone(model).fit_chunks(chunks).coef_, whole.coef_, rtol=1e-8, atol=1e-12
    )
    with pytest.raises(ValueError, match="chunks gave no rows"):
        clone(model).fit_chunks(chunks[:1])


@every_regressor
def test_given_noise_stays_where_the_target_is_constant(model, rows):
    model = clone(model).set_params(noise_precision=4.0).fit(rows[0], np.ones(120))
    assert not model.relevance_.any()
    mean, std = model.predict(rows[0], return_std=True)
    np.testing.assert_allclose(mean, 1)
    # Of the noise, and of the intercept.
    np.testing.assert_allclose(std, 0.5 * np.sqrt(1 + 1 / 120))


@every_classifier
@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint16, bool, "U3", object])
def test_classes_keep_their_type(model, rows, dtype):
    X, y = rows
    labels = np.where(y > 1, *(("b", "a") if dtype in ("U3", object) else (1, 0))).astype(dtype)
    model = clone(model).fit(X, labels)
    assert model.classes_.dtype == model.predict(X).dtype == labels.dtype


@every_classifier
def test_probabilities_add_to_one_however_far_out(model):
    X, y = load_iris(return_X_y=True)
    model = clone(model).fit(X, y)
    for factor in (1e3, -1e6, 1e12):
        probabilities = model.predict_proba(factor * X)
        np.testing.assert_allclose(probabilities.sum(axis=1), 1)
        np.testing.assert_array_equal(
            model.classes_[probabilities.argmax(axis=1)], model.predict(factor * X)
        )


@pytest.fixture
def array():
    return pytest.importorskip("dask.array")


@every
def test_dask_blocks_of_unknown_and_of_no_length_are_fit(model, rows, array):
    X, y = rows[0], targets(model, rows[1])
    blocks = array.from_array(X, chunks=(30, 5))
    chosen = array.from_array(np.arange(120) >= 30, chunks=30)  # none of the first block
    there = clone(model).fit(blocks[chosen], array.from_array(y, chunks=30)[chosen])
    np.testing.assert_allclose(
        there.coef_, clone(model).fit(X[30:], y[30:]).coef_, rtol=1e-8, atol=1e-12
    )


@every
def test_dask_input_is_checked_as_arrays_are(model, rows, array):
    X, y = rows[0], targets(model, rows[1])
    blocks, labels = array.from_array(X, chunks=(30, 5)), array.from_array(y, chunks=50)

    def refused(message, X, y, sample_weight=None):
        with pytest.raises(ValueError, match=message):
            clone(model).fit(X, y, sample_weight=sample_weight)

    refused("inconsistent numbers of samples", blocks, labels[:100])
    refused("inconsistent numbers of samples", blocks, y[:100])
    refused("inconsistent numbers of samples", blocks, labels[:, None])
    refused("Negative values in data passed to `sample_weight`", blocks, labels, -np.ones(120))
    refused("sample_weight contains NaN", blocks, labels, np.full(120, np.nan))
    refused("no rows of positive weight", blocks, labels, np.zeros(120))
    refused("no rows of positive weight", blocks[:0], labels[:0])
    refused("Expected a dask.array of shape", blocks[:, 0], labels)
    refused("Expected a dask.array of shape", blocks[:, :0], labels)
    refused("Complex data not supported", blocks + 1j, labels)
    refused("y contains NaN", blocks, array.where(blocks[:, 0] > 1, np.nan, 1.0))
    if model in CLASSIFIERS:
        refused("Unknown label type", blocks, array.from_array(rows[1], chunks=50))


@every
def test_dask_fit_forgets_the_names_of_an_earlier_one(model, rows, array):
    X, y = rows[0], targets(model, rows[1])
    frame = pd.DataFrame(X, columns=[f"feature {n}" for n in range(12)])
    model = clone(model).fit(frame, y)
    assert hasattr(model, "feature_names_in_")
    assert not hasattr(model.fit(array.from_array(X), y), "feature_names_in_")


@every
def test_other_collections_of_dask_are_refused(model, rows):
    dask = pytest.importorskip("dask")
    with pytest.raises(TypeError, match=r"Wanted a dask\.array, got Delayed.*; a data frame has"):
        clone(model).fit(dask.delayed(rows[0]), rows[1])


@pytest.mark.parametrize("Regressor", [RVMRegressor, VariationalDropoutRegressor])
@pytest.mark.parametrize("form", [np.asarray, sparse.csr_array])
@pytest.mark.parametrize("offset", [0.0, 1e4, 1e7])
def test_rows_without_weight_say_nothing(Regressor, form, offset):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(3000, 5)) + offset
    y = X @ [1, 2, 0, 0, 0] + 0.1 * rng.normal(size=3000)
    masked = np.vstack([np.zeros((1500, 5)), X]), np.append(np.zeros(1500), y)
    weight = np.append(np.zeros(1500), np.ones(3000))
    expected = Regressor().fit(form(X), y)
    model = Regressor().fit(form(masked[0]), masked[1], sample_weight=weight)
    # What is left of 16 digits.
    np.testing.assert_allclose(model.coef_, expected.coef_, atol=1e-8 + 1e-14 * offset)
    assert model.noise_precision_ == pytest.approx(expected.noise_precision_, rel=1e-5)


def test_radial_basis_far_from_zero():
    X = np.random.default_rng(0).normal(size=(50, 3))
    near, far = RBFBasis().fit(X), RBFBasis().fit(X + 1e8)
    assert far.gamma_ == pytest.approx(near.gamma_, rel=1e-6)
    np.testing.assert_allclose(far.transform(X + 1e8), near.transform(X), atol=1e-6)


@pytest.mark.parametrize("value", [0.0, 0.1, 0.3, 1e8])
@pytest.mark.parametrize("container", [np.asarray, sparse.csr_array])
def test_radial_basis_of_a_constant_has_a_width(value, container):
    assert RBFBasis().fit(container(np.full((50, 7), value))).gamma_ == 1.0


@pytest.mark.parametrize("Model", [RVMClassifier, RVMRegressor])
@pytest.mark.parametrize("unit", [1e-24, 1.0, 1e20])
def test_sparse_rows_of_single_precision_in_any_unit(Model, unit):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 4)) * (rng.random((200, 4)) < 0.5)
    y = X[:, 0] + 0.5 * rng.normal(size=200)
    y = y > 0 if Model is RVMClassifier else y
    scaled = (X * unit).astype(np.float32)
    dense, thin = Model().fit(scaled, y), Model().fit(sparse.csr_array(scaled), y)
    np.testing.assert_allclose(thin.coef_ * unit, dense.coef_ * unit, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("constant", [0.1, 7.7, 100.3])
def test_weighted_constants_are_found_without_a_word(constant):
    X = np.column_stack([np.arange(50.0) % 7, np.full(50, constant)])
    y = X[:, 0] + np.sin(np.arange(50))
    model = RVMRegressor().fit(X, y, sample_weight=np.arange(1, 51) / 10)
    assert model.relevance_.tolist() == [True, False]


def test_streams_of_too_many_features_are_refused():
    X, y = sparse.random_array((20, 9000), density=0.01, rng=0, format="csr"), np.arange(20.0)
    message = r"up to 8,192 of them, got 9,000; give fit all rows in one array or sparse matrix"
    with pytest.raises(ValueError, match=message):
        RVMRegressor().partial_fit(X, y)
    with pytest.raises(ValueError, match=message):
        RVMRegressor().fit_chunks([(X, y)])
    RVMRegressor().fit(X, y)


def test_a_stream_that_fails_leaves_the_model_as_it_was():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(50, 5))
    model = RVMRegressor().fit(X, X[:, 0])
    wide = rng.normal(size=(50, 8))
    with pytest.raises(ValueError, match="expecting 8 features"):
        model.fit_chunks([(wide, wide[:, 0]), (X, X[:, 0])])
    np.testing.assert_allclose(model.predict(X), X[:, 0], atol=1e-3)
    with pytest.raises(ValueError, match=r"must be \(X, y\) or \(X, y, sample_weight\), got 4"):
        model.fit_chunks([(X, X[:, 0], np.ones(50), "?")])


def test_blocks_of_unknown_length_get_a_sentence():
    array = pytest.importorskip("dask.array")
    X = np.random.default_rng(0).normal(size=(60, 3))
    blocks = array.from_array(X, chunks=20)
    blocks = blocks[blocks[:, 0] > -100]
    for y in (X[:, 0], array.from_array(X[:, 0], chunks=30)):
        with pytest.raises(ValueError, match=r"call X\.compute_chunk_sizes\(\) first"):
            RVMRegressor().fit(blocks, y)


def test_basis_has_its_own_centres():
    X = np.random.default_rng(0).normal(size=(10, 2))
    basis = RBFBasis(gamma=1.0).fit(X)
    before = basis.transform(X[:3].copy())
    rows = X[:3].copy()
    X *= 0
    np.testing.assert_array_equal(basis.transform(rows), before)
    with pytest.raises(ValueError, match="too large for float64"):
        RBFBasis().fit(np.full((3, 2), 1e155) * [[1], [2], [3]])


def make_rows(num_rows, num_features):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(num_rows, num_features))
    return X, 2 * X[:, 1] - 3 * X[:, 4] + 0.1 * rng.normal(size=num_rows)


@more_features_than_rows
@pytest.mark.parametrize("shape", [(60, 6), (20, 40)], ids=str)
@every
def test_numbers_of_any_size_are_fitted_or_refused(model, shape):
    X, y = make_rows(*shape)
    if is_classifier(model):
        y = y > 0
    usual = clone(model).fit(X, y)
    for scale in (1e-150, 1e-100, 1e100, 1e150):
        same = clone(model).fit(scale * X, y)
        np.testing.assert_array_equal(same.relevance_, usual.relevance_)
        np.testing.assert_array_equal(same.predict(scale * X) > 0, usual.predict(X) > 0)
    for scale, size in ((1e-300, "small"), (1e-170, "small"), (1e170, "large"), (1e300, "large")):
        with pytest.raises(ValueError, match=f"Squares of X.* are too {size} for float64; rescale"):
            clone(model).fit(scale * X, y)
        if not is_classifier(model):
            with pytest.raises(ValueError, match=f"y are too {size} for float64; rescale"):
                clone(model).fit(X, scale * y)


@every
def test_one_feature_that_is_too_small_is_named(model):
    X, y = make_rows(60, 6)
    X[:, 2] *= 1e-170
    for rows in (X, sparse.csr_array(X)):
        with pytest.warns(UserWarning, match=r"\(the first is number 2\) are too small"):
            clone(model).fit(rows, y > 0 if is_classifier(model) else y)
    X[:, 2] = 1e-170  # A constant is not too small.
    clone(model).fit(X, y > 0 if is_classifier(model) else y)


@every_regressor
def test_squares_of_weights_outside_float64_are_refused(model):
    X, y = make_rows(60, 6)
    for scale in (1e-100, 1e100):
        with pytest.raises(ValueError, match="differ so much in size"):
            clone(model).fit(scale * X, y / scale)


@pytest.mark.parametrize("value", [1e160, -1e155])
@pytest.mark.parametrize("form", [np.asarray, sparse.csr_array], ids=["dense", "sparse"])
@every_regressor
def test_constant_targets_of_any_size_are_fitted_or_refused(model, form, value):
    X, _ = make_rows(60, 6)
    y = np.full(60, value)
    fitted = clone(model).fit(form(X), y)
    np.testing.assert_array_equal(fitted.predict(form(X)), y)
    with pytest.raises(ValueError, match="are too large for float64; rescale them"):
        clone(model).set_params(fit_intercept=False).fit(form(X), y)


@every_regressor
def test_targets_too_large_for_their_weights_are_refused(model):
    X, y = make_rows(60, 6)
    with pytest.raises(ValueError, match="are too large for float64; rescale them"):
        clone(model).fit(X, 1e153 * y, sample_weight=np.full(60, 1e-12))
