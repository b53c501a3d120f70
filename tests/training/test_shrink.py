"""Networks that one call makes smaller: what it promises of them, and what it refuses."""

import copy
import shutil
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import zeromean as zm
from zeromean import export
from zeromean.compression import speed
from zeromean.compression.export.int8_onnx import OnnxNetwork
from zeromean.compression.plan import Plan
from zeromean.training import ShrunkNetwork, Target, TargetMissedWarning, TrainingConfig, shrink
from zeromean.training.shrinking import measuring
from zeromean.training.shrinking.shrink import Search
from zeromean.training.shrinking.steps import Work, round_filters_

_WIDTHS = [f", {bits} bits" for bits in (8, 6, 5, 4)]
CONFIG = TrainingConfig(epochs=4, batch_size=20, lr=5e-3)


def labelled(count, seed):
    """Two classes, told apart by two of four pixels."""
    images = torch.randn(count, 1, 4, 4, generator=torch.Generator().manual_seed(seed))
    return images, (images[:, 0, 0, 0] + images[:, 0, 2, 2] > 0).long()


def trained():
    torch.manual_seed(0)
    model = nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(1, 16, 3, padding=1, bias=False),
            norm=nn.BatchNorm2d(16),
            relu=nn.ReLU(),
            flatten=nn.Flatten(),
            dense=nn.Linear(256, 24),
            tanh=nn.Tanh(),
            out=nn.Linear(24, 2),
        )
    )
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    x, y = labelled(500, 0)
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run for all tests that only look at it."""
    model, folder = trained(), tmp_path_factory.mktemp("shrink") / "run"
    before = copy.deepcopy(model.state_dict())
    options = {"config": CONFIG, "steps": 2, "pressure": 0.2, "sparse_weights": True}
    data = labelled(500, 0), labelled(300, 1)
    found = shrink(model, *data, target=Target(loss=100.0), folder=folder, **options)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert not model.training
    return model, found, data, options


def test_networks_get_smaller_and_stay_what_was_measured(run):
    model, found, (_, validation), _ = run
    names = [network.name for network in found.networks if "bits" not in network.name]
    assert names == ["original", "step 1", "step 1, sparse", "step 2", "step 2, sparse"]
    weights = [network.weights for network in found.networks if "bits" not in network.name]
    assert weights[0] > weights[1] > weights[2]
    assert weights[1] > weights[3] > weights[4]
    x, y = validation
    for network in found.networks:
        with torch.no_grad():
            accuracy = 100 * (network.model(x).argmax(1) == y).double().mean().item()
        assert network.score == pytest.approx(accuracy)
        assert all(time > 0 for time in network.milliseconds.values())
    times = {"torch 1", "torch 64", "onnxruntime 1", "onnxruntime 64"}
    assert set(found.original.milliseconds) == times
    # With any loss allowed, the fastest one is taken.
    key = "onnxruntime 64"
    fastest = min(n.milliseconds[key] for n in found.networks[1:])
    alike = [n for n in found.networks if n.milliseconds[key] == fastest]
    assert found.reached
    assert found.best in alike
    # Rounded weights take as long: of these the smallest file.
    assert found.best.file_size == min(n.file_size for n in alike)
    assert found.best.name in str(found)
    assert type(found.networks[1].model) is nn.Sequential
    assert model.conv.out_channels == 16


def named(found, name):
    return next(network for network in found.networks if network.name == name)


def test_rounded_networks_are_smaller_and_as_fast(run):
    _, found, _, _ = run
    of_steps = [network for network in found.networks if network.name.endswith(" bits")]
    assert of_steps
    for network in of_steps:
        exact = named(found, network.name.rpartition(", ")[0])
        assert network.milliseconds == exact.milliseconds
        assert network.file_size < exact.file_size
        # A quarter of a point, of all the loss that is allowed.
        assert network.score >= exact.score - 0.25
    assert "8 bits" in str(found) or "6 bits" in str(found) or "4 bits" in str(found)
    assert "onnxruntime multiplies by zeros as by other weights" in str(found)


def test_files_hold_the_network_that_is_taken(run):
    import onnxruntime

    _, found, _, _ = run
    x = torch.randn(7, 1, 4, 4)
    with torch.no_grad():
        expected = found.model(x)
    loaded = export.load_compressed(found.folder / "chosen.safetensors")
    torch.testing.assert_close(loaded(x), expected, atol=1e-5, rtol=1e-5)
    session = onnxruntime.InferenceSession(
        found.folder / "chosen.onnx", providers=["CPUExecutionProvider"]
    )
    (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(output), expected, atol=1e-5, rtol=1e-5)
    assert found.best.file_size == (found.folder / "chosen.safetensors").stat().st_size


def test_the_report_goes_from_the_first_network_to_the_last(run):
    model, found, _, _ = run
    report = zm.compression_report(model, named(found, "step 2").model)
    assert not report.replanned
    left = report["dense"].after[1]
    assert f"{24 - left} of 24 units gone" in report["dense"].note
    assert report["conv"].before == (1, 16)
    assert report["norm"].after is None


@pytest.fixture
def folder(run, tmp_path):
    """A copy of the run's: another target leaves another network in it."""
    return shutil.copytree(run[1].folder, tmp_path / "run")


