"""Compression: the same predictions from fewer units and weights."""

import copy
import pickle
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune as torch_prune

import zeromean as zm
from zeromean.compression.compress import trimmed_with_plan, units_left
from zeromean.compression.modules.adapters import RequireDim
from zeromean.compression.modules.batch_last import BatchLast
from zeromean.compression.modules.sparse_layers import SparseConv2d, SparseLinear
from zeromean.layers.stochastic_module import stochastic_modules
from zeromean.models.lenet import lenet5, lenet5_caffe, lenet_300_100

ADDITIVE = {
    "dense": partial(zm.Linear, posterior=partial(zm.Additive, log_variance=-20.0)),
    "conv": partial(zm.Conv2d, posterior=partial(zm.Additive, log_variance=-20.0)),
}


def zero_out(model, sparsity, dead=0.3):
    """Random zeros in all weights, whole output units among them."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
                weight = module.weight
                weight *= torch.rand_like(weight) > sparsity
                unit_dim = int(module.transposed) if hasattr(module, "transposed") else 0
                units = torch.rand(weight.shape[unit_dim]) < dead
                weight.movedim(unit_dim, 0)[units] = 0
            elif isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2.0)
                if module.affine:
                    module.weight.normal_()
                    module.bias.normal_()
    return model.eval()


def assert_same_predictions(model, compressed, *inputs, tolerance=1e-5):
    with torch.no_grad(), zm.sampling(model.eval(), zm.mean):
        for x in inputs:
            torch.testing.assert_close(compressed(x), model(x), rtol=tolerance, atol=tolerance)


def num_units(module):
    return [
        getattr(m, "out_features", None) or m.out_channels
        for m in module.modules()
        if isinstance(m, (nn.Linear, SparseLinear, nn.modules.conv._ConvNd, SparseConv2d))
    ]


def images(*batches):
    return [torch.rand(batch, 1, 28, 28) for batch in batches]


def network(forward, **modules):
    """A module with this forward function."""

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            for name, module in modules.items():
                self.add_module(name, module)

        def forward(self, x):
            return forward(self, x)

    return Network()


@pytest.mark.parametrize("batchnorm", [True, False])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.Sigmoid])
def test_lenet5_predicts_the_same_with_fewer_units(batchnorm, activation):
    model = zero_out(lenet5(batchnorm=batchnorm, activation=activation, dropout=0.5), 0.95)
    compressed = zm.compress(model)
    assert_same_predictions(model, compressed, *images(1, 2, 9, 20))
    conv1, conv2, dense1, dense2 = num_units(compressed)
    assert conv1 < 20
    assert conv2 < 50
    assert dense1 < 400
    assert dense2 == 10
    assert not any(isinstance(m, (nn.BatchNorm2d, nn.Dropout)) for m in compressed.modules())


def test_sparse_posteriors_become_plain_layers():
    model = lenet_300_100(**dict.fromkeys(("dense1", "dense2", "dense3"), ADDITIVE["dense"]))
    zm.prune_(model, sparsity=0.98)
    compressed = zm.compress(model, images(3)[0])
    assert_same_predictions(model, compressed, *images(1, 4, 64))
    assert not stochastic_modules(compressed)
    assert isinstance(compressed, BatchLast)
    ours, theirs = zm.sparsity(compressed).total, zm.sparsity(model).total
    assert ours.weights < theirs.weights
    assert ours.kept <= theirs.kept
    assert model.dense1.weight.mask is not None


def test_removal_goes_on_until_nothing_changes():
    # A chain of single paths: the dead last unit takes all the units behind it along.
    layers = [nn.Linear(8, 8) for _ in range(4)]
    model = nn.Sequential(*[m for layer in layers for m in (layer, nn.ReLU())][:-1])
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(layer.weight * torch.eye(8))
        layers[2].weight[:5] = 0
        layers[0].weight[7] = 0
    compressed = zm.compress(model)
    assert num_units(compressed) == [2, 2, 2, 8]
    assert_same_predictions(model, compressed, torch.randn(5, 8))


def test_constants_of_dead_units_are_folded_only_where_that_is_exact():
    def network(padding, pool):
        model = nn.Sequential(
            nn.Conv2d(2, 6, 3), nn.ReLU(), pool, nn.Conv2d(6, 4, 3, padding=padding)
        )
        with torch.no_grad():
            model[0].weight[:3] = 0
            model[0].bias[:] = torch.tensor([1.0, 2.0, -1.0, 0.1, 0.1, 0.1])
        return model

    x = torch.randn(4, 2, 12, 12)
    for padding, pool, left in [
        (0, nn.MaxPool2d(2), 3),
        (0, nn.AvgPool2d(2), 3),
        (0, nn.AvgPool2d(3, 2, padding=1), 5),  # only the unit that is zero can go
        (0, nn.AvgPool2d(3, 2, padding=1, count_include_pad=False), 3),
        (0, nn.AdaptiveAvgPool2d(5), 3),
        (0, nn.Upsample(scale_factor=2, mode="bilinear"), 3),
        (1, nn.MaxPool2d(2), 4),  # one constant stands for both that are not zero
        ("same", nn.MaxPool2d(2), 4),
    ]:
        model = network(padding, pool)
        compressed = zm.compress(model)
        assert num_units(compressed)[0] == left
        assert_same_predictions(model, compressed, x)
    reflecting = network(1, nn.MaxPool2d(2))
    reflecting[3].padding_mode = "reflect"
    assert num_units(zm.compress(reflecting))[0] == 3
    assert_same_predictions(reflecting, zm.compress(reflecting), x)


class Residual(nn.Module):
    """A forward function with a residual, a flattening view and functions for modules."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 12, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(12)
        self.conv2 = nn.Conv2d(12, 12, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(12)
        self.conv3 = nn.Conv2d(12, 12, 3, padding=1)
        self.drop = nn.Dropout(0.5)
        self.dense1 = nn.Linear(12 * 16, 30)
        self.dense2 = nn.Linear(30, 5)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        y = self.conv3(F.relu(self.norm2(self.conv2(x))))
        x = F.max_pool2d(torch.relu(x + y), 7)
        x = self.drop(x.view(x.size(0), -1))
        x = F.dropout(torch.tanh(self.dense1(x)), training=self.training)
        return {"logits": self.dense2(x)}


def test_modules_with_forward_functions_of_their_own_lose_units_too():
    model = zero_out(Residual(), 0.8, dead=0.5)
    with torch.no_grad():
        # A unit that both branches leave alone can go; one that a branch feeds stays.
        for conv in (model.conv1, model.conv3):
            conv.weight[:4] = 0
        model.norm1.running_mean[:4] = 0.0
        model.conv1.bias[:4] = 0.0
        model.norm1.bias[:4] = -1.0
        model.conv3.bias[:4] = 0.0
        model.conv2.weight[:3] = 0
        model.norm2.weight[:3] = 0
        model.norm2.bias[:3] = -1.0
    compressed = zm.compress(model, torch.rand(3, 1, 28, 28))
    conv1, conv2, conv3, dense1, _ = num_units(compressed)
    assert conv1 == conv3 <= 8
    assert conv2 <= 9
    assert dense1 < 30
    for x in images(2, 20):
        torch.testing.assert_close(
            compressed(x)["logits"], model(x)["logits"], rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize(
    "flatten",
    [
        lambda x, _: torch.flatten(x, 1),
        lambda x, _: x.flatten(1),
        lambda x, _: x.flatten(start_dim=1),
        lambda x, _: x.reshape(x.shape[0], -1),
        lambda x, _: x.reshape((x.size(0), -1)),
        lambda x, _: x.view(x.size()[0], -1),
        lambda x, _: x.view(x.size(dim=0), 54),
        lambda x, _: x.view(-1, 54),
        lambda x, _: x.reshape(-1, 54),
        lambda x, images: x.view(images.size(0), -1),
        lambda x, images: x.reshape(images.shape[0], -1),
    ],
)
def test_every_way_to_flatten_is_understood(flatten):
    def forward(self, images):
        x = torch.relu(self.norm(self.conv(images)))
        return self.dense(self.drop(flatten(x, images)))

    model = network(
        forward,
        conv=nn.Conv2d(1, 6, 9, stride=9),
        norm=nn.BatchNorm2d(6),
        drop=nn.Dropout(),
        dense=nn.Linear(54, 3),
    ).eval()
    model.conv.weight.data[:4] = 0
    compressed = zm.compress(model)
    assert num_units(compressed)[0] == 2
    assert_same_predictions(model, compressed, *images(1, 2, 20))


def test_view_that_cuts_objects_into_pieces_is_right_or_refused():
    model = network(
        lambda self, x: self.dense(self.conv(x).view(-1, 18)),
        conv=nn.Conv2d(1, 6, 9, stride=9),
        dense=nn.Linear(18, 3),
    )
    model.conv.weight.data[:4] = 0
    (x,) = images(4)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        zm.compress(model)(x)
    assert_same_predictions(model, zm.compress(model, x), x)
    # Behind other layers than Linear, nothing would refuse the wrong reading.
    model = network(lambda self, x: self.conv(x).view(-1, 18).softmax(1), conv=model.conv)
    assert_same_predictions(model, zm.compress(model), x)


def test_images_of_another_size_are_refused():
    model = zero_out(lenet5_caffe(), 0.97)
    compressed = zm.compress(model)
    for batch in (1, 4, 20):
        with pytest.raises(ValueError, match=r"needs \d+ features here, got \d+"):
            compressed(torch.rand(batch, 1, 32, 32))
    with pytest.raises(ValueError, match=r"needs images \(N, C, H, W\), got shape \(1, 28, 28\)"):
        compressed(torch.rand(1, 28, 28))
    linear = zm.compress(zero_out(nn.Linear(100, 60), 0.97))
    with pytest.raises(ValueError, match="needs 100 features here, got 200"):
        linear(torch.rand(3, 200))


def test_batchnorm_behind_linear_layers_is_right_or_refused_for_sequences():
    layers = [nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)]
    model = zero_out(nn.Sequential(*layers), 0.3)
    with torch.no_grad():
        model[0].weight[:3] = 0
    rows, steps = torch.randn(4, 5), torch.randn(4, 6, 5)  # as many steps as features
    for_rows = zm.compress(model)
    assert num_units(for_rows)[0] <= 3
    assert_same_predictions(model, for_rows, rows)
    with pytest.raises(
        ValueError,
        match=r"compressed for tensors of 2 dimensions here, got shape \(4, 6, 5\); compress it "
        "with example_inputs of this shape",
    ):
        for_rows(steps)
    assert_same_predictions(model, zm.compress(model, rows), rows)
    assert_same_predictions(model, zm.compress(model, steps), steps, rows)
    flat = nn.Sequential(nn.Flatten(), *model)
    assert not any(isinstance(m, RequireDim) for m in zm.compress(flat).modules())


def test_units_along_another_dimension_than_those_of_the_layer_are_left_alone():
    # Linear works on positions here, so that BatchNorm sees the channels in front of it.
    model = nn.Sequential(nn.Conv1d(2, 6, 3), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Flatten())
    zero_out(model, 0.3)
    assert_same_predictions(model, zm.compress(model), torch.randn(4, 2, 8))
    noise = zm.LogNormalDropout(6)
    noise.location.data.normal_()
    noise.keep[:2] = False
    model = nn.Sequential(nn.Linear(5, 6), noise, nn.Linear(6, 3))
    steps = torch.randn(4, 6, 5)
    assert_same_predictions(model, zm.compress(model, steps), steps, torch.randn(4, 5))
    with pytest.raises(ValueError, match="compressed for tensors of 2 dimensions"):
        zm.compress(model)(steps)


def test_what_depends_on_data_is_compressed_layer_by_layer_with_a_warning():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense1 = ADDITIVE["dense"](100, 80)
            self.dense2 = nn.Linear(80, 3)

        def forward(self, x):
            x = self.dense1(x)
            return self.dense2(x if x.sum() > 0 else x.relu())

    model = Branching()
    zm.prune_(model, sparsity=0.97)
    with pytest.warns(UserWarning, match="cannot trace the model .* layers are compressed one by"):
        compressed = zm.compress(model)
    assert isinstance(compressed.dense1, SparseLinear)
    assert_same_predictions(model, compressed, torch.randn(4, 100), torch.randn(1, 100))


def test_activations_changed_in_place_are_left_to_the_fallback():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense1, self.dense2 = nn.Linear(4, 6), nn.Linear(4, 6)

        def forward(self, x):
            h = self.dense1(x)
            g = h.relu_()
            return g + h + F.relu(self.dense2(x), inplace=True)

    model = zero_out(InPlace(), 0.5)
    with pytest.warns(UserWarning, match="relu_ changes in place what something else reads too"):
        compressed = zm.compress(model)
    assert_same_predictions(model, compressed, torch.randn(3, 4))


def change_after_view(self, x):
    h = self.dense1(x)
    g = F.relu(torch.flatten(h, 1), inplace=True)
    return self.dense2(g) + self.dense3(h)


def change_after_dropout(self, x):
    h = self.dense1(x)
    g = F.relu(F.dropout(h, training=self.training), inplace=True)
    return self.dense2(g) + self.dense3(h)


def change_by_operator(self, x):
    h = g = self.dense1(x)
    g -= 1
    return self.dense2(g) + self.dense3(h)


@pytest.mark.parametrize("forward", [change_after_view, change_after_dropout, change_by_operator])
def test_hidden_changes_in_place_are_left_to_the_fallback(forward):
    layers = {"dense1": nn.Linear(4, 6), "dense2": nn.Linear(6, 3), "dense3": nn.Linear(6, 3)}
    model = zero_out(network(forward, **layers), 0.5)
    with pytest.warns(UserWarning, match="changes in place what something else reads too"):
        compressed = zm.compress(model)
    assert_same_predictions(model, compressed, torch.randn(3, 4))


def test_residual_sum_in_place_loses_units():
    def forward(self, x):
        h = torch.relu(self.dense1(x))
        h += self.dense2(h)
        return self.dense3(h)

    model = network(
        forward, dense1=nn.Linear(4, 20), dense2=nn.Linear(20, 20), dense3=nn.Linear(20, 3)
    )
    zero_out(model, 0.5, dead=0.7)
    compressed = zm.compress(model)
    assert num_units(compressed)[0] < 20
    assert_same_predictions(model, compressed, torch.randn(3, 4))


def test_layers_that_follow_each_other_directly_lose_units():
    dense = nn.Sequential(nn.Linear(6, 20), nn.Linear(20, 10), nn.BatchNorm1d(10), nn.Linear(10, 3))
    compressed = zm.compress(zero_out(dense, 0.5))
    assert num_units(compressed)[0] < 20
    assert_same_predictions(dense, compressed, torch.randn(5, 6))
    conv = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 2, 3))
    assert_same_predictions(conv, zm.compress(zero_out(conv, 0.5)), *images(2, 9))


