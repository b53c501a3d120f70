import copy
from functools import partial

import pytest
import torch
from torch import nn

import zeromean as zm
from zeromean import models

MNIST, CIFAR = (1, 28, 28), (3, 32, 32)

# Hand-computed: weights + biases, layer by layer, and two numbers a channel for BatchNorm.
LENET5_WEIGHTS = 20 * 25 + 50 * 20 * 25 + 500 * 800 + 10 * 500
VGG_CONVS = 27 * 64 + 9 * (
    64 * 64 + 64 * 128 + 128**2 + 128 * 256 + 2 * 256**2 + 256 * 512 + 5 * 512**2
)
CASES = {
    "lenet5": (models.lenet5, MNIST, LENET5_WEIGHTS + 2 * (20 + 50 + 500)),
    "lenet5 without biases": (partial(models.lenet5, bias=False), MNIST, LENET5_WEIGHTS),
    "lenet5 without batchnorm": (partial(models.lenet5, batchnorm=False), MNIST, 431_080),
    "lenet5 with batchnorm behind one layer": (
        partial(models.lenet5, batchnorm=("dense1",)),
        MNIST,
        LENET5_WEIGHTS + 20 + 50 + 2 * 500 + 10,
    ),
    "lenet5 bare": (partial(models.lenet5, batchnorm=False, bias=False), MNIST, LENET5_WEIGHTS),
    "lenet5 with dropout": (partial(models.lenet5, dropout=0.5), MNIST, LENET5_WEIGHTS + 1140),
    "lenet5_caffe": (models.lenet5_caffe, MNIST, 431_080),
    "lenet_300_100": (models.lenet_300_100, MNIST, 266_610),
    "mlp": (partial(models.mlp, (784, 50, 10)), MNIST, 784 * 50 + 50 + 50 * 10 + 10),
    "vgg_like": (
        models.vgg_like,
        CIFAR,
        VGG_CONVS + 2 * (2 * 64 + 2 * 128 + 3 * 256 + 6 * 512) + 512 * 512 + 2 * 512 + 5130,
    ),
    "vgg_like, an eighth": (
        partial(models.vgg_like, 0.125),
        CIFAR,
        27 * 8
        + 9 * (8 * 8 + 8 * 16 + 16**2 + 16 * 32 + 2 * 32**2 + 32 * 64 + 5 * 64**2)
        + 2 * (2 * 8 + 2 * 16 + 3 * 32 + 6 * 64)
        + 64 * 64
        + 2 * 64
        + 650,
    ),
    "resnet of 20 layers": (
        models.resnet,
        CIFAR,
        9 * (3 * 16 + 6 * 16**2 + 16 * 32 + 5 * 32**2 + 32 * 64 + 5 * 64**2)
        + (16 * 32 + 32 * 64)
        + 2 * (7 * 16 + 7 * 32 + 7 * 64)
        + 650,
    ),
    "airbench_like": (
        models.airbench_like,
        CIFAR,
        24 * 12
        + 24
        + 9 * (24 * 64 + 64**2 + 64 * 256 + 3 * 256**2)
        + 2 * (2 * 64 + 4 * 256)
        + 2560,
    ),
}


