import errno
import json
import logging
import math
import os
import signal
import sys
import textwrap
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock, Timeout
from torch import nn

import zeromean as zm
from zeromean.data import Batches, ImageSet
from zeromean.data import load as load_data
from zeromean.training import TrainingConfig, fit
from zeromean.training.layer_monitor import layer_metrics
from zeromean.training.weight_average import WeightAverage

pl = pytest.importorskip("lightning.pytorch")
pytest.importorskip("tensorboard")

CONFIG = TrainingConfig(
    epochs=3, batch_size=100, lr=5e-3, log_alpha_lr=5e-2, kl_warmup_epochs=2, weight_decay=1e-4
)


def network(seed=0):
    torch.manual_seed(seed)
    dense = partial(zm.Linear, posterior=partial(zm.Multiplicative, share="layer"))
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Flatten(),
        dense(288, 40),
        nn.ReLU(),
        zm.Linear(40, 40),
        nn.ReLU(),
        nn.Linear(40, 10),
    )


def digits():
    return load_data("digits")


def blobs(num=60, seed=0):
    """A tiny problem for what does not depend on the data."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(num) % 3
    images = torch.rand(num, 1, 2, 2, generator=generator) + labels.view(-1, 1, 1, 1)
    return ImageSet(images, labels, num_classes=3)


def small_network(log_alpha=-3.0):
    torch.manual_seed(0)
    posterior = partial(zm.Multiplicative, share="layer", log_alpha=log_alpha)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), zm.Linear(8, 3, posterior=posterior)
    )


def small_config(**settings):
    return TrainingConfig(**{"epochs": 2, "batch_size": 20, **settings})


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_same_state(a, b):
    """The two models agree in every bit."""
    a, b = a.state_dict(), b.state_dict()
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different


class At(pl.Callback):
    """Do something at the start of a batch, both counted from 1."""

    def __init__(self, epoch, batch, action):
        self.when, self.action = (epoch - 1, batch - 1), action

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == self.when:
            self.action()


def plain_trainer(epochs, folder):
    """Lightning's own, as somebody else would use it."""
    return pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def interrupt():
    raise KeyboardInterrupt


# --- resuming


KILLED_RUN = """
    import os, signal, sys
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    import test_training as t

    t.fit(
        t.network(),
        t.digits(),
        t.CONFIG,
        folder=Path({folder!r}),
        test=t.load_data("digits", "test"),
        callbacks=[t.At(2, 4, lambda: os.kill(os.getpid(), signal.SIGKILL))],
    )
"""


