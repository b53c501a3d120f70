"""Accumulated steps, early stopping, float16 and devices: what `fit` does and what it refuses."""

import math

import pytest
import torch
from test_any_data import CLASSES, VALUES, X, network
from test_training import At, assert_same_state, blobs, interrupt, small_config, small_network
from torch import nn

import zeromean as zm
from zeromean.training import ElboModule, TrainingConfig, fit
from zeromean.training.config import mode_of
from zeromean.training.devices import chosen_accelerator, device_of, require_devices
from zeromean.training.distributed import launched_elsewhere
from zeromean.training.early_stopping import best_epoch, is_over
from zeromean.training.precision import computes_in_float16

pl = pytest.importorskip("lightning.pytorch")
pytest.importorskip("tensorboard")


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_accumulated_batches_are_one_large_batch(optimizer, tmp_path):
    """Rates, averages and the last, smaller step included: 62 = 3 · 16 + 14 = 2 · 24 + 14."""
    models, rates = [], []

    class Rates(pl.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            rates.append(optimizer.param_groups[0]["lr"])

    # Four batches of 8 a step, or one of 32; the last has 30, as three of 8 and one of 6.
    for accumulate in (1, 4):
        size = 32 // accumulate
        config = TrainingConfig(
            epochs=3, batch_size=size, accumulate=accumulate, optimizer=optimizer, lr=0.05,
            log_alpha_lr=0.05, average_epochs=0.5, decay="one-cycle",
        )  # fmt: skip
        folder = tmp_path / str(accumulate)
        result = fit(plain(), (X[:56], CLASSES[:56]), config, folder=folder, callbacks=[Rates()])
        models.append(result.model)
    half = len(rates) // 2
    assert half == 6
    assert rates[:half] == rates[half:]
    for name, tensor in models[0].state_dict().items():
        torch.testing.assert_close(tensor, models[1].state_dict()[name], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning's own
def test_a_trainer_of_ones_own_counts_steps_too(tmp_path):
    def trained(config_accumulate, trainer_accumulate):
        config = TrainingConfig(epochs=1, batch_size=20, lr=0.1, accumulate=config_accumulate)
        module = ElboModule(small_network(), config, num_data=60, steps_per_epoch=3)
        trainer = pl.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
            accumulate_grad_batches=trainer_accumulate,
        )  # fmt: skip
        trainer.fit(module, zm.data.Batches(blobs(), 20, seed=0))
        return trainer.lr_scheduler_configs[0].scheduler.get_last_lr()[0]

    assert trained(1, 2) == trained(2, 2) == 0.0  # Two steps, at the end of which it has decayed.
    with pytest.raises(ValueError, match="accumulate_grad_batches=3"):
        trained(3, 2)


# --- the best epoch


def test_best_epoch_and_end_follow_from_the_metrics():
    config = TrainingConfig(epochs=9, monitor="validation_nll", patience=2)
    values = [3.0, 1.0, None, 1.0, 0.5]
    history = [{"epoch": i, "validation_nll": v} for i, v in enumerate(values, 1)]
    assert [best_epoch(history[:n], config) for n in range(6)] == [None, 1, 2, 2, 2, 5]
    assert [is_over(history[:n], config) for n in range(6)] == [False] * 4 + [True, False]
    largest = TrainingConfig(epochs=9, monitor="validation_nll", monitor_mode="max")
    assert best_epoch(history, largest) == 1
    assert is_over([{"epoch": 9}], TrainingConfig(epochs=9))


@pytest.mark.parametrize("average", [None, 0.5])
def test_run_stops_and_keeps_the_weights_of_its_best_epoch(average, tmp_path):
    config = TrainingConfig(
        epochs=40, batch_size=20, lr=0.3, decay="constant", monitor="validation_nll", patience=3,
        average_epochs=average,
    )  # fmt: skip
    kept = {}

    def look(epoch, model):
        kept[epoch] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        return {}

    def train(folder, **more):
        options = {"folder": tmp_path / folder, "validation": (X, CLASSES.flip(0)), **more}
        return fit(network(), (X, CLASSES), config, **options)

    whole = train("whole", on_epoch=look)
    nll = [row["validation_nll"] for row in whole.history]
    assert len(nll) == whole.best_epoch + 3 < 40
    assert nll[whole.best_epoch - 1] == min(nll)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, kept[whole.best_epoch][name])
    again = train("whole", callbacks=[At(1, 1, lambda: pytest.fail("trained again"))])
    assert again.best_epoch == whole.best_epoch
    assert_same_state(again.model, whole.model)
    with pytest.raises(KeyboardInterrupt):
        train("cut", callbacks=[At(len(nll), 1, interrupt)])
    cut = train("cut")
    assert cut.resumed_from == len(nll) - 1
    assert_same_state(cut.model, whole.model)
    assert cut.history == whole.history


