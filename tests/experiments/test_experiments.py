"""Every experiment at its smallest size, and the parts of them that can be wrong by themselves."""

import dataclasses
import fnmatch
import json

import pytest
import torch

import zeromean as zm
from zeromean.experiments import registry
from zeromean.experiments.networks import small_networks
from zeromean.experiments.report.notes import PLACEHOLDER
from zeromean.experiments.runs import records, runner
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.variance_networks import fig1, lenet, theorem1

# What a report can draw.
KINDS = {"line", "bar", "scatter", "histogram", "image"}
# Experiments whose notes are about metrics that the smallest size has not.
NEEDS_FULL_SIZE = {"deep_sea"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One folder for all, so that they share trained networks as in real life."""
    return tmp_path_factory.mktemp("experiments") / "runs"


@pytest.mark.parametrize("name", registry.REGISTRY)
def test_smoke_size_runs_and_is_recorded(name, runs):
    experiment = registry.load(name)
    place = runner.Place(runs=runs, progress=False)
    (folder,) = runner.run_experiment(name, experiment.SMOKE, place=place)
    assert (folder / "metrics.jsonl").stat().st_size > 0
    record = json.loads(json.dumps(records.record_of(name, runs), allow_nan=False))
    assert record["command"] == f"zeromean run {name} --smoke --seeds 0"
    assert record["figures"]
    # Times of a fast machine must not look like results, nor patterns match nothing.
    for pattern in getattr(experiment, "TIMINGS", ()):
        assert any(fnmatch.fnmatchcase(key, pattern) for key in record["runs"][0]["metrics"])
    # A note that names a metric which no run has would say that it was not measured.
    if name not in NEEDS_FULL_SIZE:
        measured = record["runs"][0]["metrics"]
        for note in getattr(experiment, "NOTES", ()):
            for kind, key, _ in PLACEHOLDER.findall(note):
                assert kind or key in measured, key
    for figure in record["figures"]:
        assert figure["traces"]
        for trace in figure["traces"]:
            assert trace["kind"] in KINDS
            if trace["kind"] not in ("histogram", "image"):
                assert len(trace["x"]) == len(trace["y"])


def test_interrupted_sweep_of_theorem_1_ends_with_the_same_rows(monkeypatch, tmp_path):
    def run(folder):
        folder.mkdir(exist_ok=True)
        torch.manual_seed(0)
        return theorem1.run(theorem1.SMOKE, RunLog(folder, progress=False))["rows"]

    expected = run(tmp_path / "whole")
    measure = theorem1._measure
    measured = []

    def interrupted(*arguments):
        if len(measured) == 4:
            raise KeyboardInterrupt
        measured.append(measure(*arguments))
        return measured[-1]

    monkeypatch.setattr(theorem1, "_measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "interrupted")
    monkeypatch.setattr(theorem1, "_measure", measure)
    assert run(tmp_path / "interrupted") == expected


@pytest.mark.parametrize("name", registry.REGISTRY)
def test_experiment_is_complete(name):
    experiment = registry.load(name)
    assert experiment.TITLE
    assert experiment.SOURCE
    assert experiment.CLAIMS
    assert all(claim.label for claim in experiment.CLAIMS)
    assert isinstance(experiment.COVERS, tuple)
    assert registry.version(name) >= 1
    config = experiment.Config()
    assert config.seed == 0
    assert isinstance(experiment.QUICK, experiment.Config)
    assert experiment.SMOKE != config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1
    assert getattr(experiment.SMOKE, "data", "digits") == "digits"


def test_fig2_has_the_exact_values(tmp_path):
    fig2 = registry.load("fig2")
    metrics = fig2.run(fig2.SMOKE, RunLog(tmp_path, progress=False))
    assert metrics["value_at_zero"]["log_uniform"] == pytest.approx(0.4266856, abs=1e-7)
    assert float(metrics["max_difference"]["approximation"]) < 0.0094
    assert metrics["decreasing"] == 1.0


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        ([[0, 1], [1, 2], [2, 3], [5, 6]], "repeating"),
        ([[0, 0], [1, -1], [2, -2], [5, -5]], "repeating"),
        ([[0, 0], [0, 5], [5, 0], [5, 5]], "orthogonal"),
        ([[0, 0], [0, 5], [4, 3], [5, 5]], "mixed"),
        ([[1, 0], [1, 5], [1, 3], [1, 5]], "repeating"),
    ],
)
def test_fig1_classifies_codes(levels, expected):
    kind = fig1.classify(
        torch.tensor(levels, dtype=torch.float64), repeating_above=0.8, orthogonal_below=0.4
    )
    assert kind == expected


def test_theorem1_bounds_hold_and_tighten(runs):
    place = runner.Place(runs=runs, progress=False)
    (folder,) = runner.run_experiment("theorem1", theorem1.SMOKE, place=place)
    metrics = json.loads((folder / "done.json").read_text())["metrics"]
    assert metrics["violations"] == 0
    rows = metrics["rows"]
    assert rows[-1]["log_alpha"] == pytest.approx(12)
    assert rows[-1]["change_max"] < rows[-1]["weight_space"] < 0.11
    assert all(row["weight_space"] <= row["paper"] + 1e-9 for row in rows)


def test_small_training_resumes_bit_for_bit(tmp_path):
    torch.manual_seed(0)
    inputs, labels = torch.randn(50, 64), torch.randint(0, 10, (50,))

    def stop(step):
        if step == 13:
            raise KeyboardInterrupt

    def train(checkpoint, before_step=None):
        torch.manual_seed(1)
        model = small_networks.digits_network(torch.nn.Linear)
        small_networks.train(
            model,
            inputs,
            labels,
            steps=20,
            batch_size=10,
            lr=1e-2,
            checkpoint=checkpoint,
            every=5,
            before_step=before_step,
        )
        return model.state_dict()

    whole = train(None)
    path = tmp_path / "checkpoint"
    with pytest.raises(KeyboardInterrupt):
        train(path, stop)
    resumed = train(path)
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def test_damaged_checkpoint_is_refused(tmp_path):
    path = tmp_path / "checkpoint"
    path.write_bytes(b"cut short")
    model = small_networks.digits_network(torch.nn.Linear)
    with pytest.raises(ValueError, match=r"is cut short or damaged\. Remove it"):
        small_networks.train(
            model,
            torch.randn(10, 64),
            torch.zeros(10, dtype=torch.int64),
            steps=1,
            batch_size=10,
            lr=1e-2,
            checkpoint=path,
        )


def test_experiments_share_trained_networks(tmp_path, monkeypatch):
    place = runner.Place(runs=tmp_path, progress=False)
    fig4, fig5 = registry.load("fig4"), registry.load("fig5")
    runner.run_experiment("fig4", fig4.SMOKE, place=place)
    looked = []
    monkeypatch.setattr(lenet, "look", lambda *args: looked.append(args) or {})
    config = dataclasses.replace(fig5.SMOKE, sparsities=(0.0, 0.5))
    runner.run_experiment("fig5", config, place=place)
    assert not looked


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("table1", {"parameterizations": ("layers",)}, "no parameterization 'layers'"),
        ("fig3", {"priors": ("flat",)}, "no prior 'flat'"),
        ("fig5", {"sparsities": (1.5,)}, "sparsities must lie between 0 and 1"),
        ("table1", {"data": "cifar"}, "cifar"),
        ("table1", {"train_size": 0}, "train_size must be at least 1"),
        ("variance_reduction", {"batch_sizes": (0,)}, "batch_sizes must lie between"),
    ],
)
def test_impossible_options_are_refused(name, change, message, tmp_path):
    smoke = registry.load(name).SMOKE
    place = runner.Place(runs=tmp_path, progress=False)
    with pytest.raises(ValueError, match=message):
        runner.run_experiment(name, dataclasses.replace(smoke, **change), place=place)


def test_logits_behind_an_antisymmetric_variance_layer_are_as_likely_as_their_negatives():
    """Why one sample of Table 3's network without a shift is right half of the time at best."""
    torch.manual_seed(0)
    model = lenet.Network(layers=("dense1",), activation="Tanh", bias=False).build().eval()
    images = torch.rand(6, 1, 28, 28)
    noise = zm.draw_noise(model)
    with torch.no_grad(), zm.held_noise(model, noise):
        logits = model(images)
    with torch.no_grad(), zm.held_noise(model, {n: -e for n, e in noise.items()}):
        torch.testing.assert_close(model(images), -logits)