def test_modules_with_the_names_of_functions_are_themselves():
    model = network(
        lambda self, x: self.dense(self.relu(20 * self.conv(x)).flatten(1)),
        conv=nn.Conv2d(1, 4, 9, stride=9),
        relu=nn.ReLU6(),
        dense=nn.Linear(36, 3),
    )
    assert_same_predictions(model, zm.compress(zero_out(model, 0.3)), *images(2, 9))


def test_keyword_arguments_of_layers_are_kept():
    model = network(
        lambda self, x: self.up(self.conv(x), output_size=(54, 54)),
        conv=nn.Conv2d(1, 4, 3),
        up=nn.ConvTranspose2d(4, 2, 3, stride=2),
    )
    assert_same_predictions(model, zm.compress(zero_out(model, 0.3)), *images(2))


def test_flatten_in_front_of_an_activation_works_for_every_batch():
    model = nn.Sequential(
        nn.Conv2d(1, 6, 9, stride=9), nn.Flatten(), nn.ReLU(), nn.Linear(54, 100), nn.Linear(100, 3)
    )
    compressed = zm.compress(zero_out(model, 0.9))
    assert any(isinstance(module, BatchLast) for module in compressed.modules())
    assert_same_predictions(model, compressed, *images(1, 3, 20))


def test_optional_arguments_keep_their_defaults_unless_they_are_given():
    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense1, self.dense2 = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x, mask=None, *, softmax=True):
            x = self.dense1(x)
            if mask is not None:
                x = x * mask
            x = self.dense2(x)
            return x.softmax(-1) if softmax else x

    model = zero_out(Optional(), 0.5)
    x, mask = torch.randn(3, 4), torch.rand(3, 6)
    assert_same_predictions(model, zm.compress(model), x)
    with_mask = zm.compress(model, (x, mask))
    torch.testing.assert_close(with_mask(x, mask), model(x, mask), rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match="softmax"):
        with_mask(x, mask, softmax=False)


