"""The call that makes a trained network uncertain, and that never returns anything worse."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import zeromean as zm
from zeromean.data import ImageSet
from zeromean.ensembles import Ensemble
from zeromean.training import TrainingConfig, add_uncertainty, fit
from zeromean.training.post_hoc import add
from zeromean.training.post_hoc.contest import Contest
from zeromean.training.post_hoc.examples import Examples
from zeromean.training.post_hoc.tasks import Classes, fitted_scale
from zeromean.training.randomness import derived_seed

pytest.importorskip("lightning.pytorch")
pytest.importorskip("tensorboard")

QUICK = TrainingConfig(epochs=1, batch_size=50, lr=1e-3, log_alpha_lr=1e-2)
OPTIONS = {"config": QUICK, "num_samples": 4, "accelerator": "cpu", "progress": False}


def points(num=300, seed=0):
    """Two classes that overlap: nobody can be sure between them."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(num) % 2
    return torch.randn(num, 2, generator=generator) + labels[:, None].float(), labels


def trained(data, *, steps=150, num_outputs=2, loss=F.cross_entropy):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(data[0].shape[1], 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh())
    model.append(nn.Linear(20, num_outputs))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(data[0]), data[1]).backward()
        optimizer.step()
    return model


@pytest.fixture(scope="module")
def classifier():
    return trained(points(100), steps=300)


def test_overconfident_classifier_gets_better_and_is_left_alone(classifier):
    state = copy.deepcopy(classifier.state_dict())
    foreign = torch.randn(100, 2) - 8
    random_state = torch.get_rng_state()
    result = add_uncertainty(
        classifier, points(100), points(600, seed=1), foreign=foreign, **OPTIONS
    )
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, state[name]) for name, value in classifier.state_dict().items())
    assert result.added
    assert result.after["NLL"] < result.before["NLL"]
    assert (result.chosen_on, result.reported_on) == (300, 300)
    assert {"temperature", result.chosen} <= {each.name for each in result.candidates}
    fresh = points(2000, seed=2)
    before = F.cross_entropy(classifier(fresh[0]), fresh[1])
    after = zm.predict_proba(result.model, fresh[0], result.num_samples, seed=0)
    assert F.nll_loss(after.log(), fresh[1]) < before
    text = str(result)
    for part in ("accuracy, %", "calibrated NLL", "AUROC", "passes for a prediction", "ECE"):
        assert part in text
    assert all(each.name in result.tried for each in result.candidates)


def test_all_passes_are_those_of_plain_training(classifier, tmp_path):
    """One run of `fit`, whatever else is tried: passes that are divided are worth less."""
    config = replace(QUICK, epochs=3)
    options = {**OPTIONS, "config": config, "folder": tmp_path / "call"}
    result = add_uncertainty(classifier, points(100), points(200, seed=1), seed=5, **options)
    plain = copy.deepcopy(classifier)
    same = replace(config, beta=0.0, seed=derived_seed(5, config.seed))
    fit(plain, points(100), same, folder=tmp_path / "fit", accelerator="cpu", progress=False)
    chosen, reported = Examples(*points(200, seed=1)).halves(5)
    trained = next(each for each in result.candidates if each.name == "trained on")
    assert (trained.passes, trained.cost) == (3, 1.0)
    samples = plain(chosen.inputs).detach().unsqueeze(0)
    scale = fitted_scale(Classes(), samples, chosen.targets)
    assert trained.nll == pytest.approx(
        Classes().nll(samples, chosen.targets, scale).mean().item(), abs=1e-6
    )
    right = (plain(reported.inputs).argmax(1) == reported.targets).double().mean()
    assert result.trained_on["accuracy, %"] == pytest.approx(100 * right.item())
    assert {each.passes for each in result.candidates} <= {0, 3}


def test_network_before_and_after_training_on_predict_together(classifier):
    """Both members answer, with one temperature, and cost two passes; not where one is allowed."""
    data = points(100), points(600, seed=1)
    both = next(
        each for each in add_uncertainty(classifier, *data, **OPTIONS).candidates if each.cost == 2
    )
    assert both.name == "two networks, before and after training on"
    cheap = add_uncertainty(classifier, *data, max_cost=1.9, **OPTIONS)
    assert both.name not in {each.name for each in cheap.candidates}

    examples = Examples(*points(400, seed=1))
    one, other = examples.halves(0)
    contest = Contest(Classes(), one, classifier, seed=0)
    turned = copy.deepcopy(classifier)
    with torch.no_grad():
        turned[-1].weight.mul_(0.1)
    contest.best = contest.enter("two", Ensemble([classifier, turned]), None, cost=2.0, passes=1)
    result = add._result(classifier, contest, Classes(), one, other, None)
    assert result.chosen == "two"
    assert isinstance(result.model, Ensemble)
    assert result.after["passes for a prediction"] == 2.0
    temperatures = {float(member.temperature) for member in result.model}
    assert len(temperatures) == 1
    mean = torch.stack([member(other.inputs).softmax(-1) for member in result.model]).mean(0)
    assert torch.allclose(zm.predict_proba(result.model, other.inputs, result.num_samples), mean)


