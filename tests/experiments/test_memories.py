"""What the rivals of yesterday's posterior keep, and that a run goes on where it was."""

import dataclasses

import pytest
import torch
from torch import nn

from zeromean.experiments.bayesian import continual, split_mnist
from zeromean.experiments.bayesian.layer_statistics import statistics
from zeromean.experiments.bayesian.memories import ElasticWeights, OnlineLaplace
from zeromean.experiments.runs import runner
from zeromean.experiments.runs.log import RunLog


def test_gradients_are_those_of_the_fisher_matrix():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3, bias=False))
    x = torch.randn(1, 4)
    p = model(x).softmax(-1).detach().flatten()
    ((_, (a, g)),) = next(iter(statistics(model, x.expand(1000, -1)))).items()
    many = torch.cat([layers["0"][1] for layers in statistics(model, x.expand(40_000, -1))])
    assert torch.equal(a[0], x[0])
    assert g.shape == (1000, 3)
    products = many[:, :, None] * many[:, None]
    expected = p.diag() - p[:, None] * p
    error = products.std(0) / len(many) ** 0.5
    assert ((products.mean(0) - expected).abs() < 5 * error + 1e-6).all()


def moved(model, memory, start):
    """The penalty here, less that at the start."""
    there = memory.penalty(model)
    here = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.load_state_dict(start)
    difference = there - memory.penalty(model)
    model.load_state_dict(here)
    return difference.detach()


def shake(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))


def test_elastic_weights_are_held_by_the_sum_of_all_tasks():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 3, bias=False))
    start = {name: value.clone() for name, value in model.state_dict().items()}
    memory, terms = ElasticWeights(0.7), []
    for _ in range(2):
        shake(model)
        inputs = torch.randn(30, 5)
        before = {key: value[0] for key, value in memory.state.items()}
        memory.keep(model, inputs)
        for key, (curvature, _) in memory.state.items():
            terms.append((key, curvature - before.get(key, 0), model.get_parameter(key).clone()))
    shake(model)

    def by_hand(state):
        return sum(0.35 * (f * (state[key] - centre).square()).sum() for key, f, centre in terms)

    expected = by_hand(dict(model.named_parameters())) - by_hand(start)
    torch.testing.assert_close(moved(model, memory, start), expected.detach())


def test_online_laplace_is_a_kronecker_product_around_the_latest_weights():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2, bias=False))
    memory = OnlineLaplace(1.5)
    memory.keep(model, torch.randn(50, 3))
    centre = model[0].weight.detach().clone()
    ((a, g),) = memory.state["0.weight"][0]
    shake(model)
    step = (model[0].weight - centre).flatten()
    expected = 0.5 * step @ (torch.eye(6) + 1.5 * torch.kron(g, a)) @ step
    torch.testing.assert_close(memory.penalty(model), expected)
    assert a.trace() == pytest.approx(3.0, rel=0.5)  # In the mean over examples,
    assert g.trace() > 1.0  # and this one in the sum.


def test_an_interrupted_run_ends_with_the_same_numbers(monkeypatch, tmp_path):
    config = dataclasses.replace(split_mnist.SMOKE, num_tasks=3)

    def run(folder):
        folder.mkdir(exist_ok=True)
        return split_mnist.run(config, RunLog(folder, progress=False))

    expected = run(tmp_path / "whole")
    learn = continual.Learner.learn
    learned = []

    def interrupted(self, number, task):
        if len(learned) == 5:
            raise KeyboardInterrupt
        learned.append(number)
        learn(self, number, task)

    monkeypatch.setattr(continual.Learner, "learn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "interrupted")
    monkeypatch.setattr(continual.Learner, "learn", learn)
    assert run(tmp_path / "interrupted") == expected


def test_more_pairs_than_there_are_digits_are_refused(tmp_path):
    config = dataclasses.replace(split_mnist.SMOKE, num_tasks=6)
    place = runner.Place(runs=tmp_path, progress=False)
    with pytest.raises(ValueError, match=r"num_tasks must lie between 1 and 5.*got 6"):
        runner.run_experiment("split_mnist", config, place=place)
