"""Files that 0.1.0 wrote still load, and hold what they held then."""

import json
import shutil

import pytest
import torch
from torch import nn

import zeromean as zm
from old_networks import FOLDER, SavedNetwork
from zeromean import export
from zeromean.data import ImageSet
from zeromean.experiments.report.records import read_record
from zeromean.experiments.runs import records

INPUT = torch.linspace(-1, 1, 2 * 64).view(2, 1, 8, 8)
SEQUENCE = torch.linspace(-1, 1, 2 * 3 * 5).view(2, 3, 5)


@pytest.fixture(scope="module")
def expected():
    content = json.loads((FOLDER / "expected.json").read_text())
    return {name: torch.tensor(values) for name, values in content.items()}


def test_saved_network_of_0_1_0_loads(expected):
    model = zm.load(FOLDER / "saved.safetensors", SavedNetwork()).eval()
    with torch.no_grad(), zm.sampling(model, zm.mean):
        torch.testing.assert_close(model.states(SEQUENCE), expected["saved_states"])
    assert torch.equal(model.last.weight.scale, expected["saved_scale"])
    assert isinstance(model.gru, zm.GRU)
    assert model.first.prior == zm.Normal(scale=0.5)
    assert int(model.first.weight.mask.sum()) == 18
    assert model.last.weight.noise is zm.rademacher
    assert model.last.sampler is zm.weight
    assert model.last.prior is None


@pytest.mark.parametrize(("name", "inputs"), [("compressed", INPUT), ("graph", SEQUENCE)])
def test_compressed_network_of_0_1_0_loads(name, inputs, expected):
    model = export.load_compressed(FOLDER / f"{name}.safetensors")
    torch.testing.assert_close(model(inputs), expected[name])


def test_training_goes_on_from_a_checkpoint_of_0_1_0(expected, tmp_path):
    from zeromean.training import TrainingConfig, fit

    shutil.copytree(FOLDER / "checkpoint", tmp_path, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    data = ImageSet(torch.randn(60, 4, generator=generator), torch.arange(60) % 3, num_classes=3)
    model = nn.Sequential(
        zm.Linear(4, 8, posterior=zm.Additive), nn.BatchNorm1d(8), nn.ReLU(), zm.Linear(8, 3)
    )
    config = TrainingConfig(epochs=3, batch_size=20, lr=1e-2, seed=0, average_epochs=1.0)
    result = fit(model, data, config, folder=tmp_path, on_epoch=lambda *_: {}, progress=False)
    assert result.resumed_from == 2
    assert [row["epoch"] for row in result.history] == [1, 2, 3]
    state = result.model.state_dict()
    for name, key in (("resumed_bias", "3.bias"), ("resumed_running_mean", "1.running_mean")):
        torch.testing.assert_close(state[key], expected[name], rtol=1e-3, atol=1e-4)


def test_record_of_0_1_0_is_read():
    record = read_record(FOLDER / "records" / "fig5.json")
    assert (record.name, record.version, record.changed) == ("fig5", 1, False)
    assert [run.size for run in record.runs] == ["full"]
    assert record.runs[0].metrics["lost_at_98"] == pytest.approx(0.0, abs=0.2)
    shown = records.with_own_runs(FOLDER / "records", None, only=("fig5",))
    assert [run["seed"] for run in shown["fig5"]["runs"]] == [0]


def test_run_folder_of_0_1_0_is_read():
    assert records.status("linear_synthetic", FOLDER / "runs") == "1 smoke"
    (run,) = records.record_of("linear_synthetic", FOLDER / "runs")["runs"]
    assert (run["size"], run["seed"]) == ("smoke", 0)
    assert run["metrics"]["regression.rvm.relevance_accuracy"] == 1
