"""blitz: weight sampling, scale-mixture prior, Monte-Carlo KL (computed in every pass)."""

import torch.nn.functional as F
from blitz.losses import kl_divergence_from_nn
from blitz.modules import BayesianConv2d, BayesianLinear
from subjects import NUM_DATA, Subject, adam_trainer, predict_by_loop

PACKAGE = "blitz-bayesian-pytorch"


def conv(in_channels, out_channels, kernel_size, padding=0):
    # Kernel sizes must be pairs here.
    return BayesianConv2d(in_channels, out_channels, (kernel_size, kernel_size), padding=padding)


def build(network):
    return network(conv, BayesianLinear)


def loss(model, x, y):
    # What its `sample_elbo(sample_nbr=1)` computes; that decorator wants a class of ours.
    return F.cross_entropy(model(x), y) + kl_divergence_from_nn(model) / NUM_DATA


SUBJECTS = [Subject("blitz", build, adam_trainer(loss), predict_by_loop)]
