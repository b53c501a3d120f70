"""The callback next to the same training in a bare loop."""

import copy
import multiprocessing
import sys
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

import zeromean as zm
from zeromean.training import ElboCallback, children

X = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
# Without noise in training both loops compute the same; the KL is there all the same.
LAYER = partial(zm.Linear, posterior=zm.Additive, prior=zm.Normal(scale=0.1), sampler=zm.mean)


class Classifier(pl.LightningModule):
    def __init__(self, returns="loss", optimizer=None):
        super().__init__()
        self.model = nn.Sequential(LAYER(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.returns = returns
        self.optimizer = optimizer or partial(torch.optim.SGD, lr=0.5)

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        return {"loss": {"loss": loss, "more": 1}, "nothing": None}.get(self.returns, loss)

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


def trainer(*callbacks, **options):
    options = {"max_epochs": 2, "logger": False, "devices": 1, **options}
    return pl.Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def loader(batch_size=8):
    return DataLoader(TensorDataset(X, Y), batch_size=batch_size)


quiet = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),
]
pytestmark = quiet


@pytest.mark.parametrize("returns", ["loss", "tensor"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_are_those_of_a_bare_loop(returns, accumulate):
    module = Classifier(returns)
    bare = copy.deepcopy(module.model)
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.5)
    beta = zm.linear_warmup(steps=4)
    callback = ElboCallback(num_data=32, beta=beta, num_samples=0)
    trainer(callback, accumulate_grad_batches=accumulate).fit(module, loader())
    step = 0
    for _ in range(2):
        for x, y in loader(8 * accumulate):  # The mean of two means is the mean of all.
            kl = zm.kl_divergence(bare)
            nll = F.cross_entropy(bare(x), y)
            optimizer.zero_grad()
            zm.elbo_loss(nll, kl, num_data=32, beta=beta(step)).backward()
            optimizer.step()
            step += 1
    for mine, theirs in zip(module.model.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


class Two(LightningEnvironment):
    """Two processes that the test has started."""

    def __init__(self, group):
        super().__init__()
        self.group = group

    creates_processes_externally = True

    def world_size(self):
        return 2

    def global_rank(self):
        return self.group.rank

    def local_rank(self):
        return self.group.rank

    def set_world_size(self, size):
        pass

    def set_global_rank(self, rank):
        pass


def train_in_two(job, group):
    """Each process has every other example; the noise is drawn after the training."""
    module = job or Classifier()
    mine = TensorDataset(X[group.rank :: 2], Y[group.rank :: 2])
    ddp = DDPStrategy(cluster_environment=Two(group))
    run = trainer(
        ElboCallback(num_data=32, beta=zm.linear_warmup(steps=4), num_samples=2),
        strategy=ddp,
        devices=2,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
    )
    run.fit(module, DataLoader(mine, batch_size=4), DataLoader(mine, batch_size=4))
    drawn = [torch.zeros(4) for _ in range(2)]
    distributed.all_gather(drawn, torch.randn(4))
    return run.callback_metrics, drawn


@pytest.mark.skipif(sys.platform != "linux", reason="needs forks")
def test_two_processes_train_as_one_does(monkeypatch):
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(children, "start_context", lambda: context)
    two = Classifier()
    one = copy.deepcopy(two)
    with children.children(train_in_two, copy.deepcopy(two), 2, "cpu") as group:
        logged, drawn = train_in_two(two, group)
    order = torch.arange(32).view(4, 4, 2).transpose(1, 2).flatten()  # As both have them together.
    data = DataLoader(TensorDataset(X[order], Y[order]), batch_size=8)
    trainer(ElboCallback(num_data=32, beta=zm.linear_warmup(steps=4), num_samples=0)).fit(one, data)
    for mine, theirs in zip(two.model.parameters(), one.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(logged["kl/model.0"], zm.kl_divergence(one).detach(), rtol=1e-4,
                               atol=0, check_dtype=False)  # fmt: skip
    # Metrics of validation are those of both shares; noise is each process's own.
    proba = zm.predict_proba(one.model, X, 1)
    nll = -proba.gather(1, Y[:, None]).log().mean()
    torch.testing.assert_close(logged["mc_nll"], nll)
    assert not torch.equal(*drawn)


def test_every_closure_of_an_optimizer_has_the_kl():
    module = Classifier(optimizer=partial(torch.optim.LBFGS, max_iter=5))
    bare = copy.deepcopy(module.model)
    optimizer = torch.optim.LBFGS(bare.parameters(), max_iter=5)
    trainer(ElboCallback(num_data=32), max_epochs=1).fit(module, loader(32))

    def closure():
        optimizer.zero_grad()
        loss = zm.elbo_loss(F.cross_entropy(bare(X), Y), zm.kl_divergence(bare), num_data=32)
        loss.backward()
        return loss

    optimizer.step(closure)
    for mine, theirs in zip(module.model.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_logs_and_validation_are_those_of_the_model():
    module = Classifier(optimizer=partial(torch.optim.SGD, lr=0.0))
    module.model[0].sampler = zm.local
    module.model[0].weight.log_variance.data.fill_(0.0)
    run = trainer(ElboCallback(num_data=32, beta=0.5, num_samples=7, seed=3))
    state = copy.deepcopy(module.model.state_dict())
    run.fit(module, loader(), loader(32))
    logged = run.callback_metrics
    assert logged["beta"] == 0.5
    torch.testing.assert_close(logged["kl"], zm.kl_divergence(module).detach())
    torch.testing.assert_close(logged["kl/model.0"], logged["kl"], check_dtype=False)
    mean, variance = module.model[0].weight.moments()
    expected = (variance.sum() / mean.square().sum()).log()
    torch.testing.assert_close(logged["log_alpha/model.0"], expected, check_dtype=False)
    probabilities = zm.predict_proba(module.model, X, 7, seed=3)
    nll = -probabilities.gather(1, Y[:, None]).log().mean()
    torch.testing.assert_close(logged["mc_nll"], nll)
    right = (probabilities.argmax(1) == Y).float().mean()
    torch.testing.assert_close(logged["mc_accuracy"], right)
    assert all(torch.equal(state[n], t) for n, t in module.model.state_dict().items())


def test_regression_is_validated_by_moments():
    module = Classifier()
    module.model[0].sampler = zm.local
    likelihood = zm.GaussianLikelihood(2, noise_variance=0.5)
    targets = torch.randn(32, 2)
    callback = ElboCallback(num_data=32, num_samples=5, likelihood=likelihood)
    run = trainer(callback)
    run.validate(module, DataLoader(TensorDataset(X, targets), 32), verbose=False)
    mean, noise, spread = zm.predict_moments(module, X, 5, likelihood=likelihood, seed=0)
    normal = torch.distributions.Normal(mean, (noise + spread).sqrt())
    torch.testing.assert_close(run.callback_metrics["mc_nll"], -normal.log_prob(targets).mean())
    mse = (mean - targets).square().mean()
    torch.testing.assert_close(run.callback_metrics["mc_mse"], mse)


def test_the_module_is_left_as_it_was_and_a_second_fit_adds_the_kl_once():
    module = Classifier(optimizer=partial(torch.optim.SGD, lr=0.0))
    losses = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, *_):
            losses.append(outputs["loss"])

    for _ in range(2):
        callback = ElboCallback(num_data=32, num_samples=0)
        trainer(callback, Watch(), max_epochs=1).fit(module, loader(32))
        assert "training_step" not in vars(module)
        expected = F.cross_entropy(module(X), Y) + zm.kl_divergence(module) / 32
        torch.testing.assert_close(losses[-1], expected.detach())

    class Breaks(pl.Callback):
        def on_train_batch_end(self, *_):
            raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        trainer(ElboCallback(num_data=32), Breaks()).fit(module, loader())
    assert "training_step" not in vars(module)


def test_a_step_without_a_loss_is_skipped():
    module = Classifier("nothing")
    before = copy.deepcopy(module.state_dict())
    trainer(ElboCallback(num_data=32)).fit(module, loader())
    assert all(torch.equal(before[n], t) for n, t in module.state_dict().items())


def test_batches_may_be_mappings():
    inputs, targets = ElboCallback(num_data=1).unpack({"x": X, "labels": Y})
    assert inputs == {"x": X}
    assert targets is Y


def test_manual_optimization_and_bad_numbers_are_refused():
    module = Classifier()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match=r"manual optimization.*zm\.elbo_loss"):
        trainer(ElboCallback(num_data=32)).fit(module, loader())
    with pytest.raises(ValueError, match="num_data must be at least 1"):
        ElboCallback(num_data=0)
