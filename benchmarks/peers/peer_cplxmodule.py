"""cplxmodule: sparse variational dropout and ARD by local reparameterization, approximate KL."""

import torch.nn.functional as F
from cplxmodule.nn.relevance import Conv2dARD, Conv2dVD, LinearARD, LinearVD, penalties
from subjects import NUM_DATA, Subject, adam_trainer, predict_by_loop

PACKAGE = "cplxmodule"


def loss(model, x, y):
    return F.cross_entropy(model(x), y) + sum(penalties(model)) / NUM_DATA


# These layers draw noise in training mode only. Models start in that mode and stay in it, so
# prediction samples as well (our networks have no BatchNorm and no Dropout to disturb).
SUBJECTS = [
    Subject(
        "cplxmodule VD",
        lambda network: network(Conv2dVD, LinearVD),
        adam_trainer(loss),
        predict_by_loop,
    ),
    Subject(
        "cplxmodule ARD",
        lambda network: network(Conv2dARD, LinearARD),
        adam_trainer(loss),
        predict_by_loop,
    ),
]
