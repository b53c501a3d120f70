"""`fit` in several processes: the same training, shared; and what happens when one of them dies."""

import multiprocessing
import os
import signal
import socket
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_any_data import CLASSES, VALUES, Augmented, X, network
from torch import nn

import zeromean as zm
from zeromean.training import TrainingConfig, children, fit
from zeromean.training.distributed import ALONE, is_about_others

pl = pytest.importorskip("lightning.pytorch")

pytestmark = pytest.mark.usefixtures("copies_of_this_process")

CONFIG = TrainingConfig(epochs=2, batch_size=16, lr=0.02)
# All that has no noise is the same in one process and in two, but for the order of sums.
PLAIN = dict(rtol=1e-4, atol=1e-6)


@pytest.fixture
def copies_of_this_process(monkeypatch):
    """They start at once, where new interpreters would import Lightning again, each for seconds.

    The tests run with one thread, so that forks are safe.
    """
    if sys.platform != "linux":
        pytest.skip("needs forks")
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(children, "start_context", lambda: context)


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def states_agree(a, b):
    b = b.state_dict()
    for name, tensor in a.state_dict().items():
        torch.testing.assert_close(tensor, b[name], **PLAIN, msg=name)


class DiesAt(nn.Module):
    """Ends the process that is not the first in its n-th forward pass of training."""

    def __init__(self, inner, step, how):
        super().__init__()
        self.inner, self.step, self.how, self.passes = inner, step, how, 0
        self.first = os.getpid()

    def forward(self, x):
        self.passes += self.training
        if os.getpid() != self.first and self.passes == self.step:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("a bad example")
        return self.inner(x)

    def __repr__(self):
        return f"DiesAt({self.inner})"


@pytest.mark.parametrize("kind", ["tensors", "regression", "accumulate", "loader"])
def test_two_processes_train_as_one_does(kind, tmp_path):
    config = TrainingConfig(
        epochs=2, batch_size=16, lr=0.02, average_epochs=0.5, accumulate=1 + (kind == "accumulate")
    )
    sets = {"test": (X, CLASSES)}
    options, data, model = {}, (X, CLASSES), plain
    if kind == "regression":
        data, sets = (X, VALUES), {"test": (X, VALUES)}
        model = lambda: nn.Linear(4, 1, bias=torch.manual_seed(0) is not None)  # noqa: E731
    elif kind == "loader":
        dataset = torch.utils.data.TensorDataset(X[:60], CLASSES[:60])
        data = torch.utils.data.DataLoader(dataset, batch_size=10, shuffle=True)
    results = []
    for devices in (1, 2):
        if kind == "regression":
            options = {"likelihood": zm.GaussianLikelihood(1)}
        folder = tmp_path / str(devices)
        results.append(
            fit(model(), data, config, folder=folder, devices=devices, **sets, **options)
        )
    one, two = results
    states_agree(one.model, two.model)
    assert one.inexact == ()
    assert "several processes" in two.inexact[0]
    for a, b in zip(one.history, two.history, strict=True):
        assert a.keys() == b.keys()
        for name in ("loss", "nll", "test_nll"):
            assert b[name] == pytest.approx(a[name], rel=1e-4)


