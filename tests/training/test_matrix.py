"""Device × precision × processes × posterior, each interrupted and resumed."""

import multiprocessing
import sys
from functools import partial

import pytest
import torch
from test_any_data import CLASSES, X
from test_training import At, assert_same_state, interrupt
from torch import nn

import zeromean as zm
from zeromean.training import TrainingConfig, children, fit
from zeromean.training.precision import computes_in_bfloat16, computes_in_float16

pytest.importorskip("lightning.pytorch")
pytest.importorskip("tensorboard")

POSTERIORS = {
    "additive": zm.Additive,
    "multiplicative": partial(zm.Multiplicative, share="layer"),
    "zero mean": zm.ZeroMean,
}
THERE = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
COMPUTES = {
    "float32": lambda device: True,
    "bfloat16": lambda device: device != "cpu" or computes_in_bfloat16(),
    "float16": lambda device: device != "cpu" or computes_in_float16(),
}


def network(posterior):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Dropout(0.1),
        zm.Linear(8, 3, posterior=POSTERIORS[posterior]),
    )


@pytest.mark.parametrize("posterior", POSTERIORS)
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("precision", COMPUTES)
@pytest.mark.parametrize("device", THERE)
def test_interrupted_run_goes_on(device, precision, processes, posterior, tmp_path, monkeypatch):
    if not THERE[device]:
        pytest.skip(f"no {device} here")
    if not COMPUTES[precision](device):
        pytest.skip(f"this {device} does not compute in {precision}")
    if processes == 2:
        if device != "cpu" or sys.platform != "linux":
            pytest.skip("copies of this process, which start at once, are for CPUs under Linux")
        context = multiprocessing.get_context("fork")
        monkeypatch.setattr(children, "start_context", lambda: context)
    torch.set_num_threads(1)
    config = TrainingConfig(
        epochs=3,
        batch_size=16,
        lr=0.02,
        accumulate=2,
        average_epochs=0.5,
        clip_gradient=1.0,
        precision=precision,
        monitor="validation_nll",
        patience=5,
    )
    options = {"accelerator": device, "devices": processes, "validation": (X, CLASSES)}

    def train(folder, **more):
        return fit(
            network(posterior), (X, CLASSES), config, folder=tmp_path / folder, **options, **more
        )

    whole = train("whole")
    with pytest.raises(KeyboardInterrupt):
        train("cut", callbacks=[At(3, 2, interrupt)])
    cut = train("cut")
    assert cut.resumed_from == 2
    assert cut.best_epoch == whole.best_epoch
    if device == "cpu":
        # Bit for bit also in what is not promised: nothing here depends on chance.
        assert_same_state(cut.model, whole.model)
        assert cut.history == whole.history
    exact = processes == 1 and device == "cpu" and precision != "float16"
    assert (cut.inexact == ()) == exact
    assert all(p.dtype == torch.float32 for p in cut.model.parameters())
