"""posteriors: diagonal variational inference over the parameters of a plain network."""

import warnings

import torch
import torch.nn.functional as F
from subjects import LEARNING_RATE, NUM_DATA, Subject, predict_by_loop
from torch import nn
from torch.func import functional_call, vmap

with warnings.catch_warnings():
    # tensordict announces a change of defaults once for each class that posteriors defines.
    warnings.simplefilter("ignore", FutureWarning)
    import posteriors
    import torchopt

PACKAGE = "posteriors"


class Inference:
    """Holds the state, which posteriors hands back from every update."""

    def __init__(self, network):
        self.module = network(nn.Conv2d, nn.Linear)
        self.transform = posteriors.vi.diag.build(
            self.log_posterior,
            torchopt.adam(lr=LEARNING_RATE),
            temperature=1 / NUM_DATA,
            init_log_sds=-4.0,
        )
        parameters = {name: p.detach().clone() for name, p in self.module.named_parameters()}
        self.state = self.transform.init(parameters)

    def log_posterior(self, parameters, batch):
        x, y = batch
        logits = functional_call(self.module, parameters, (x,))
        log_prior = posteriors.diag_normal_log_prob(parameters)
        return -F.cross_entropy(logits, y) + log_prior / NUM_DATA, logits

    def step(self, x, y):
        self.state, _ = self.transform.update(self.state, (x, y))

    def __call__(self, x):
        return functional_call(self.module, posteriors.vi.diag.sample(self.state), (x,))


@torch.no_grad()
def predict_by_vmap(model, x, num_samples):
    draws = posteriors.vi.diag.sample(model.state, (num_samples,))
    logits = vmap(lambda parameters: functional_call(model.module, parameters, (x,)))(draws)
    return logits.softmax(-1).mean(0)


# The vmap recipe is the documented one; the loop is the faster one on a CPU.
SUBJECTS = [
    Subject("posteriors, loop", Inference, lambda model: model.step, predict_by_loop),
    Subject("posteriors, vmap", Inference, lambda model: model.step, predict_by_vmap),
]
