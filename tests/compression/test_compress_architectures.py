"""Compression of the networks that people have: what they predict, their files, and ONNX."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from test_compress import assert_same_predictions, network, num_units
from test_export import in_onnxruntime
from torch import nn

import zeromean as zm
from zeromean import export
from zeromean.compression.modules.adapters import RequireDim


def vgg():
    def block(inputs, outputs):
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *block(3, 12),
        *block(12, 12),
        nn.MaxPool2d(2),
        *block(12, 16),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(32, 10),
    )


class BasicBlock(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


def resnet():
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(inplace=True),
        BasicBlock(12, 12, 1),
        BasicBlock(12, 20, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(20, 10),
    )


def mobile_net():
    def block(inputs, outputs, stride):
        depthwise = nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False)
        pointwise = nn.Conv2d(inputs, outputs, 1, bias=False)
        norms = nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)
        return [depthwise, norms[0], nn.ReLU6(), pointwise, norms[1], nn.ReLU6()]

    blocks = [*block(8, 16, 1), *block(16, 24, 2)]
    return network(
        lambda self, x: self.classifier(self.features(x).mean([2, 3])),
        features=nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU6(), *blocks),
        classifier=nn.Linear(24, 10),
    )


class UNet(nn.Module):
    def __init__(self):
        super().__init__()

        def block(inputs, outputs):
            conv = nn.Conv2d(inputs, outputs, 3, padding=1)
            return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))

        self.down1, self.down2, self.middle = block(3, 8), block(8, 12), block(12, 16)
        self.up2, self.join2 = nn.ConvTranspose2d(16, 12, 2, 2), block(24, 12)
        self.join1, self.out = block(20, 8), nn.Conv2d(8, 2, 1)

    def forward(self, x):
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        x = self.middle(F.max_pool2d(second, 2))
        x = self.join2(torch.cat([self.up2(x), second], dim=1))
        x = F.interpolate(x, scale_factor=2, mode="bilinear")
        return self.out(self.join1(torch.cat((x, first), 1)))


class SqueezeAndExcite(nn.Module):
    """A gated convolution, scaled and added to its input."""

    def __init__(self):
        super().__init__()
        self.enter, self.conv = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3, padding=1)
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        x = F.hardswish(self.enter(x))
        y = self.conv(x)
        gate = self.excite(F.relu(self.squeeze(y.mean((2, 3), keepdim=True))))
        return self.head((x + 0.5 * (y * gate.sigmoid())).amax((-2, -1)))


def mlp_with_layer_norm():
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(768, 40),
        nn.LayerNorm(40),
        nn.GELU(),
        nn.Linear(40, 30),
        nn.PReLU(),
        nn.Linear(30, 10),
    )


def bag_of_words():
    return network(
        lambda self, tokens: self.dense2(F.relu(self.dense1(self.embedding(tokens).mean(1)))),
        embedding=nn.Embedding(80, 24),
        dense1=nn.Linear(24, 20),
        dense2=nn.Linear(20, 4),
    )


def temporal():
    """Convolutions over time, with features last in between."""

    def forward(self, x):
        x = F.relu(self.conv1(x.transpose(1, 2)))
        x = F.relu(self.mix(x.permute(0, 2, 1))).transpose(1, 2)
        return self.head(self.conv2(x)[:, :, -1])

    return network(
        forward,
        conv1=nn.Conv1d(5, 16, 3),
        mix=nn.Linear(16, 12),
        conv2=nn.Conv1d(12, 10, 3, dilation=2),
        head=nn.Linear(10, 3),
    )


def image_batch(number):
    return torch.randn(number, 3, 16, 16)


NETWORKS = {
    "vgg": (vgg, image_batch),
    "resnet": (resnet, image_batch),
    "mobile net": (mobile_net, image_batch),
    "u-net": (UNet, image_batch),
    "squeeze and excite": (SqueezeAndExcite, image_batch),
    "layer norm": (mlp_with_layer_norm, image_batch),
    "embedding": (bag_of_words, lambda number: torch.randint(80, (number, 7))),
    "temporal": (temporal, lambda number: torch.randn(number, 12, 5)),
}


def sparse(build):
    """Stochastic, with most weights drowned in noise, whole units among them, and pruned."""
    model = build()
    zm.make_stochastic_(model, posterior=partial(zm.Additive, log_variance=-20.0))
    for layer in zm.stochastic_layers(model).values():
        posterior = layer.weight
        drowned = torch.rand(posterior.shape) < 0.8
        units = drowned.movedim(posterior.layout.neuron_dim, 0)
        units[torch.rand(len(units)) < (0.4 if len(units) > 5 else 0)] = True
        posterior.log_variance.data += 40.0 * drowned
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    zm.prune_(model)
    return model.eval()


@pytest.mark.parametrize("name", NETWORKS)
def test_compressed_networks_predict_the_same_and_fit_into_files(name, tmp_path):
    build, batch = NETWORKS[name]
    model = sparse(build)
    compressed = zm.compress(model)
    assert_same_predictions(model, compressed, *map(batch, (1, 3, 20)))
    assert_same_predictions(model, zm.compress(model, batch(2)), batch(3))
    export.save_compressed(compressed, tmp_path / "m.safetensors")
    loaded = export.load_compressed(tmp_path / "m.safetensors")
    x = batch(4)
    assert torch.equal(loaded(x), compressed(x))
    report = zm.compression_report(model, loaded)
    assert report.compression > 3
    # Few units are left, unless LayerNorm reads all of them.
    bound = 0.6 if name != "layer norm" else 0.99
    assert zm.sparsity(compressed).total.weights < bound * zm.sparsity(model).total.weights


@pytest.mark.parametrize("name", ["mobile net", "u-net", "embedding"])
def test_onnxruntime_runs_compressed_networks(name, tmp_path):
    build, batch = NETWORKS[name]
    model = sparse(build)
    export.save_onnx(zm.compress(model), tmp_path / "m.onnx", batch(2))
    x = batch(5)
    with torch.no_grad(), zm.sampling(model, zm.mean):
        expected = model(x)
    output = in_onnxruntime(tmp_path / "m.onnx")(x)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


def test_checked_dimensions_compile_and_export(tmp_path, fresh_dynamo):
    layers = [nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 3)]
    model = sparse(lambda: nn.Sequential(*layers))
    compressed = zm.compress(model)
    assert any(isinstance(module, RequireDim) for module in compressed.modules())
    x = torch.randn(4, 6)
    compiled = torch.compile(compressed, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), compressed(x))
    export.save_compressed(compressed, tmp_path / "m.safetensors")
    loaded = export.load_compressed(tmp_path / "m.safetensors")
    assert torch.equal(loaded(x), compressed(x))
    with pytest.raises(ValueError, match="compressed for tensors of 2 dimensions"):
        loaded(x.expand(9, 4, 6))
    export.save_onnx(compressed, tmp_path / "m.onnx", x)
    output = in_onnxruntime(tmp_path / "m.onnx")(x)
    torch.testing.assert_close(output, compressed(x), rtol=1e-5, atol=1e-5)


def test_depthwise_variance_layers_keep_their_distribution():
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3),
        nn.ReLU(),
        zm.Conv2d(6, 12, 3, padding=1, groups=6),
        nn.ReLU(),
        nn.Conv2d(12, 3, 3),
    )
    with torch.no_grad():
        model[0].weight[:2] = 0
        model[0].bias[:2] = -1.0  # zero behind the ReLU
        model[2].weight.scale[4:6] = 0
        model[2].bias[4:6] = -1.0
    compressed = zm.compress(model)
    small = next(iter(zm.stochastic_layers(compressed).values()))
    # The channels of constant zeros put out their bias, which is a constant as well.
    assert (small.in_channels, small.out_channels, small.groups) == (3, 6, 3)
    assert num_units(compressed) == [3, 3]
    x = torch.randn(2, 2, 9, 9)
    draws = [zm.sample_outputs(m, x, 3000, seed=s) for s, m in enumerate((model, compressed))]
    for moment in (1, 2):
        ours, theirs = (d.double() ** moment for d in draws)
        error = (2 * ours.var(0) / len(ours)).sqrt()
        assert ((ours.mean(0) - theirs.mean(0)).abs() < 6 * error).all()


def test_variance_embeddings_lose_columns_with_the_same_distribution(tmp_path):
    model = network(
        lambda self, tokens: self.dense(self.embedding(tokens)),
        embedding=zm.Embedding(20, 8, padding_idx=0),
        dense=nn.Linear(8, 3),
    )
    zm.prune_(model, by="variance", sparsity=0.5, unit="neuron")
    compressed = zm.compress(model)
    assert compressed.embedding.weight.shape == (20, 4)
    export.save_compressed(compressed, tmp_path / "m.safetensors")
    loaded = export.load_compressed(tmp_path / "m.safetensors")
    tokens = torch.tensor([[0, 3, 5]])
    draws = [zm.sample_outputs(m, tokens, 4000, seed=s) for s, m in enumerate((model, loaded))]
    for moment in (1, 2):
        ours, theirs = (d.double() ** moment for d in draws)
        error = (2 * ours.var(0) / len(ours)).sqrt() + 1e-6  # Padding has no noise.
        assert ((ours.mean(0) - theirs.mean(0)).abs() < 5 * error).all()


def test_forward_functions_that_read_parameters_fit_into_files(tmp_path):
    model = network(
        lambda self, x: self.dense(x + self.shift) * self.part.gain, dense=nn.Linear(4, 3)
    )
    model.shift = nn.Parameter(torch.randn(4))
    model.part = nn.Module()
    model.part.register_buffer("gain", torch.randn(3))
    model.dense.weight.data[0] = 0
    compressed = zm.compress(model)
    export.save_compressed(compressed, tmp_path / "m.safetensors")
    loaded = export.load_compressed(tmp_path / "m.safetensors")
    assert_same_predictions(model, loaded, torch.randn(5, 4))


def test_files_hold_hardtanh(tmp_path):
    model = nn.Sequential(nn.Linear(6, 8), nn.Hardtanh(-0.5, 0.7), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].weight[3:] = 0
    compressed = zm.compress(model)
    export.save_compressed(compressed, tmp_path / "m.safetensors")
    x = torch.randn(4, 6)
    torch.testing.assert_close(export.load_compressed(tmp_path / "m.safetensors")(x), model(x))
