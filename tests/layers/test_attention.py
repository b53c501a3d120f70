"""`zm.MultiheadAttention` next to torch's: the same means and masks, with random projections."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import zeromean as zm
from cases import POSTERIORS, PRIORS, SAMPLERS, is_allowed
from zeromean.samplers.linear_maps import Projections

GEOMETRIES = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False, "batch_first": True},
    "other sizes": {"kdim": 5, "vdim": 6, "batch_first": True},
    "further keys": {"add_bias_kv": True, "add_zero_attn": True},
    "one more key": {"add_bias_kv": True, "batch_first": True},
}
every_geometry = pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
every_posterior = pytest.mark.parametrize("posterior", POSTERIORS.values(), ids=POSTERIORS)
CALLS = {
    "self-attention": lambda q, k, v: (q, q, q),
    "memory": lambda q, k, v: (q, k, k),
    "all differ": lambda q, k, v: (q, k, v),
    "other values": lambda q, k, v: (k, k, v),
}


def pair(**options):
    """torch's layer, and ours with its weights as means."""
    plain = nn.MultiheadAttention(8, 2, **options)
    for bias in (plain.in_proj_bias, plain.out_proj.bias):
        if bias is not None:
            nn.init.normal_(bias)  # torch starts them at zero.
    model = nn.Sequential(copy.deepcopy(plain))
    report = zm.make_stochastic_(model, posterior=partial(zm.Additive, log_variance=-3.0))
    assert report.converted == ["0"]
    assert not report.left
    return plain, model[0]


def inputs(length=3, source=4, *, batch_first=False, kdim=8, vdim=8, **_):
    q, k, v = torch.randn(2, length, 8), torch.randn(2, source, kdim), torch.randn(2, source, vdim)
    return [q, k, v] if batch_first else [x.transpose(0, 1) for x in (q, k, v)]


def masks(length, source, heads=2):
    padding = torch.zeros(2, source, dtype=torch.bool)
    padding[1, -1] = True
    hidden = torch.rand(length, source) < 0.3
    hidden[:, 0] = False
    hidden_from_each = torch.rand(2 * heads, length, source) < 0.3
    hidden_from_each[:, :, 0] = False
    as_numbers = torch.zeros(length, source).masked_fill(hidden, -1.5)
    return [
        {},
        {"key_padding_mask": padding},
        {"attn_mask": hidden},
        {"attn_mask": hidden_from_each, "key_padding_mask": padding},
        {"attn_mask": as_numbers, "key_padding_mask": padding.float()},
        {"need_weights": False},
        {"need_weights": False, "attn_mask": hidden, "key_padding_mask": padding},
        {"average_attn_weights": False},
    ]


@every_geometry
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_means_are_what_torch_computes(geometry, call):
    if "kdim" in geometry and call is not CALLS["all differ"]:
        return
    plain, layer = pair(**geometry)
    given = call(*inputs(**geometry))
    length, source = (x.shape[1 if geometry.get("batch_first") else 0] for x in given[:2])
    for options in masks(length, source):
        expected, weights = plain(*given, **options)
        with zm.sampling(layer, zm.mean):
            output, own_weights = layer(*given, **options)
        torch.testing.assert_close(output, expected)
        assert (own_weights is None) == (weights is None)
        if weights is not None:
            torch.testing.assert_close(own_weights, weights)


@pytest.mark.parametrize("need_weights", [True, False])
def test_one_sequence_and_a_causal_hint_are_as_in_torch(need_weights):
    for further in (False, True):
        plain, layer = pair(add_zero_attn=further, batch_first=True)
        for x in (torch.randn(5, 8), torch.randn(2, 5, 8)):
            mask = nn.Transformer.generate_square_subsequent_mask(5)
            with zm.sampling(layer, zm.mean):
                output, weights = layer(
                    x, x, x, attn_mask=mask, is_causal=True, need_weights=need_weights
                )
            # Without the hint: torch's own loses the keys behind the mask with it.
            expected = plain(x, x, x, attn_mask=mask, need_weights=need_weights)
            torch.testing.assert_close(output, expected[0])
            assert (weights is None) == (not need_weights)
            if need_weights:
                torch.testing.assert_close(weights, expected[1])