def test_a_metric_that_is_not_there_is_named(tmp_path):
    config = small_config(monitor="validation_nll")
    with pytest.raises(ValueError, match=r"'validation_nll' is not among the metrics.*loss"):
        fit(small_network(), blobs(), config, folder=tmp_path)
    config = small_config(monitor="list", monitor_mode="min")
    with pytest.raises(ValueError, match="must be a number"):
        fit(small_network(), blobs(), config, folder=tmp_path, on_epoch=lambda e, m: {"list": [1]})


def test_metrics_of_ones_own_are_monitored(tmp_path):
    config = small_config(epochs=3, monitor="mine", monitor_mode="max")
    result = fit(
        small_network(), blobs(), config, folder=tmp_path,
        on_epoch=lambda epoch, model: {"mine": -abs(epoch - 2)},
    )  # fmt: skip
    assert result.best_epoch == 2


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"patience": 3}, ValueError, r"say which: monitor='validation_nll'"),
        ({"patience": 0, "monitor": "loss"}, ValueError, "patience must be at least 1"),
        ({"monitor": "happiness"}, ValueError, "monitor_mode='min' or 'max'"),
        ({"monitor": 3}, TypeError, "monitor must be the name of a metric"),
        ({"monitor": "loss", "monitor_mode": "low"}, ValueError, "monitor_mode must be one of min"),
        ({"accumulate": 0}, ValueError, "accumulate must be at least 1, got 0"),
        ({"accumulate": 1.5}, ValueError, "accumulate must be a whole number"),
    ],
)
def test_settings_that_mean_nothing(settings, error, message):
    with pytest.raises(error, match=message):
        small_config(**settings)


def test_settings_of_today_leave_older_descriptions_alone():
    described = small_config().described()
    assert not {"accumulate", "monitor", "patience", "monitor_mode"} & set(described)
    assert small_config(monitor="elbo").described()["monitor_mode"] == "max"
    assert mode_of("validation_accuracy") == "max"
    assert mode_of("rmse") == mode_of("kl") == "min"


# --- devices


def test_devices_that_are_not_there_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert chosen_accelerator("auto") == "cpu"
    for name in ("cuda", "gpu", "mps"):
        with pytest.raises(ValueError, match=r"needs a GPU.*accelerator='cpu' or 'auto'"):
            fit(plain(), (X, CLASSES), small_config(), folder=tmp_path, accelerator=name)
    with pytest.raises(ValueError, match="accelerator must be one of auto, cpu"):
        fit(plain(), (X, CLASSES), small_config(), folder=tmp_path, accelerator="tpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="devices=2, but there is 1 of cuda; use devices=1"):
        require_devices(2, "cuda")
    with pytest.raises(TypeError, match="devices must be an integer"):
        require_devices("all", "cpu")


def test_parts_on_several_devices_are_named(tmp_path):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3, device="meta"))
    with pytest.raises(ValueError, match=r"0\.weight on cpu, 1\.weight on meta.*move it to one"):
        fit(model, (X, CLASSES), small_config(), folder=tmp_path)
    with pytest.raises(ValueError, match="on the device meta, where it has no weights"):
        device_of(nn.Linear(2, 2, device="meta"))
    assert device_of(nn.Identity()).type == "cpu"


def test_torchrun_says_how_many_there_are(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert launched_elsewhere() == (1, 2)
    with pytest.raises(ValueError, match="devices=3, but this script has been started as 2"):
        fit(plain(), (X, CLASSES), small_config(), folder=tmp_path, devices=3)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert launched_elsewhere() is None


# --- float16


@pytest.mark.skipif(not computes_in_float16(), reason="no float16 on this CPU")
def test_float16_scales_its_loss_and_remembers_the_scale(tmp_path):
    config = TrainingConfig(epochs=4, batch_size=20, lr=0.02, precision="float16")
    result = fit(network(), (X, CLASSES), config, folder=tmp_path)
    assert result.history[-1]["nll"] < result.history[0]["nll"]
    state = torch.load(tmp_path / "checkpoint.ckpt", weights_only=True)
    assert state["scaler"]["scale"] >= 1
    assert "float16" in result.inexact[0]
    exact = TrainingConfig(epochs=4, batch_size=20, lr=0.02)
    rows = fit(network(), (X, CLASSES), exact, folder=tmp_path / "exact").history
    for row, other in zip(result.history, rows, strict=True):
        assert row["nll"] == pytest.approx(other["nll"], rel=0.1)


def test_a_cpu_without_float16_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("zeromean.training.precision.computes_in_float16", lambda: False)
    with pytest.raises(ValueError, match=r"float16' needs a GPU.*precision='float32'"):
        fit(plain(), (X, CLASSES), small_config(precision="float16"), folder=tmp_path)


def test_targets_that_are_not_finite_are_named(tmp_path):
    values = VALUES.clone()
    values[3] = math.nan
    with pytest.raises(ValueError, match="so it is the likelihood of the targets"):
        fit(nn.Linear(4, 1), (X, values), small_config(), folder=tmp_path,
            likelihood=zm.GaussianLikelihood(1))  # fmt: skip