def test_weights_of_the_kl_term_take_as_many_passes_each(classifier):
    data = points(100), points(200, seed=1)
    result = add_uncertainty(classifier, *data, kl_weights=(0.1, 1.0), **OPTIONS)
    tried = [each for each in result.candidates if "KL weight" in each.name]
    assert [each.name.split()[-1] for each in tried] == ["0.1", "1"]
    assert [each.passes for each in tried] == [1, 1]
    assert tried[0].nll != tried[1].nll


def test_same_seed_gives_the_same_model_and_another_one_not(classifier):
    data = points(100), points(200, seed=1)
    one, same = (add_uncertainty(classifier, *data, seed=3, **OPTIONS) for _ in range(2))
    assert [each.nll for each in one.candidates] == [each.nll for each in same.candidates]
    state, again = one.model.state_dict(), same.model.state_dict()
    assert all(torch.equal(state[name], again[name]) for name in state)
    other = add_uncertainty(classifier, *data, seed=4, **OPTIONS)
    assert [each.nll for each in one.candidates] != [each.nll for each in other.candidates]


def test_what_is_worse_is_not_returned(classifier):
    """The examples that choose are fooled by labels that are wrong; the others are not."""
    inputs, labels = points(400, seed=1)
    one, other = Examples(inputs, labels).halves(0)
    wrong = Examples(one.inputs, 1 - one.targets)
    contest = Contest(Classes(), wrong, classifier, seed=0)
    broken = copy.deepcopy(classifier)
    nn.init.constant_(broken[-1].weight, 0.0)
    contest.enter("broken", broken, None, cost=1.0, passes=0.0)
    assert contest.best.row.name == "broken"
    contest.first = contest.trained = replace(contest.first, scale=0.1)
    result = add._result(classifier, contest, Classes(), wrong, other, None)
    assert result.model is classifier
    assert not result.added
    assert result.after == result.before
    assert "not returned: broken; it makes more mistakes than before" in result.rejected
    assert "the model as it was" in str(result)


def test_interrupted_call_goes_on_where_it_was(classifier, tmp_path):
    data = points(100), points(200, seed=1)
    options = {**OPTIONS, "config": replace(QUICK, epochs=4)}
    whole = add_uncertainty(classifier, *data, **options)
    count = 0

    def interrupting(inputs, *, generator):
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return inputs

    with pytest.raises(KeyboardInterrupt):
        add_uncertainty(classifier, *data, folder=tmp_path, augment=interrupting, **options)
    again = add_uncertainty(classifier, *data, folder=tmp_path, augment=interrupting, **options)
    assert [each.nll for each in again.candidates] == [each.nll for each in whole.candidates]


class Attentive(nn.Module):
    """Takes a mapping, as Hugging Face's models do, and has dropout and attention."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(8, 2)

    def forward(self, tokens, shift=None):
        return {"logits": self.head(self.encoder(tokens).mean(1))}


def test_transformer_with_a_mapping_of_inputs():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(120) % 2
    tokens = torch.randn(120, 3, 8, generator=generator) + 0.3 * labels[:, None, None]
    rows = [{"tokens": x, "labels": y} for x, y in zip(tokens, labels, strict=True)]
    train, validation = DataLoader(rows[:60], batch_size=20), DataLoader(rows[60:], batch_size=20)
    model = Attentive()
    result = add_uncertainty(model, train, validation, **OPTIONS)
    names = " ".join(each.name for each in result.candidates)
    assert "layer head: Laplace" in names
    assert "trained on" in names
    inputs = {"tokens": tokens}
    one, same = (zm.predict_proba(result.model, inputs, 4, seed=0) for _ in range(2))
    assert torch.equal(one, same)
    assert model.encoder.layers[0].dropout.p == 0.2
    if result.added and result.num_samples == 1:  # Dropout is off.
        assert torch.equal(one, zm.predict_proba(result.model, inputs, 4, seed=1))


def test_convolutions_with_batchnorm_and_augmentation():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(90) % 3
    images = torch.rand(90, 1, 6, 6, generator=generator) + labels.view(-1, 1, 1, 1) / 2
    train = ImageSet(images[:60], labels[:60], 3)
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3)),
        *(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)),
    )
    result = add_uncertainty(
        model,
        train,
        (images[60:], labels[60:]),
        augment=lambda images, *, generator: images.flip(-1),
        max_cost=30.0,
        **OPTIONS,
    )
    assert any(each.name.startswith("layers 0 to 8") for each in result.candidates)


@pytest.mark.parametrize("likelihood", [None, zm.GaussianLikelihood()])
def test_regression_gets_variances_and_keeps_its_means(likelihood):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(700, 1, generator=generator) * 4 - 2
    noise = torch.where(x > 0, 0.5, 0.05)
    y = x.sin() + noise * torch.randn(700, 1, generator=generator)
    data = (x[:300], y[:300]), (x[300:], y[300:])
    model = trained(data[0], num_outputs=1, loss=F.mse_loss)
    result = add_uncertainty(model, *data, likelihood=likelihood, **OPTIONS)
    assert result.after["NLL"] < result.before["NLL"] - 0.3
    assert result.after["RMSE"] < 1.02 * result.before["RMSE"]
    assert isinstance(result.likelihood, zm.HeteroscedasticGaussianLikelihood)
    moments = zm.predict_moments(
        result.model, torch.tensor([[-1.0], [1.0]]), 50, likelihood=result.likelihood, seed=0
    )
    quiet, loud = moments.variance.sqrt().flatten().tolist()
    assert quiet < 0.2 < loud < 0.8


class Scaled(nn.Module):
    """Does more to the last layer's outputs than to return them."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).exp()


