"""Heads of attention: noise on them, and plain networks with fewer of them."""

import pytest
import torch
import torch.nn.functional as F
from test_add_unit_noise import drown_
from test_compress import assert_same_predictions, network
from test_export import in_onnxruntime
from torch import nn

import zeromean as zm
from zeromean import export
from zeromean.layers.plain_attention import PlainAttention, from_torch, to_torch


def of_torchs_blocks(norm_first=False, activation="relu", **options):
    block = nn.TransformerEncoderLayer(
        *(16, 4, 24, 0.1), activation, batch_first=True, norm_first=norm_first, **options
    )
    return network(
        lambda self, x: self.head(self.encoder(self.embed(x)).mean(1)),
        embed=nn.Embedding(20, 16),
        encoder=nn.TransformerEncoder(block, 2, nn.LayerNorm(16), enable_nested_tensor=False),
        head=nn.Linear(16, 3),
    )


def of_a_decoder():
    return network(
        lambda self, x: self.head(self.decoder(self.embed(x), self.embed(x)).mean(1)),
        embed=nn.Embedding(20, 16),
        decoder=nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 24, batch_first=True), 1),
        head=nn.Linear(16, 3),
    )


def of_attention_that_is_called(kind=nn.MultiheadAttention, **options):
    def forward(self, x):
        tokens = self.embed(x).transpose(0, 1)
        mixed, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        return self.head(self.norm(tokens + mixed).mean(0))

    parts = {"embed": nn.Embedding(20, 16), "attention": kind(16, 4, **options)}
    return network(forward, **parts, norm=nn.LayerNorm(16), head=nn.Linear(16, 3))


def of_other_features():
    def forward(self, x):
        tokens = self.embed(x)
        mixed = self.attention(self.query(tokens), self.key(tokens), tokens)[0]
        return self.head(mixed.mean(1))

    attention = nn.MultiheadAttention(8, 4, kdim=12, vdim=16, batch_first=True, bias=False)
    parts = {"embed": nn.Embedding(20, 16), "attention": attention, "head": nn.Linear(8, 3)}
    return network(forward, **parts, query=nn.Linear(16, 8), key=nn.Linear(16, 12))


