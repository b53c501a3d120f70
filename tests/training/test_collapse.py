"""The prior winning over the data is noticed, and nothing else is."""

import warnings

import pytest
import torch

from zeromean.training import CollapseWarning, CollapseWatch


def watch_epochs(targets, nlls, kls):
    watch = CollapseWatch()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for nll, kl in zip(nlls, kls, strict=True):
            for batch in targets.split(50):
                watch.add(batch, nll)
            watch.end_epoch(kl)
    return [str(w.message) for w in caught if w.category is CollapseWarning]


FALLING = [{"fc1": 100.0 - i, "fc2": 1000.0 / (i + 1)} for i in range(16)]
CLASSES = torch.arange(200) % 4  # A constant has log 4 = 1.386 nats.


def test_a_constant_fit_with_falling_kl_warns_once_and_names_the_layer():
    (message,) = watch_epochs(CLASSES, [1.39] * 16, FALLING)
    assert "fc2" in message
    assert "1.39" in message
    assert "warmup" in message


@pytest.mark.parametrize(
    ("nlls", "kls"),
    [
        ([1.39, 1.39, 1.0, 0.6, *[0.5] * 12], FALLING),  # It learns late, but it learns.
        ([1.39] * 16, list(reversed(FALLING))),  # The KL rises: not the prior's doing.
        ([1.39] * 3, FALLING[:3]),  # Too early to tell.
        ([0.9] * 16, FALLING),
    ],
)
def test_nothing_else_warns(nlls, kls):
    assert watch_epochs(CLASSES, nlls, kls) == []


def test_a_few_steps_are_too_early_to_tell_however_many_epochs_they_are():
    """Epochs of one step, as with all data in one batch."""
    watch = CollapseWatch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kl in FALLING:
            watch.add(CLASSES, 1.39)
            watch.end_epoch(kl)


def test_a_kl_that_hardly_falls_is_not_the_prior_winning():
    falls = [{"fc1": 1000.0 - i} for i in range(16)]
    assert watch_epochs(CLASSES, [1.39] * 16, falls) == []


def test_regression_is_compared_with_the_variance_of_its_targets():
    torch.manual_seed(0)
    targets = torch.randn(5000, 2) * torch.tensor([1.0, 3.0]) + 5
    normal = torch.distributions.Normal(targets.mean(0), targets.std(0))
    constant = -normal.log_prob(targets).sum(1).mean().item()
    assert len(watch_epochs(targets, [constant] * 16, FALLING)) == 1
    assert watch_epochs(targets, [0.9 * constant] * 16, FALLING) == []


def test_targets_with_nothing_to_learn_do_not_warn():
    assert watch_epochs(torch.zeros(100, dtype=torch.int64), [0.0] * 16, FALLING) == []
    assert watch_epochs(torch.full((100, 1), 2.0), [0.0] * 16, FALLING) == []
