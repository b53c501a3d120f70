"""Modules that are called twice, and weights that a forward function reads itself."""

import threading
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from test_compress import assert_same_predictions, network, zero_out
from torch import nn

import zeromean as zm
from zeromean import export
from zeromean.compression.modules.batch_last import BatchLast
from zeromean.compression.modules.sparse_layers import SparseConv2d


def dense(sizes, sparsity=0.96):
    layers = [nn.Linear(*pair) for pair in pairwise(sizes)]
    return [zero_out(layer, sparsity, dead=0.05) for layer in layers]


def one_activation_for_all():
    a, b, c = dense((200, 200, 200, 5))
    return network(
        lambda self, x: self.c(self.relu(self.b(self.relu(self.a(x))))),
        a=a,
        b=b,
        c=c,
        relu=nn.ReLU(),
    ), torch.randn(20, 200)


def one_pool_for_all():
    modules = {
        "conv1": nn.Conv2d(1, 6, 5),
        "conv2": nn.Conv2d(6, 16, 5),
        "pool": nn.MaxPool2d(2, 2),
        "fc1": nn.Linear(16 * 16, 120),
        "fc2": nn.Linear(120, 10),
    }

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        return self.fc2(F.relu(self.fc1(torch.flatten(x, 1))))

    return zero_out(network(forward, **modules), 0.95, dead=0.1), torch.rand(20, 1, 28, 28)


@pytest.mark.parametrize("build", [one_activation_for_all, one_pool_for_all])
def test_modules_that_are_called_twice_stay_in_both_places(build, tmp_path):
    torch.manual_seed(0)
    model, x = build()
    compressed = zm.compress(model, x)
    assert any(isinstance(module, BatchLast) for module in compressed.modules())
    assert_same_predictions(model, compressed, x, x[:1], x[:3])
    by_object = torch.vmap(lambda one: compressed(one.unsqueeze(0)).squeeze(0))(x)
    torch.testing.assert_close(by_object, model(x), rtol=1e-5, atol=1e-5)
    export.save_compressed(compressed, tmp_path / "small.safetensors")
    assert_same_predictions(model, export.load_compressed(tmp_path / "small.safetensors"), x)
    onnxruntime = pytest.importorskip("onnxruntime")
    export.save_onnx(compressed, tmp_path / "small.onnx", x)
    session = onnxruntime.InferenceSession(tmp_path / "small.onnx")
    (ours,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(ours), model(x).detach(), rtol=1e-4, atol=1e-5)


def test_int8_keeps_both_places_of_a_module():
    torch.manual_seed(0)
    model, x = one_activation_for_all()
    compressed = zm.compress(model)
    rounded = zm.to_int8(zm.to_deterministic(compressed), min_weights=1)
    assert (rounded(x) - model(x)).abs().max() < 0.02 * model(x).abs().max()


def test_files_hold_both_places_of_a_module(tmp_path):
    relu, layer = nn.ReLU(), nn.Linear(8, 8)
    model = nn.Sequential(nn.Linear(8, 8), relu, layer, relu, layer)
    export.save_compressed(model, tmp_path / "m.safetensors")
    assert_same_predictions(
        model, export.load_compressed(tmp_path / "m.safetensors"), torch.randn(5, 8)
    )


def weight_behind_batchnorm():
    def forward(self, x):
        return self.out(F.linear(F.relu(self.norm(self.layer(x))), self.layer.weight))

    model = network(forward, layer=nn.Linear(16, 16), norm=nn.BatchNorm1d(16), out=nn.Linear(16, 4))
    return zero_out(model, 0.3), torch.randn(5, 16)


def tied_embedding():
    def forward(self, x):
        return F.linear(self.layer(self.embedding(x)), self.embedding.weight)

    model = network(forward, embedding=nn.Embedding(20, 16), layer=nn.Linear(16, 16))
    model.layer.weight.data[:, :8] = 0
    return model, torch.randint(0, 20, (5,))


@pytest.mark.parametrize("build", [weight_behind_batchnorm, tied_embedding])
def test_weights_that_forward_reads_stay_what_they_were(build):
    torch.manual_seed(0)
    model, x = build()
    compressed = zm.compress(model)
    assert_same_predictions(model, compressed, x)


def test_weights_that_an_untraceable_forward_reads_stay_what_they_were():
    def forward(self, x):
        h = self.layer(x)
        return F.linear(h * 2 if h.sum() > 1e9 else h, self.layer.weight)

    model = network(forward, layer=dense((80, 80))[0])
    with pytest.warns(UserWarning, match="cannot trace"):
        compressed = zm.compress(model)
    assert_same_predictions(model, compressed, torch.randn(3, 80))


def feature_pyramid(self, x):
    wide = F.relu(self.first(x))
    small = F.relu(self.down(wide))
    return self.last(wide + F.interpolate(small, size=(wide.shape[2], wide.shape[3])))


