"""Noise on the hidden units of LSTM and GRU, and plain layers with fewer of them."""

import copy
import pickle

import pytest
import torch
from test_add_unit_noise import drown_
from test_compress import assert_same_predictions
from test_export import in_onnxruntime
from torch import nn

import zeromean as zm
from zeromean import export
from zeromean.layers.dropout.hidden_noise import HiddenNoise, attach_hidden_, take_hidden_noise_


class Reader(nn.Module):
    """Reads tokens, and answers by its output or by its last state."""

    def __init__(self, kind, layers=1, bidirectional=False, batch_first=True, by_state=False):
        super().__init__()
        options = {"bidirectional": bidirectional, "batch_first": batch_first}
        self.embed, self.rnn = nn.Embedding(20, 10), kind(10, 12, layers, **options)
        directions = 2 if bidirectional and not by_state else 1
        self.hidden, self.out = nn.Linear(12 * directions, 9), nn.Linear(9, 3)
        self.by_state, self.batch_first = by_state, batch_first
        self.pair = kind in (nn.LSTM, zm.LSTM)

    def forward(self, x):
        features = self.embed(x)
        features = features if self.batch_first else features.transpose(0, 1)
        output, last = self.rnn(features)
        if self.by_state:
            answer = (last[0] if self.pair else last)[-1]
        else:
            answer = output[:, -1] if self.batch_first else output[-1]
        return self.out(self.hidden(answer).relu())


READERS = {
    "LSTM": lambda: Reader(nn.LSTM),
    "GRU": lambda: Reader(nn.GRU, by_state=True),
    "two layers": lambda: Reader(nn.GRU, 2, batch_first=False),
    "both directions": lambda: Reader(nn.LSTM, 2, True),
    "last state": lambda: Reader(nn.LSTM, 2, True, False, by_state=True),
    "random weights": lambda: Reader(zm.LSTM, 2),
}


def tokens(count, length=7):
    return torch.randint(20, (count, length))


def noisy(name):
    torch.manual_seed(0)
    model = READERS[name]().eval()
    return model, zm.add_unit_noise_(model, tokens(2))


@pytest.mark.parametrize("name", READERS)
def test_dead_units_are_gone_from_plain_networks_and_their_files(name, tmp_path):
    model, report = noisy(name)
    blocks = model.rnn.num_layers * (1 + model.rnn.bidirectional)
    assert [(g.units, g.makers) for g in report.groups] == [
        (12 * blocks, ("rnn",)),
        (10, ("embed",)),
        (9, ("hidden",)),
    ]
    assert set(report.groups[0].readers) == {"rnn", "hidden"}
    drown_(model)
    small = zm.compress(model, tokens(3))
    assert_same_predictions(model, small, tokens(1), tokens(5), tokens(4, 9))
    assert small.rnn.hidden_size < 12
    assert small.rnn.input_size < 10
    x = tokens(4)
    export.save_compressed(small, tmp_path / "small.safetensors")
    assert torch.equal(export.load_compressed(tmp_path / "small.safetensors")(x), small(x))
    zm.save(model, tmp_path / "noisy.safetensors")
    loaded = zm.load(tmp_path / "noisy.safetensors", READERS[name]()).eval()
    with zm.sampling(model, zm.mean), zm.sampling(loaded, zm.mean):
        assert torch.equal(loaded(x), model(x))
    torch.manual_seed(1)
    drawn = model(x)
    torch.manual_seed(1)
    assert torch.equal(loaded(x), drawn)
    assert_same_predictions(model, zm.to_deterministic(model), x)


def test_onnxruntime_runs_what_is_left(tmp_path):
    model, _ = noisy("LSTM")
    drown_(model)
    small = zm.compress(model, tokens(3))
    export.save_onnx(small, tmp_path / "m.onnx", tokens(2))
    x = tokens(5)
    found = in_onnxruntime(tmp_path / "m.onnx")(x)
    torch.testing.assert_close(found, small(x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_noise_multiplies_the_state_that_the_layer_reads(kind, bidirectional):
    """Step by step, with the state multiplied between one step and the next."""
    torch.manual_seed(0)
    layer = kind(3, 4, bidirectional=bidirectional)
    noise = zm.LogNormalDropout(4, location=-0.5, log_scale=-1.0)
    plain = copy.deepcopy(layer)
    index = torch.arange(4).repeat(1 + bidirectional)
    attach_hidden_(layer, HiddenNoise(noise, index))
    noise.sampler = zm.mean
    x = torch.randn(5, 2, 3)
    found, _ = layer(x)
    scale = noise.mean()
    cell = (nn.LSTMCell if kind is nn.LSTM else nn.GRUCell)(3, 4)
    for suffix, steps, part in (("", x, found[..., :4]), ("_reverse", x.flip(0), found[..., 4:])):
        if suffix and not bidirectional:
            continue
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            getattr(cell, name).data = getattr(plain, f"{name}_l0{suffix}").data
        state, outputs = (torch.zeros(2, 4),) * 2, []
        for step in steps:
            if kind is nn.LSTM:
                state = cell(step, (scale * state[0], state[1]))
            else:
                # The part of the state that is kept has no noise: what is read has.
                new = cell(step, scale * state[0])
                update = torch.sigmoid(
                    step @ cell.weight_ih[4:8].t()
                    + cell.bias_ih[4:8]
                    + (scale * state[0]) @ cell.weight_hh[4:8].t()
                    + cell.bias_hh[4:8]
                )
                state = (new + update * (1 - scale) * state[0],)
            outputs.append(state[0])
        outputs = torch.stack(outputs[::-1] if suffix else outputs)
        torch.testing.assert_close(part, outputs, atol=1e-6, rtol=1e-5)


def test_the_layer_has_its_own_weights_between_calls():
    model, _ = noisy("two layers")
    layer, x = model.rnn, tokens(3)
    assert type(layer) is nn.GRU
    with pytest.raises(RuntimeError):
        model.rnn(torch.zeros(2, 3, 4))
    own = [getattr(layer, name) for name in layer._flat_weights_names]
    assert all(a is b for a, b in zip(layer._flat_weights, own, strict=True))
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.manual_seed(0)
        expected = model(x)
        torch.manual_seed(0)
        assert torch.equal(again(x), expected)
        assert not torch.equal(again(x), expected)
    assert set(take_hidden_noise_(model)) == {"rnn"}
    assert not layer._forward_hooks
    assert torch.isfinite(model(x)).all()


@pytest.mark.parametrize("name", ["LSTM", "random weights"])
def test_noise_is_trained_and_predicts(name):
    model, _ = noisy(name)
    (model(tokens(3)).square().sum() + zm.kl_divergence(model)).backward()
    noises = [m for m in model.modules() if isinstance(m, zm.LogNormalDropout)]
    assert len(noises) == 3
    assert all(noise.log_scale.grad.abs().min() > 0 for noise in noises)
    x = tokens(4)
    predicted = zm.predict_proba(model, x, 3, seed=0)
    assert torch.equal(zm.predict_proba(model, x, 3, seed=0), predicted)
    torch.testing.assert_close(predicted.sum(1), torch.ones(4))


def test_units_that_somebody_needs_as_a_whole_stay():
    class Normed(Reader):
        def forward(self, x):
            return self.out(self.norm(self.rnn(self.embed(x))[0][:, -1]))

    model = Normed(nn.LSTM)
    model.norm, model.out = nn.LayerNorm(12), nn.Linear(12, 3)
    report = zm.add_unit_noise_(model, tokens(2))
    assert [group.makers for group in report.groups] == [("embed",)]
    assert "norm (LayerNorm)" in report.left["rnn"]
