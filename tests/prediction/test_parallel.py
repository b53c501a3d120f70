"""Predictions over processes: the same numbers, however many processes draw them."""

import multiprocessing
import os
import signal
import sys
import types
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zeromean as zm
from zeromean.prediction import parallel, processes

X = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))


def test_sessions_that_nobody_can_import_are_forked(monkeypatch):
    script = types.ModuleType("__main__")
    script.__file__ = "script.py"
    monkeypatch.setitem(sys.modules, "__main__", script)
    assert processes.start_context().get_start_method() == "spawn"
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    forks = sys.platform == "linux" and not torch.cuda.is_initialized()
    assert processes.start_context().get_start_method() == ("fork" if forks else "spawn")


@pytest.fixture(autouse=True)
def _copies_of_this_process(monkeypatch):
    """Forks start at once; tests run with one thread, so that they are safe."""
    if sys.platform != "linux":
        pytest.skip("needs forks")
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(parallel, "start_context", lambda: context)


def network(seed=0, **options):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 8),
        nn.ReLU(),
        nn.Dropout(0.2),
        zm.Linear(8, 3, posterior=zm.Additive, **options),
    )


def regression(*args, **options):
    return zm.predict_moments(*args, likelihood=zm.GaussianLikelihood(3), **options)


PREDICTIONS = {
    "probabilities": zm.predict_proba,
    "with errors": partial(zm.predict_proba, return_stderr=True),
    "uncertainty": zm.predictive_uncertainty,
    "moments": regression,
    "samples": zm.sample_outputs,
}
SOURCES = {
    "network": network,
    "weights": lambda: network(sampler=zm.weight),
    "ensemble": lambda: [network(0), network(1)],
    "states": lambda: zm.States(network(), [network(s).state_dict() for s in (1, 2)]),
}


def tensors_in(value):
    return [value] if isinstance(value, torch.Tensor) else [t for v in value for t in tensors_in(v)]


def assert_equal(a, b):
    for one, other in zip(tensors_in(a), tensors_in(b), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("name", PREDICTIONS)
def test_two_processes_give_the_numbers_of_one(name):
    predict = PREDICTIONS[name]
    one, two = (predict(network(), X, 12, seed=3, devices=devices) for devices in (1, 2))
    assert_equal(one, two)


@pytest.mark.parametrize("kind", SOURCES)
def test_any_source_and_any_inputs(kind):
    loader = DataLoader(TensorDataset(X), batch_size=8)
    for inputs, options in ((X, {}), (X, {"batch_size": 7}), (loader, {})):
        one, two = (
            zm.predict_proba(SOURCES[kind](), inputs, 7, seed=3, devices=devices, **options)
            for devices in (1, 2)
        )
        assert_equal(one, two)


def test_samples_are_draws_like_any_other():
    """In standard errors next to a prediction in one piece; no two parts are alike."""
    model = network()
    split, errors = zm.predict_proba(model, X, 2000, seed=0, devices=1, return_stderr=True)
    whole, others = zm.predict_proba(model, X, 2000, seed=1, return_stderr=True)
    z = (split - whole) / (errors.square() + others.square()).sqrt()
    assert z.abs().max() < 5
    samples = zm.sample_outputs(model, X, 15, seed=0, devices=1)
    assert len(samples) == 15
    assert len(samples.flatten(1).unique(dim=0)) == 15


def test_without_a_seed_every_prediction_is_another_and_the_model_stays_as_it_is():
    model = network().train()
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    one, two = (zm.predict_proba(model, X, 5, devices=2) for _ in range(2))
    assert not torch.equal(one, two)
    assert model.training
    assert before == {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}


class Broken(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.layer, self.here = how, zm.Linear(4, 3), os.getpid()

    def forward(self, x):
        if self.how == "killed" and os.getpid() != self.here:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("a bad example")


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (lambda: Broken("killed"), {}, ChildProcessError, "ended from outside"),
        (lambda: Broken("raises"), {}, ValueError, "a bad example"),
        (network, {"devices": 0}, ValueError, "devices must be at least 1"),
        (lambda: iter([network()]), {}, TypeError, r"a list, or zm\.States; got a generator"),
    ],
)
def test_what_goes_wrong_is_said_in_a_sentence(model, options, error, message):
    with pytest.raises(error, match=message):
        zm.predict_proba(model(), X, 12, seed=0, **{"devices": 2, **options})


def test_what_cannot_be_sent_is_said(monkeypatch):
    monkeypatch.setattr(parallel, "start_context", lambda: multiprocessing.get_context("spawn"))
    with pytest.raises(TypeError, match=r"cannot be sent to other processes.*leave devices= out"):
        zm.predict_proba(network(), X, 12, devices=2, select=lambda output: output)
    with pytest.raises(ValueError, match="gradients do not reach"):
        zm.sample_outputs(network(), X, 12, devices=2, differentiable=True)
