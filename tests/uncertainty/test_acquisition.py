from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

import zeromean as zm
from zeromean.uncertainty import (
    Acquired,
    active_learning,
    at_random,
    bald,
    batch_bald,
    entropy,
    variation_ratios,
)


@pytest.fixture
def samples():
    """5 networks, 7 examples, 3 classes; examples 0 and 1 tell the same."""
    logits = 2 * torch.randn(5, 7, 3, generator=torch.Generator().manual_seed(11))
    logits[:, 1] = logits[:, 0]
    return logits.softmax(-1).double()


def joint_information(samples, chosen):
    """I(labels; weights) by enumeration of all labels."""
    total = 0.0
    for labels in product(range(samples.shape[2]), repeat=len(chosen)):
        given = samples[:, chosen, list(labels)].prod(1)
        total -= (given.mean() * given.mean().log()).item()
    conditional = -(samples[:, chosen] * samples[:, chosen].log()).sum(-1).mean(0).sum()
    return total - conditional.item()


def test_batch_bald_is_greedy_by_enumeration(samples):
    found = batch_bald(samples, 4)
    chosen = []
    for score in found.scores.tolist():
        gains = {i: joint_information(samples, [*chosen, i]) for i in range(7) if i not in chosen}
        chosen.append(max(gains, key=gains.get))
        assert score == pytest.approx(gains[chosen[-1]], abs=1e-12)
    assert found.indices.tolist() == chosen


def test_drawn_configurations_agree_with_all_of_them(samples):
    exact = batch_bald(samples, 5)
    estimates = torch.stack(
        [batch_bald(samples, 5, num_configurations=80, seed=seed).scores for seed in range(30)]
    )
    stderr = estimates.std(0) / 30**0.5
    # The first two are enumerated: 9 configurations; the others' choices may differ by chance.
    torch.testing.assert_close(estimates[:, :3], exact.scores[:3].expand(30, 3))
    assert ((estimates.mean(0) - exact.scores).abs() <= 5 * stderr + 0.03).all()
    large = batch_bald(samples, 5, num_configurations=200)
    assert large.scores.tolist() == pytest.approx(exact.scores.tolist(), abs=0.1)


def test_batch_bald_does_not_ask_twice(samples):
    """Two copies of the best example: BALD takes both."""
    best = bald(samples, 1).indices
    twice = torch.cat([samples[:, best], samples[:, best], samples], 1)
    assert set(bald(twice, 2).indices.tolist()) <= {0, 1, 2 + int(best)}
    together = set(batch_bald(twice, 2).indices.tolist())
    assert len(together & {0, 1, 2 + int(best)}) == 1


def test_scores_are_those_of_prediction():
    model = nn.Sequential(zm.Linear(4, 8, posterior=zm.Additive), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(20, 4)
    expected = zm.predictive_uncertainty(model, x, 30, seed=1)
    samples = zm.sample_outputs(model, x, 30, seed=1).softmax(-1)
    for found, scores in (
        (bald(samples, 20), expected.mutual_information),
        (entropy(samples, 20), expected.predictive_entropy),
        (variation_ratios(samples, 20), 1 - zm.predict_proba(model, x, 30, seed=1).amax(1)),
    ):
        torch.testing.assert_close(found.scores, scores[found.indices], atol=1e-6, rtol=1e-4)
        assert found.scores.dtype == torch.float32
        assert (found.scores.diff() <= 0).all()


def test_arrays_come_back_as_arrays(samples):
    for acquire in (bald, batch_bald, entropy, variation_ratios, at_random):
        found = acquire(samples.numpy(), 100)
        assert isinstance(found.indices, np.ndarray)
        assert sorted(found.indices) == list(range(7))


def test_random_goes_on_unless_it_has_a_seed(samples):
    many = samples.repeat(1, 20, 1)
    assert at_random(many, 5, seed=1).indices.equal(at_random(many, 5, seed=1).indices)
    assert not at_random(many, 5).indices.equal(at_random(many, 5).indices)


def test_loop_labels_what_was_acquired(samples):
    asked, rounds = [], []

    def sample(rest):
        asked.append(rest.tolist())
        return samples[:, rest]

    for labelled in active_learning(7, sample, initial=[6], count=2, acquire=batch_bald):
        rounds.append(labelled.tolist())
    assert [len(each) for each in rounds] == [1, 3, 5, 7]
    first = batch_bald(samples[:, :6], 2).indices.tolist()
    assert rounds[1] == [6, *first]
    assert asked == [sorted(set(range(7)) - set(each)) for each in rounds[:-1]]


def test_loop_can_be_left_and_takes_any_function(samples):
    def sample(rest):
        return samples[:, rest]

    def last(samples, count):
        return Acquired(torch.arange(samples.shape[1])[-count:], torch.zeros(count))

    loop = active_learning(7, sample, initial=range(2), count=1, acquire=last)
    assert [next(loop).tolist() for _ in range(3)] == [[0, 1], [0, 1, 6], [0, 1, 6, 5]]
    some = active_learning(7, sample, initial=[0], count=2, acquire=at_random, candidates=2)
    assert [len(labelled.unique()) for labelled in some] == [1, 3, 5, 7]
    seeded = partial(at_random, seed=0)
    drawn = active_learning(7, sample, initial=[], count=3, acquire=seeded)
    assert next(drawn).tolist() == []
    assert len(next(drawn)) == 3


def test_what_cannot_be_acquired_is_refused(samples):
    with pytest.raises(ValueError, match=r"examples, classes\), got \(7, 3\); for one"):
        bald(samples[0], 2)
    with pytest.raises(ValueError, match="samples must sum to 1"):
        bald(samples * 2, 2)
    with pytest.raises(ValueError, match="samples must not be negative"):
        entropy(samples.log() + 1, 2)
    with pytest.raises(ValueError, match="samples must be numbers, got 105 NaN"):
        variation_ratios(samples * float("nan"), 2)
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        bald(samples, 0)
    with pytest.raises(TypeError, match=r"count must be an integer, got 1\.5"):
        batch_bald(samples, 1.5)
    for initial in ([7], [-1], [1, 1]):
        with pytest.raises(ValueError, match=r"different positions from 0 to 6, got \["):
            active_learning(7, bald, initial=initial, count=1)
    with pytest.raises(TypeError, match="sample must be a function, got 3"):
        active_learning(7, 3, initial=[0], count=1)
    with pytest.raises(ValueError, match="candidates must be at least count, 3, got 2"):
        active_learning(7, bald, initial=[0], count=3, candidates=2)
    loop = active_learning(7, lambda rest: samples, initial=[0], count=1)
    next(loop)
    with pytest.raises(ValueError, match="samples of the 6 examples that it was given"):
        next(loop)
