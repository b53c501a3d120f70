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


# Sizes of chunks: all at once, some at a time, and as many as memory says.
CHUNKS = {"default": {}, "at once": {"chunk_size": 12}, "some": {"chunk_size": 5}}


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("name", PREDICTIONS)
def test_processes_give_the_numbers_of_a_plain_call(name, chunks):
    predict = partial(PREDICTIONS[name], network(), X, 12, seed=3, **CHUNKS[chunks])
    plain = predict()
    for devices in (1, 2, 3):
        assert_equal(predict(devices=devices), plain)


@pytest.mark.parametrize("kind", SOURCES)
def test_any_source_and_any_inputs(kind):
    loader = DataLoader(TensorDataset(X), batch_size=8)
    for inputs, options in (
        (X, {"chunk_size": 2}),
        (X, {"batch_size": 7}),
        (loader, {"sampler": zm.weight}),
    ):
        predict = partial(zm.predict_proba, SOURCES[kind](), inputs, 7, seed=3, **options)
        assert_equal(predict(devices=2), predict())


class Loops(nn.Sequential):
    """What no vmap can run."""

    def forward(self, x):
        return super().forward(x) * float(x.isfinite().all().item())


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}])
def test_models_that_vmap_cannot_run(options):
    model = Loops(nn.Dropout(0.2), zm.Linear(4, 3, posterior=zm.Additive))
    predict = partial(zm.sample_outputs, model, X, 7, seed=3, **options)
    assert_equal(predict(devices=2), predict())


def test_steps_are_shared_evenly_and_their_results_come_in_order():
    with parallel.shared_turns(go_through, range(7), 3) as turn:
        found = go_through(range(7), turn)
    assert [value for value, _ in found] == [0, 1, 4, 9, 16, 25, 36]
    processes_of = [process for _, process in found]
    assert processes_of[0] == os.getpid()
    assert processes_of[:3] == processes_of[3:6]
    assert len(set(processes_of)) == 3


def go_through(numbers, turn):
    return [turn(lambda n=n: (n * n, os.getpid())) for n in numbers]


@pytest.mark.parametrize("chunk_size", [1, 5])
def test_chunks_are_independent_draws(chunk_size):
    """In standard errors next to a prediction in one piece; no two samples are alike."""
    model = network()
    split, errors = zm.predict_proba(
        model, X, 2000, seed=0, chunk_size=chunk_size, return_stderr=True
    )
    whole, others = zm.predict_proba(model, X, 2000, seed=1, chunk_size=2000, return_stderr=True)
    z = (split - whole) / (errors.square() + others.square()).sqrt()
    assert z.abs().max() < 5
    samples = zm.sample_outputs(model, X, 15, seed=0, chunk_size=chunk_size)
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
        if os.getpid() == self.here and self.how != "raises":
            return self.layer(x)
        if self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("a bad example")


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (lambda: Broken("killed"), {"chunk_size": 4}, ChildProcessError, "ended from outside"),
        (lambda: Broken("there"), {"chunk_size": 4}, ValueError, "a bad example"),
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
