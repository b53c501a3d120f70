"""What the experiments on CIFAR share: settings, precision, the networks, what is measured."""

import dataclasses
import json
from functools import partial

import pytest
import torch
from torch import nn

import zeromean as zm
from zeromean import data
from zeromean.data import ImageSet
from zeromean.experiments import registry
from zeromean.experiments.networks import cifar, evaluation
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.sparse_networks.magnitude import prune_by_magnitude
from zeromean.experiments.variance_networks import fig3_vgg, kingma, post_linear

SMOKE = cifar.Settings(**cifar.SMOKE | {"epochs": 1})


@pytest.fixture
def log(tmp_path):
    return RunLog(tmp_path, progress=False)


def folders(log):
    return {
        path.parent.name: json.loads(path.read_text()) for path in log.models.glob("*/network.json")
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"precision": "half"}, "precision must be one of auto, float32, bfloat16, got 'half'"),
        ({"architecture": "alexnet"}, "architecture must be one of vgg, airbench"),
        ({"dropout": 2.0}, r"it must be in \[0, 2\), got 2.0"),
    ],
)
def test_bad_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMOKE, **change)


def test_precision_that_was_used_is_part_of_a_network_and_of_the_record(log, monkeypatch):
    monkeypatch.setattr("zeromean.training.precision.computes_in_bfloat16", lambda: False)
    assert cifar.precision_of(SMOKE) == "float32"
    assert cifar.bits(SMOKE) == 32
    wanted = dataclasses.replace(SMOKE, precision="bfloat16")
    with pytest.raises(ValueError, match=r"needs a CPU that computes in it .* precision='float32'"):
        cifar.train("net", cifar.DETERMINISTIC, wanted, log)
    cifar.train("net", cifar.DETERMINISTIC, SMOKE, log)
    (known,) = folders(log).values()
    assert known["precision"] == "float32"
    monkeypatch.setattr("zeromean.training.precision.computes_in_bfloat16", lambda: True)
    assert cifar.precision_of(SMOKE) == "bfloat16"
    assert cifar.bits(SMOKE) == 16
    # Said by hand it is the same network as chosen by the CPU.
    by_hand = dataclasses.replace(SMOKE, precision="float32")
    cifar.train("net", cifar.DETERMINISTIC, by_hand, log)
    assert len(folders(log)) == 1


def test_width_that_leaves_no_channels_is_said(log):
    narrow = dataclasses.replace(SMOKE, width=1e-3)
    with pytest.raises(ValueError, match=r"width=0.001 leaves no channels .* at least 0.008"):
        cifar.train("net", cifar.DETERMINISTIC, narrow, log)


def test_labels_outside_of_the_classes_are_said(log, monkeypatch):
    def wrong(name, split="train", **options):
        return ImageSet(torch.rand(60, 3, 32, 32), torch.arange(60) % 11, num_classes=10)

    monkeypatch.setattr(data, "load", wrong)
    with pytest.raises(ValueError, match=r"Labels must be from 0 to 9, .* got 0 to 10"):
        cifar.train("net", cifar.DETERMINISTIC, SMOKE, log)


def test_folder_without_cifar_is_said(tmp_path, monkeypatch):
    def offline(*args, **options):
        raise OSError("there is no network")

    monkeypatch.setattr("zeromean.data.loading.provide", offline)
    log = RunLog(tmp_path / "run", data_dir=tmp_path / "empty", progress=False)
    settings = dataclasses.replace(SMOKE, data="cifar10")
    with pytest.raises(FileNotFoundError, match=r"cifar10 is not complete in .*empty.*no network"):
        cifar.train("net", cifar.DETERMINISTIC, settings, log)


def test_points_are_no_images(log):
    with pytest.raises(ValueError, match="these networks read images, which toy has none of"):
        cifar.images(dataclasses.replace(SMOKE, data="toy"), "test", log)


@pytest.mark.parametrize("architecture", cifar.ARCHITECTURES)
def test_variance_networks_have_noise_in_the_last_layers_alone(architecture):
    settings = dataclasses.replace(SMOKE, architecture=architecture, width=0.1, dropout=0.5)
    images = torch.rand(20, 3, 32, 32)
    network = cifar.VARIANCE.build(settings, images, 7)
    names = cifar.LAST_LAYERS[architecture]
    assert tuple(zm.stochastic_layers(network)) == names
    assert list(evaluation.log_alphas(network).values()) == pytest.approx([-10.0] * len(names))
    assert network(images).shape == (20, 7)
    rates = {m.p for m in network.modules() if isinstance(m, nn.Dropout)}
    assert rates == ({0.15, 0.2, 0.25} if architecture == "vgg" else {0.1})
    plain = cifar.DETERMINISTIC.build(settings, images, 7)
    assert not any(isinstance(m, nn.Dropout) for m in plain.modules())


