"""Weights that depend on each other: low rank, and samplers that draw outputs together."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import zeromean as zm
from zeromean.distributions.posteriors import WeightLayout

NUM_SAMPLES = 20_000


def low_rank(shape=(2, 3), rank=2):
    posterior = zm.LowRank(shape, rank=rank, dtype=torch.float64)
    torch.manual_seed(0)
    with torch.no_grad():
        posterior.log_variance.normal_(-1.5, 0.5)
        posterior.factor.normal_(0, 0.4)
    return posterior


def full(shape=(2, 3)):
    posterior = zm.FullCovariance(shape, dtype=torch.float64)
    torch.manual_seed(0)
    with torch.no_grad():
        posterior.below.normal_(0, 0.3)
        posterior.log_diagonal.uniform_(-1.5, -0.5)
    return posterior


def covariance(posterior):
    columns = posterior.columns().detach().flatten(1)
    own = posterior.own_variance()
    return columns.T @ columns + (0 if own is None else own.detach().flatten().diag())


def placed(build, posterior, **options):
    made = build(posterior=lambda shape, **_: posterior, prior=None, **options)
    return nn.Sequential(made)


DEPENDENT = {"LowRank": low_rank, "FullCovariance": full}
every_posterior = pytest.mark.parametrize("make", DEPENDENT.values(), ids=DEPENDENT)


@pytest.mark.parametrize("rank", [1, 2, 8])
def test_kl_and_determinant_are_those_of_a_multivariate_normal(rank):
    posterior = low_rank(rank=rank)
    mean, known = posterior.mean.detach().flatten(), covariance(posterior)
    here = torch.distributions.MultivariateNormal(mean, known)
    there = torch.distributions.MultivariateNormal(
        torch.zeros_like(mean), 0.49 * torch.eye(6).double()
    )
    expected = torch.distributions.kl_divergence(here, there)
    torch.testing.assert_close(zm.Normal(0.7).kl(posterior), expected)
    torch.testing.assert_close(posterior.log_determinant(), known.logdet())
    torch.testing.assert_close(posterior.moments()[1].flatten(), known.diag())


def test_noise_goes_through_a_square_root_of_the_covariance():
    posterior = low_rank(rank=4)
    root = (posterior(torch.eye(6).double().view(6, 2, 3)) - posterior.mean).flatten(1)
    torch.testing.assert_close(root.T @ root, covariance(posterior))
    noise = torch.randn(4, 2, 3).double()
    torch.testing.assert_close(posterior(noise)[1], posterior(noise[1]))


def test_kl_and_draws_have_gradients_also_without_shared_noise():
    posterior = low_rank()
    posterior.factor.data.zero_()

    def loss():
        torch.manual_seed(1)
        return zm.Normal().kl(posterior) + posterior.sample().square().sum()

    gradients = torch.autograd.grad(loss(), list(posterior.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)
    posterior.mean.data[0, 0] += 1e-6
    above = loss()
    posterior.mean.data[0, 0] -= 2e-6
    torch.testing.assert_close((above - loss()) / 2e-6, gradients[0][0, 0], rtol=1e-5, atol=1e-7)


@every_posterior
def test_pruned_weights_leave_the_marginal(make):
    posterior = make()
    kept = torch.tensor([[True, False, True], [True, True, False]])
    known = covariance(posterior)[kept.flatten()][:, kept.flatten()]
    posterior.mask = kept
    assert not posterior.sample()[~kept].any()
    torch.testing.assert_close(posterior.log_determinant(), known.logdet())
    there = torch.distributions.MultivariateNormal(torch.zeros(4).double(), torch.eye(4).double())
    here = torch.distributions.MultivariateNormal(posterior.mean[kept].detach(), known)
    expected = torch.distributions.kl_divergence(here, there)
    torch.testing.assert_close(zm.Normal().kl(posterior), expected)


@every_posterior
@pytest.mark.parametrize("sampler", [zm.local, zm.moment_matched])
def test_outputs_of_an_example_are_drawn_together(make, sampler):
    """Cov(W x) = J Σ Jᵀ, where J x is linear in W, and nothing between two examples."""
    posterior = make()
    model = placed(partial(zm.Linear, 3, 2), posterior, sampler=sampler, dtype=torch.float64)
    x = torch.tensor([[1.0, -2.0, 0.5], [0.3, 1.0, 2.0]], dtype=torch.float64)
    drawn = zm.sample_outputs(model, x, NUM_SAMPLES, seed=0).flatten(1)
    jacobian = torch.block_diag(x[:1], x[:1]), torch.block_diag(x[1:], x[1:])
    expected = torch.block_diag(*(j @ covariance(posterior) @ j.T for j in jacobian))
    variances = expected.diag()
    errors = ((variances[:, None] * variances + expected.square()) / NUM_SAMPLES).sqrt()
    assert ((drawn.T.cov() - expected).abs() < 5 * errors).all()
    mean = nn.functional.linear(x, posterior.mean.detach(), model[0].bias.detach()).flatten()
    assert ((drawn.mean(0) - mean).abs() < 5 * (variances / NUM_SAMPLES).sqrt()).all()


@every_posterior
def test_convolutions_draw_outputs_of_an_example_together(make):
    posterior = make((2, 1, 3))
    build = partial(zm.Conv1d, 1, 2, 3, bias=False)
    model = placed(build, posterior, sampler=zm.local, dtype=torch.float64)
    x = torch.randn(1, 1, 4, dtype=torch.float64)
    drawn = zm.sample_outputs(model, x, NUM_SAMPLES, seed=0).flatten(1)
    jacobian = torch.autograd.functional.jacobian(
        lambda w: nn.functional.conv1d(x, w).flatten(), posterior.mean.detach()
    ).flatten(1)
    expected = jacobian @ covariance(posterior) @ jacobian.T
    if make is low_rank:  # The noise that weights have by themselves is that of `local`.
        shared = jacobian @ posterior.columns().detach().flatten(1).T
        expected = shared @ shared.T + (expected - shared @ shared.T).diag().diag()
    variances = expected.diag()
    errors = ((variances[:, None] * variances + expected.square()) / NUM_SAMPLES).sqrt()
    assert ((drawn.T.cov() - expected).abs() < 5 * errors).all()
    torch.manual_seed(1)
    batched = model(x)
    torch.manual_seed(1)
    torch.testing.assert_close(model(x[0]), batched[0])


@every_posterior
def test_other_layers_draw_by_example(make):
    embedding = placed(partial(zm.Embedding, 2, 3), make(), sampler=zm.local, dtype=torch.float64)
    same = embedding(torch.tensor([[1, 1], [1, 1]]))
    assert same[0, 0].equal(same[0, 1])
    assert not same[0, 0].equal(same[1, 0])
    attention = zm.MultiheadAttention(
        4, 2, posterior=type(make()), prior=zm.Normal(), sampler=zm.local
    )
    assert attention(*[torch.randn(3, 2, 4)] * 3)[0].isfinite().all()
    layer = placed(partial(zm.Linear, 3, 2), make(), sampler=zm.local, dtype=torch.float64)
    assert layer(torch.randn(3).double()).shape == (2,)
    assert zm.sample_outputs(layer, torch.randn(5, 3).double(), 4, sampler="auto").shape == (
        4,
        5,
        2,
    )


@every_posterior
def test_compiles_without_graph_breaks(make, fresh_dynamo):
    model = placed(partial(zm.Linear, 3, 2), make(), sampler=zm.local, dtype=torch.float64)
    x = torch.randn(4, 3).double()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    torch.testing.assert_close(compiled(x), expected)


def test_low_rank_trains_predicts_saves_and_loads(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(200, 3)
    y = (x[:, 0] - x[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    posterior = partial(zm.LowRank, rank=3)
    zm.make_stochastic_(model, posterior=posterior, sampler=zm.local)
    assert all(layer.prior == zm.Normal() for layer in zm.stochastic_layers(model).values())
    optimizer = torch.optim.Adam(zm.parameter_groups(model, lr=3e-2))
    for _ in range(200):
        nll = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        zm.elbo_loss(nll, zm.kl_divergence(model), num_data=len(x)).backward()
        optimizer.step()
    probabilities = zm.predict_proba(model, x, 20, seed=0)
    assert (probabilities.argmax(-1) == y).float().mean() > 0.9
    zm.save(model, tmp_path / "m.safetensors")
    plain = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    loaded = zm.load(tmp_path / "m.safetensors", plain)
    assert loaded[0].weight.rank == 3
    for same in (loaded, copy.deepcopy(model)):
        assert zm.predict_proba(same, x, 20, seed=0).equal(probabilities)
    with zm.held_noise(model):
        assert model(x).equal(model(x))
    with pytest.raises(ValueError, match="its weights depend on each other"):
        zm.prune_(model)
    with pytest.raises(ValueError, match="cannot become a prior: LowRank"):
        zm.become_prior_(model)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"rank": 0}, "rank must be"),
        ({"noise": zm.uniform}, "LowRank needs normal noise, got uniform"),
        ({"layout": WeightLayout(noiseless_row=0)}, "no row without noise"),
    ],
)
def test_what_it_is_not_for_is_refused(options, match):
    with pytest.raises(ValueError, match=match):
        zm.LowRank((2, 2), **options)
    with pytest.raises(ValueError, match=r"is for independent weights.*use zm.Normal"):
        zm.Linear(3, 2, posterior=zm.LowRank, prior=zm.ARD())