def test_batchnorm_of_all_processes_ends_as_that_of_the_first(tmp_path):
    """Each has seen its own half of the batch, and looks at one batch of the two of the test."""
    torch.manual_seed(0)
    test = torch.utils.data.DataLoader(list(zip(X, CLASSES, strict=True)), batch_size=len(X) // 2)
    model = nn.Sequential(nn.BatchNorm1d(4, momentum=0.5), nn.Linear(4, 3))
    config = TrainingConfig(epochs=1, batch_size=len(X), lr=1e-9, average_epochs=0.01)
    result = fit(model, (X, CLASSES), config, folder=tmp_path, devices=2, test=test)
    mean = result.model[0].running_mean
    assert not torch.allclose(mean, X.mean(0) / 2, rtol=1e-3)
    with torch.no_grad():
        nll = F.cross_entropy(result.model.eval()(X), CLASSES).item()
    assert result.history[-1]["test_nll"] == pytest.approx(nll, rel=1e-5)


class Gradients(pl.Callback):
    """What every step of the optimizer is given for one parameter."""

    def __init__(self, parameter):
        self.parameter, self.seen = parameter, []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.seen.append(self.parameter.grad.flatten().clone())


def test_kl_counts_once_and_callbacks_stay_here(tmp_path):
    """Inputs of zero leave the gradient of the KL alone, which is what one process has."""
    seen, gradients = [], []
    for devices in (1, 2):
        torch.manual_seed(0)
        layer = zm.Linear(4, 3, posterior=zm.Additive)
        watch = Gradients(layer.weight.log_variance)
        fit(
            layer,
            (X * 0, CLASSES),
            TrainingConfig(epochs=1, batch_size=62),
            folder=tmp_path / str(devices),
            devices=devices,
            callbacks=[watch],
            on_epoch=lambda epoch, model: {"seen": seen.append(epoch)},
        )
        gradients.append(watch.seen[0])
    assert gradients[0].abs().min() > 0
    torch.testing.assert_close(gradients[1], gradients[0])
    assert seen == [1, 1]


def test_expected_gradient_of_two_is_that_of_one(tmp_path):
    """Over many steps without any movement, in standard errors; the noise of the two differs."""
    means, errors, spread = [], [], []
    for devices in (1, 2):
        torch.manual_seed(0)
        model = zm.Linear(4, 1, posterior=lambda *a, **k: zm.Additive(*a, log_variance=0.0, **k))
        watch = Gradients(model.weight.mean)
        fit(
            model,
            # Many steps in few epochs: each of these is written to disk.
            (X.repeat(75, 1), VALUES.repeat(75, 1)),
            TrainingConfig(epochs=2, batch_size=62, lr=1e-12),
            folder=tmp_path / str(devices),
            devices=devices,
            likelihood=zm.GaussianLikelihood(1, learn=False),
            callbacks=[watch],
            progress=False,
        )
        drawn = torch.stack(watch.seen)
        means.append(drawn.mean(0))
        errors.append(drawn.std(0) / len(drawn) ** 0.5)
        spread.append(drawn.std(0))
    z = (means[1] - means[0]) / (errors[0].square() + errors[1].square()).sqrt()
    assert z.abs().max() < 5
    # Noise that were alike on both would not be of their 62 examples' independent draws.
    ratio = spread[1] / spread[0]
    assert (ratio.log().abs() < 0.35).all()


class Stop(pl.Callback):
    """Interrupts after the first epoch."""

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            raise KeyboardInterrupt


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2)])
def test_checkpoint_goes_on_with_another_number_of_processes(first, second, tmp_path):
    whole = fit(plain(), (X, CLASSES), CONFIG, folder=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fit(plain(), (X, CLASSES), CONFIG, folder=tmp_path / "cut", devices=first,
            callbacks=[Stop()])  # fmt: skip
    cut = fit(plain(), (X, CLASSES), CONFIG, folder=tmp_path / "cut", devices=second)
    assert cut.resumed_from == 1
    states_agree(cut.model, whole.model)
    assert cut.inexact == (f"{first} and then {second} processes have trained it",)


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("killed", ChildProcessError, r"Process 1 \(code -9\).*run again to go on"),
        ("raises", ValueError, "a bad example"),
    ],
)
def test_a_process_that_ends_ends_the_run_which_resumes(how, error, message, tmp_path):
    with pytest.raises(error, match=message):
        # Four steps an epoch.
        fit(DiesAt(plain(), 6, how), (X, CLASSES), CONFIG, folder=tmp_path, devices=2)
    resumed = fit(DiesAt(plain(), 99, how), (X, CLASSES), CONFIG, folder=tmp_path, devices=2)
    assert resumed.resumed_from == 1
    whole = fit(DiesAt(plain(), 99, how), (X, CLASSES), CONFIG, folder=tmp_path / "whole")
    states_agree(resumed.model, whole.model)


