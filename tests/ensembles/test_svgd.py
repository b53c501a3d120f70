"""SVGD against the kernel by autograd, against moments that it has exactly, and in `fit`."""

import math
from importlib.util import find_spec

import pytest
import torch
from torch import nn

import zeromean as zm
from zeromean.ensembles import Ensemble, fit_svgd, stein_direction, stein_gradients_
from zeromean.training import TrainingConfig

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 1).long()
CONFIG = TrainingConfig(epochs=3, batch_size=20, lr=0.02)


def plain():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def line():
    return nn.Linear(4, 1)


def test_direction_is_that_of_the_kernel_by_autograd():
    torch.manual_seed(0)
    x, scores = torch.randn(5, 3).double(), torch.randn(5, 3).double()
    for bandwidth in (0.5, 7.0, None):
        squared = (x[:, None] - x[None]).square().sum(-1)
        off = squared[~torch.eye(5, dtype=torch.bool)]
        h = off.median() / math.log(5) if bandwidth is None else bandwidth
        expected = torch.zeros_like(x)
        for i in range(5):
            for j in range(5):
                at = x[j].clone().requires_grad_()
                kernel = (-(at - x[i]).square().sum() / h).exp()
                (slope,) = torch.autograd.grad(kernel, at)
                expected[i] += kernel.detach() * scores[j] + slope
        torch.testing.assert_close(stein_direction(x, scores, bandwidth), expected / 5)


def run(x, mean, precision, bandwidth, steps=4000, rate=0.1):
    for _ in range(steps):
        x = x + rate * stein_direction(x, -(x - mean) @ precision, bandwidth)
    return x


def test_wide_kernels_find_mean_and_variance_exactly():
    """Liu and Wang (2018): by moment matching, a kernel of degree two has both, however few."""
    torch.manual_seed(0)
    variance = 2.25
    x = torch.randn(6, 1).double()
    # In the limit the shape no longer moves at all, so that h must not be endless.
    found = run(x, 3.0, torch.eye(1).double() / variance, bandwidth=100.0, steps=10_000, rate=2.0)
    assert found.mean().item() == pytest.approx(3.0, abs=1e-3)
    assert found.var(correction=0).item() == pytest.approx(variance, rel=0.05)


def test_a_dozen_particles_stand_for_a_normal_distribution():
    torch.manual_seed(0)
    covariance = torch.tensor([[1.0, 0.6], [0.6, 1.0]]).double()
    mean = torch.tensor([1.0, -2.0]).double()
    found = run(torch.randn(12, 2).double(), mean, covariance.inverse(), None)
    assert (found.mean(0) - mean).abs().max() < 0.05
    spread = found.mT.cov(correction=0)
    assert (spread - covariance).abs().max() < 0.35
    assert spread[0, 1] > 0.3
    # Where it has come to rest Stein's identity holds in its kernel.
    assert stein_direction(found, -(found - mean) @ covariance.inverse()).abs().max() < 1e-3