@every_posterior
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("call", ["self-attention", "memory"])
def test_every_posterior_and_sampler_trains_or_is_refused(posterior, sampler, call):
    name = next(n for n, p in POSTERIORS.items() if p is posterior)
    options = {"posterior": posterior, "prior": None, "sampler": SAMPLERS[sampler]}
    if not is_allowed(name, "None", sampler):
        with pytest.raises(ValueError, match=r"needs (normal|symmetric) noise"):
            zm.MultiheadAttention(8, 2, **options)
        return
    layer = zm.MultiheadAttention(8, 2, batch_first=True, **options)
    given = CALLS[call](*inputs(batch_first=True))
    output, _ = layer(*given)
    output.square().mean().backward()
    grads = {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}
    assert all(grad.isfinite().all() for grad in grads.values())
    if sampler != "mean":
        assert grads.keys() == {n for n, _ in layer.named_parameters()}
    samples = zm.sample_outputs(layer, given, 3, select=lambda output: output[0])
    assert samples.shape == (3, *output.shape)
    assert sampler == "mean" or (samples[0] != samples[1]).any()


def test_projections_drawn_locally_have_the_moments_of_drawn_weights():
    op = Projections((3, 4), (2, 5))
    posterior = zm.Additive((7, 6), log_variance=-1.0, dtype=torch.float64)
    x, bias = torch.randn(2, 7, 6, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    with torch.no_grad():
        mean, variance = op.moments(x, posterior, bias)
        for sampler in (zm.local, zm.weight, zm.flipout):
            drawn = torch.stack([sampler(op, x, posterior, bias) for _ in range(4000)])
            error = (variance / 4000).sqrt()
            assert ((drawn.mean(0) - mean).abs() < 5 * error).all()
            assert ((drawn.var(0) / variance - 1).abs() < 0.2).all()
    first, second = op.split(op(x, posterior.mean, bias))
    torch.testing.assert_close(first, nn.functional.linear(x[:, :3], posterior.mean[:2], bias[:2]))
    torch.testing.assert_close(second, nn.functional.linear(x[:, 3:], posterior.mean[2:], bias[2:]))


def test_one_weight_is_drawn_for_queries_keys_and_values_together():
    layer = zm.MultiheadAttention(
        8, 2, batch_first=True, posterior=partial(zm.Additive, log_variance=-1.0), sampler=zm.weight
    )
    q, k, _ = inputs(batch_first=True)
    with zm.held_noise(layer) as held:
        plain = nn.MultiheadAttention(8, 2, batch_first=True)
        state = {name: p(held.noise[name]) for name, p in layer.posteriors().items()}
        plain.load_state_dict(state | dict(layer.biases()))
        torch.testing.assert_close(layer(q, k, k)[0], plain(q, k, k)[0])
    with zm.held_noise(layer, num_objects=2):  # A network for each sequence.
        a = layer(q, k, k)[0]
        b = layer(q, k.clone(), k.clone())[0]
        torch.testing.assert_close(a, b)


def test_kl_is_the_sum_over_all_projections_and_counts_once():
    for geometry in (GEOMETRIES["plain"], GEOMETRIES["other sizes"]):
        layer = zm.MultiheadAttention(8, 2, prior=zm.Normal(scale=0.5), **geometry)
        posteriors = layer.posteriors().values()
        assert len(posteriors) == (4 if "kdim" in geometry else 2)
        expected = sum(
            torch.distributions.kl_divergence(
                torch.distributions.Normal(p.mean, (0.5 * p.log_variance).exp()),
                torch.distributions.Normal(0.0, 0.5),
            ).sum()
            for p in posteriors
        )
        model = nn.ModuleList([layer, layer])
        torch.testing.assert_close(zm.kl_divergence(model), expected)
        assert list(zm.kl_by_layer(model)) == ["0"]


@pytest.mark.parametrize("prior", [p for p in PRIORS if is_allowed("Additive", p, "weight")])
def test_priors_are_those_of_other_layers(prior):
    layer = zm.MultiheadAttention(4, 2, prior=PRIORS[prior])
    assert zm.kl_divergence(layer).isfinite()
    assert f"prior={PRIORS[prior]}" in repr(layer)


def test_state_dict_keys_are_torchs_names():
    layer = zm.MultiheadAttention(4, 2, add_bias_kv=True)
    assert set(layer.state_dict()) == {
        "in_proj_weight.mean",
        "in_proj_weight.log_variance",
        "in_proj_bias",
        "bias_k",
        "bias_v",
        "out_proj.weight.mean",
        "out_proj.weight.log_variance",
        "out_proj.bias",
    }
    names = {"q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"}
    assert set(zm.MultiheadAttention(4, 2, kdim=3).posteriors()) == names


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        decoder = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(encoder, 2)
        self.decoder = nn.TransformerDecoder(decoder, 1)

    def forward(self, source, target):
        memory = self.encoder(self.embedding(source), src_key_padding_mask=source == 0)
        length = target.shape[1]
        causal = nn.Transformer.generate_square_subsequent_mask(length, target.device)
        return self.decoder(
            self.embedding(target), memory, tgt_mask=causal, memory_key_padding_mask=source == 0
        )


SOURCE = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]])
TARGET = torch.tensor([[1, 2, 3], [3, 2, 1]])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_transformers_are_converted_and_predict_by_means_as_before():
    plain = Seq2Seq().eval()
    model = copy.deepcopy(plain)
    report = zm.make_stochastic_(model)
    attention = {n for n, m in model.named_modules() if isinstance(m, zm.MultiheadAttention)}
    assert attention == {
        "encoder.layers.0.self_attn",
        "encoder.layers.1.self_attn",
        "decoder.layers.0.self_attn",
        "decoder.layers.0.multihead_attn",
    }
    assert attention <= set(report.converted)
    assert all("LayerNorm" in why for why in report.left.values())
    with torch.no_grad():  # Where torch's fast path would read the weights.
        expected = plain(SOURCE, TARGET)
        with zm.sampling(model, zm.mean):
            torch.testing.assert_close(model(SOURCE, TARGET), expected)
        assert not torch.equal(model(SOURCE, TARGET), model(SOURCE, TARGET))
        back = zm.to_deterministic(model)
        assert type(back.encoder.layers[0].self_attn) is nn.MultiheadAttention
        assert back.state_dict().keys() == plain.state_dict().keys()
        torch.testing.assert_close(back(SOURCE, TARGET), expected)
        one = zm.to_deterministic(model, weights="sample")
        assert not torch.equal(one(SOURCE, TARGET), expected)


