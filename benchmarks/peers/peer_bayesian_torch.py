"""bayesian-torch: a plain network converted as in its README, MOPED on; plain and Flipout."""

from functools import partial

import torch.nn.functional as F
from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss
from subjects import Subject, adam_trainer, predict_by_loop
from torch import nn

PACKAGE = "bayesian-torch"


def build(layer_type, network):
    model = network(nn.Conv2d, nn.Linear)
    dnn_to_bnn(
        model,
        {
            "prior_mu": 0.0,
            "prior_sigma": 1.0,
            "posterior_mu_init": 0.0,
            "posterior_rho_init": -3.0,
            "type": layer_type,
            "moped_enable": True,
            "moped_delta": 0.5,
        },
    )
    return model


def loss(model, x, y):
    # As its README has it: the KL is a mean over the weights there, divided by the batch size.
    return F.cross_entropy(model(x), y) + get_kl_loss(model) / len(x)


SUBJECTS = [
    Subject(
        "bayesian-torch",
        partial(build, "Reparameterization"),
        adam_trainer(loss),
        predict_by_loop,
    ),
    Subject(
        "bayesian-torch Flipout",
        partial(build, "Flipout"),
        adam_trainer(loss),
        predict_by_loop,
    ),
]