def test_regression_without_a_last_layer_has_one_variance_for_all():
    x = torch.linspace(-1, 1, 200)[:, None]
    y = x.exp() + 0.1 * torch.randn(200, 1)
    model = Scaled(nn.Sequential(nn.Linear(1, 1)))
    with torch.no_grad():
        model.model[0].weight.fill_(1.0)
        model.model[0].bias.zero_()
    data = (x[::2], y[::2]), (x[1::2], y[1::2])
    result = add_uncertainty(model, *data, **OPTIONS)
    assert "noise by input" not in {each.name for each in result.candidates}
    assert result.before["NLL"] < 0
    assert model(x).shape == (200, 1)


X, Y = points(60)
BAD = {
    "no model": ((nn.Linear, (X, Y), (X, Y)), {}, TypeError, "model must be a torch module"),
    "random": ((zm.Linear(2, 2), (X, Y), points(60, 1)), {}, ValueError, "random already"),
    "the same": ((None, (X, Y), (X, Y)), {}, ValueError, "hold 60 of its 60 examples"),
    "few": ((None, (X, Y), points(10, 1)), {}, ValueError, "at least 20 examples.*got 10"),
    "samples": ((None, (X, Y), points(60, 1)), {"num_samples": 1}, ValueError, "num_samples"),
    "cost": ((None, (X, Y), points(60, 1)), {"max_cost": 0.5}, ValueError, "max_cost"),
    "weights": ((None, (X, Y), points(60, 1)), {"kl_weights": 1.0}, TypeError, "kl_weights"),
    "weight": ((None, (X, Y), points(60, 1)), {"kl_weights": (-1.0,)}, ValueError, "at least 0"),
    "config": ((None, (X, Y), points(60, 1)), {"config": 5}, TypeError, "TrainingConfig"),
    "monitor": (
        (None, (X, Y), points(60, 1)),
        {"config": replace(QUICK, monitor="validation_nll")},
        ValueError,
        "must not monitor 'validation_nll'",
    ),
    "one class": (
        (None, (X, Y), (X + 1, torch.zeros_like(Y))),
        {},
        ValueError,
        "two classes, got 60 of class 0",
    ),
    "labels": ((None, (X, Y), (X + 1, Y + 1)), {}, ValueError, "classes from 0 to 1"),
    "likelihood": (
        (None, (X, Y), points(60, 1)),
        {"likelihood": zm.GaussianLikelihood()},
        TypeError,
        "likelihood= is for a regression",
    ),
    "function": (
        (None, (X, Y), points(60, 1)),
        {"likelihood": F.mse_loss},
        TypeError,
        "zm.GaussianLikelihood",
    ),
    "shape": ((None, (X, Y.float()), (X + 1, Y.float())), {}, ValueError, "unsqueeze"),
    "nan": (
        (None, (X, X), (X + 1, torch.full_like(X, float("nan")))),
        {},
        ValueError,
        "must be finite, got 120 NaN",
    ),
    "generator": ((None, (X, Y), (p for p in ())), {}, TypeError, "validation must be a pair"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name, classifier):
    (model, train, validation), options, error, match = BAD[name]
    with pytest.raises(error, match=match):
        add_uncertainty(model or classifier, train, validation, **{**OPTIONS, **options})


def test_training_data_are_known_under_other_names(classifier):
    rows = TensorDataset(X, Y)
    pairs = [
        (rows, rows),
        (DataLoader(rows), DataLoader(rows, batch_size=5)),
        (Subset(rows, range(40)), Subset(rows, range(20, 60))),
        (TensorDataset(X, Y), TensorDataset(X, Y.clone())),
        (ImageSet(X, Y, 2), (X.clone()[10:], Y[10:])),
    ]
    for train, validation in pairs:
        with pytest.raises(ValueError, match="was not trained on"):
            add_uncertainty(classifier, train, validation, **OPTIONS)
    halves = Subset(rows, range(40)), Subset(rows, range(40, 60))
    add_uncertainty(classifier, *halves, **OPTIONS)