def test_a_layer_put_in_by_hand_keeps_torchs_fast_path_off():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
    layer.self_attn = zm.MultiheadAttention(8, 2, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 3, 8)
    padding = torch.tensor([[False, False, False], [False, False, True]])
    with torch.no_grad():
        for model, options in ((layer, {}), (encoder, {"src_key_padding_mask": padding})):
            assert not torch.equal(model(x, **options), model(x, **options))


def test_predictions_are_vectorized_and_seeded():
    model = Seq2Seq()
    zm.make_stochastic_(model, posterior=partial(zm.Additive, log_variance=-4.0))
    first = zm.sample_outputs(model, (SOURCE, TARGET), 6, seed=1)
    assert first.shape == (6, 2, 3, 8)
    torch.testing.assert_close(first, zm.sample_outputs(model, (SOURCE, TARGET), 6, seed=1))
    assert first.std(0).min() > 0
    by_weight = zm.sample_outputs(model, (SOURCE, TARGET), 3, sampler=zm.weight, batch_size=1)
    assert by_weight.shape == (3, 2, 3, 8)


def test_dropout_of_attention_is_on_in_predictions_and_off_with_means():
    layer = zm.MultiheadAttention(8, 2, dropout=0.5, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    plain = zm.to_deterministic(nn.Sequential(layer))[0]
    draws = zm.sample_outputs(plain, (x, x, x), 4, select=lambda output: output[0])
    assert draws.std(0).min() > 0
    with zm.sampling(layer, zm.mean):
        torch.testing.assert_close(layer(x, x, x)[0], plain(x, x, x)[0])
    draws = zm.sample_outputs(layer, (x, x, x), 4, select=lambda output: output[0])
    assert draws.std(0).min() > 1e-2  # Much more than the little noise of new weights.


@pytest.mark.parametrize("sampler", ["local", "weight", "flipout"])
@pytest.mark.parametrize("call", ["self-attention", "memory"])
def test_compiles_without_graph_breaks(sampler, call, fresh_dynamo):
    layer = zm.MultiheadAttention(8, 2, batch_first=True, sampler=SAMPLERS[sampler])
    given = CALLS[call](*inputs(batch_first=True))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.manual_seed(1)
    expected, _ = layer(*given, need_weights=False)
    torch.manual_seed(1)
    output, _ = compiled(*given, need_weights=False)
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("posterior", ["ZeroMean", "Additive", "Multiplicative-neuron"])
@every_geometry
def test_files_bring_the_layer_back(geometry, posterior, tmp_path):
    options = {"posterior": POSTERIORS[posterior], "sampler": zm.weight, "prior": zm.Normal()}
    model = nn.Sequential(zm.MultiheadAttention(8, 2, **geometry, **options))
    given = inputs(**geometry)
    zm.save(model, tmp_path / "model.safetensors")
    expected = zm.sample_outputs(model[0], tuple(given), 2, seed=3, select=lambda output: output[0])
    for architecture in (nn.MultiheadAttention(8, 2, **geometry), copy.deepcopy(model[0])):
        loaded = zm.load(tmp_path / "model.safetensors", nn.Sequential(architecture))
        assert repr(loaded) == repr(model)
        again = zm.sample_outputs(
            loaded[0], tuple(given), 2, seed=3, select=lambda output: output[0]
        )
        torch.testing.assert_close(again, expected, rtol=0, atol=0)


def test_deepcopy_draws_as_the_original():
    layer = zm.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 3, 8)
    twin = copy.deepcopy(layer)
    torch.manual_seed(1)
    expected = layer(x, x, x)[0]
    torch.manual_seed(1)
    torch.testing.assert_close(twin(x, x, x)[0], expected, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:torch.fx cannot trace")
def test_pruned_attention_compresses_to_a_plain_network():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))

    model = Pooled().eval()
    zm.make_stochastic_(model, posterior=partial(zm.Additive, log_alpha=-2.0))
    pruning = zm.prune_(model, sparsity=0.5)
    assert pruning.pruned["attention.in_proj_weight"] == 96
    assert pruning.pruned["attention.out_proj"] == 32
    x = torch.randn(4, 5, 8)
    with zm.sampling(model, zm.mean):
        expected = model(x)
    small = zm.compress(model, x)
    torch.testing.assert_close(small(x), expected)
    assert zm.sparsity(model)["attention.out_proj"].kept == 32


