"""scikit-learn's own checks, every one of them, for every estimator."""

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from zeromean import estimators


# Some checks have more features than rows.
@pytest.mark.filterwarnings("ignore:VariationalDropoutClassifier separates all")
@parametrize_with_checks([getattr(estimators, name)() for name in estimators.__all__])
def test_scikit_learn_checks(estimator, check):
    check(estimator)