def test_run_killed_in_mid_epoch_resumes_bit_for_bit(processes, tmp_path):
    killed = tmp_path / "killed"
    script = KILLED_RUN.format(tests=str(Path(__file__).parent), folder=str(killed))
    processes.run([sys.executable, "-c", textwrap.dedent(script)], code=-signal.SIGKILL)
    assert [row["epoch"] for row in rows(killed)] == [1]

    test = load_data("digits", "test")
    resumed = fit(network(), digits(), CONFIG, folder=killed, test=test)
    whole = fit(network(), digits(), CONFIG, folder=tmp_path / "whole", test=test)
    assert resumed.resumed_from == 1
    assert_same_state(resumed.model, whole.model)
    assert resumed.history == whole.history == rows(killed) == rows(tmp_path / "whole")
    assert whole.history[-1]["nll"] < whole.history[0]["nll"]
    # Adam's moments and the generators are part of the promise as well.
    states = [torch.load(f / "checkpoint.ckpt", weights_only=True) for f in (killed, whole.folder)]
    for one, other in zip(*(s["optimizer"]["state"].values() for s in states), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert torch.equal(states[0]["random"]["torch"], states[1]["random"]["torch"])


def test_looking_at_the_model_does_not_change_its_training(tmp_path):
    def look(epoch, model):
        model.eval()
        return {"draw": torch.rand(()), "list": torch.ones(2), "odd": float("nan")}

    watched = fit(small_network(), blobs(), small_config(), folder=tmp_path / "a", on_epoch=look)
    alone = fit(small_network(), blobs(), small_config(), folder=tmp_path / "b")
    assert_same_state(watched.model, alone.model)
    assert watched.history[0]["list"] == [1.0, 1.0]
    assert watched.history[0]["odd"] is None
    assert watched.history[0]["draw"] != watched.history[1]["draw"]


def test_training_leaves_the_callers_generators_alone(tmp_path):
    model, data = small_network(), blobs()
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    fit(model, data, small_config(), folder=tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_finished_run_is_only_loaded(tmp_path):
    first = fit(small_network(), blobs(), small_config(), folder=tmp_path)
    again = fit(
        small_network(),
        blobs(),
        small_config(),
        folder=tmp_path,
        callbacks=[At(1, 1, lambda: pytest.fail("trained again"))],
    )
    assert again.resumed_from == 2
    assert_same_state(first.model, again.model)
    assert again.history == first.history == rows(tmp_path)


def test_other_seed_is_another_run(tmp_path):
    one = fit(small_network(), blobs(), small_config(seed=0), folder=tmp_path / "0")
    two = fit(small_network(), blobs(), small_config(seed=1), folder=tmp_path / "1")
    assert not torch.equal(one.model[1].weight, two.model[1].weight)


def test_interrupt_keeps_the_last_epoch_and_propagates(tmp_path):
    config = small_config(epochs=3)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        fit(small_network(), blobs(), config, folder=tmp_path, callbacks=[At(3, 2, interrupt)])
    assert signal.getsignal(signal.SIGINT) is handler
    assert [row["epoch"] for row in rows(tmp_path)] == [1, 2]
    resumed = fit(small_network(), blobs(), config, folder=tmp_path)
    whole = fit(small_network(), blobs(), config, folder=tmp_path / "whole")
    assert resumed.resumed_from == 2
    assert_same_state(resumed.model, whole.model)


def test_logs_of_a_resumed_run_repeat_no_epoch(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = small_config(epochs=3)
    with pytest.raises(KeyboardInterrupt):
        fit(small_network(), blobs(), config, folder=tmp_path, callbacks=[At(3, 1, interrupt)])
    # As if killed between the checkpoint and the end of the line.
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 3, "lo')
    fit(small_network(), blobs(), config, folder=tmp_path)
    assert [row["epoch"] for row in rows(tmp_path)] == [1, 2, 3]
    csv = (tmp_path / "logs/csv/metrics.csv").read_text().splitlines()
    assert len(csv) == 4
    assert "log_alpha/3" in csv[0]
    events = EventAccumulator(str(tmp_path / "logs/tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("nll")] == [1, 2, 3]


# --- checkpoints that are not as they should be


def run_until_epoch_3(folder):
    config = small_config(epochs=3)
    with pytest.raises(KeyboardInterrupt):
        fit(small_network(), blobs(), config, folder=folder, callbacks=[At(3, 1, interrupt)])
    return config


@pytest.mark.parametrize("kept", [0, 100, 0.5, -1])
def test_checkpoint_cut_short_falls_back_to_the_one_before(tmp_path, caplog, kept):
    config = run_until_epoch_3(tmp_path)
    path = tmp_path / "checkpoint.ckpt"
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
    with caplog.at_level(logging.WARNING, "zeromean.training"):
        resumed = fit(small_network(), blobs(), config, folder=tmp_path)
    assert "cut short or damaged. Going back to epoch 1" in caplog.text
    assert resumed.resumed_from == 1
    whole = fit(small_network(), blobs(), config, folder=tmp_path / "whole")
    assert_same_state(resumed.model, whole.model)
    assert [row["epoch"] for row in rows(tmp_path)] == [1, 2, 3]


def test_checkpoint_with_a_changed_number_falls_back_to_the_one_before(tmp_path, caplog):
    config = run_until_epoch_3(tmp_path)
    path = tmp_path / "checkpoint.ckpt"
    content = bytearray(path.read_bytes())
    # Wherever it is: numbers and their names are all in the checksums.
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING, "zeromean.training"):
        resumed = fit(small_network(), blobs(), config, folder=tmp_path)
    assert "cut short or damaged. Going back to epoch 1" in caplog.text
    assert resumed.resumed_from == 1


def test_damaged_checkpoints_are_refused_and_left_alone(tmp_path):
    config = run_until_epoch_3(tmp_path)
    for path in tmp_path.glob("*.ckpt"):
        path.write_bytes(path.read_bytes()[:1000])
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(ValueError, match=r"cut short or damaged\. There is no sound one before it"):
        fit(small_network(), blobs(), config, folder=tmp_path)
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}


def test_kill_between_the_two_renames_loses_one_epoch_at_most(tmp_path):
    config = run_until_epoch_3(tmp_path)
    os.replace(tmp_path / "checkpoint.ckpt", tmp_path / "checkpoint.previous.ckpt")
    assert fit(small_network(), blobs(), config, folder=tmp_path).resumed_from == 2


@pytest.mark.parametrize(
    ("model", "data", "settings", "message"),
    [
        (small_network, blobs, {"lr": 0.5}, "lr is 0.001 there and 0.5 here"),
        (small_network, blobs, {"epochs": 9}, "epochs is 2 there and 9 here"),
        (small_network, partial(blobs, seed=1), {}, "data is 60 images"),
        (network, blobs, {}, "model is another one there"),
    ],
)
def test_folder_of_another_configuration_is_refused(tmp_path, model, data, settings, message):
    fit(small_network(), blobs(), small_config(), folder=tmp_path)
    before = (tmp_path / "checkpoint.ckpt").read_bytes()
    with pytest.raises(ValueError, match=f"another configuration.*{message}"):
        fit(model(), data(), small_config(**settings), folder=tmp_path)
    assert (tmp_path / "checkpoint.ckpt").read_bytes() == before


def test_newer_format_is_refused(tmp_path):
    fit(small_network(), blobs(), small_config(), folder=tmp_path)
    path = tmp_path / "checkpoint.ckpt"
    torch.save({**torch.load(path, weights_only=True), "format_version": 99}, path)
    with pytest.raises(ValueError, match="format version 99"):
        fit(small_network(), blobs(), small_config(), folder=tmp_path)


def test_foreign_folder_is_not_overwritten(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl but no checkpoint"):
        fit(small_network(), blobs(), small_config(), folder=tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"


def test_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(OSError, match="it is a file; choose another"):
        fit(small_network(), blobs(), small_config(), folder=tmp_path / "run")


def test_full_disk_loses_nothing(tmp_path, monkeypatch):
    def no_room(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fill():
        monkeypatch.setattr(os, "fsync", no_room)

    config = small_config(epochs=4)
    with pytest.raises(OSError, match=r"Epoch 3 could not be saved.*checkpoint\.ckpt is intact"):
        fit(small_network(), blobs(), config, folder=tmp_path, callbacks=[At(3, 1, fill)])
    assert not list(tmp_path.glob(".*"))
    assert [row["epoch"] for row in rows(tmp_path)] == [1, 2]

    monkeypatch.undo()
    resumed = fit(small_network(), blobs(), config, folder=tmp_path)
    whole = fit(small_network(), blobs(), config, folder=tmp_path / "whole")
    assert resumed.resumed_from == 2
    assert_same_state(resumed.model, whole.model)


# --- what is trained, recorded and said


def test_learning_rate_decays_linearly_and_log_alpha_has_its_own(tmp_path):
    seen = []

    class Rates(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append({g["name"]: g["lr"] for g in trainer.optimizers[0].param_groups})

    config = small_config(lr=1e-2, log_alpha_lr=1e-1)
    result = fit(small_network(), blobs(), config, folder=tmp_path, callbacks=[Rates()])
    assert [s["weights"] for s in seen] == pytest.approx([1e-2 * (1 - i / 6) for i in range(6)])
    assert [s["log_alpha"] for s in seen] == pytest.approx([1e-1 * (1 - i / 6) for i in range(6)])
    assert [row["lr"] for row in result.history] == pytest.approx([5e-3, 0.0])


def test_kl_warmup_reaches_beta_after_its_epochs():
    config = TrainingConfig(epochs=9, kl_warmup_epochs=2, beta=0.5)
    assert [config.kl_weight(step, 10) for step in (0, 10, 20, 99)] == [0.0, 0.25, 0.5, 0.5]
    assert TrainingConfig(epochs=1, beta=0.5).kl_weight(0, 10) == 0.5


def test_first_step_is_the_elbo_of_a_plain_loop(tmp_path):
    data = blobs()
    model = small_network()
    with zm.sampling(model, zm.mean):
        nll = nn.functional.cross_entropy(model(data.images), data.labels)
        loss = zm.elbo_loss(nll, zm.kl_divergence(model), num_data=60)
        model[3].sampler = zm.mean
    trained = small_network()
    trained[3].sampler = zm.mean
    config = small_config(epochs=1, batch_size=60)
    row = fit(trained, data, config, folder=tmp_path).history[0]
    assert row["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert row["nll"] == pytest.approx(nll.item(), rel=1e-5)
    assert row["elbo"] == pytest.approx(row["data_term"] - row["kl"])
    assert row["data_term"] == pytest.approx(-60 * row["nll"])
    assert row["kl/3"] == row["kl"] == pytest.approx(zm.kl_divergence(trained).item())


@pytest.mark.parametrize(("num", "batch_size", "steps"), [(61, 20, 3), (62, 20, 4), (6, 1, 6)])
def test_batchnorm_gets_no_last_batch_of_one_image(tmp_path, num, batch_size, steps):
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(4, 8), zm.Linear(8, 3)]
    if batch_size > 1:
        layers.insert(2, nn.BatchNorm1d(8))
    seen = []

    class Count(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append(len(batch[1]))

    config = small_config(epochs=1, batch_size=batch_size)
    fit(nn.Sequential(*layers), blobs(num), config, folder=tmp_path, callbacks=[Count()])
    assert len(seen) == steps
    assert sum(seen) == num - (num % batch_size == 1)


def test_pruned_weights_stay_pruned_through_training_and_interruptions(tmp_path):
    def sparse_network():
        torch.manual_seed(0)
        dense = partial(zm.Linear, posterior=partial(zm.Additive, log_variance=-4.0))
        return nn.Sequential(nn.Flatten(), dense(4, 8), nn.ReLU(), dense(8, 3))

    kept = []

    def look(epoch, model):
        kept.append(zm.sparsity(model).total.kept)
        return {"kept": kept[-1]}

    config = small_config(epochs=4, lr=0.1, prune_after_epochs=2, average_epochs=1)
    folder = tmp_path / "whole"
    whole = fit(sparse_network(), blobs(), config, folder=folder, on_epoch=look)
    assert kept[0] == kept[1] == 56
    assert kept[1] > kept[2] >= kept[3] > 0
    folder = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        fit(sparse_network(), blobs(), config, folder=folder, callbacks=[At(4, 2, interrupt)])
    resumed = fit(sparse_network(), blobs(), config, folder=folder)
    assert resumed.resumed_from == 3
    assert_same_state(resumed.model, whole.model)
    loaded = fit(sparse_network(), blobs(), config, folder=folder)
    assert_same_state(loaded.model, whole.model)
    # The model in hand, which has masks by now, is the same run.
    assert_same_state(fit(loaded.model, blobs(), config, folder=folder).model, whole.model)


def test_interrupted_pruning_goes_on_with_the_model_in_hand(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), zm.Linear(4, 3, posterior=partial(zm.Additive, log_variance=-2.0))
    )
    config = small_config(epochs=3, lr=0.1, prune_after_epochs=0)
    with pytest.raises(KeyboardInterrupt):
        fit(model, blobs(), config, folder=tmp_path, callbacks=[At(3, 1, interrupt)])
    assert model[1].weight.mask is not None
    assert fit(model, blobs(), config, folder=tmp_path).resumed_from == 2


def test_pruning_without_anything_to_prune_is_refused_before_training(tmp_path):
    model = nn.Sequential(nn.Flatten(), zm.Linear(4, 3))
    with pytest.raises(ValueError, match="Nothing to prune by snr"):
        fit(model, blobs(), small_config(prune_after_epochs=1), folder=tmp_path)
    assert not (tmp_path / "checkpoint.ckpt").exists()


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.rand(60), "labels must be classes, one integer for each image, got torch.float32"),
        (torch.arange(60), "Labels must be from 0 to 2, as num_classes says, got 0 to 59"),
    ],
)
def test_labels_that_are_no_classes_are_refused(tmp_path, labels, message):
    data = ImageSet(blobs().images, labels, num_classes=3)
    with pytest.raises(ValueError, match=message):
        fit(small_network(), data, small_config(), folder=tmp_path)


def test_scales_decay_apart_from_their_gradients(tmp_path):
    """Every step takes lr · decay of them off: exactly so where there is no gradient."""
    model = nn.Sequential(nn.Flatten(), zm.Linear(4, 3), nn.Linear(3, 3))
    nn.init.zeros_(model[2].weight).requires_grad_(False)
    before = model[1].weight.scale.detach().clone()
    config = small_config(epochs=1, lr=0.1, scale_decay=0.5, decay="constant")
    fit(model, blobs(), config, folder=tmp_path)
    torch.testing.assert_close(model[1].weight.scale, before * (1 - 0.1 * 0.5) ** 3)


def test_gradient_is_cut_to_its_norm(tmp_path):
    norms = []

    class Norms(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
            norms.append(nn.utils.get_total_norm(gradients).item())

    for clip, name in ((None, "free"), (0.01, "cut")):
        config = small_config(epochs=1, clip_gradient=clip)
        fit(small_network(), blobs(), config, folder=tmp_path / name, callbacks=[Norms()])
    assert min(norms[:3]) > 0.02
    assert norms[3:] == pytest.approx([0.01] * 3, rel=1e-3)


def test_log_alpha_is_projected_after_steps(tmp_path):
    config = small_config(log_alpha_lr=1.0, clip_log_alpha=(-3.5, -2.5))
    model = small_network(log_alpha=-3.0)
    fit(model, blobs(), config, folder=tmp_path)
    assert -3.5 <= model[3].weight.log_alpha.item() <= -2.5


def test_tied_weights_have_one_average():
    model = nn.ModuleDict({"first": nn.Linear(3, 3), "second": nn.Linear(3, 3)})
    model["second"].weight = model["first"].weight
    start = model["first"].weight.detach().clone()
    average = WeightAverage(model, num_steps=10)
    model["first"].weight.data += 1
    average.update(step=0)
    with average.shown():
        torch.testing.assert_close(model["second"].weight, start + 0.9)
    torch.testing.assert_close(model["second"].weight, start + 1)


def test_averaged_weights_are_those_of_torch_and_survive_an_interruption(tmp_path):
    weights, judged = [], []

    class Steps(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            weights.append(pl_module.model[1].weight.detach().clone())

    def look(epoch, model):
        judged.append(model[1].weight.detach().clone())
        return {}

    config = small_config(epochs=4, average_epochs=0.5)  # 1.5 steps
    start = small_network()[1].weight.detach().clone()
    whole = fit(
        small_network(),
        blobs(),
        config,
        folder=tmp_path / "whole",
        callbacks=[Steps()],
        on_epoch=look,
    )
    average = start
    for step, weight in enumerate(weights):
        decay = min(math.exp(-1 / 1.5), (1 + step) / (10 + step))
        average = torch.optim.swa_utils.get_ema_avg_fn(decay)(average, weight, step)
    torch.testing.assert_close(whole.model[1].weight, average)
    torch.testing.assert_close(judged[-1], average)
    with pytest.raises(KeyboardInterrupt):
        fit(
            small_network(),
            blobs(),
            config,
            folder=tmp_path / "cut",
            callbacks=[At(3, 2, interrupt)],
        )
    resumed = fit(small_network(), blobs(), config, folder=tmp_path / "cut")
    loaded = fit(small_network(), blobs(), config, folder=tmp_path / "cut")
    assert_same_state(resumed.model, whole.model)
    assert_same_state(loaded.model, whole.model)


def test_monitor_says_once_that_a_layer_became_a_variance_layer(tmp_path, caplog):
    config = small_config(epochs=4, log_alpha_lr=0.5, kl_warmup_epochs=0, beta=50.0)
    with caplog.at_level(logging.INFO, "zeromean.training"):
        with pytest.raises(KeyboardInterrupt):
            fit(
                small_network(log_alpha=2.0),
                blobs(),
                config,
                folder=tmp_path,
                callbacks=[At(4, 1, interrupt)],
            )
        history = fit(small_network(log_alpha=2.0), blobs(), config, folder=tmp_path).history
    said = [r.getMessage() for r in caplog.records if "variance layer" in r.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("Layer 3 has become a variance layer in epoch")
    crossed = next(row["epoch"] for row in history if row["log_alpha/3"] > 3)
    assert [row["epoch"] for row in history if row["new_variance_layers"] == ["3"]] == [crossed]


def test_nan_parameter_stops_the_run_and_names_the_layer(tmp_path):
    model = small_network()

    def break_parameter():
        with torch.no_grad():
            model[3].weight.mean[0, 0] = float("nan")

    message = r"loss became nan in epoch 2 at step 2: the parameters of layer 3 \(weight.mean\)"
    with pytest.raises(ValueError, match=message):
        fit(
            model,
            blobs(),
            small_config(),
            folder=tmp_path,
            callbacks=[At(2, 2, break_parameter)],
        )
    assert torch.load(tmp_path / "checkpoint.ckpt", weights_only=True)["epoch"] == 1


def test_overflowing_activation_names_the_layer(tmp_path):
    model = small_network()

    def overflow():
        with torch.no_grad():
            model[1].weight.fill_(3e38)

    with pytest.raises(ValueError, match="activations of layer 1 are not finite"):
        fit(model, blobs(), small_config(), folder=tmp_path, callbacks=[At(1, 2, overflow)])


def test_model_that_breaks_in_the_last_step_is_not_saved(tmp_path):
    class Break(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                nn.init.constant_(pl_module.model[1].bias, float("inf"))

    with pytest.raises(ValueError, match=r"After epoch 2 the parameters of layer 1 \(bias\)"):
        fit(small_network(), blobs(), small_config(), folder=tmp_path, callbacks=[Break()])
    assert torch.load(tmp_path / "checkpoint.ckpt", weights_only=True)["epoch"] == 1


def test_recurrent_model_that_breaks_in_the_last_step_is_not_saved(tmp_path):
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.gates = zm.LSTM(2, 3, posterior=zm.Additive, batch_first=True)

        def forward(self, images):
            return self.gates(images.squeeze(1))[0][:, -1]

    class Break(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            nn.init.constant_(pl_module.model.gates.weight_hh_l0.mean, float("nan"))

    with pytest.raises(ValueError, match=r"layer gates \(weight_hh_l0.mean\) are not finite"):
        fit(Last(), blobs(), small_config(), folder=tmp_path, callbacks=[Break()])
    assert not (tmp_path / "checkpoint.ckpt").exists()


def test_images_that_are_not_finite_are_named(tmp_path):
    data = blobs()
    data.images[5] = float("nan")
    with pytest.raises(ValueError, match="inputs of the batch are not finite"):
        fit(small_network(), data, small_config(), folder=tmp_path)


def test_deterministic_model_trains_too(tmp_path):
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    result = fit(model, blobs(), small_config(), folder=tmp_path)
    assert result.history[-1]["kl"] == 0


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning's own
def test_module_trains_the_noise_of_a_regression_with_any_trainer(tmp_path):
    from zeromean.training import ElboModule

    x = torch.randn(64, 1)
    likelihood = zm.GaussianLikelihood(1)
    module = ElboModule(
        zm.Linear(1, 1, posterior=zm.Additive),
        small_config(lr=0.1),
        num_data=64,
        steps_per_epoch=4,
        likelihood=likelihood,
    )
    batches = Batches(ImageSet(x, 3 * x, num_classes=1), 16, seed=0)
    plain_trainer(2, tmp_path).fit(module, batches)
    assert likelihood.log_noise_variance.item() != 0
    assert math.isfinite(module.averages.loss)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning's own
def test_lightnings_own_checkpoints_hold_the_average(tmp_path):
    from zeromean.training import ElboModule

    def train(epochs, **resume):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
        config = small_config(epochs=4, lr=0.1, average_epochs=1)
        module = ElboModule(model, config, num_data=60, steps_per_epoch=3)
        trainer = plain_trainer(epochs, tmp_path)
        trainer.fit(module, Batches(blobs(), 20, seed=0, shuffle=False), **resume)
        trainer.save_checkpoint(tmp_path / "lightning.ckpt")
        return module.weight_average.tensors

    whole = train(4)
    train(2)
    resumed = train(4, ckpt_path=tmp_path / "lightning.ckpt")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_run_is_silent_where_there_is_no_terminal(tmp_path, capfd):
    fit(small_network(), blobs(), small_config(), folder=tmp_path, progress=True)
    assert capfd.readouterr() == ("", "")


def test_progress_bar_shows_the_loss_on_a_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    fit(small_network(), blobs(), small_config(), folder=tmp_path, progress=True)
    assert "nll=" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"lr": 0.0}, "lr must be a positive number, got 0.0"),
        ({"lr": float("nan")}, "lr must be a positive number, got nan"),
        ({"seed": -1}, "seed must not be negative, got -1"),
        ({"beta": -1.0}, r"beta must be at least 0, got -1\.0"),
        ({"clip_log_alpha": (1.0, 0.0)}, r"clip_log_alpha must be \(low, high\)"),
        ({"clip_log_alpha": (0.0,)}, r"clip_log_alpha must be \(low, high\)"),
        ({"clip_log_alpha": (0.0, 1.0, 2.0)}, r"clip_log_alpha must be \(low, high\)"),
        ({"kl_warmup_epochs": float("nan")}, "kl_warmup_epochs must not be negative, got nan"),
        ({"epochs": float("inf")}, "epochs must be a whole number, got inf"),
        ({"scale_decay": -1.0}, r"scale_decay must be at least 0, got -1\.0"),
        ({"decay": "cosine"}, "decay must be one of linear, .*got 'cosine'"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**{"epochs": 1, **settings})


def test_metrics_that_json_cannot_hold_are_refused(tmp_path):
    with pytest.raises(TypeError, match="metric odd must be made of numbers"):
        fit(
            small_network(),
            blobs(),
            small_config(),
            folder=tmp_path,
            on_epoch=lambda epoch, model: {"odd": object()},
        )


def test_missing_lightning_names_the_extra(tmp_path, monkeypatch):
    from zeromean.training import trainer

    monkeypatch.setattr(trainer, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install '\.\[experiments\]'"):
        fit(small_network(), blobs(), small_config(), folder=tmp_path)


def test_importing_the_package_leaves_lightning_out(processes):
    code = "import sys, zeromean.training; sys.exit('lightning' in sys.modules)"
    processes.run([sys.executable, "-c", code])


def test_numbers_of_numpy_are_numbers(tmp_path):
    config = small_config(lr=np.logspace(-3, -2, 2)[0], seed=np.int64(3))
    first = fit(small_network(), blobs(), config, folder=tmp_path)
    again = fit(small_network(), blobs(), config, folder=tmp_path)
    assert_same_state(first.model, again.model)
    with pytest.raises(ValueError, match=r"epochs must be a whole number, got 2\.5"):
        small_config(epochs=2.5)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.last(self.second(self.first(x.flatten(1)[:, :4]).relu()))


def test_averages_of_tied_weights_are_loaded_as_they_were(tmp_path):
    config = small_config(average_epochs=1.0)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(fit(Tied(), blobs(), config, folder=tmp_path).model)
    assert_same_state(*models)
    assert models[1].first.weight is models[1].second.weight


def test_terminated_training_does_not_look_like_success(processes, tmp_path):
    script = KILLED_RUN.replace("SIGKILL", "SIGTERM").format(
        tests=str(Path(__file__).parent), folder=str(tmp_path)
    )
    command = [sys.executable, "-c", textwrap.dedent(script)]
    finished = processes.run(command, code=128 + signal.SIGTERM)
    assert "terminated; run again to go on after epoch 1" in finished.stderr


def test_folder_in_which_another_process_trains_is_refused(tmp_path):
    elsewhere, other = FileLock(tmp_path / "fit.lock"), small_network()

    def try_again():
        with pytest.raises(Timeout):
            elsewhere.acquire(timeout=0)
        with pytest.raises(ValueError, match="is being run by another process; wait for it"):
            fit(other, blobs(), small_config(), folder=tmp_path)

    result = fit(
        small_network(), blobs(), small_config(), folder=tmp_path, callbacks=[At(1, 2, try_again)]
    )
    whole = fit(small_network(), blobs(), small_config(), folder=tmp_path / "whole")
    assert_same_state(result.model, whole.model)
    elsewhere.acquire(timeout=0)  # Free again.
    elsewhere.release()


def test_empty_test_set_is_refused_before_training(tmp_path):
    data = blobs()
    with pytest.raises(ValueError, match="test set is empty"):
        fit(small_network(), data, small_config(), folder=tmp_path, test=data.subset([]))


def test_every_weight_of_a_recurrent_layer_has_its_log_alpha():
    model = nn.ModuleDict({"r": zm.LSTM(3, 4), "v": zm.Linear(4, 2)})
    metrics = layer_metrics(model)
    assert metrics.keys() == {
        "log_alpha/r.weight_ih_l0",
        "log_alpha/r.weight_hh_l0",
        "kl/r",
        "kl/v",
    }


def test_the_prior_winning_is_said(tmp_path):
    """A wide network on few images, with all of the KL from the start; with little, it learns."""
    from zeromean.training import CollapseWarning

    def wide():
        torch.manual_seed(0)
        layer = partial(zm.Linear, posterior=zm.Additive)
        return nn.Sequential(nn.Flatten(), layer(64, 300), nn.ReLU(), layer(300, 10))

    few = digits().subset(torch.arange(100))
    settings = {"epochs": 25, "batch_size": 50, "lr": 2e-2, "log_alpha_lr": 0.2}
    with pytest.warns(CollapseWarning, match="layer 1"):
        fit(wide(), few, TrainingConfig(**settings), folder=tmp_path / "a", progress=False)
    little = TrainingConfig(**settings, beta=0.01)
    result = fit(wide(), few, little, folder=tmp_path / "b", progress=False)  # No warning.
    assert result.history[-1]["nll"] < 1


def test_parameters_without_an_optimizer_are_refused(tmp_path):
    class Converts(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            zm.make_stochastic_(pl_module.model)

    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    config = TrainingConfig(epochs=1, batch_size=20)
    with pytest.raises(ValueError, match=r"1\.weight\.mean.*before the model was converted"):
        fit(model, blobs(), config, folder=tmp_path, callbacks=[Converts()], progress=False)


def test_optimizer_from_before_a_conversion_is_found():
    model = nn.Sequential(nn.Linear(4, 3))
    before = torch.optim.SGD(model.parameters(), lr=0.1)
    zm.require_optimized(model, before)
    zm.make_stochastic_(model)
    with pytest.raises(ValueError, match="No optimizer has"):
        zm.require_optimized(model, before)
    model[0].weight.requires_grad_(False)
    zm.require_optimized(model, before)


def test_ranks_of_one_training_draw_noise_of_their_own():
    from types import SimpleNamespace

    from zeromean.training import ElboModule

    drawn = []
    for rank, world_size in ((0, 2), (1, 2)):
        module = ElboModule(network(), CONFIG, num_data=100, steps_per_epoch=1)
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.1)]
        module._trainer = SimpleNamespace(
            world_size=world_size, global_rank=rank, optimizers=optimizers
        )
        torch.manual_seed(0)
        module.on_train_start()
        drawn.append(torch.randn(100))
    assert torch.corrcoef(torch.stack(drawn))[0, 1].abs() < 0.5
