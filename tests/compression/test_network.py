"""The annotated graph: what it says of its nodes stays true while it is rewritten."""

import pytest
import torch
from test_compress import network
from test_compress_random import RandomNetwork, zero_out_
from torch import nn

from zeromean.compression import analysis
from zeromean.compression.graph.network import Network
from zeromean.compression.graph.roles import Role
from zeromean.compression.graph.trace import trace
from zeromean.compression.plan import Reason
from zeromean.compression.rewrite.remove import remove_units_
from zeromean.compression.rewrite.sparsify import choose_layers_, join_chains_


def known(graph):
    return [(n.name, graph[n].role, graph[n].obstacle, graph[n].blocks) for n in graph.nodes]


@pytest.mark.parametrize("seed", range(12))
def test_annotations_are_those_of_a_new_look(seed):
    torch.manual_seed(seed)
    model = RandomNetwork(seed).eval()
    with torch.no_grad():
        zero_out_(model)
        graph = trace(model)
        found = analysis.analyse_(graph, None)
        assert known(graph) == known(Network(graph.module, {}))
        remove_units_(graph, found.units, found.needs)
        choose_layers_(graph)
        join_chains_(graph)
    assert known(graph) == known(Network(graph.module, {}))
    assert set(graph.decisions) >= {f"layers.{i}" for i, m in enumerate(model.layers) if i < 1}


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_states_are_known_by_what_picks_them(kind):
    def forward(self, x):
        output, last = self.recurrent(self.drop(x))
        last = self.drop(last[0] if kind is nn.LSTM else last)
        return output, last[-1], last.squeeze(0)

    model = network(forward, recurrent=kind(4, 5, 2, bidirectional=True), drop=nn.Dropout())
    graph = trace(model.eval())
    blocks = [graph[node].blocks for node in graph.nodes if graph.role(node) is Role.STATES]
    assert blocks == [range(2, 4), range(3, 4)]
    # Dropout is gone, so that the last states are what is picked from.
    bundles = [node for node in graph.nodes if graph.role(node) is Role.BUNDLE]
    assert len(bundles) == (2 if kind is nn.LSTM else 1)


def test_obstacles_are_reasons():
    model = network(
        lambda self, x: self.hooked(self.twice(self.twice(x))) + self.keyword(input=x),
        twice=nn.Linear(4, 4),
        hooked=nn.Linear(4, 4),
        keyword=nn.Linear(4, 4),
    )
    model.hooked.register_forward_hook(lambda module, inputs, output: output)
    graph = trace(model)
    obstacles = {graph.layer_name(n): graph[n].obstacle for n in graph.nodes if graph.layer(n)}
    assert obstacles == {
        "twice": Reason.CALLED_AGAIN,
        "hooked": Reason.HOOKS,
        "keyword": Reason.ARGUMENTS,
    }


def test_units_are_looked_for_once_in_every_state(monkeypatch):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)]
    looked = []

    def units(graph):
        looked.append(str(graph.module.graph))
        return found(graph)

    found = analysis.units
    monkeypatch.setattr(analysis, "units", units)
    analysis.analyse_(trace(nn.Sequential(*layers).eval()), None)
    assert len(looked) == 1
    folded = nn.Sequential(nn.Flatten(), *layers[:1], nn.BatchNorm1d(8), *layers[1:]).eval()
    analysis.analyse_(trace(folded), None)
    assert len(looked) == 3
    assert len(set(looked)) == 3