def test_a_run_goes_on_in_its_folder_also_with_another_target(run, folder, monkeypatch):
    model, found, data, options = run
    monkeypatch.setattr(speed.time, "process_time", lambda: pytest.fail("measured again"))
    target = Target(file_size=10**6)
    again = shrink(model, *data, target=target, folder=folder, **options)
    # The first step is small enough, and all its networks are looked at, in every width.
    assert {n.name for n in again.networks} == {
        "original",
        *(f"step 1{s}{b}" for s in ("", ", sparse") for b in ("", *_WIDTHS)),
    }
    for network in again.networks:
        if network.name in {n.name for n in found.networks}:
            other = named(found, network.name)
            assert replace(network, model=None) == replace(other, model=None)
    assert again.best.score == max(network.score for network in again.networks[1:])


def test_a_target_out_of_reach_is_a_warning_with_the_best_there_was(run, folder):
    model, found, data, options = run
    with pytest.warns(
        TargetMissedWarning, match=r"not reached in \d+ networks; the nearest is step"
    ):
        nearest = shrink(model, *data, target=Target(file_size=10), folder=folder, **options)
    assert not nearest.reached
    assert nearest.best.file_size == min(n.file_size for n in nearest.networks)
    assert nearest.best.file_size <= min(n.file_size for n in found.networks)
    assert "not what was asked for" in str(nearest)