def test_hooks_are_called():
    def hooked(place):
        model = zero_out(nn.Sequential(nn.Linear(90, 80), nn.ReLU(), nn.Linear(80, 3)), 0.97)
        module = model if place is None else model[place]
        module.register_forward_hook(lambda module, inputs, output: output + 1)
        return model

    for place in (0, 1, 2):
        model = hooked(place)
        compressed = zm.compress(model)
        assert_same_predictions(model, compressed, torch.randn(4, 90), torch.randn(1, 90))
    model = hooked(None)
    with pytest.warns(UserWarning, match=r"cannot trace the model \(the model has hooks"):
        compressed = zm.compress(model)
    assert_same_predictions(model, compressed, torch.randn(4, 90))


def test_transformer_layers_survive_the_fallback():
    model = network(
        lambda self, x: self.layer(x) if x.sum() > -1e9 else x,
        layer=nn.TransformerEncoderLayer(64, 4, 128, batch_first=True),
    )
    with pytest.warns(UserWarning, match="cannot trace the model"):
        compressed = zm.compress(zero_out(model, 0.97))
    assert_same_predictions(model, compressed, torch.randn(2, 5, 64))


def test_branches_that_are_joined_lose_units_together():
    def forward(self, x):
        a, b = torch.relu(self.dense1(x)), torch.tanh(self.dense2(x))
        return self.dense3(torch.cat([torch.maximum(a, b) - b, a], dim=1))

    model = network(
        forward, dense1=nn.Linear(5, 9), dense2=nn.Linear(5, 9), dense3=nn.Linear(18, 3)
    )
    with torch.no_grad():
        for layer in (model.dense1, model.dense2):
            layer.weight[:4] = 0
    x = torch.randn(7, 5)
    # Without an example, dimension 1 might as well be that of steps.
    assert_same_predictions(model, zm.compress(model), x, torch.randn(4, 2, 5)[:, 0])
    compressed = zm.compress(model, x)
    assert num_units(compressed) == [5, 5, 3]
    assert_same_predictions(model, compressed, x)
    with pytest.raises(ValueError, match="compressed for tensors of 2 dimensions"):
        compressed(torch.randn(3, 4, 5))


