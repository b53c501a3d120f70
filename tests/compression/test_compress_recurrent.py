"""Compression of LSTM and GRU: hidden units and inputs that nobody needs are gone."""

import itertools

import pytest
import torch
from test_compress import assert_same_predictions, network
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import zeromean as zm
from zeromean import export
from zeromean.compression.modules.adapters import RequireDim, SelectInputs

KINDS = (nn.LSTM, nn.GRU)
GEOMETRIES = [
    dict(zip(("num_layers", "bidirectional", "batch_first", "bias"), values, strict=True))
    for values in itertools.product((1, 2), (False, True), (False, True), (False, True))
]
NEW_VALUE = 2  # the gate behind the tanh, of both kinds


def last_states(self, x):
    last = self.recurrent(x)[1]
    return last[0] if isinstance(self.recurrent, nn.LSTM) else last


READINGS = {
    "every step": lambda self, x: self.recurrent(x)[0],
    "last step": lambda self, x: (
        self.recurrent(x)[0][:, -1] if self.recurrent.batch_first else self.recurrent(x)[0][-1]
    ),
    "mean": lambda self, x: self.recurrent(x)[0].mean(1 if self.recurrent.batch_first else 0),
    "last state": lambda self, x: last_states(self, x)[-1],
    "first state": lambda self, x: last_states(self, x)[0],
}


def reader(kind, reading, hidden_size=20, **geometry):
    recurrent = kind(12, hidden_size, **geometry)
    both = geometry.get("bidirectional") and "state" not in reading
    return network(
        lambda self, x: self.head(READINGS[reading](self, torch.relu(self.enter(x)))),
        enter=nn.Linear(7, 12),
        recurrent=recurrent,
        head=nn.Linear(hidden_size * (2 if both else 1), 5),
    )


