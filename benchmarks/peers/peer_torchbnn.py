"""torchbnn: weight sampling, Gaussian prior, closed-form KL."""

import torch.nn.functional as F
import torchbnn as bnn
from subjects import NUM_DATA, Subject, adam_trainer, predict_by_loop

PACKAGE = "torchbnn"


def build(network):
    return network(
        lambda *args, **kwargs: bnn.BayesConv2d(0.0, 0.1, *args, **kwargs),
        lambda *args: bnn.BayesLinear(0.0, 0.1, *args),
    )


def loss(model, x, y):
    # The default reduction divides the KL by the number of weights; "sum" is the ELBO.
    kl = bnn.BKLLoss(reduction="sum")(model).sum()
    return F.cross_entropy(model(x), y) + kl / NUM_DATA


SUBJECTS = [Subject("torchbnn", build, adam_trainer(loss), predict_by_loop)]