def test_autocast_and_meta_device():
    layer = zm.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 3, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(3)
    for need_weights in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output, _ = layer(x, x, x, attn_mask=mask, need_weights=need_weights)
        output.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    on_meta = zm.MultiheadAttention(8, 2, device="meta", dtype=torch.float64)
    assert {p.device.type for p in on_meta.parameters()} == {"meta"}
    x = torch.empty(3, 2, 8, dtype=torch.float64, device="meta")
    assert on_meta(x, x, x)[0].shape == (3, 2, 8)


def test_a_frozen_or_unselected_layer_stays_so():
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    report = zm.make_stochastic_(model, where=lambda name, module: isinstance(module, nn.Linear))
    assert report.converted == ["1"]
    assert report.left["0"] == "not selected"
    assert "reads its weight directly" in report.left["0.out_proj"]
    zm.make_stochastic_(model)
    assert not any(p.requires_grad for p in model[0].parameters())


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="multiple of num_heads, got 8 and 3"):
        zm.MultiheadAttention(8, 3)
    with pytest.raises(ValueError, match=r"dropout must lie between 0 and 1, got 2"):
        zm.MultiheadAttention(8, 2, dropout=2)
    layer = zm.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 3, 8)
    with pytest.raises(ValueError, match=r"key of shape \(N, L, 8\).*got \(2, 3, 7\)"):
        layer(x, x[..., :7], x)
    with pytest.raises(ValueError, match="the same number of sequences"):
        layer(x, x[:1], x[:1])
    with pytest.raises(TypeError, match="float64"):
        layer(x, x.double(), x)
    with pytest.raises(ValueError, match="is_causal=True says that attn_mask is causal"):
        layer(x, x, x, is_causal=True)
    with pytest.raises(ValueError, match=r"attn_mask must have the shape \(3, 3\) or \(4, 3, 3\)"):
        layer(x, x, x, attn_mask=torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"key_padding_mask must have the shape \(2, 3\)"):
        layer(x, x, x, key_padding_mask=torch.zeros(3, 3))
    with pytest.raises(TypeError, match="bool or floating point"):
        layer(x, x, x, attn_mask=torch.zeros(3, 3, dtype=torch.int64))
