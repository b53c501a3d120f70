"""FSDP2: parameters that are divided among processes, in `fit` and in a loop of one's own."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from test_any_data import CLASSES, VALUES, X
from test_processes_of_fit import Stop, copies_of_this_process, states_agree  # noqa: F401
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import zeromean as zm
from zeromean.training import TrainingConfig, children, fit

pl = pytest.importorskip("lightning.pytorch")
pytestmark = pytest.mark.usefixtures("copies_of_this_process")

POSTERIORS = {
    "additive": zm.Additive,
    "one alpha": partial(zm.Multiplicative, share="layer"),  # A scalar, which FSDP2 refuses.
}
RECIPES = {
    "adam": {
        "accumulate": 2,
        "clip_gradient": 0.1,
        "clip_log_alpha": (-5.0, 1.0),
        "monitor": "validation_nll",
    },
    "sgd": {"optimizer": "sgd", "log_alpha_lr": 0.01, "average_epochs": 0.5},
}


def network(posterior="additive"):
    """Means alone: without noise two processes come to what one comes to."""
    torch.manual_seed(0)
    layer = partial(zm.Linear, posterior=POSTERIORS[posterior], sampler=zm.mean)
    # Adam would make steps of a bias in front of BatchNorm, whose gradient is nothing but rounding;
    # a kink would make more of rounding too.
    return nn.Sequential(layer(4, 9, bias=False), nn.BatchNorm1d(9), nn.Tanh(), layer(9, 3))


class Shards(pl.Callback):
    """What a process holds of the parameters, and of the optimizer's moments, between steps."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        parameters = [p for p in pl_module.parameters() if p.dim()]
        moments = [
            value
            for state in trainer.optimizers[0].state.values()
            for value in state.values()
            if value.dim()
        ]
        self.held = [t.to_local().numel() / t.numel() for t in (*parameters, *moments)]


def train(folder, config, *, posterior="additive", **options):
    return fit(
        network(posterior),
        (X, CLASSES),
        TrainingConfig(**{"epochs": 2, "batch_size": 16, "lr": 0.02, **config}),
        folder=folder,
        validation=(X, CLASSES),
        sync_batchnorm=True,
        progress=False,
        **options,
    )


@pytest.mark.parametrize(
    ("recipe", "posterior"), [("adam", "additive"), ("adam", "one alpha"), ("sgd", "additive")]
)
def test_sharded_training_is_that_of_one_process(recipe, posterior, tmp_path):
    config = RECIPES[recipe]
    one = train(tmp_path / "one", config, posterior=posterior)
    shards = Shards()
    two = train(
        tmp_path / "two",
        config,
        posterior=posterior,
        devices=2,
        strategy="fsdp",
        callbacks=[shards],
    )
    assert max(shards.held) < 0.7
    states_agree(two.model, one.model)
    assert not any(isinstance(tensor, DTensor) for tensor in two.model.state_dict().values())
    for a, b in zip(one.history, two.history, strict=True):
        for name in ("loss", "kl", "validation_nll", "validation_accuracy"):
            assert b[name] == pytest.approx(a[name], rel=1e-4)


@pytest.mark.parametrize(("first", "second"), [("fsdp", "ddp"), (None, "fsdp")])
def test_checkpoint_goes_on_sharded_or_whole(first, second, tmp_path):
    places = {None: {}, "ddp": {"devices": 2}, "fsdp": {"devices": 2, "strategy": "fsdp"}}
    config = {"average_epochs": 0.5, "log_alpha_lr": 0.01, "optimizer": "sgd"}
    whole = train(tmp_path / "whole", config)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", config, callbacks=[Stop()], **places[first])
    cut = train(tmp_path / "cut", config, **places[second])
    assert cut.resumed_from == 1
    states_agree(cut.model, whole.model)


def test_sharded_likelihood_and_pruning_and_noise(tmp_path):
    torch.manual_seed(0)
    model = zm.Linear(4, 1, posterior=zm.Additive)
    likelihood = zm.GaussianLikelihood(1)
    before = [p.detach().clone() for p in likelihood.parameters()]
    result = fit(
        model,
        (X, VALUES),
        TrainingConfig(epochs=3, batch_size=16, lr=0.05, prune_after_epochs=1,
                       clip_log_alpha=(-5.0, 5.0)),
        folder=tmp_path,
        likelihood=likelihood,
        test=(X, VALUES),
        devices=2,
        strategy="fsdp",
        on_epoch=lambda epoch, trained: {"predicted": zm.predict_moments(trained, X).mean},
    )  # fmt: skip
    assert result.history[-1]["test_rmse"] < result.history[0]["test_rmse"]
    assert not any(map(torch.equal, before, likelihood.parameters()))
    predicted = zm.predict_moments(result.model, X, 500, seed=0).mean
    found = torch.tensor(result.history[-1]["predicted"])
    assert (found - predicted).square().mean().sqrt() < 0.2 * predicted.std()


def test_another_strategy_is_refused(tmp_path):
    with pytest.raises(ValueError, match="strategy must be one of ddp, fsdp, got 'zero'"):
        train(tmp_path, {}, strategy="zero")


class Objective(nn.Module):
    """Parameters are whole inside of a forward pass: that is where the KL belongs."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, y):
        nll = F.cross_entropy(self.model(x), y)
        return zm.elbo_loss(nll, zm.kl_divergence(self.model), num_data=100)


def loop(job, group):
    torch.manual_seed(0)
    layer = partial(zm.Linear, posterior=zm.Additive, sampler=zm.mean)
    objective = Objective(nn.Sequential(layer(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    if group is not None:
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        fully_shard(objective, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.Adam(objective.parameters(), lr=0.05)
    mine = slice(None) if group is None else slice(group.rank, None, group.world_size)
    for _ in range(5):
        objective(X[mine], CLASSES[mine]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        name: p if group is None else p.full_tensor() for name, p in objective.named_parameters()
    }


def test_a_loop_of_ones_own_that_is_sharded_trains_as_a_whole_one_does():
    whole = loop(None, None)
    with children.children(loop, None, 2, "cpu") as group:
        sharded = loop(None, group)
    for name, parameter in sharded.items():
        torch.testing.assert_close(parameter, whole[name], rtol=1e-4, atol=1e-6)