def test_refusals_of_one_process_are_those_of_all(tmp_path):
    fit(plain(), (X, CLASSES), CONFIG, folder=tmp_path)
    config = TrainingConfig(epochs=2, batch_size=16, lr=0.5)
    with pytest.raises(ValueError, match="another configuration: lr is"):
        fit(plain(), (X, CLASSES), config, folder=tmp_path, devices=2)


def test_noise_and_early_stopping_in_two_processes(tmp_path):
    config = TrainingConfig(
        epochs=30, batch_size=16, lr=0.5, decay="constant", monitor="validation_nll", patience=2
    )
    result = fit(
        network(), Augmented(), config, folder=tmp_path, devices=2, validation=(X, CLASSES)
    )
    assert len(result.history) == result.best_epoch + 2 < 30


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"devices": 0}, ValueError, "devices must be at least 1"),
        ({"devices": 3}, ValueError, "batch_size counts the examples of all processes.*16 for 3"),
        ({"devices": 2, "sync_batchnorm": 2}, TypeError, "sync_batchnorm must be True or False"),
    ],
)
def test_places_that_cannot_be(options, error, message, tmp_path):
    with pytest.raises(error, match=message):
        fit(plain(), (X, CLASSES), CONFIG, folder=tmp_path, **options)


def test_what_cannot_be_sent_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(children, "start_context", lambda: multiprocessing.get_context("spawn"))
    with pytest.raises(TypeError, match=r"cannot be sent to other processes.*torchrun"):
        fit(plain(), (X, VALUES), CONFIG, folder=tmp_path, devices=2,
            likelihood=lambda outputs, targets: (outputs - targets).square().mean())  # fmt: skip


def test_one_process_asks_nobody():
    assert ALONE.first(lambda: 3) == 3
    assert ALONE.sums([1, 2.5]) == [1, 2.5]
    assert is_about_others(RuntimeError("[gloo/transport/tcp] Connection closed by peer"))
    assert not is_about_others(ValueError("gloo"))


SCRIPT = """
    import sys
    sys.path.insert(0, {tests!r})
    import test_any_data as t

    if __name__ == "__main__":
        result = t.fit(
            t.network(), (t.X, t.CLASSES), t.TrainingConfig(epochs=1, batch_size=16),
            folder={folder!r}, {options}
        )
        total = sum(float(p.detach().sum()) for p in result.model.parameters())
        print("trained", len(result.history), result.inexact, total)
"""


@pytest.mark.slow
def test_script_that_starts_processes(processes, tmp_path):
    script = tmp_path / "train.py"
    tests = str(Path(__file__).parent)
    script.write_text(
        textwrap.dedent(SCRIPT.format(tests=tests, folder=str(tmp_path / "a"), options="devices=2"))
    )
    said = processes.run([sys.executable, script]).stdout
    assert said.count("trained 1 ('several processes") == 1


def ranks(processes, command, **environment):
    """Two processes as torchrun makes them, without one in between that could leave others."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        processes.start(command, env=os.environ | common | {"RANK": str(rank)} | environment)
        for rank in range(2)
    ]
    said = [processes.finish(rank) for rank in started]
    assert [each.returncode for each in said] == [0, 0], [each.stderr for each in said]
    return [each.stdout for each in said]


@pytest.mark.slow
def test_script_under_torchrun(processes, tmp_path):
    tests, folder = str(Path(__file__).parent), str(tmp_path / "a")
    code = textwrap.dedent(SCRIPT.format(tests=tests, folder=folder, options=""))
    first, second = ranks(processes, [sys.executable, "-c", code])
    assert "trained 1 ('several processes" in first
    assert first == second


@pytest.mark.slow
def test_experiment_under_torchrun(processes, tmp_path):
    command = ["-m", "zeromean", "run", "sparse_lenet300", "--smoke", "--runs", tmp_path]
    first, second = ranks(processes, [sys.executable, *command])
    assert "seed-0" in first
    assert second == ""
    networks = list(tmp_path.glob("models/*/seed-0/checkpoint.ckpt"))
    assert networks
    for checkpoint in networks:
        assert torch.load(checkpoint, weights_only=True)["processes"] == [2]