def test_one_particle_is_the_mode():
    torch.manual_seed(0)
    scores = torch.randn(1, 3)
    assert torch.equal(stein_direction(torch.randn(1, 3), scores), scores)
    member = line()
    loss = (member(X) - X[:, :1]).square().mean() / 2
    loss.backward()
    expected = [p.grad + p.detach() / (60 * 0.5**2) for p in member.parameters()]
    stein_gradients_([member], num_data=60, prior_scale=0.5)
    for parameter, gradient in zip(member.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_particles_in_one_place_stay_finite():
    x = torch.zeros(4, 2)
    assert stein_direction(x, torch.ones(4, 2)).isfinite().all()


def test_gradients_of_networks_are_directions_of_their_parameters():
    torch.manual_seed(0)
    members = [plain() for _ in range(4)]
    for member in members:
        nn.functional.cross_entropy(member(X), Y).backward()
    flat = nn.utils.parameters_to_vector
    positions = torch.stack([flat(m.parameters()) for m in members]).detach()
    gradients = torch.stack([flat(p.grad for p in m.parameters()) for m in members])
    wanted = stein_direction(positions, -60 * gradients - positions / 4.0) / -60
    stein_gradients_(members, num_data=60, prior_scale=2.0)
    found = torch.stack([flat(p.grad for p in m.parameters()) for m in members])
    torch.testing.assert_close(found, wanted)


needs_lightning = pytest.mark.skipif(
    find_spec("lightning") is None or find_spec("tensorboard") is None, reason="needs Lightning"
)


@needs_lightning
def test_fit_is_a_loop_of_steins_steps(tmp_path):
    config = TrainingConfig(epochs=2, batch_size=60, lr=0.02, decay="constant")
    found = fit_svgd(plain, (X, Y), config, folder=tmp_path, num_particles=3, progress=False)
    torch.manual_seed(0)
    members = [plain() for _ in range(3)]
    optimizer = torch.optim.Adam(
        [p for m in members for p in m.parameters()], lr=0.02, eps=1e-8 / 60
    )
    for _ in range(2):
        optimizer.zero_grad()
        sum(nn.functional.cross_entropy(m(X), Y) for m in members).backward()
        stein_gradients_(members, num_data=60)
        optimizer.step()
    assert isinstance(found, Ensemble)
    torch.testing.assert_close(zm.predict_proba(found, X, 1), zm.predict_proba(members, X, 1))


@needs_lightning
def test_interrupted_svgd_ends_bit_for_bit_the_same(tmp_path):
    from lightning.pytorch import Callback

    class StopsInTheSecondEpoch(Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            if trainer.current_epoch == 1 and index == 1:
                raise KeyboardInterrupt

    options = {"num_particles": 3, "validation": (X, Y), "progress": False}
    whole = fit_svgd(plain, (X, Y), CONFIG, folder=tmp_path / "whole", **options)
    callbacks = [StopsInTheSecondEpoch()]
    with pytest.raises(KeyboardInterrupt):
        fit_svgd(plain, (X, Y), CONFIG, folder=tmp_path / "cut", callbacks=callbacks, **options)
    cut = fit_svgd(plain, (X, Y), CONFIG, folder=tmp_path / "cut", **options)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, cut.state_dict()[name])
    with pytest.raises(ValueError, match="likelihood"):
        fit_svgd(plain, (X, Y), CONFIG, folder=tmp_path / "cut", prior_scale=2.0, **options)


@needs_lightning
def test_particles_of_a_linear_regression_have_its_posterior(tmp_path):
    torch.manual_seed(0)
    weight, noise = torch.tensor([[1.0], [-1.0], [0.5], [0.0]]), 1.0
    few = X[:12]
    targets = few @ weight + noise * torch.randn(12, 1)
    likelihood = zm.GaussianLikelihood(noise_variance=noise**2, learn=False)
    batches = [(few, targets)] * 250
    config = TrainingConfig(epochs=3, lr=0.1)

    def build():
        return nn.Linear(4, 1, bias=False)

    options = {"likelihood": likelihood, "num_data": 12, "progress": False}
    particles = fit_svgd(build, batches, config, folder=tmp_path, **options)
    covariance = (few.mT @ few / noise**2 + torch.eye(4)).inverse()
    mean = covariance @ few.mT @ targets / noise**2
    weights = torch.stack([member.weight.detach()[0] for member in particles])
    deviations = covariance.diagonal().sqrt()
    assert ((weights.mean(0) - mean[:, 0]) / deviations).abs().max() < 0.1
    ratio = weights.std(0, correction=0) / deviations
    assert ((ratio > 0.5) & (ratio < 1.2)).all()  # A dozen in four dimensions are too close.


def test_what_svgd_cannot_train_is_refused(tmp_path):
    data = (X, Y)
    with pytest.raises(TypeError, match="build must be a function"):
        fit_svgd(plain(), data, CONFIG, folder=tmp_path)
    with pytest.raises(TypeError, match="config must be a TrainingConfig"):
        fit_svgd(plain, data, 10, folder=tmp_path)
    with pytest.raises(ValueError, match="num_particles must be at least 1"):
        fit_svgd(plain, data, CONFIG, folder=tmp_path, num_particles=0)
    with pytest.raises(ValueError, match="prior_scale must be a positive number"):
        fit_svgd(plain, data, CONFIG, folder=tmp_path, prior_scale=0.0)
    with pytest.raises(ValueError, match="bandwidth must be a positive number"):
        fit_svgd(plain, data, CONFIG, folder=tmp_path, bandwidth=-1.0)
    decayed = TrainingConfig(epochs=1, weight_decay=1e-4)
    with pytest.raises(ValueError, match="leave weight_decay at 0"):
        fit_svgd(plain, data, decayed, folder=tmp_path)
    with pytest.raises(ValueError, match=r"without random weights.*member 0.*torch's layers"):
        fit_svgd(lambda: nn.Sequential(zm.Linear(4, 3)), data, CONFIG, folder=tmp_path)
    with pytest.raises(ValueError, match=r"member 1.*torch's layers"):
        stein_gradients_([plain(), zm.Linear(4, 3)], num_data=3)
    with pytest.raises(ValueError, match="at least one network"):
        stein_gradients_([], num_data=60)
    with pytest.raises(ValueError, match="num_data must be at least 1"):
        stein_gradients_([plain()], num_data=0)


@needs_lightning
def test_svgd_of_probabilities_is_refused(tmp_path):
    def build():
        return nn.Sequential(plain(), nn.Softmax(-1))

    with pytest.raises(ValueError, match="returns probabilities"):
        fit_svgd(build, (X, Y), CONFIG, folder=tmp_path, num_particles=2, progress=False)