def zero_out_(model, sparsity=0.93, biases=0.3):
    """Zeros in weights and, fewer, in the biases of recurrent layers."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            part = sparsity if parameter.dim() > 1 else biases * name.startswith("recurrent")
            parameter *= torch.rand_like(parameter) >= part
    return model


def recurrent_in(model):
    (layer,) = (m for m in model.modules() if isinstance(m, nn.RNNBase))
    return layer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reading", READINGS)
def test_compressed_recurrent_networks_predict_the_same(kind, reading):
    hidden = []
    for geometry in GEOMETRIES:
        model = zero_out_(reader(kind, reading, **geometry), sparsity=0.97)
        compressed = zm.compress(model)
        # As the plain network has it, for other lengths and batches too.
        assert_same_predictions(model, compressed, torch.randn(6, 9, 7), torch.randn(1, 3, 7))
        layer = recurrent_in(compressed)
        assert layer.input_size < 12
        hidden.append(layer.hidden_size)
    assert max(hidden) <= 20
    assert sum(hidden) < 0.8 * 20 * len(hidden)


@pytest.mark.parametrize("kind", KINDS)
def test_exactly_the_units_that_are_read_stay(kind):
    model = reader(kind, "last step", hidden_size=6, batch_first=True)
    gates = {
        name: parameter.data.unflatten(0, (-1, 6))
        for name, parameter in model.recurrent.named_parameters()
    }
    with torch.no_grad():
        model.enter.weight[3:] = 0
        model.enter.bias.copy_(torch.linspace(-1, 1, 12))  # constants, zero behind the ReLU or not
        model.head.weight[:, [0, 2, 3]] = 0  # nobody but the units themselves reads these
        gates["weight_hh_l0"].zero_()
        gates["weight_hh_l0"][0, 4, 2] = 1.0  # unit 4 reads unit 2
        gates["weight_hh_l0"][1, 0, 0] = 1.0  # unit 0 reads only itself
        for name in ("weight_ih_l0", "bias_ih_l0", "bias_hh_l0"):
            gates[name][NEW_VALUE, 5] = 0  # unit 5 is read, but silent
    compressed = zm.compress(model)
    layer = recurrent_in(compressed)
    assert (layer.input_size, layer.hidden_size) == (3, 3)  # units 1, 2 and 4
    assert_same_predictions(model, compressed, torch.randn(4, 8, 7))
    with torch.no_grad():
        gates["bias_ih_l0"][NEW_VALUE, 5] = 0.1  # It reads nothing, but changes with time.
    compressed = zm.compress(model)
    assert recurrent_in(compressed).hidden_size == 4
    assert_same_predictions(model, compressed, torch.randn(4, 8, 7))


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_stochastic_recurrent_layers_shrink_by_their_means(kind):
    model = network(
        lambda self, x: self.head(self.recurrent(x)[0][:, -1]),
        recurrent=getattr(zm, kind)(9, 24, batch_first=True),
        head=zm.Linear(24, 3, posterior=zm.Additive),
    )
    for layer in (model.recurrent, model.head):
        for posterior in layer.children():
            drowned = torch.rand(posterior.shape) < (0.98 if layer is model.recurrent else 0.8)
            posterior.log_variance.data += 40.0 * drowned
    zm.prune_(model)
    compressed = zm.compress(model, torch.randn(2, 5, 9))
    assert recurrent_in(compressed).hidden_size < 24
    assert_same_predictions(model, compressed, torch.randn(4, 6, 9))
    assert any(isinstance(m, SelectInputs) for m in compressed.modules())  # few inputs are read


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_direction_decides(kind, tmp_path):
    model = reader(kind, "every step", bidirectional=True, batch_first=True)
    with torch.no_grad():
        model.recurrent.weight_hh_l0.zero_()
        model.recurrent.weight_hh_l0_reverse.zero_()
        model.head.weight[:, 3:20] = 0
        model.head.weight[:, 29:] = 0
    compressed = zm.compress(model)
    assert recurrent_in(compressed).hidden_size == 9  # of 3 and 9
    x = torch.randn(4, 6, 7)
    assert_same_predictions(model, compressed, x)
    assert "the largest of its layers and directions decides" in str(
        zm.compression_report(model, compressed)
    )
    export.save_compressed(compressed, tmp_path / "m.safetensors")
    assert torch.equal(export.load_compressed(tmp_path / "m.safetensors")(x), compressed(x))


def test_states_that_others_read_stay_whole():
    recurrent = zero_out_(reader(nn.LSTM, "every step")).recurrent
    given = network(
        lambda self, x: self.recurrent(x, (x.new_zeros(1, x.size(1), 20),) * 2)[0],
        recurrent=recurrent,
    )
    returned = network(lambda self, x: self.recurrent(x)[1][1], recurrent=recurrent)
    for model, why in (
        (given, "it is called with more than one argument"),
        (returned, "all read by the output"),
    ):
        compressed = zm.compress(model)
        assert recurrent_in(compressed).hidden_size == 20
        assert_same_predictions(model, compressed, torch.randn(5, 3, 12))
        assert zm.compression_report(model, compressed)["recurrent"].note == why


def test_sequences_without_a_batch_are_right_or_refused():
    model = zero_out_(reader(nn.GRU, "last step", batch_first=True))
    compressed = zm.compress(model)
    assert any(isinstance(m, RequireDim) for m in compressed.modules())
    with pytest.raises(ValueError, match=r"of at least 3 dimensions here, got shape \(20, 20\)"):
        compressed(torch.randn(20, 7))  # as many steps as units: the last unit, not the last step
    model = zero_out_(reader(nn.GRU, "every step"))
    compressed = zm.compress(model)
    assert not any(isinstance(m, RequireDim) for m in compressed.modules())
    assert_same_predictions(model, compressed, torch.randn(20, 7), torch.randn(5, 2, 7))


def test_packed_sequences_are_read():
    model = network(lambda self, x: self.recurrent(x)[1].squeeze(0), recurrent=nn.GRU(12, 20))
    zero_out_(model)
    with torch.no_grad():
        model.recurrent.weight_ih_l0[:, 4:] = 0
    compressed = zm.compress(model)
    assert recurrent_in(compressed).input_size == 4
    packed = pack_sequence([torch.randn(n, 12) for n in (5, 3, 2)])
    torch.testing.assert_close(compressed(packed), model(packed))


def test_embedding_recurrence_and_head_lose_units_together():
    model = network(
        lambda self, tokens: self.head(self.recurrent(self.embedding(tokens))[0][:, -1]),
        embedding=nn.Embedding(50, 16, padding_idx=0),
        recurrent=nn.LSTM(16, 12, batch_first=True),
        head=nn.Linear(12, 3),
    )
    with torch.no_grad():
        model.embedding.weight[:, :6] = 0
        model.recurrent.weight_ih_l0[:, 13:] = 0
        model.recurrent.weight_hh_l0.zero_()
        model.head.weight[:, 5:] = 0
    compressed = zm.compress(model)
    assert compressed.embedding.weight.shape == (50, 7)
    layer = recurrent_in(compressed)
    assert (layer.input_size, layer.hidden_size) == (7, 5)
    assert_same_predictions(model, compressed, torch.randint(50, (4, 9)))


READINGS_OF_ALL_STATES = {
    "linear": (lambda self, h: self.head(h).mean(0), 1),
    "recurrent": (lambda self, h: self.head(self.second(h)[0][-1]), 1),
    "pointwise": (lambda self, h: self.head(torch.tanh(h)[-1]), 1),
    "flattened": (lambda self, h: self.head(torch.tanh(h).transpose(0, 1).flatten(1)), 2),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("reading", READINGS_OF_ALL_STATES)
@pytest.mark.parametrize("with_example", [False, True])
def test_who_reads_all_last_states_together_keeps_them(kind, bidirectional, reading, with_example):
    read, blocks = READINGS_OF_ALL_STATES[reading]
    model = network(
        lambda self, x: read(self, last_states(self, x)),
        recurrent=kind(7, 6, bidirectional=bidirectional),
        second=nn.GRU(6, 6),
        head=nn.Linear(6 * (blocks if bidirectional else 1), 5),
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "recurrent.weight_hh" in name:
                parameter.zero_()
        model.head.weight[:, 0] = 0
        model.second.weight_ih_l0[:, 0] = 0
    x = torch.randn(4, 3, 7)
    compressed = zm.compress(model, x if with_example else None)
    assert_same_predictions(model, compressed, x)
