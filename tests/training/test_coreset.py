"""Which few examples of a task are kept."""

import pytest
import torch

from zeromean.training import coreset


def test_random_ones_are_different_and_follow_the_seed():
    inputs = torch.randn(50, 3)
    chosen = coreset(inputs, 20, seed=1)
    assert len(set(chosen.tolist())) == 20
    assert torch.equal(chosen, coreset(inputs, 20, seed=1))
    assert not torch.equal(chosen, coreset(inputs, 20, seed=2))


def test_k_center_covers_every_cluster():
    torch.manual_seed(0)
    centres = 100 * torch.randn(7, 5)
    inputs = (centres[:, None] + torch.randn(7, 30, 5)).flatten(0, 1)
    assert {int(i) // 30 for i in coreset(inputs, 7, method="k-center")} == set(range(7))


def test_k_center_is_farthest_first():
    inputs = torch.randn(40, 2, 3)
    chosen = coreset(inputs, 10, method="k-center", seed=3).tolist()
    rows = inputs.flatten(1)
    for count in range(1, 10):
        distance = torch.cdist(rows, rows[chosen[:count]]).min(1).values
        assert distance[chosen[count]] == pytest.approx(float(distance.max()), rel=1e-5)


def test_k_center_among_equal_examples_takes_each_once():
    assert sorted(coreset(torch.zeros(6, 2), 6, method="k-center").tolist()) == list(range(6))


@pytest.mark.parametrize(
    ("inputs", "size", "options", "error", "message"),
    [
        (torch.randn(5, 2), 6, {}, ValueError, "size must be at most the 5 examples.*got 6"),
        (torch.randn(5, 2), 0, {}, ValueError, "size must be at least 1"),
        (torch.randn(5, 2), 2, {"method": "herding"}, ValueError, "random, k-center.*herding"),
        ([1, 2], 1, {}, TypeError, "inputs must be a tensor with a row for each"),
    ],
)
def test_bad_input_is_refused(inputs, size, options, error, message):
    with pytest.raises(error, match=message):
        coreset(inputs, size, **options)
