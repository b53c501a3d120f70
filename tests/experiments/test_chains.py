"""Networks without their empty units predict what the whole ones do, and go back into them."""

from functools import partial

import pytest
import torch
from torch import nn

import zeromean as zm
from zeromean.experiments.sparse_networks import chains, lenet_training
from zeromean.experiments.sparse_networks.sparse_lenet5 import relu_lenet5_caffe
from zeromean.models.lenet import lenet5_caffe, lenet_300_100

# Shares of the weights that are pruned, which leave empty units of all kinds.
PRUNED = {
    relu_lenet5_caffe: {"conv1": 0.97, "conv2": 0.998, "dense1": 0.996, "dense2": 0.97},
    lenet5_caffe: {"conv1": 0.97, "conv2": 0.998, "dense1": 0.996, "dense2": 0.97},
    lenet_300_100: {"dense1": 0.998, "dense2": 0.99, "dense3": 0.97},
}


def sparse(architecture):
    make = {
        name: partial(
            zm.Conv2d if name.startswith("conv") else zm.Linear,
            posterior=zm.Additive,
            prior=zm.LogUniform(),
        )
        for name in lenet_training.LAYERS[architecture.__name__]
    }
    return architecture(**make)


def pruned(architecture):
    torch.manual_seed(0)
    model = sparse(architecture)
    for name, share in PRUNED[architecture].items():
        layer = model.get_submodule(name)
        layer.weight.mask = torch.rand(layer.weight.shape) > share
        nn.init.normal_(layer.bias)
    return model


@torch.no_grad()
def predicted(model, x):
    with zm.sampling(model, zm.mean):
        return model(x)


@pytest.mark.parametrize("architecture", PRUNED)
def test_small_and_expanded_networks_predict_the_same(architecture):
    model, x = pruned(architecture), torch.randn(7, 1, 28, 28)
    chain = chains.whole_chain(architecture, tuple(PRUNED[architecture]), model)
    fewer, small = chains.shrink(chain, model)
    sizes = [len(kept) for kept in fewer.kept]
    assert all(size < len(kept) for size, kept in zip(sizes[:-1], chain.kept[:-1], strict=True))
    assert sizes[-1] == 10
    torch.testing.assert_close(predicted(small, x), predicted(model, x))
    back = chains.expand(fewer, small, sparse(architecture))
    torch.testing.assert_close(predicted(back, x), predicted(model, x))
    assert zm.sparsity(back).total.kept == zm.sparsity(small).total.kept
    assert zm.sparsity(back).total.kept <= zm.sparsity(model).total.kept
    # What is left has nothing empty, and keeps its numbers through a second time.
    again, smallest = chains.shrink(fewer, small)
    assert [k.tolist() for k in again.kept] == [k.tolist() for k in fewer.kept]
    for name in PRUNED[architecture]:
        assert smallest.get_submodule(name).weight.mask.flatten(1).any(1).all() or name == "dense2"


def test_a_small_network_can_be_pruned_and_shrunk_further():
    model, x = pruned(lenet5_caffe), torch.randn(7, 1, 28, 28)
    chain = chains.whole_chain(lenet5_caffe, tuple(PRUNED[lenet5_caffe]), model)
    chain, small = chains.shrink(chain, model)
    mask = small.get_submodule("dense1").weight.mask
    mask &= torch.rand(mask.shape) > 0.5
    expected = predicted(small, x)
    chain, smaller = chains.shrink(chain, small)
    back = chains.expand(chain, smaller, sparse(lenet5_caffe))
    torch.testing.assert_close(predicted(back, x), expected)


def test_an_empty_layer_leaves_a_constant():
    model, x = pruned(lenet_300_100), torch.randn(3, 1, 28, 28)
    model.get_submodule("dense2").weight.mask.zero_()
    chain = chains.whole_chain(lenet_300_100, tuple(PRUNED[lenet_300_100]), model)
    _, small = chains.shrink(chain, model)
    torch.testing.assert_close(predicted(small, x), predicted(model, x))
