"""Processes that train together: each draws noise of its own, from one seed."""

import torch

import zeromean as zm
from zeromean.training.ranks import seed_rank


def test_ranks_draw_different_noise_from_one_seed():
    draws = {}
    for rank in range(4):
        torch.manual_seed(7)
        weights = torch.randn(3)  # The same everywhere: the initial weights.
        seed_rank(rank, 7)
        draws[rank] = torch.randn(1000)
        torch.manual_seed(7)
        assert torch.equal(weights, torch.randn(3))
    for a in range(4):
        for b in range(a):
            correlation = torch.corrcoef(torch.stack([draws[a], draws[b]]))[0, 1]
            assert correlation.abs() < 5 / 1000**0.5


def test_seed_is_reproducible_and_not_the_one_that_was_given():
    first = zm.seed_ranks(3)
    a = torch.randn(5)
    assert zm.seed_ranks(3) == first
    assert torch.equal(a, torch.randn(5))
    torch.manual_seed(3)
    assert not torch.equal(a, torch.randn(5))


def test_default_is_what_torch_was_seeded_with():
    torch.manual_seed(11)
    assert zm.seed_ranks() == zm.seed_ranks(11)