def test_constants_in_front_of_padding_share_one_channel():
    def forward(self, x):
        x = torch.relu(self.conv1(x))
        return self.conv2(x) + self.up(x)

    model = network(
        forward,
        conv1=nn.Conv2d(2, 9, 3),
        conv2=nn.Conv2d(9, 4, 3, padding=1),
        up=nn.ConvTranspose2d(9, 4, 3, padding=1),
    )
    with torch.no_grad():
        model.conv1.weight[:6] = 0
        model.conv1.bias[:6] = torch.tensor([0.5, 2.0, -1.0, 1e-3, 0.1, 0.0])
    compressed = zm.compress(model)
    assert num_units(compressed)[0] == 4
    assert_same_predictions(model, compressed, torch.randn(3, 2, 8, 8))


def test_compressing_again_changes_nothing():
    for model in (lenet5_caffe(), Residual(), nn.Linear(100, 90)):
        compressed = zm.compress(zero_out(model, 0.97))
        again = zm.compress(compressed)
        x = torch.rand(9, 100) if isinstance(model, nn.Linear) else images(9)[0]
        torch.testing.assert_close(again(x), compressed(x))


def test_compressed_model_runs_under_autocast():
    dense = [nn.Linear(90, 80), nn.ReLU(), nn.Linear(80, 70), nn.ReLU(), nn.Linear(70, 3)]
    model = zero_out(nn.Sequential(*dense), 0.5, dead=0)
    model[2].weight.data *= torch.rand_like(model[2].weight) < 0.08
    compressed = zm.compress(model)
    assert any(isinstance(module, SparseLinear) for module in compressed.modules())
    with torch.no_grad():
        for batch in (1, 3, 30):
            x = torch.randn(batch, 90)
            with torch.autocast("cpu", torch.bfloat16):
                output = compressed(x)
            assert output.dtype == torch.bfloat16
            torch.testing.assert_close(output.float(), model(x), rtol=0.05, atol=0.01)