def number_of_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("case", CASES)
def test_size_and_output_are_as_computed_by_hand(case):
    build, shape, size = CASES[case]
    model = build()
    assert number_of_parameters(model) == size
    assert model(torch.rand(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize("batchnorm", ["dense1", ("dense2",), ("conv1", "dense9")])
def test_batchnorm_where_there_is_none_is_refused(batchnorm):
    with pytest.raises(ValueError, match=r"batchnorm must be a bool or some of .*'conv1'"):
        models.lenet5(batchnorm=batchnorm)


def test_totals_of_the_papers():
    assert number_of_parameters(models.lenet5()) == 431_640
    assert number_of_parameters(models.vgg_like()) == 14_987_210
    assert number_of_parameters(models.toy_network(nn.Linear)) == 31_504


def test_number_of_classes_is_free():
    small = partial(models.vgg_like, 0.125)
    assert small(num_classes=100)(torch.rand(2, *CIFAR)).shape == (2, 100)
    for build in (models.lenet5, models.lenet5_caffe, models.lenet_300_100):
        assert build(num_classes=7)(torch.rand(2, *MNIST)).shape == (2, 7)


def kinds(model):
    return [type(module).__name__ for module in model]


def test_lenet5_is_the_authors_sequence():
    block = ["BatchNorm2d", "ReLU", "MaxPool2d"]
    dense = ["Linear", "BatchNorm1d", "ReLU", "Linear"]
    assert kinds(models.lenet5()) == ["Conv2d", *block, "Conv2d", *block, "Flatten", *dense]
    assert kinds(models.lenet5(dropout=0.5))[9:11] == ["Dropout", "Linear"]
    assert all(not name.startswith("dense2.bias") for name in models.lenet5().state_dict())


def test_lenet5_of_table_3_has_tanh_and_no_affine_maps():
    model = models.lenet5(activation=nn.Tanh, bias=False)
    assert kinds(model).count("Tanh") == 3
    assert [name for name, _ in model.named_parameters()] == [
        f"{layer}.weight" for layer in ("conv1", "conv2", "dense1", "dense2")
    ]


def test_lenet5_caffe_has_its_nonlinearity_after_dense1_only():
    expected = ["Conv2d", "MaxPool2d", "Conv2d", "MaxPool2d", "Flatten", "Linear", "ReLU", "Linear"]
    assert kinds(models.lenet5_caffe()) == expected
    assert kinds(models.lenet5_caffe(conv_activation=nn.ReLU)).count("ReLU") == 3


def test_vgg_like_has_dropout_within_the_first_four_groups_and_before_dense_layers():
    model = models.vgg_like(0.125)
    rates = {n: m.p for n, m in model.named_children() if isinstance(m, nn.Dropout)}
    assert rates == {
        "dropout1": 0.3,
        "dropout3": 0.4,
        "dropout5": 0.4,
        "dropout6": 0.4,
        "dropout8": 0.4,
        "dropout9": 0.4,
        "dropout_dense1": 0.5,
        "dropout_dense2": 0.5,
    }
    assert "Dropout" not in kinds(models.vgg_like(0.125, dropout=False))
    names = [name for name, _ in model.named_children()]
    pools = [names[names.index(f"pool{group}") - 3] for group in range(1, 6)]
    assert pools == ["conv2", "conv4", "conv7", "conv10", "conv13"]


def test_vgg_like_takes_stochastic_convolutions_by_keyword():
    model = models.vgg_like(
        0.125, conv11=zm.Conv2d, conv12=zm.Conv2d, conv13=zm.Conv2d, dense1=zm.Linear
    )
    assert list(zm.stochastic_layers(model)) == ["conv11", "conv12", "conv13", "dense1"]
    everywhere = models.vgg_like(0.125, conv=zm.Conv2d, conv2=nn.Conv2d)
    assert len(zm.stochastic_layers(everywhere)) == 12
    with pytest.raises(TypeError, match="no layer 'conv14'; its convolutions are conv1 to conv13"):
        models.vgg_like(0.125, conv14=nn.Conv2d)
    with pytest.raises(ValueError, match="width must be positive, got 0"):
        models.vgg_like(0)


@pytest.mark.parametrize(
    ("build", "least"),
    [(models.vgg_like, 0.008), (models.resnet, 0.032), (models.airbench_like, 0.008)],
)
def test_width_that_leaves_no_channels_is_refused(build, least):
    with pytest.raises(ValueError, match=f"width=0.001 leaves no channels.* at least {least}"):
        build(width=0.001)
    assert build(width=least)(torch.rand(2, *CIFAR)).shape == (2, 10)
    for width in (0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="width must be positive, got"):
            build(width=width)


def test_resnet_projects_where_shapes_change_and_only_there():
    model = models.resnet(14, 0.25)
    projected = [n for n, m in model.named_modules() if n.endswith("shortcut.conv")]
    assert projected == ["block2_1.shortcut.conv", "block3_1.shortcut.conv"]
    assert model[:-3](torch.rand(1, *CIFAR)).shape == (1, 16, 8, 8)
    with pytest.raises(ValueError, match=r"depth must be 6n \+ 2, as in 8, 14, 20 or 32, got 9"):
        models.resnet(9)


def test_resnet_adds_the_input_to_what_a_block_computes():
    block = models.resnet(8, 0.25).get_submodule("block1_1").eval()
    torch.nn.init.zeros_(block.conv2.weight)
    x = torch.rand(2, 4, 8, 8)
    assert torch.equal(block(x), x)


def test_resnet_projects_every_other_pixel():
    block = models.resnet(8, 0.25).get_submodule("block2_1")
    x = torch.rand(2, 4, 8, 8)
    expected = nn.functional.conv2d(x, block.shortcut.conv.weight, stride=2)
    torch.testing.assert_close(block.shortcut[:2](x), expected)


def test_resnet_of_few_channels_trains_in_channels_last():
    model = models.resnet(8, 0.25).to(memory_format=torch.channels_last)
    model(torch.rand(32, *CIFAR)).logsumexp(1).sum().backward()


def test_resnet_takes_stochastic_convolutions_by_number():
    model = models.resnet(8, 0.25, conv7=zm.Conv2d, dense=zm.Linear)
    assert list(zm.stochastic_layers(model)) == ["block3_1.conv2", "dense"]
    projection = models.resnet(8, 0.25, conv6=zm.Conv2d)
    names = ["block3_1.conv1", "block3_1.shortcut.conv"]
    assert list(zm.stochastic_layers(projection)) == names
    with pytest.raises(TypeError, match="no layer 'conv8'; its convolutions are conv1 to conv7"):
        models.resnet(8, conv8=nn.Conv2d)


def test_airbench_like_passes_its_input_on_at_the_start():
    layer = models.airbench_like(0.5).get_submodule("conv1")
    x = torch.rand(2, 24, 6, 6)
    torch.testing.assert_close(layer(x)[:, :24], x)
    with pytest.raises(TypeError, match="no layer 'conv7'; its convolutions are conv1 to conv6"):
        models.airbench_like(conv7=nn.Conv2d)
    stochastic = models.airbench_like(0.125, conv5=zm.Conv2d, dense1=zm.Linear)
    assert list(zm.stochastic_layers(stochastic)) == ["conv5", "dense1"]


def test_whitened_patches_have_the_identity_for_their_covariance():
    torch.manual_seed(0)
    images = torch.rand(50, *CIFAR).cumsum(3).cumsum(2) / 100  # Neighbours are alike.
    model = models.whiten_(models.airbench_like(0.125), images, eps=0.0)
    whitening = model.get_submodule("whitening")
    assert not whitening.weight.requires_grad
    with torch.no_grad():
        outputs = whitening(images).transpose(0, 1).flatten(1).double()
    torch.testing.assert_close(outputs[:12].cov(), torch.eye(12).double(), atol=1e-2, rtol=0)
    torch.testing.assert_close(whitening.weight[:12], -whitening.weight[12:])
    with pytest.raises(ValueError, match=r"whiten_ needs images of shape \(N, 3, H, W\), got"):
        models.whiten_(models.airbench_like(0.125), torch.rand(5, 1, 28, 28))


def test_mlp_takes_a_factory_for_each_layer():
    model = models.mlp((4, 8, 8, 2), (nn.Linear, zm.Linear, nn.Linear), dropout=0.2)
    assert list(zm.stochastic_layers(model)) == ["dense2"]
    assert kinds(model).count("Dropout") == 2
    assert model(torch.rand(3, 4)).shape == (3, 2)
    with pytest.raises(ValueError, match="one for each of 3 layers, got 2"):
        models.mlp((4, 8, 8, 2), (nn.Linear, nn.Linear))
    with pytest.raises(ValueError, match="sizes of input and output"):
        models.mlp((4,))


def test_toy_network_is_an_encoder_with_two_variance_neurons_and_a_classifier():
    model = models.toy_network()
    assert list(zm.stochastic_layers(model)) == ["encoder.bottleneck"]
    points = torch.rand(5, 2)
    assert model.get_submodule("encoder")(points).shape == (5, 2)
    assert model(points).shape == (5, 4)
    with zm.sampling(model, zm.mean):  # the mean says nothing about the point
        assert torch.equal(*model.get_submodule("encoder")(points)[:2])


C, D = (partial(layer, posterior=zm.Additive) for layer in (zm.Conv2d, zm.Linear))
TWINS = {
    "lenet5": (models.lenet5, {"conv1": C, "conv2": C, "dense1": D, "dense2": D}, MNIST),
    "lenet5_caffe": (
        models.lenet5_caffe,
        {"conv1": C, "conv2": C, "dense1": D, "dense2": D},
        MNIST,
    ),
    "lenet_300_100": (models.lenet_300_100, {"dense1": D, "dense2": D, "dense3": D}, MNIST),
    "mlp": (partial(models.mlp, (784, 30, 10)), {"layer": D}, MNIST),
    "vgg_like": (partial(models.vgg_like, 0.125), {"conv": C, "dense1": D, "dense2": D}, CIFAR),
    "resnet": (partial(models.resnet, 8, 0.25), {"conv": C, "dense": D}, CIFAR),
    "toy_network": (partial(models.toy_network), {"bottleneck": D}, (2,)),
}


def build_twins(name):
    build, stochastic, shape = TWINS[name]
    deterministic = {"bottleneck": nn.Linear} if name == "toy_network" else {}
    plain, twin = build(**deterministic), build(**stochastic)
    means = {f"{name}.weight": f"{name}.weight.mean" for name in zm.stochastic_layers(twin)}
    state = {means.get(key, key): value for key, value in plain.state_dict().items()}
    assert not twin.load_state_dict(state, strict=False).unexpected_keys
    return plain.eval(), twin.eval(), torch.rand(4, *shape)


@pytest.mark.parametrize("name", TWINS)
def test_mean_of_the_stochastic_twin_is_the_plain_network(name):
    plain, twin, x = build_twins(name)
    with zm.sampling(twin, zm.mean), torch.no_grad():
        torch.testing.assert_close(twin(x), plain(x))
        torch.testing.assert_close(twin(x), twin(x), rtol=0, atol=0)
    assert not torch.equal(twin(x), twin(x))  # and it does sample
    assert zm.kl_divergence(twin) > 0


@pytest.mark.parametrize("name", TWINS)
def test_models_are_copied_and_their_gradients_reach_every_parameter(name):
    _, twin, x = build_twins(name)
    twin.train()
    copied = copy.deepcopy(twin)
    torch.manual_seed(0)
    copied(x).logsumexp(1).sum().backward()
    assert all(parameter.grad is not None for parameter in copied.parameters())
    assert all(parameter.grad is None for parameter in twin.parameters())


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", ["lenet5", "lenet_300_100", "toy_network", "vgg_like", "resnet"])
def test_models_compile_without_graph_breaks(name):
    _, twin, x = build_twins(name)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    with zm.sampling(twin, zm.mean), torch.no_grad():
        torch.testing.assert_close(compiled(x), twin(x))
    with torch.no_grad():
        assert compiled(x).shape == twin(x).shape


def test_variance_network_predicts_under_vmap():
    model = models.lenet5(dense1=partial(zm.Linear, posterior=zm.ZeroMean))
    proba = zm.predict_proba(model, torch.rand(3, *MNIST), num_samples=4)
    torch.testing.assert_close(proba.sum(1), torch.ones(3))


def test_dropout_of_vgg_like_is_a_switch():
    with pytest.raises(TypeError, match=r"dropout must be True, .* or False, got 0.1"):
        models.vgg_like(dropout=0.1)
