"""The recipe of the fast trainings: SGD next to Adam, one cycle, smoothed labels, bfloat16."""

import math

import pytest
import torch
import torch.nn.functional as F
from test_training import assert_same_state, blobs, interrupt, small_config, small_network
from torch import nn

import zeromean as zm
from zeromean.data import Batches, ImageSet, ShiftAndAlternate
from zeromean.training import ElboModule, TrainingConfig, fit
from zeromean.training.optimizers import NesterovAndAdam
from zeromean.training.precision import autocast, computes_in_bfloat16

pl = pytest.importorskip("lightning.pytorch")

FAST = {
    "optimizer": "sgd",
    "lr": 0.05,
    "log_alpha_lr": 0.01,
    "decay": "one-cycle",
    "label_smoothing": 0.1,
    "average_epochs": 0.5,
}
needs_bfloat16 = pytest.mark.skipif(
    not computes_in_bfloat16(), reason="this CPU does not compute in bfloat16"
)
PRECISIONS = ["float32", pytest.param("bfloat16", marks=needs_bfloat16)]


def images(num=40):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(num) % 3
    pixels = torch.rand(num, 1, 8, 8, generator=generator) + labels.view(-1, 1, 1, 1)
    return ImageSet(pixels, labels, num_classes=3)


def convolutional():
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        zm.Conv2d(8, 8, 3, posterior=zm.Multiplicative),
        nn.Flatten(),
        zm.Linear(288, 3),
    )
    return network.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_interrupted_run_ends_bit_for_bit_the_same(precision, tmp_path):
    config = TrainingConfig(epochs=3, batch_size=16, precision=precision, **FAST)
    options = {"augment": ShiftAndAlternate(1)}

    class Stop(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if (trainer.current_epoch, batch_idx) == (1, 1):
                interrupt()

    whole = fit(convolutional(), images(), config, folder=tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        fit(
            convolutional(),
            images(),
            config,
            folder=tmp_path / "cut",
            callbacks=[Stop()],
            **options,
        )
    cut = fit(convolutional(), images(), config, folder=tmp_path / "cut", **options)
    assert cut.resumed_from == 1
    assert_same_state(cut.model, whole.model)


def test_rates_rise_and_fall_once():
    config = TrainingConfig(epochs=10, decay="one-cycle", peak_at=0.2)
    factors = [config.lr_factor(step, 10) for step in range(100)]
    assert max(factors) == pytest.approx(1.0, abs=0.03)
    assert factors.index(max(factors)) in (19, 20)
    assert all(0 < factor <= 1 for factor in factors)
    assert sum(factors) == pytest.approx(50, rel=1e-3)  # Half of a constant rate, as a triangle is.


def test_weights_go_by_nesterov_and_log_alpha_by_adam():
    """Against torch's own two optimizers, each on its parameters."""
    ours, theirs = small_network(), small_network()
    groups = zm.parameter_groups(ours, lr=0.1, log_alpha_lr=0.01, weight_decay=1e-3)
    optimizer = NesterovAndAdam(groups, momentum=0.9, eps=1e-9)
    twins = zm.parameter_groups(theirs, lr=0.1, log_alpha_lr=0.01, weight_decay=1e-3)
    sgd = torch.optim.SGD(twins[:-1], momentum=0.9, nesterov=True)
    adam = torch.optim.Adam(twins[-1:], eps=1e-9)
    assert twins[-1]["name"] == "log_alpha"
    x, y = torch.randn(20, 1, 2, 2), torch.arange(20) % 3
    for step in range(5):
        for model, steppers in ((ours, [optimizer]), (theirs, [sgd, adam])):
            torch.manual_seed(step)
            model.zero_grad()
            loss = F.cross_entropy(model(x), y) + zm.kl_divergence(model) / 100
            loss.backward()
            for stepper in steppers:
                stepper.step()
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, msg=name)
    # A state that is loaded goes on as if it had not been, also where a scheduler sets rates.
    again = NesterovAndAdam(groups, momentum=0.9, eps=1e-9)
    again.load_state_dict(optimizer.state_dict())
    again.param_groups[0]["lr"] = 0.0
    assert again.parts[0].param_groups[0]["lr"] == 0.0


def test_smoothed_labels_are_those_of_torch_and_stay_out_of_the_metrics(tmp_path):
    outputs, targets = torch.randn(8, 3), torch.arange(8) % 3
    module = ElboModule(
        small_network(), small_config(label_smoothing=0.2), num_data=60, steps_per_epoch=3
    )
    loss, nll = module._data_loss_and_nll(outputs, targets)
    torch.testing.assert_close(loss, F.cross_entropy(outputs, targets, label_smoothing=0.2))
    torch.testing.assert_close(nll, F.cross_entropy(outputs, targets))
    plain, smooth = (
        fit(
            small_network(),
            blobs(),
            small_config(epochs=1, lr=1e-9, label_smoothing=smoothing),
            folder=tmp_path / str(smoothing),
        ).history[0]
        for smoothing in (0.0, 0.3)
    )
    assert smooth["nll"] == pytest.approx(plain["nll"], rel=1e-5)
    assert smooth["loss"] != plain["loss"]


@needs_bfloat16
def test_moments_and_kl_under_bfloat16_are_those_of_float32():
    """The local sampler's mean and variance to bfloat16's rounding, and the KL exactly."""
    torch.manual_seed(0)
    layer = zm.Linear(64, 32, posterior=zm.Additive, prior=zm.LogUniform())
    x = torch.randn(16, 64)
    with torch.no_grad():
        mean, variance = layer.linear_map().moments(x, layer.weight, layer.bias)
        with autocast("bfloat16", "cpu"):
            rounded_mean, rounded_variance = layer.linear_map().moments(x, layer.weight, layer.bias)
            draws = torch.stack([layer(x).float() for _ in range(4000)])
    scale = mean.abs().mean()
    assert (rounded_mean.float() - mean).abs().max() < 0.03 * scale
    assert (rounded_variance.float() / variance - 1).abs().max() < 0.03
    # Eight bits are 0.4%, and four thousand draws know a variance to 2.2%.
    z = (draws.mean(0) - rounded_mean.float()) / (variance / 4000).sqrt()
    assert z.std() < 1.5
    assert draws.var(0).div(variance).mean() == pytest.approx(1.0, abs=0.03)
    config = small_config(precision="bfloat16")
    module = ElboModule(layer, config, num_data=10, steps_per_epoch=1)
    with autocast(config.precision, "cpu"):
        module.model(x)
    expected = zm.kl_divergence(layer)
    assert expected.dtype == torch.float32
    torch.testing.assert_close(zm.kl_divergence(module.model), expected, rtol=0, atol=0)


@needs_bfloat16
def test_training_in_bfloat16_ends_near_that_in_float32(tmp_path):
    results = {}
    for precision in ("float32", "bfloat16"):
        config = TrainingConfig(epochs=8, batch_size=20, lr=0.01, precision=precision)
        result = fit(small_network(), blobs(), config, folder=tmp_path / precision)
        assert all(p.dtype == torch.float32 for p in result.model.parameters())
        results[precision] = [row["nll"] for row in result.history]
    assert results["float32"] != results["bfloat16"]
    for exact, rounded in zip(*results.values(), strict=True):
        assert rounded == pytest.approx(exact, rel=0.05)


def test_images_are_mirrored_in_every_other_epoch():
    data = ImageSet(torch.rand(200, 1, 4, 4), torch.zeros(200, dtype=torch.int64), num_classes=2)
    augment = ShiftAndAlternate(padding=0, seed=3)
    batches = Batches(data, 50, seed=0, shuffle=False, augment=augment)
    epochs = []
    for epoch in range(4):
        batches.set_epoch(epoch)
        epochs.append(torch.cat([chosen for chosen, _ in batches]))
    assert torch.equal(epochs[0], epochs[1].flip(3))
    assert torch.equal(epochs[0], epochs[2])
    assert torch.equal(epochs[1], epochs[3])
    mirrored = (epochs[0] != data.images).flatten(1).any(1)
    assert abs(mirrored.double().mean() - 0.5) < 5 * 0.5 / math.sqrt(200)


def test_shifts_reflect_at_the_edge():
    row = torch.arange(5.0)
    data = ImageSet(row.expand(60, 1, 5, 5).contiguous(), torch.zeros(60).long(), num_classes=2)
    shifted = torch.cat([x for x, _ in Batches(data, 60, seed=0, augment=ShiftAndAlternate(2))])
    padded = torch.tensor([2.0, 1, 0, 1, 2, 3, 4, 3, 2])
    windows = [padded[k : k + 5] for k in range(5)]
    seen = set()
    for image in shifted[:, 0, 0]:
        found = [
            k
            for k, w in enumerate(windows)
            if torch.equal(image, w) or torch.equal(image, w.flip(0))
        ]
        assert found
        seen |= set(found)
    assert seen == set(range(5))


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"optimizer": "rmsprop"}, "optimizer must be one of adam, sgd, got 'rmsprop'"),
        ({"precision": "int8"}, "precision must be one of float32, bfloat16, .*got 'int8'"),
        ({"decay": "cosine"}, "decay must be one of linear, constant, one-cycle, got 'cosine'"),
        ({"label_smoothing": 1.0}, r"label_smoothing.*\[0, 1\)"),
        ({"momentum": -0.1}, r"momentum.*\[0, 1\)"),
    ],
)
def test_bad_settings_are_refused(settings, names):
    with pytest.raises(ValueError, match=names):
        small_config(**settings)


def test_sgd_asks_for_the_rate_of_log_alpha(tmp_path):
    with pytest.raises(ValueError, match=r"Adam.*log_alpha_lr"):
        fit(small_network(), blobs(), small_config(optimizer="sgd", lr=0.1), folder=tmp_path)


def test_a_cpu_without_bfloat16_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("zeromean.training.precision.computes_in_bfloat16", lambda: False)
    with pytest.raises(ValueError, match=r"bfloat16.*precision='float32'"):
        fit(small_network(), blobs(), small_config(precision="bfloat16"), folder=tmp_path)


def test_configurations_of_older_runs_read_as_they_did():
    described = small_config().described()
    assert not {"optimizer", "momentum", "peak_at", "label_smoothing", "precision"} & set(described)
    assert small_config(precision="bfloat16").described()["precision"] == "bfloat16"
