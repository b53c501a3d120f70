"""`fit` on tensors, data sets, loaders and data modules, for classes and for regressions."""

import math
import zlib

import pytest
import torch
from test_training import At, assert_same_state, interrupt
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import zeromean as zm
from zeromean.data import ImageSet
from zeromean.training import TrainingConfig, fit
from zeromean.training.data_sources import data_source, describe_data
from zeromean.training.loader_batches import LoaderBatches

pl = pytest.importorskip("lightning.pytorch")
pytest.importorskip("tensorboard")

X = torch.randn(62, 4, generator=torch.Generator().manual_seed(0))
CLASSES = (X[:, 0] > 0).long() + (X[:, 1] > 1).long()
VALUES = X[:, :1] * 2 - X[:, 1:2]
CONFIG = TrainingConfig(epochs=3, batch_size=20, lr=0.02, kl_warmup_epochs=1)


def network(outputs=3, dropout=0.1):
    torch.manual_seed(0)
    hidden = zm.Linear(4, 8, posterior=zm.Additive)
    return nn.Sequential(hidden, nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, outputs))


class Augmented(Dataset):
    """Examples that draw from torch's generator when they are read."""

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index] + 0.01 * torch.randn(4), CLASSES[index]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, CLASSES, strict=True))


class ByName(nn.Module):
    """A model with keyword arguments and several outputs, as transformers are."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = zm.Linear(4, 3, posterior=zm.Additive)

    def forward(self, values, mask):
        return {"logits": self.head(values * mask), "hidden": values}


class Named(Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return {"values": X[index], "mask": torch.ones(4), "labels": CLASSES[index]}


class Module(pl.LightningDataModule):
    prepared = 0

    def prepare_data(self):
        self.prepared += 1

    def setup(self, stage):
        self.train = TensorDataset(X[:40], CLASSES[:40])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=10, shuffle=True)

    def val_dataloader(self):
        return DataLoader(TensorDataset(X[40:], CLASSES[40:]), batch_size=10)


SHUFFLED = DataLoader(TensorDataset(X, CLASSES), batch_size=20, shuffle=True)
SOURCES = {
    "tensors": lambda: (X, CLASSES),
    "dataset": Augmented,
    "tensor dataset": lambda: TensorDataset(X, CLASSES),
    "loader": lambda: SHUFFLED,
    "loader with a generator": lambda: DataLoader(
        Augmented(), batch_size=20, shuffle=True, generator=torch.Generator()
    ),
    "loader with workers": lambda: DataLoader(
        Augmented(), batch_size=20, shuffle=True, num_workers=1
    ),
    "weighted sampler": lambda: DataLoader(
        Augmented(),
        batch_size=20,
        sampler=torch.utils.data.WeightedRandomSampler(torch.arange(62.0), 62),
    ),
    "data module": Module,
    "list of batches": lambda: [(X[:30], CLASSES[:30]), (X[30:], CLASSES[30:])],
}
NO_LENGTH = {"list of batches": {"num_data": 62}}


@pytest.mark.parametrize("kind", SOURCES)
def test_interrupted_run_on_any_data_ends_bit_for_bit_the_same(kind, tmp_path):
    options = NO_LENGTH.get(kind, {})
    config = TrainingConfig(epochs=3, batch_size=20, lr=0.02, accumulate=2)
    whole = fit(network(), SOURCES[kind](), config, folder=tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        fit(
            network(),
            SOURCES[kind](),
            config,
            folder=tmp_path / "cut",
            callbacks=[At(2, 2, interrupt)],
            **options,
        )
    cut = fit(network(), SOURCES[kind](), config, folder=tmp_path / "cut", **options)
    assert cut.resumed_from == 1
    assert_same_state(cut.model, whole.model)
    assert cut.history == whole.history
    assert whole.history[-1]["nll"] < whole.history[0]["nll"]
    assert (whole.inexact == ()) == (kind != "list of batches")


def test_a_data_module_brings_its_validation(tmp_path):
    module = Module()
    result = fit(network(), module, CONFIG, folder=tmp_path)
    assert module.prepared == 1
    assert {"validation_accuracy", "validation_nll"} <= result.history[-1].keys()


def test_mappings_are_arguments_of_the_model(tmp_path):
    config = TrainingConfig(epochs=20, batch_size=20, lr=0.05)
    result = fit(ByName(), Named(), config, folder=tmp_path, test=Named())
    assert result.history[-1]["test_accuracy"] > 70
    assert result.history[-1]["test_nll"] < result.history[0]["test_nll"]


def test_each_epoch_of_a_loader_has_an_order_of_its_own():
    batches = LoaderBatches(SHUFFLED, 4, seed=0)
    orders = []
    for epoch in (0, 1, 0):
        batches.set_epoch(epoch)
        before = torch.get_rng_state()
        orders.append(torch.cat([y for _, y in batches]))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(orders[0], orders[2])
    assert not torch.equal(orders[0], orders[1])


@pytest.mark.parametrize("kind", ["tensors", "loader", "data set", "stream", "other loader"])
def test_shares_of_two_processes_are_the_batches_of_one(kind):
    class Other(DataLoader):
        """Nobody knows how to build it again."""

    data = {
        "tensors": lambda: (X, CLASSES),
        "loader": lambda: SHUFFLED,
        "data set": lambda: TensorDataset(torch.arange(62.0), X, CLASSES),
        "stream": lambda: DataLoader(Stream(), batch_size=20),
        "other loader": lambda: Other(TensorDataset(X, CLASSES), batch_size=20, shuffle=True),
    }[kind]
    options = {"num_data": 62, "steps_per_epoch": 4} if kind == "stream" else {}

    def rows(**place):
        config = TrainingConfig(epochs=1, batch_size=16)  # Of tensors; loaders have their own.
        source = data_source(data(), config, **options, **place)
        assert source.num_data == 62
        source.batches.set_epoch(1)
        return [batch[0] for batch in source.batches]

    whole = rows()
    parts = zip(rows(rank=0, num_ranks=2), rows(rank=1, num_ranks=2), strict=True)
    for batch, (first, second) in zip(whole, parts, strict=True):
        assert len(first) == len(second)
        torch.testing.assert_close(torch.stack([first, second], 1).flatten(0, 1), batch)


def test_data_are_described_as_runs_of_old_have_them():
    content = X.numpy().tobytes() + CLASSES.numpy().tobytes()
    described = describe_data(ImageSet(X, CLASSES, num_classes=3))
    assert described == f"62 images, checksum {zlib.crc32(content):08x}"
    assert describe_data((X, CLASSES)) == described.replace("images", "examples")
    assert "batches of 20" in describe_data(SHUFFLED)
    describe_data((X.bfloat16(), CLASSES))


# --- likelihoods


def test_regression_learns_its_noise_and_says_rmse(tmp_path):
    likelihood = zm.GaussianLikelihood(1)
    config = TrainingConfig(epochs=60, batch_size=62, lr=0.05, beta=0.1, monitor="validation_rmse")
    sets = {"validation": (X, VALUES), "test": (X, VALUES)}
    result = fit(
        network(1, 0.0), (X, VALUES), config, folder=tmp_path, likelihood=likelihood, **sets
    )
    row = result.history[-1]
    assert "test_accuracy" not in row
    best = result.history[result.best_epoch - 1]
    assert best["validation_rmse"] == min(r["validation_rmse"] for r in result.history)
    assert best["validation_rmse"] < 0.7 < result.history[0]["validation_rmse"]
    assert likelihood.log_noise_variance.item() != 0
    # A finished run gives the likelihood back as well.
    again = zm.GaussianLikelihood(1)
    fit(network(1, 0.0), (X, VALUES), config, folder=tmp_path, likelihood=again, **sets)
    assert torch.equal(again.log_noise_variance, likelihood.log_noise_variance)


def test_rmse_and_nll_are_those_of_the_predictions(tmp_path):
    likelihood = zm.GaussianLikelihood(1, noise_variance=0.3, learn=False)
    model = nn.Linear(4, 1)
    config = TrainingConfig(epochs=1, batch_size=62)
    row = fit(
        model, (X, VALUES), config, folder=tmp_path, likelihood=likelihood, test=(X, VALUES)
    ).history[0]
    with torch.no_grad():
        outputs = model(X)
    assert row["test_rmse"] == pytest.approx((outputs - VALUES).square().mean().sqrt().item())
    normal = torch.distributions.Normal(outputs, 0.3**0.5)
    assert row["test_nll"] == pytest.approx(-normal.log_prob(VALUES).mean().item(), rel=1e-5)


def test_noise_that_depends_on_the_input(tmp_path):
    likelihood = zm.HeteroscedasticGaussianLikelihood()
    row = fit(
        network(2), (X, VALUES), CONFIG, folder=tmp_path, likelihood=likelihood, test=(X, VALUES)
    ).history[-1]
    assert math.isfinite(row["test_rmse"])


def counts(outputs, targets):
    return nn.functional.poisson_nll_loss(outputs, targets)


@pytest.mark.parametrize("function", [counts, nn.PoissonNLLLoss()])
def test_a_function_is_a_likelihood(function, tmp_path):
    y = torch.poisson(X[:, :1].exp())
    result = fit(network(1), (X, y), CONFIG, folder=tmp_path, likelihood=function, test=(X, y))
    assert result.history[-1]["nll"] < result.history[0]["nll"]
    assert "test_nll" in result.history[-1]


def test_likelihood_is_part_of_the_run(tmp_path):
    config = TrainingConfig(epochs=1, batch_size=20)
    likelihood = zm.GaussianLikelihood(1)
    fit(network(1), (X, VALUES), config, folder=tmp_path, likelihood=likelihood)
    with pytest.raises(ValueError, match="another configuration: likelihood is"):
        fit(network(1), (X, VALUES), config, folder=tmp_path, likelihood=counts)


# --- what cannot be


def per_example(outputs, targets):
    return (outputs - targets).square()


@pytest.mark.parametrize(
    ("data", "options", "error", "message"),
    [
        (DataLoader(Stream(), batch_size=20), {}, ValueError, r"no length.*steps_per_epoch= and"),
        (DataLoader(Stream(), batch_size=20), {"num_data": 62}, ValueError, "say steps_per_epoch="),
        ([(X, CLASSES)], {}, ValueError, "have no length; say num_data="),
        (
            DataLoader(Stream(), batch_size=20),
            {"num_data": 62, "steps_per_epoch": 9},
            ValueError,
            "ended after 4 of the 9 batches",
        ),
        ((X, CLASSES), {"steps_per_epoch": 2}, ValueError, "loaders without a length"),
        ((X, VALUES), {}, TypeError, r"targets must be classes.*zm\.GaussianLikelihood"),
        ((X, CLASSES + 1), {}, ValueError, "classes from 0 to 2.*got 1 to 3"),
        ((X, CLASSES[:, None]), {}, ValueError, r"classes of shape \(20,\), got \(20, 1\)"),
        ((X, CLASSES[:5]), {}, ValueError, "62 examples and 5 targets"),
        ((X, CLASSES.tolist()), {}, TypeError, r"two tensors.*torch\.as_tensor"),
        ((X[:0], CLASSES[:0]), {}, ValueError, "training set is empty"),
        (((X, CLASSES) for _ in range(3)), {}, TypeError, "a generator gives one epoch only"),
        (X, {}, TypeError, "train must be a pair of tensors"),
        ([(X, CLASSES, X)], {"num_data": 62}, TypeError, "A batch must be.*got 3 things"),
        ([{"x": X}], {"num_data": 62}, TypeError, "got a mapping of x"),
        ([(X, 3)], {"num_data": 62}, TypeError, "targets must be a tensor with a row"),
        (Augmented(), {"augment": torch.flip}, ValueError, "augment is for tensors"),
        ((X, CLASSES), {"validation": X}, TypeError, "validation must be a pair of tensors"),
        ((X, VALUES), {"likelihood": 3}, TypeError, "likelihood must have a method nll"),
        ((X, VALUES), {"likelihood": per_example}, ValueError, r"one number.*nll\.mean\(\)"),
    ],
)
def test_data_that_cannot_be_trained_on(data, options, error, message, tmp_path):
    with pytest.raises(error, match=message):
        fit(network(), data, CONFIG, folder=tmp_path, **options)
    assert not (tmp_path / "checkpoint.ckpt").exists()


def test_stream_is_trained_on_and_said_to_be_inexact(tmp_path):
    loader = DataLoader(Stream(), batch_size=20)
    result = fit(network(), loader, CONFIG, folder=tmp_path, num_data=62, steps_per_epoch=3)
    assert len(result.inexact) == 1
    assert "iterable data set" in result.inexact[0]
    with pytest.raises(ValueError, match="another configuration: data is"):
        fit(network(), loader, CONFIG, folder=tmp_path, num_data=62, steps_per_epoch=2)