def test_recurrent_networks_become_plain_ones():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = zm.LSTM(5, 6, batch_first=True, posterior=zm.Additive)
            self.dense1 = ADDITIVE["dense"](6, 30)
            self.dense2 = ADDITIVE["dense"](30, 3)

        def forward(self, x):
            states, _ = self.lstm(x)
            return self.dense2(torch.relu(self.dense1(states)))

    model = Tagger()
    zm.prune_(model, sparsity=0.9)
    compressed = zm.compress(model)
    assert not stochastic_modules(compressed)
    assert num_units(compressed)[0] < 25
    assert_same_predictions(model, compressed, torch.randn(4, 7, 5))


def test_units_that_other_code_reads_are_kept():
    class Opaque(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense1, self.dense2 = nn.Linear(4, 6), nn.Linear(6, 6)
            self.norm = nn.LayerNorm(6)

        def forward(self, x):
            h = self.dense1(x)
            return self.norm(h) + self.dense2(h).softmax(-1) * h[:, :1], h

    model = zero_out(Opaque(), 0.5)
    compressed = zm.compress(model)
    x = torch.randn(3, 4)
    for ours, theirs in zip(compressed(x), model(x), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_layer_that_is_called_twice_keeps_its_units():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.step = nn.Linear(5, 6), nn.Linear(6, 6)

        def forward(self, x):
            return self.step(torch.tanh(self.step(torch.tanh(self.enter(x)))))

    model = zero_out(Twice(), 0.3, dead=0.5)
    assert_same_predictions(model, zm.compress(model), torch.randn(3, 5))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d, (4, 9)),
        (nn.Conv3d, (4, 5, 5, 6)),
        (nn.ConvTranspose2d, (4, 5, 5)),
        (partial(nn.Conv2d, groups=2), (4, 6, 6)),
        (partial(nn.Conv2d, stride=2, padding=(1, 2), dilation=2), (4, 11, 12)),
        (partial(nn.Conv2d, padding="same", padding_mode="circular"), (4, 7, 7)),
    ],
)
def test_every_convolution_is_compressed(layer, shape):
    model = nn.Sequential(layer(4, 8, 3), nn.ELU(), layer(8, 6, 3))
    zero_out(model, 0.8, dead=0.4)
    compressed = zm.compress(model)
    for batch in (1, 12):
        assert_same_predictions(model, compressed, torch.randn(batch, *shape))
    assert_same_predictions(model, compressed, torch.randn(shape))