def pool_over_all(self, x):
    wide = F.relu(self.first(x))
    return self.last(F.avg_pool2d(wide, (wide.size(2), wide.size(3))))


@pytest.mark.parametrize("forward", [feature_pyramid, pool_over_all])
@pytest.mark.parametrize("given", [True, False])
def test_sizes_that_come_from_activations(forward, given):
    model = network(
        forward,
        first=nn.Conv2d(1, 6, 3, padding=1),
        down=nn.Conv2d(6, 6, 3, 2, 1),
        last=nn.Conv2d(6, 2, 1),
    )
    model.first.weight.data[:2] = 0
    x = torch.randn(3, 1, 9, 9)
    assert_same_predictions(model, zm.compress(model, x if given else None), x)


def test_steps_of_a_chain_can_be_replaced():
    torch.manual_seed(0)
    model, x = one_activation_for_all()
    compressed = zm.compress(model)
    assert isinstance(compressed, BatchLast)
    zm.make_stochastic_(compressed)
    first, second = compressed(x), compressed(x)
    assert (first != second).any()
    for batch in (x, x[:1]):
        assert zm.predict_proba(compressed, batch, 3).shape == (len(batch), 5)


def test_memory_is_not_taken_for_a_copy():
    def forward(self, x):
        h = self.a(x)
        y = h.float()  # h itself
        y += 1
        return self.b(h) + y.sum(1, keepdim=True)

    model = network(forward, a=nn.Linear(6, 6), b=nn.Linear(6, 2))
    model.a.weight.data[:3] = 0
    with pytest.warns(UserWarning, match="in place"):
        compressed = zm.compress(model)
    assert_same_predictions(model, compressed, torch.randn(3, 6))


@pytest.mark.parametrize("last", [True, False])
def test_more_objects_than_before_are_no_flattening(last):
    def forward(self, x):
        both = torch.cat([self.a(x), self.b(x)], 0).view(x.size(0), -1)
        return self.c(both) if last else both

    model = network(forward, a=nn.Linear(6, 6), b=nn.Linear(6, 6), c=nn.Linear(12, 2))
    model.a.weight.data[:3] = 0
    assert_same_predictions(model, zm.compress(model), torch.randn(3, 6))


def test_inputs_by_name():
    model = network(lambda self, x: self.layer(x), layer=dense((100, 100))[0])
    x = torch.randn(5, 100)
    compressed = zm.compress(model, {"x": x})
    torch.testing.assert_close(compressed(x=x), model(x))


@pytest.mark.parametrize("features", [20, 39, 41, 400])
def test_another_number_of_features_is_refused(features, tmp_path):
    model = nn.Sequential(nn.Linear(40, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].weight.data[:, ::2] = 0
    compressed = zm.compress(model)
    export.save_compressed(compressed, tmp_path / "m.safetensors")
    for network_ in (compressed, export.load_compressed(tmp_path / "m.safetensors")):
        with pytest.raises(ValueError, match=f"needs 40 features here, got {features}"):
            network_(torch.randn(4, features))


@pytest.mark.parametrize("batch", [2, 20])
@pytest.mark.parametrize("shape", [(3, 12, 12), (1, 2, 12), (1, 4, 4)])
def test_other_images_are_refused(batch, shape):
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(3), nn.Conv2d(8, 4, 1))
    compressed = zm.compress(zero_out(model, 0.9, dead=0.0))
    with pytest.raises((ValueError, RuntimeError)):
        compressed(torch.rand(batch, *shape))


def test_sparse_convolutions_follow_their_weight():
    torch.manual_seed(0)
    layer = SparseConv2d(zero_out(nn.Conv2d(2, 4, 3), 0.7, dead=0.0))
    x = torch.rand(16, 2, 9, 9)
    layer(x)  # Remembers which products to add up.
    state = {name: 2 * tensor for name, tensor in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)
    torch.testing.assert_close(layer(x), torch.cat([layer(part) for part in x.split(4)]))
    layer.weight = nn.Parameter(-layer.weight)
    torch.testing.assert_close(layer(x), torch.cat([layer(part) for part in x.split(4)]))


def test_threads_share_a_sparse_convolution():
    torch.manual_seed(0)
    layer = SparseConv2d(zero_out(nn.Conv2d(1, 3, 3), 0.5, dead=0.0))
    inputs = [torch.rand(8, 1, size, size) for size in range(5, 17)]  # more than it remembers
    expected = [layer._convolve(x) for x in inputs]
    wrong = []

    def predict():
        for _ in range(20):
            for x, wanted in zip(inputs, expected, strict=True):
                try:
                    torch.testing.assert_close(layer(x), wanted)
                except Exception as error:
                    wrong.append(error)

    threads = [threading.Thread(target=predict) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