def test_pictures_are_drawn(run, tmp_path):
    _, found, _, _ = run
    found.save_picture(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def network(score, size, ms):
    return ShrunkNetwork("one", score, 1, size, {"torch 64": ms})


@pytest.mark.parametrize(
    ("target", "chosen", "met"),
    [
        (Target(), 2, True),  # The fastest without loss.
        (Target(loss=0.5), 3, True),
        (Target(speedup=4.0), 3, True),  # The most accurate of those that are fast enough.
        (Target(file_size=60), 2, True),
        (Target(speedup=8.0, loss=0.6), 3, False),  # The nearest without more loss.
        (Target(speedup=1000.0), 4, False),
        (Target(file_size=30, speedup=3.0), 3, True),
        (Target(file_size=2), 4, False),  # Not the one at chance, which is small enough.
    ],
)
def test_targets_choose(target, chosen, met):
    curve = [
        network(99.0, 100, 10.0),
        network(99.2, 80, 6.0),
        network(99.0, 50, 4.0),
        network(98.5, 20, 2.0),
        network(90.0, 5, 1.0),
        network(50.0, 1, 0.5),
    ]
    allowed = target.allowed_loss(0.1)
    assert target.choose(curve[0], curve, "torch 64", allowed) == chosen
    assert target.is_met(curve[0], curve[chosen], "torch 64", allowed) is met


@pytest.mark.parametrize(("kept", "rounded"), [(0, 0), (1, 4), (5, 4), (7, 8), (15, 16), (18, 18)])
def test_filters_come_by_fours(kept, rounded):
    model = nn.Sequential(nn.Conv2d(1, 18, 3), nn.ReLU(), nn.Conv2d(18, 2, 3))
    zm.add_unit_noise_(model, torch.rand(2, 1, 8, 8))
    noise = next(m for m in model.modules() if isinstance(m, zm.LogNormalDropout))
    noise.log_scale.data = torch.linspace(-5, -1, 18)
    noise.keep[kept:] = False
    round_filters_(model)
    assert noise.keep.tolist() == [i < rounded for i in range(18)]


def test_the_price_is_looked_for():
    """The largest price under a bound, from both sides, and never from above it."""
    for start in (0.1, 64.0):
        search, tried = Search(start), []
        while not search.is_over:
            tried.append(search.price)
            search = search.after(too_much=search.price > 3.0)
        assert search.paid <= 3.0 < search.ceiling < 1.1 * 3.0 * 1.1
        assert len(tried) < 20


def refuse(match, error=ValueError, model=None, train=None, validation=None, **options):
    model = trained() if model is None else model
    keys = set(model.state_dict())
    train = labelled(50, 0) if train is None else train
    validation = labelled(50, 1) if validation is None else validation
    with pytest.raises(error, match=match):
        shrink(model, train, validation, **options)
    assert set(model.state_dict()) == keys
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_validation_on_training_data_is_refused():
    data = TensorDataset(*labelled(50, 0))
    refuse("not trained on.*hold 50 of its 50", validation=labelled(50, 0))
    refuse("not trained on.*the training data", train=DataLoader(data), validation=DataLoader(data))
    overlapping = Subset(data, range(30)), Subset(data, range(29, 50))
    refuse("not trained on.*the training data", train=overlapping[0], validation=overlapping[1])


def test_an_untraceable_model_is_refused_with_its_line():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = trained()

        def forward(self, x):
            return self.inside(x if x.sum() > 0 else -x)

    refuse(r"line \d+ of .*test_shrink.py: return self.inside", model=Branching())


def test_what_cannot_run_is_said_before_training(monkeypatch):
    monkeypatch.setattr(speed, "has_onnxruntime", lambda: False)
    refuse(r"onnxruntime.*pip install", ImportError, target=Target(runtime="onnxruntime"))


def test_options_are_checked():
    refuse("target must be a zeromean.training.Target", TypeError, target=3.0)
    refuse("config must be a TrainingConfig", TypeError, config={"epochs": 3})
    refuse("pressure must be a positive number", pressure=0.0)
    refuse("steps", steps=0)
    for options, match in (
        ({"loss": -1.0}, "loss must be at least 0"),
        ({"batch_size": 7}, "batch_size must be 1 or 64"),
        ({"runtime": "tensorrt"}, "runtime"),
        ({"file_size": 0}, "file_size"),
    ):
        with pytest.raises((ValueError, TypeError), match=match):
            Target(**options)


@pytest.mark.parametrize("runtime", ["torch", "onnxruntime"])
def test_large_products_run_in_integers_where_that_is_faster(runtime, tmp_path, monkeypatch):
    """Times are made up, so that int8 is what is faster."""
    torch.manual_seed(0)
    layers = nn.Linear(16, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 2)
    model = nn.Sequential(*layers).requires_grad_(False)
    x = torch.randn(200, 16)
    margin = (model(x) * torch.tensor([1.0, -1.0])).sum(1).abs()
    x = x[margin > margin.median()]  # Which rounding does not change.
    validation = x, model(x).argmax(1)
    work = Work(
        train=None,
        validation=validation,
        likelihood=None,
        config=CONFIG,
        folder=tmp_path,
        example=x[:64],
        augment=None,
        progress=False,
    )
    faster = "int8"

    def milliseconds(calls):
        return {name: 1.0 if name.startswith(faster) else 2.0 for name in calls}

    monkeypatch.setattr(measuring, "milliseconds", milliseconds)
    measured = measuring.Measurements(work, model, Target(runtime=runtime))
    exact, *others = measured.network("step-1", "step 1", model, Plan({}, {}), 1.0)
    int8 = next(network for network in others if network.name == "step 1, int8")
    assert int8.score == exact.score == 100
    assert int8.milliseconds[f"{runtime} 64"] == exact.milliseconds[f"{runtime} 64"] / 2
    if runtime == "onnxruntime":
        assert int8.onnx_size < exact.onnx_size / 2
        found = OnnxNetwork(tmp_path / int8.folder / "network.onnx")(x)
    else:
        found = int8.model(x)
    assert 0 < float((found - model(x)).abs().max()) < 0.05 * float(model(x).abs().max())
    faster = "exact"  # Where integers are slower, there is no such network.
    _, *others = measured.network("step-2", "step 2", model, Plan({}, {}), 1.0)
    assert not any("int8" in network.name for network in others)