def test_linear_layers_on_sequences_and_odd_shapes():
    model = nn.Sequential(nn.Linear(90, 170), nn.GELU(), nn.Linear(170, 80), nn.ReLU())
    zero_out(model, 0.96)
    compressed = zm.compress(model)
    assert isinstance(compressed, BatchLast)
    x = torch.randn(3, 7, 90)
    assert_same_predictions(model, compressed, x, x[:1, :1], x[0, 0], x[:, :0], x[0])


def test_masks_of_torch_prune_count():
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 4))
    torch_prune.random_structured(model[0], "weight", 0.5, dim=0)
    torch_prune.l1_unstructured(model[2], "weight", 0.5)
    model(torch.randn(2, 20)).sum().backward()
    with torch.no_grad():
        model[0].weight_orig.mul_(2.0)  # An optimizer step that no call has seen yet.
    compressed = zm.compress(model)
    assert not any("mask" in name for name in compressed.state_dict())
    assert num_units(compressed)[0] <= 15
    assert_same_predictions(model, compressed, torch.randn(6, 20))


def test_unread_inputs_are_not_multiplied():
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 20), nn.ReLU(), nn.Linear(20, 5))
    model[1].weight.data[:, torch.rand(784) < 0.6] = 0
    compressed = zm.compress(model)
    assert max(m.in_features for m in compressed.modules() if isinstance(m, nn.Linear)) < 400
    assert_same_predictions(model, compressed, *images(1, 3))


@pytest.mark.parametrize("noise", [zm.normal, zm.rademacher])
def test_variance_layers_are_shrunk_with_the_same_distribution(noise):
    posterior = partial(zm.ZeroMean, noise=noise)
    model = nn.Sequential(
        nn.Linear(6, 8),
        nn.ReLU(),
        zm.Linear(8, 10, posterior=posterior, sampler=zm.weight),
        nn.BatchNorm1d(10),
        nn.ReLU(),
        nn.Linear(10, 3),
    ).eval()
    model[0].weight.data[:3] = 0
    model[0].bias.data[:3] = torch.tensor([0.7, -0.7, -0.1])  # one constant that noise multiplies
    zm.prune_(model, by="variance", sparsity=0.5, unit="neuron")
    compressed = zm.compress(model)
    small = next(iter(zm.stochastic_layers(compressed).values()))
    assert (small.in_features, small.out_features) == (6, 5)
    assert small.weight.noise is noise
    assert small.sampler is zm.weight
    x = torch.randn(4, 6)
    draws = [zm.sample_outputs(m, x, 5000, seed=s) for s, m in enumerate((model, compressed))]
    for moment in (1, 2):
        ours, theirs = (d.double() ** moment for d in draws)
        error = (2 * ours.var(0) / len(ours)).sqrt()
        assert ((ours.mean(0) - theirs.mean(0)).abs() < 5 * error).all()