def as_nano_gpt(self, x):
    batch, length, features = x.size()
    q, k, v = self.qkv(x).split(16, dim=2)
    q, k, v = (part.view(batch, length, 4, features // 4).transpose(1, 2) for part in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return self.out(mixed.transpose(1, 2).contiguous().view(batch, length, features))


def as_vision_transformers(self, x):
    batch, length, features = x.shape
    qkv = self.qkv(x).reshape(batch, length, 3, 4, 4).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
    return self.out(mixed.transpose(1, 2).reshape(batch, length, features))


def with_heads_outermost(self, x):
    q, k, v = self.qkv(x).unflatten(-1, (4, 12)).transpose(1, 2).chunk(3, dim=-1)
    mask = torch.ones(1, 1, dtype=torch.bool)
    mixed = F.scaled_dot_product_attention(q, k, v, mask)
    return self.out(mixed.permute(0, 2, 1, 3).flatten(2))


def of_a_forward_function(attend):
    block = network(attend, qkv=nn.Linear(16, 48), out=nn.Linear(16, 16))
    return network(
        lambda self, x: self.head((self.embed(x) + self.block(self.embed(x))).mean(1)),
        embed=nn.Embedding(20, 16),
        block=block,
        head=nn.Linear(16, 3),
    )


def of_three_layers():
    def attend(self, x):
        q, k, v = (f(x).view(x.size(0), -1, 4, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0)
        return self.out(mixed.transpose(1, 2).reshape(x.size(0), -1, 16))

    layers = {name: nn.Linear(16, 16, bias=name != "k") for name in ("q", "k", "v", "out")}
    return nn.Sequential(nn.Embedding(20, 16), network(attend, **layers), nn.LayerNorm(16))


NETWORKS = {
    "torch's blocks": (of_torchs_blocks, 2),
    "norm first, gelu": (lambda: of_torchs_blocks(True, "gelu"), 2),
    "no biases": (lambda: of_torchs_blocks(bias=False), 2),
    "a decoder": (of_a_decoder, 2),
    "attention that is called": (of_attention_that_is_called, 1),
    "other features": (of_other_features, 1),
    "nano gpt": (lambda: of_a_forward_function(as_nano_gpt), 1),
    "vision transformer": (lambda: of_a_forward_function(as_vision_transformers), 1),
    "heads outermost": (lambda: of_a_forward_function(with_heads_outermost), 1),
    "three layers": (of_three_layers, 1),
}


def tokens(count, length=7):
    return torch.randint(20, (count, length))


def heads_of(report):
    return [group for group in report.groups if group.units == 4]


@pytest.mark.parametrize("name", NETWORKS)
def test_dead_heads_are_gone_from_plain_networks_and_their_files(name, tmp_path):
    build, number = NETWORKS[name]
    torch.manual_seed(0)
    model = build().eval()
    names = [key for key, _ in model.named_parameters()]
    expected = model(tokens(3).fill_(4))
    report = zm.add_unit_noise_(model, tokens(2))
    assert len(heads_of(report)) == number
    assert [key for key, _ in model.named_parameters() if "unit_noise" not in key] == names
    drown_(model)
    small = zm.compress(model, tokens(3))
    assert_same_predictions(model, small, tokens(1), tokens(5), tokens(4, 9))
    lost = [row.note for row in zm.compression_report(model, small).layers if "heads" in row.note]
    assert len(lost) >= number
    assert sum(p.numel() for p in small.parameters()) < sum(
        p.numel() for key, p in model.named_parameters() if "unit_noise" not in key
    )
    x = tokens(4)
    export.save_compressed(small, tmp_path / "small.safetensors")
    again = export.load_compressed(tmp_path / "small.safetensors")
    torch.testing.assert_close(again(x), small(x), atol=1e-6, rtol=1e-5)
    zm.save(model, tmp_path / "noisy.safetensors")
    loaded = zm.load(tmp_path / "noisy.safetensors", build()).eval()
    with zm.sampling(model, zm.mean), zm.sampling(loaded, zm.mean):
        assert torch.equal(loaded(x), model(x))
    plain = zm.to_deterministic(model)
    assert not any(isinstance(m, PlainAttention) for m in plain.modules())
    assert_same_predictions(model, plain, x)
    assert expected.shape == plain(tokens(3)).shape


@pytest.mark.parametrize("name", ["torch's blocks", "nano gpt"])
def test_onnxruntime_runs_what_is_left(name, tmp_path):
    torch.manual_seed(0)
    model = NETWORKS[name][0]().eval()
    zm.add_unit_noise_(model, tokens(2))
    drown_(model)
    small = zm.compress(model, tokens(3))
    export.save_onnx(small, tmp_path / "m.onnx", tokens(2))
    x = tokens(5)
    found = in_onnxruntime(tmp_path / "m.onnx")(x)
    torch.testing.assert_close(found, small(x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", [nn.MultiheadAttention, zm.MultiheadAttention])
def test_each_example_has_multipliers_of_its_own(kind):
    """Noise on all heads but one is zero: what is left has the noise of that one."""
    torch.manual_seed(0)
    model = of_attention_that_is_called(kind, bias=False).eval()
    zm.add_unit_noise_(model, tokens(2))
    (noise,) = (m for m in model.modules() if isinstance(m, zm.LogNormalDropout))
    noise.keep[1:] = False
    noise.location.data.fill_(-1.0)
    noise.log_scale.data.fill_(-1.0)
    attention = model.attention
    x = torch.randn(5, 40, 16)
    with torch.no_grad(), zm.sampling(model, zm.mean):
        expected = attention(x, x, x, need_weights=False)[0] / noise.mean()[0]
    attention.sampler = zm.mean  # The weights, where they are random.
    with torch.no_grad():
        ratio = attention(x, x, x, need_weights=False)[0] / expected
    torch.testing.assert_close(ratio, ratio[:1, :, :1].expand_as(ratio), rtol=1e-3, atol=1e-3)
    assert ratio[0, :, 0].unique().numel() == 40


def test_noise_on_heads_is_trained():
    model = of_torchs_blocks()
    zm.add_unit_noise_(model, tokens(2))
    (model(tokens(3)).square().sum() + zm.kl_divergence(model)).backward()
    noises = [m for m in model.modules() if isinstance(m, zm.LogNormalDropout)]
    assert len(noises) == 4
    assert all(noise.log_scale.grad.abs().min() > 0 for noise in noises)


def test_random_projections_can_have_noise_on_their_heads_too():
    torch.manual_seed(0)
    model = of_attention_that_is_called(zm.MultiheadAttention).eval()
    report = zm.add_unit_noise_(model, tokens(2))
    assert [group.makers for group in report.groups] == [("attention",)]
    drown_(model)
    small = zm.compress(model, tokens(3))
    assert_same_predictions(model, small, tokens(5))
    assert small.attention.num_heads < 4


def test_networks_are_shrunk_again():
    """Noise on what has lost heads already."""
    torch.manual_seed(0)
    model = of_torchs_blocks().eval()
    for _ in range(2):
        zm.add_unit_noise_(model, tokens(2))
        drown_(model, share=0.3)
        model = zm.compress(model, tokens(3)).requires_grad_(True)
    layers = [m for m in model.modules() if isinstance(m, PlainAttention)]
    assert len(layers) == 2
    assert all(layer.num_heads < 4 for layer in layers)


@pytest.mark.parametrize("options", [{}, {"kdim": 12, "vdim": 10}, {"bias": False}])
@pytest.mark.parametrize("need_weights", [False, True])
def test_plain_attention_is_torchs(options, need_weights):
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(8, 2, batch_first=True, **options).eval()
    ours = from_torch(theirs)
    q, k, v = torch.randn(3, 5, 8), torch.randn(3, 6, 8), torch.randn(3, 6, 8)
    if "kdim" in options:
        k, v = torch.randn(3, 6, 12), torch.randn(3, 6, 10)
    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[:, 4:] = True
    masks = {"attn_mask": torch.ones(5, 6).triu(1).bool(), "key_padding_mask": padding}
    for kwargs in ({}, masks, {"average_attn_weights": False}):
        for found, wanted in zip(
            ours(q, k, v, need_weights=need_weights, **kwargs),
            theirs(q, k, v, need_weights=need_weights, **kwargs),
            strict=True,
        ):
            assert (found is None) == (wanted is None)
            if found is not None:
                torch.testing.assert_close(found, wanted)
    single = ours(q[0], k[0], v[0])[0]
    torch.testing.assert_close(single, theirs(q[0], k[0], v[0])[0])
    back = to_torch(ours)
    assert all(a is b for a, b in zip(back.parameters(), theirs.parameters(), strict=True))


def test_heads_stay_where_somebody_sees_their_weights():
    def forward(self, x):
        tokens = self.embed(x)
        mixed, weights = self.attention(tokens, tokens, tokens)
        return self.head(mixed.mean(1)), weights

    attention = nn.MultiheadAttention(16, 4, batch_first=True)
    head = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 3))
    model = network(forward, attention=attention, head=head, embed=nn.Embedding(20, 16))
    report = zm.add_unit_noise_(model, tokens(2))
    assert [group.makers for group in report.groups] == [("head.0",)]


@pytest.mark.parametrize(
    "mask",
    [torch.randn(4, 7, 7), torch.randn(1, 4, 7, 7)],
)
def test_heads_stay_where_a_mask_tells_them_apart(mask):
    def attend(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, self.mask)
        return self.out(mixed.transpose(1, 2).flatten(2))

    block = network(attend, qkv=nn.Linear(16, 48), out=nn.Linear(16, 16))
    block.register_buffer("mask", mask)
    model = nn.Sequential(nn.Embedding(20, 16), block)
    report = zm.add_unit_noise_(model, tokens(2))
    assert [group.makers for group in report.groups] == [("0",)]
    assert report.left["1.qkv"] == "all its units are needed by unflatten()"
