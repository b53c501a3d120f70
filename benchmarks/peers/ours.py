"""zeromean itself, through its public names only."""

from functools import partial

import torch
import torch.nn.functional as F
from subjects import NUM_DATA, Step, Subject, adam_trainer
from torch import Tensor, nn

import zeromean as zm

PACKAGE = "zeromean"

LAYER_ALPHA = partial(zm.Multiplicative, share="layer")


def build(posterior, network):
    layer = {"posterior": posterior, "prior": zm.LogUniform()}
    return network(partial(zm.Conv2d, **layer), partial(zm.Linear, **layer))


def build_drawing_weights(network, prior=zm.LogUniform()):
    """Additive layers that draw one weight for each batch in training too."""
    layer = {"posterior": zm.Additive, "prior": prior, "sampler": zm.weight}
    return network(partial(zm.Conv2d, **layer), partial(zm.Linear, **layer))


def build_with_one_stochastic_layer(name, network):
    """A plain network, one layer of which is replaced by a variance layer."""
    model = network(nn.Conv2d, nn.Linear)
    plain = model.get_submodule(name)
    setattr(model, name, zm.Linear(plain.in_features, plain.out_features))
    return model


def build_as_training_leaves_it(network):
    """Zero-mean layers, 95% of whose scales are so small that their squares are denormal."""
    model = build(zm.ZeroMean, network)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("weight.scale"):
                parameter.masked_fill_(torch.rand_like(parameter) < 0.95, 1e-21)
    return model


def loss(model, x, y):
    nll = F.cross_entropy(model(x), y)
    return zm.elbo_loss(nll, zm.kl_divergence(model), num_data=NUM_DATA)


def predict(model, x, num_samples, sampler=zm.local):
    return zm.predict_proba(model, x, num_samples=num_samples, sampler=sampler)


def predict_by_moments(model, x, num_samples):
    """One pass that carries means and variances, whatever the number of samples."""
    return zm.predict_proba(model, x, method="moments")


def trainer_that_keeps_the_scales(model: nn.Module) -> Step:
    """The same work at learning rate zero: one step of Adam would undo the tiny scales."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss(model, x, y).backward()
        optimizer.step()

    return step


TRAIN = adam_trainer(loss)

SUBJECTS = [
    Subject("zeromean, zero-mean", partial(build, zm.ZeroMean), TRAIN, predict),
    Subject(
        "zeromean, zero-mean, 95% of scales 1e-21",
        build_as_training_leaves_it,
        trainer_that_keeps_the_scales,
        predict,
    ),
    Subject("zeromean, layer-wise alpha", partial(build, LAYER_ALPHA), TRAIN, predict),
    Subject("zeromean, additive", partial(build, zm.Additive), TRAIN, predict),
    Subject(
        "zeromean, additive, sampler=weight",
        partial(build, zm.Additive),
        TRAIN,
        partial(predict, sampler=zm.weight),
    ),
    Subject(
        'zeromean, additive, sampler="auto"',
        partial(build, zm.Additive),
        TRAIN,
        partial(predict, sampler="auto"),
    ),
    Subject("zeromean, additive, weights drawn", build_drawing_weights, TRAIN, predict),
    Subject(
        "zeromean, additive, weights drawn, normal prior",
        partial(build_drawing_weights, prior=zm.Normal(scale=0.1)),
        TRAIN,
        predict,
    ),
    Subject(
        "zeromean, only dense1 stochastic",
        partial(build_with_one_stochastic_layer, "dense1"),
        TRAIN,
        predict,
    ),
    Subject("zeromean, additive, moments", partial(build, zm.Additive), TRAIN, predict_by_moments),
    Subject(
        "zeromean, only dense1 stochastic, moments",
        partial(build_with_one_stochastic_layer, "dense1"),
        TRAIN,
        predict_by_moments,
    ),
    Subject(
        "zeromean, only the last layer stochastic",
        partial(build_with_one_stochastic_layer, "dense2"),
        TRAIN,
        predict,
    ),
]