def test_noise_on_units_is_folded_and_dropped_units_are_removed():
    model = nn.Sequential(
        nn.Conv2d(1, 10, 5),
        nn.ReLU(),
        zm.LogNormalDropout(10),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(360, 20),
        nn.Tanh(),
        zm.LogNormalDropout(20),
        nn.Linear(20, 5),
        zm.LogNormalDropout(5),
        nn.Sigmoid(),
        zm.GaussianDropout(5),
    )
    for noise in (model[2], model[7], model[9]):
        noise.location.data.normal_()
    model[2].keep[:6] = False
    model[7].keep[3:15] = False
    compressed = zm.compress(model)
    assert num_units(compressed) == [4, 8, 5]
    assert not any(isinstance(m, zm.UnitNoise) for m in compressed.modules())
    assert_same_predictions(model, compressed, *images(1, 3, 10))


def test_emptied_network_predicts_its_constant():
    model = lenet5_caffe(conv1=ADDITIVE["conv"], dense1=ADDITIVE["dense"])
    with pytest.warns(UserWarning, match="Nothing is left of conv1, dense1"):
        zm.prune_(model, threshold=-100.0)
    compressed = zm.compress(model)
    assert_same_predictions(model, compressed, *images(1, 9))
    assert num_units(compressed)[:3] == [1, 1, 1]


def test_compressed_model_is_copied_pickled_moved_and_differentiated():
    model = zero_out(lenet5_caffe(), 0.97)
    compressed = zm.compress(model)
    x = images(16)[0]
    expected = compressed(x)
    state = compressed.state_dict()
    reloaded = zm.compress(model)
    for parameter in reloaded.parameters():
        parameter.zero_()
    reloaded.load_state_dict(state)
    for twin in (copy.deepcopy(compressed), pickle.loads(pickle.dumps(compressed)), reloaded):
        assert torch.equal(twin(x), expected)
    torch.testing.assert_close(compressed.double()(x.double()).float(), expected)
    model, x = model.double(), x.double().requires_grad_()
    ours, theirs = (torch.autograd.grad(m(x).square().sum(), x)[0] for m in (compressed, model))
    torch.testing.assert_close(ours, theirs)
    batched = torch.func.vmap(lambda image: compressed(image.unsqueeze(0)))(x.detach())
    torch.testing.assert_close(batched.squeeze(1), model(x.detach()))


def test_inference_mode_leaves_no_traces():
    model = zero_out(lenet5_caffe(), 0.97)
    x = images(16)[0].requires_grad_()
    with torch.inference_mode():
        compressed = zm.compress(model)
        compressed(x)
    compressed(x).sum().backward()
    assert x.grad.isfinite().all()