def test_five_guesses_count_where_the_label_is_among_them():
    proba = torch.tensor([[0.5, 0.3, 0.1, 0.06, 0.03, 0.01]]).expand(6, -1)
    labels = torch.arange(6)
    assert evaluation.top_accuracy(proba, labels) == pytest.approx(100 / 6)
    assert evaluation.top_accuracy(proba, labels, 5) == pytest.approx(500 / 6)
    assert evaluation.top_accuracy(proba, labels, 50) == 100


def test_measures_of_many_classes_have_five_guesses():
    images = ImageSet(torch.rand(40, 3, 32, 32), torch.arange(40), num_classes=100)
    network = cifar.DETERMINISTIC.build(SMOKE, images.images, 100).eval()
    trained = cifar.Trained(network, [], images, images)
    row = cifar.measure(trained, SMOKE)
    assert row["top5_averaged"] >= row["accuracy_averaged"]
    assert row["accuracy_1"] == row["accuracy_mean"]  # There is no noise.


@pytest.mark.parametrize(
    ("accuracies", "passes"),
    [([10, 20, 70, 80, 40, 10], 5), ([10, 20, 30, 45], 4), ([10, 70, 80, 85], 4), ([90, 49], 2)],
)
def test_transition_is_after_the_means_have_known_something(accuracies, passes):
    assert fig3_vgg.transition(accuracies) == passes


def test_readings_of_alpha_are_each_there_once_after_a_resume(tmp_path, monkeypatch):
    settings = dataclasses.replace(kingma.SMOKE, epochs=2, train_size=64)
    layer = partial(zm.Linear, posterior=zm.Multiplicative, prior=zm.LogUniform())

    def train(folder):
        log = RunLog(tmp_path / folder, progress=False)
        return kingma.train("net", {}, layer, settings, log).history

    whole = train("whole")
    look, seen = cifar.look, []

    def stop(few, epoch, model):
        seen.append(epoch)
        if seen == [1, 2]:
            raise KeyboardInterrupt
        return look(few, epoch, model)

    monkeypatch.setattr(cifar, "look", stop)
    with pytest.raises(KeyboardInterrupt):
        train("cut")
    resumed = train("cut")
    readings = [[row["iteration"] for row in each["readings"]] for each in resumed]
    assert readings == [[1, 2], [3, 4]]
    assert [row["readings"] for row in resumed] == [row["readings"] for row in whole]


def test_noise_behind_the_product_has_the_moments_of_noise_in_front_of_it():
    torch.manual_seed(0)
    pre, post = (post_linear._layer(kind, 0.5, 30, 3) for kind in ("pre", "post"))
    with torch.no_grad():
        post.weight.mean.copy_(pre.linear.weight)
        post.bias.copy_(pre.linear.bias)
        x = torch.rand(1, 30).expand(20_000, -1)
        draws = {"pre": pre(x), "post": post(x)}
    assert not post.weight.log_alpha.requires_grad
    scale = draws["pre"].std(0)
    difference = draws["pre"].mean(0) - draws["post"].mean(0)
    assert (difference.abs() < 5 * scale * (2 / 20_000) ** 0.5).all()
    # A variance of 20,000 normal draws is known to 1%.
    ratio = draws["pre"].var(0) / draws["post"].var(0)
    torch.testing.assert_close(ratio, torch.ones(3), atol=0.07, rtol=0)


def test_pruning_by_magnitude_keeps_the_largest_weights_of_all_layers():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    weights = torch.cat([p.flatten() for p in network.parameters() if p.dim() > 1])
    seen = []

    def retrain(model, steps):
        seen.append(steps)
        return model

    found = list(prune_by_magnitude(network, [2.0, 4.0], retrain))
    assert seen == [[2.0], [2.0, 4.0]]
    assert [compression for compression, _ in found] == [2.0, 4.0]
    left = torch.cat([module.weight.flatten() for module in found[-1][1]])
    smallest = weights.abs().sort(descending=True).values[19]
    assert torch.equal(left != 0, weights.abs() >= smallest)
    assert not hasattr(network[0], "weight_orig")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("fig3_vgg", {"priors": ("flat",)}, "no prior 'flat'"),
        ("sparse_vgg", {"widths": (0.2, 0.1)}, "widths must rise"),
        ("ensemble_networks", {"variance": 0}, "variance must be at least 1"),
        ("sparse_resnet", {"depth": 9}, r"depth must be 6n \+ 2"),
    ],
)
def test_impossible_options_are_refused(name, change, message, log):
    experiment = registry.load(name)
    with pytest.raises(ValueError, match=message):
        experiment.run(dataclasses.replace(experiment.SMOKE, **change), log)
