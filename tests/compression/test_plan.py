"""The plan that a compressed network carries: typed, through copies, and read by the report."""

import copy
import io
import pickle

import pytest
import torch
from test_compress import network, zero_out
from torch import fx, nn

import zeromean as zm
from zeromean import export
from zeromean.compression import report as report_module
from zeromean.compression.plan import (
    Folded,
    PlannedLayer,
    Reader,
    Reason,
    UnitsLeft,
    Unknown,
    plan_of,
)


def pruned(layers, dead=3):
    model = nn.Sequential(*layers).eval()
    model[0].weight.data[:dead] = 0
    return model


def chain():
    return pruned([nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)])


def single():
    return zero_out(nn.Linear(90, 80), 0.97, dead=0)


def joined():
    return zero_out(nn.Sequential(nn.Linear(90, 80), nn.ReLU(), nn.Linear(80, 3)), 0.99, dead=0)


def graph():
    model = network(
        lambda self, x: self.last(self.norm(self.first(x)).cumsum(1)) + x.sum() * self.shift,
        first=nn.Linear(6, 8),
        norm=nn.LayerNorm(8),
        last=nn.Linear(8, 3),
    )
    model.shift = nn.Parameter(torch.randn(3))
    return zero_out(model, 0.5)


def torch_saved(network):
    file = io.BytesIO()
    torch.save(network, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "itself": lambda network: network,
    "deepcopy": copy.deepcopy,
    "pickle": lambda network: pickle.loads(pickle.dumps(network)),
    "pickled copy": lambda network: pickle.loads(pickle.dumps(copy.deepcopy(network))),
    "torch.save": torch_saved,
    "moved": lambda network: network.double(),
}


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("build", [chain, single, joined, graph])
def test_plan_goes_with_the_network(build, copied, monkeypatch):
    torch.manual_seed(0)
    model = build()
    compressed = zm.compress(model)
    keys = compressed.state_dict().keys()
    plan, twin = plan_of(compressed), COPIES[copied](compressed)
    assert plan_of(twin) == plan
    assert twin.state_dict().keys() == keys
    assert not any("plan" in name for name in keys)
    for name, layer in plan.layers.items():
        assert name in dict(model.named_modules())
        assert (layer.place is None) == isinstance(layer.decision, Folded)
        if layer.place is not None:
            assert type(twin.get_submodule(layer.place)) is not fx.GraphModule

    def no_second_compression(*_):
        raise AssertionError

    monkeypatch.setattr(report_module, "compressed_with_plan", no_second_compression)
    report = zm.compression_report(model, twin)
    assert not report.replanned
    notes = [row.note for row in report.layers]
    assert notes[: len(plan.layers)] == [layer.note for layer in plan.layers.values()]


def test_decisions_are_types():
    model = pruned(
        [
            *(nn.Conv1d(2, 8, 3), nn.BatchNorm1d(8), nn.ReLU()),
            *(nn.Conv1d(8, 8, 1, groups=2), nn.Conv1d(8, 6, 1), nn.GroupNorm(2, 6), nn.Flatten()),
            *(nn.Linear(24, 5), nn.Linear(5, 3)),
        ]
    )
    model[7].weight.data[:2] = 0
    plan = plan_of(zm.compress(model))
    assert plan.layers == {
        "0": PlannedLayer((2, 8), "0", UnitsLeft(0, 8, Reader("3", "Conv1d"))),
        "1": PlannedLayer((8,), None, Folded("0")),
        "3": PlannedLayer((8, 8), "3", Reason.GROUPS),
        "4": PlannedLayer((8, 6), "4", UnitsLeft(0, 6, Reader("5", "GroupNorm"))),
        "5": PlannedLayer((6,), "5", Unknown("GroupNorm")),
        "7": PlannedLayer((24, 5), "7", UnitsLeft(2, 5)),
        "8": PlannedLayer((5, 3), "8", UnitsLeft(0, 3, Reader())),
    }
    assert [layer.note for layer in plan.layers.values()] == [
        "all read by 3 (Conv1d)",
        "in the weights of 0",
        "a convolution of groups keeps its units",
        "all read by 5 (GroupNorm)",
        "GroupNorm stays as it is",
        "2 of 5 units gone",
        "all read by the output",
    ]
    assert plan.obstacle == ""


def test_plan_of_what_cannot_be_traced():
    def refuse(self, x):
        if isinstance(x, fx.Proxy):
            raise AssertionError  # without a word
        return self.layer(x)

    model = zero_out(network(refuse, layer=nn.Linear(90, 80)), 0.97)
    with pytest.warns(UserWarning, match=r"cannot trace the model \(AssertionError"):
        compressed = zm.compress(model)
    plan = plan_of(compressed)
    assert plan.untraced.startswith("AssertionError, in line")
    assert plan.layers == {"layer": PlannedLayer((90, 80), "layer")}
    report = zm.compression_report(model, compressed)
    assert not report.replanned
    assert report["layer"].storage == "sparse"


def test_layer_that_is_folded_in_one_of_its_places_is_still_there():
    model = network(
        lambda self, x: self.norm(self.noise(self.norm(self.noise(self.first(x))))),
        first=nn.Linear(6, 8),
        noise=zm.LogNormalDropout(8),
        norm=nn.LayerNorm(8),
    )
    model.noise.keep[:3] = False
    compressed = zm.compress(model)
    assert zm.compression_report(model, compressed)["noise"].after is not None


def test_report_of_last_states_behind_a_guard():
    model = network(
        lambda self, x: self.head(self.recurrent(x)[1]).mean(0),
        recurrent=nn.GRU(7, 6),
        head=nn.Linear(6, 5),
    )
    model.head.weight.data[:, 0] = 0
    x = torch.randn(4, 3, 7)
    report = zm.compression_report(model, zm.compress(model, x))
    assert report["recurrent"].after == (7, 6)
    assert "all read by" in report["recurrent"].note


def test_network_of_another_model_is_compared_with_compressing_again(tmp_path):
    compressed = zm.compress(chain())
    wider = pruned([nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 3)])
    report = zm.compression_report(wider, compressed)
    assert report.replanned  # The plan is of other sizes.
    other = pruned([nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)])
    with pytest.raises(ValueError, match=r"which does not go with .* of the model; pass what"):
        zm.compression_report(other, compressed)


def test_networks_without_a_plan_are_reported_as_they_are(tmp_path):
    model = joined()
    compressed = zm.compress(model)
    carried = zm.compression_report(model, compressed)
    export.save_compressed(compressed, tmp_path / "m.safetensors")
    loaded = export.load_compressed(tmp_path / "m.safetensors")
    assert plan_of(loaded) is None
    of_loaded = zm.compression_report(model, loaded)
    assert of_loaded.replanned
    assert of_loaded.layers == carried.layers
    old = copy.deepcopy(compressed)
    del old._compression_plan  # An older version left none.
    assert zm.compression_report(model, old) == of_loaded