def test_example_inputs_are_compared():
    class Remembering(nn.Module):
        """Puts out something else in every call, which the graph of one call does not show."""

        calls: ClassVar = []

        def __init__(self):
            super().__init__()
            self.dense = nn.Linear(3, 2)

        def forward(self, x):
            self.calls.append(None)
            return self.dense(x) + len(self.calls)

    model = zero_out(Remembering(), 0.5)
    with pytest.raises(RuntimeError, match="predicts something else than the model on example_in"):
        zm.compress(model, torch.randn(2, 3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_compared_within_their_rounding(dtype):
    dense = [nn.Linear(90, 80), nn.BatchNorm1d(80), nn.ReLU(), nn.Linear(80, 70), nn.Linear(70, 3)]
    model = zero_out(nn.Sequential(*dense), 0.9).to(dtype)
    x = torch.randn(20, 90).to(dtype)
    assert zm.compress(model, x)(x).dtype == dtype


def test_compressed_model_compiles_and_exports_for_any_batch(fresh_dynamo):
    model = zero_out(lenet5_caffe(), 0.97)
    compressed = zm.compress(model)
    assert isinstance(compressed, BatchLast)
    compiled = torch.compile(compressed, fullgraph=True, backend="aot_eager")
    batch = torch.export.Dim.DYNAMIC
    program = torch.export.export(compressed, tuple(images(16)), dynamic_shapes=({0: batch},))
    for x in images(2, 20):
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(program.module()(x), model(x), rtol=1e-5, atol=1e-5)


def test_input_is_left_as_it_is_by_steps_in_place():
    model = zero_out(nn.Sequential(nn.Linear(80, 60), nn.ReLU(), nn.Linear(60, 3)), 0.97)
    compressed = zm.compress(model)
    for batch in (1, 3):
        x = -torch.rand(batch, 80)
        before = x.clone()
        compressed(x)
        assert torch.equal(x, before)


def test_compressing_what_is_not_pruned_is_refused():
    for model in (additive := nn.Sequential(ADDITIVE["dense"](3, 2)), nn.Linear(3, 2)):
        with pytest.raises(ValueError, match=r"no pruned weights.*call zm\.prune_\(model\) first"):
            zm.compress(model)
    zm.prune_(additive, sparsity=0.5)
    assert_same_predictions(additive, zm.compress(additive), torch.randn(2, 3))
    assert_same_predictions(additive[0], zm.compress(additive[0]), torch.randn(2, 3))


def test_conv_sparse_variational_dropout_trains_prunes_and_compresses():
    """Images of bars: the position says the class, most weights are useless."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(4, (256,), generator=generator)
    x = 0.1 * torch.randn(256, 1, 10, 10, generator=generator)
    for image, label in zip(x, labels, strict=True):
        image[0, :, 2 * int(label) : 2 * int(label) + 2] += 1.0
    model = nn.Sequential(
        zm.Conv2d(1, 8, 3, posterior=zm.Additive),
        nn.ReLU(),
        nn.MaxPool2d(2),
        zm.Conv2d(8, 8, 3, posterior=zm.Additive),
        nn.ReLU(),
        nn.Flatten(),
        zm.Linear(32, 4, posterior=zm.Additive),
    )
    optimizer = torch.optim.Adam(zm.parameter_groups(model, lr=1e-2, log_alpha_lr=1e-1))
    warmup = zm.linear_warmup(80)
    for step in range(200):
        optimizer.zero_grad()
        nll = F.cross_entropy(model(x), labels)
        kl = zm.kl_divergence(model)
        zm.elbo_loss(nll, kl, num_data=256, beta=warmup(step)).backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
    zm.prune_(model)
    assert zm.sparsity(model).total.sparsity > 0.8
    compressed = zm.compress(model, x)
    assert_same_predictions(model, compressed, x)
    assert (compressed(x).argmax(1) == labels).float().mean() > 0.95
    assert sum(num_units(compressed)) < 20


@pytest.mark.parametrize("name", ["in_", "lambda_", "train_", "half_", "graph_", "training_", "_"])
def test_layers_may_have_names_that_end_in_an_underscore(name):
    model = network(
        lambda self, x: self.out(getattr(self, name)(x)) + x.mean(),
        **{name: nn.Linear(5, 6)},
        out=nn.Linear(6, 3),
    )
    x = torch.randn(4, 5)
    assert_same_predictions(zero_out(model, 0.5), zm.compress(model, x), x)


def test_functions_may_have_their_inputs_by_keyword():
    def forward(self, x):
        hidden = torch.clamp(input=self.dense1(x), min=0.0)
        return self.dense2(torch.mul(input=hidden, other=torch.exp(input=hidden)))

    model = network(forward, dense1=nn.Linear(6, 8), dense2=nn.Linear(8, 4))
    x = torch.randn(2, 6)
    assert_same_predictions(zero_out(model, 0.8), zm.compress(model, x), x)


def test_outputs_may_be_a_dataclass_and_inputs_any_keywords():
    @dataclass
    class Output:
        logits: torch.Tensor

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = nn.Linear(6, 4)

        def forward(self, **inputs):
            return Output(self.dense(inputs["a"] + inputs["b"]))

    model = zero_out(Network(), 0.5)
    inputs = {"a": torch.randn(2, 6), "b": torch.randn(2, 6)}
    compressed = zm.compress(model, inputs)
    torch.testing.assert_close(compressed(**inputs).logits, model(**inputs).logits)


@torch.no_grad()
def test_units_left_are_those_that_a_trimmed_network_has():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    model[0].weight[[1, 3]] = 0.0  # Constants, which go into the biases behind them.
    model[2].weight[:, 4] = 0.0  # Read by nobody.
    model[4].weight[:, 0] = 0.0
    left = units_left(model)
    assert left["0"].tolist() == [True, False, True, False, False]
    assert left["2"].tolist() == [False, True, True, True]
    assert left["4"].all()
    trimmed, plan = trimmed_with_plan(model)
    places = {name: trimmed.get_submodule(layer.place) for name, layer in plan.layers.items()}
    assert {name: places[name].out_features for name in places} == {
        name: int(left[name].sum()) for name in places
    }
    torch.testing.assert_close(places["0"].weight, model[0].weight[left["0"]])
    x = torch.randn(7, 6)
    torch.testing.assert_close(trimmed(x), model(x))
