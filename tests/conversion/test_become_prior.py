"""Yesterday's posterior is today's prior."""

import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zeromean as zm
from cases import LAYERS, POSTERIORS, is_normal
from zeromean.distributions.posteriors import FactorizedPosterior, Posterior, WeightLayout

NORMAL = [name for name in POSTERIORS if is_normal(name)]


def shaken(model):
    """As if trained on."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.rand_like(parameter))
    return model


def normals(posterior):
    mean, variance = posterior.moments()
    mean = torch.zeros_like(variance) if mean is None else mean
    # Without the row of an embedding that is not random.
    mean, variance = (posterior.counted(each).detach().clone() for each in (mean, variance))
    return torch.distributions.Normal(mean, variance.sqrt())


@pytest.mark.parametrize("posterior", NORMAL)
@pytest.mark.parametrize("layer", LAYERS)
def test_kl_is_zero_at_first_and_then_that_of_two_normals(layer, posterior):
    model = LAYERS[layer][0](posterior=POSTERIORS[posterior], sampler=zm.weight)
    shaken(model)
    zm.become_prior_(model)
    before = normals(model.weight)
    at_first = zm.kl_divergence(model)
    at_first.backward()
    assert at_first == 0
    # Exactly: Adam makes steps of full size of the smallest gradient.
    assert not any(p.grad is not None and p.grad.any() for p in model.parameters())
    shaken(model)
    after = normals(model.weight)
    expected = torch.distributions.kl_divergence(after, before).sum()
    torch.testing.assert_close(zm.kl_divergence(model), expected, rtol=1e-4, atol=1e-4)


def test_kl_of_a_full_covariance_is_that_of_two_normals():
    model = zm.Linear(3, 2, posterior=partial(zm.FullCovariance, log_variance=-1.0))
    with torch.no_grad():
        model.weight.below.normal_(0, 0.3)

    def joint():
        mean, factor = model.weight.mean.detach().flatten().clone(), model.weight.factor().detach()
        return torch.distributions.MultivariateNormal(mean, scale_tril=factor)

    zm.become_prior_(model)
    before = joint()
    assert zm.kl_divergence(model).abs() < 1e-6
    shaken(model)
    now = joint()
    expected = torch.distributions.kl_divergence(now, before)
    torch.testing.assert_close(zm.kl_divergence(model), expected)
    # Of a pruned one the marginals of the weights that are left.
    model.weight.mask = torch.tensor([[True, False, True], [True, True, False]])
    kept = model.weight.mask.flatten()
    parts = [
        torch.distributions.MultivariateNormal(
            each.mean[kept], each.covariance_matrix[kept][:, kept]
        )
        for each in (now, before)
    ]
    expected = torch.distributions.kl_divergence(*parts)
    torch.testing.assert_close(zm.kl_divergence(model), expected, rtol=1e-4, atol=1e-4)


def test_two_halves_are_as_good_as_the_whole():
    """Bayes' rule in two steps, where it is exact: a Gaussian in one weight."""
    torch.manual_seed(0)
    x = torch.randn(40, 1, dtype=torch.float64)
    y = 0.7 * x + 0.5 * torch.randn_like(x)

    def fit(model, x, y):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for step in range(1500):
            optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 1500)
            mean, variance = model.weight.moments()
            # E (y − w x)², without noise.
            nll = ((y - x * mean).square() + variance * x.square()).sum() / (2 * 0.25)
            loss = nll + zm.kl_divergence(model)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    posterior = partial(zm.Additive, log_variance=-2.0)
    options = {"bias": False, "posterior": posterior, "dtype": torch.float64}
    model = zm.Linear(1, 1, prior=zm.Normal(2.0), **options)
    fit(model, x[:25], y[:25])
    zm.become_prior_(model)
    fit(model, x[25:], y[25:])
    precision = 1 / 4 + x.square().sum() / 0.25
    mean, variance = (float(moment.detach()) for moment in model.weight.moments())
    assert mean == pytest.approx(float((x * y).sum() / 0.25 / precision), abs=1e-6)
    assert variance == pytest.approx(float(1 / precision), rel=1e-6)


def test_what_new_data_say_nothing_about_stays_as_it_is():
    """Pixels that are always black: their weights do not move by a bit, with Adam too."""
    torch.manual_seed(0)
    model = nn.Sequential(zm.Linear(6, 8, posterior=zm.Additive), nn.ReLU(), nn.Linear(8, 2))
    zm.become_prior_(model)
    before = copy.deepcopy(model[0].weight.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x = torch.randn(50, 6)
    x[:, 3] = 0
    for _ in range(20):
        nll = F.cross_entropy(model(x), (x[:, 0] > 0).long())
        optimizer.zero_grad()
        zm.elbo_loss(nll, zm.kl_divergence(model), num_data=50).backward()
        optimizer.step()
    for name in ("mean", "log_variance"):
        after = model[0].weight.state_dict()[name]
        assert torch.equal(after[:, 3], before[name][:, 3])
        assert not torch.equal(after[:, 0], before[name][:, 0])


@pytest.mark.parametrize("posterior", [*NORMAL, "FullCovariance"])
def test_it_is_saved_and_loaded_and_copied(posterior, tmp_path):
    wide = partial(zm.FullCovariance, log_variance=0.0)
    factory = wide if posterior == "FullCovariance" else POSTERIORS[posterior]

    def plain():
        return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))

    model = plain()
    zm.make_stochastic_(model, posterior=factory)
    zm.become_prior_(model, where=lambda name, layer: name == "0")
    shaken(model)
    path = tmp_path / "model.safetensors"
    zm.save(model, path)
    for loaded in (zm.load(path, plain()), zm.load(path, model), copy.deepcopy(model)):
        assert loaded[0].prior == zm.FromPosterior()
        assert loaded[2].prior == model[2].prior != zm.FromPosterior()
        assert torch.equal(zm.kl_divergence(loaded), zm.kl_divergence(model))
        # And once more.
        zm.become_prior_(loaded)
        assert zm.kl_divergence(loaded).abs() < 1e-5
    another = plain()
    zm.make_stochastic_(another, posterior=factory)
    with pytest.raises(RuntimeError, match="prior_mean"):
        another.load_state_dict(model.state_dict())


def test_old_files_have_no_priors_of_their_own(tmp_path):
    model = nn.Sequential(zm.Linear(3, 2))
    zm.save(model, tmp_path / "before.safetensors")
    zm.become_prior_(model)
    zm.save(model, tmp_path / "after.safetensors")
    versions = [
        (tmp_path / f"{name}.safetensors").read_bytes().find(b'format_version\\": 6')
        for name in ("before", "after")
    ]
    assert versions[0] == -1 != versions[1]


@pytest.mark.parametrize("build", [zm.LSTM, zm.GRU])
def test_layers_with_several_weights(build, tmp_path):
    model = nn.Sequential(build(3, 4))
    zm.become_prior_(model)
    assert zm.kl_divergence(model) == 0
    shaken(model)
    expected = sum(
        torch.distributions.kl_divergence(
            normals(p),
            torch.distributions.Normal(p.prior_mean, (0.5 * p.prior_log_variance).exp()),
        ).sum()
        for p in model.modules()
        if isinstance(p, FactorizedPosterior)
    )
    torch.testing.assert_close(zm.kl_divergence(model), expected, rtol=1e-4, atol=0)
    zm.save(model, tmp_path / "model.safetensors")
    loaded = zm.load(tmp_path / "model.safetensors", nn.Sequential(build(3, 4)))
    assert torch.equal(zm.kl_divergence(loaded), zm.kl_divergence(model))


def test_tied_layers_have_one_prior():
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    plain[2].weight = plain[0].weight
    zm.make_stochastic_(plain)
    zm.become_prior_(plain)
    assert zm.kl_divergence(plain) == 0
    once = nn.Sequential(plain[0])
    shaken(plain)
    assert torch.equal(zm.kl_divergence(plain), zm.kl_divergence(once))


def test_pruned_weights_stay_out_of_it_and_come_back():
    model = nn.Sequential(zm.Linear(4, 3, posterior=partial(zm.Additive, log_variance=-2.0)))
    model[0].weight.mask = torch.rand(3, 4) > 0.4
    zm.become_prior_(model)
    assert (~model[0].weight.mask).any()
    shaken(model)
    pruned = zm.kl_divergence(model)
    pruned.backward()
    assert pruned.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    model[0].weight.mask = None
    assert pruned < zm.kl_divergence(model) < math.inf


def test_weights_without_variance_have_a_finite_kl():
    """Training drives most scales of a variance layer to where the layers take them for zero."""
    model = zm.Linear(4, 3)
    with torch.no_grad():
        model.weight.scale[0] = 0.0
        model.weight.scale[1] = 1e-30
    zm.become_prior_(model)
    kl = zm.kl_divergence(model)
    kl.backward()
    assert kl == 0
    assert not model.weight.scale.grad.any()


def test_posteriors_of_another_model():
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(4, 3))
    zm.make_stochastic_(teacher, posterior=partial(zm.Additive, log_variance=-3.0))
    model = nn.Sequential(zm.Linear(4, 3))
    zm.become_prior_(model, of=teacher)
    expected = torch.distributions.kl_divergence(
        normals(model[0].weight), normals(teacher[0].weight)
    )
    torch.testing.assert_close(zm.kl_divergence(model), expected.sum())
    assert model[0].weight.has_mean is False


def test_dropped_means_keep_the_prior():
    model = nn.Sequential(zm.Linear(4, 3, posterior=partial(zm.Multiplicative, log_alpha=8.0)))
    zm.become_prior_(model)
    zm.zero_mean_(model)
    assert not model[0].weight.has_mean
    assert 0 < zm.kl_divergence(model) < 0.1


def test_layers_without_a_prior_get_one_and_bfloat16_works():
    model = zm.Linear(4, 3, posterior=zm.Additive, prior=None, dtype=torch.bfloat16)
    zm.become_prior_(model)
    assert model.weight.prior_mean.dtype == torch.bfloat16
    assert zm.kl_divergence(model) == 0


class Joint(Posterior):
    """Somebody's own, whose weights depend on each other in a way that nobody knows."""

    def __init__(self, shape, *, noise=zm.normal, layout=WeightLayout(), device=None, dtype=None):
        super().__init__(shape, noise, layout)
        self.mean = nn.Parameter(torch.zeros(shape))

    def log_determinant(self):
        return torch.zeros(())


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (nn.Linear(2, 2), {}, "no layer with random weights.*make_stochastic_"),
        (
            nn.Sequential(zm.Linear(2, 2)),
            {"where": lambda name, layer: False},
            "no layer with random weights.*check where",
        ),
        (
            nn.Sequential(zm.Linear(2, 2, posterior=partial(zm.ZeroMean, noise=zm.rademacher))),
            {},
            "0.weight cannot become a prior: its noise is rademacher.*name != '0'",
        ),
        (
            nn.Sequential(zm.Linear(2, 2, posterior=Joint, prior=None)),
            {},
            "Joint does not say how its weights depend",
        ),
        (
            nn.Sequential(zm.Linear(2, 2)),
            {"of": nn.Sequential(nn.ReLU())},
            "other model has no random weight 0.weight",
        ),
        (
            nn.Sequential(zm.Linear(2, 2)),
            {"of": nn.Sequential(zm.Linear(2, 3))},
            r"0.weight has the shape \(2, 2\), and \(3, 2\) in the other model",
        ),
        (
            nn.Sequential(zm.Linear(2, 2)),
            {"of": nn.Sequential(zm.Linear(2, 2, posterior=zm.FullCovariance))},
            "0.weight is ZeroMean, and FullCovariance in the other model",
        ),
    ],
)
def test_what_cannot_be_a_prior_is_refused(model, options, message):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        zm.become_prior_(model, **options)
    assert list(model.state_dict()) == list(state)


def test_one_bad_layer_leaves_the_others_as_they_were():
    bad = zm.Linear(2, 2, posterior=partial(zm.ZeroMean, noise=zm.uniform))
    model = nn.Sequential(zm.Linear(2, 2), bad)
    with pytest.raises(ValueError, match=r"1\.weight cannot become a prior"):
        zm.become_prior_(model)
    assert model[0].prior == zm.LogUniform()
    zm.become_prior_(model, where=lambda name, layer: name != "1")
    assert model[0].prior == zm.FromPosterior()


def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match="model must be a torch module"):
        zm.become_prior_("model")
    with pytest.raises(TypeError, match="of must be a torch module"):
        zm.become_prior_(zm.Linear(2, 2), of="model")
    with pytest.raises(
        ValueError, match=r"build it with another prior, and call zm\.become_prior_"
    ):
        zm.Linear(2, 2, prior=zm.FromPosterior())
    with pytest.raises(ValueError, match=r"this one has none; call zm\.become_prior_"):
        zm.FromPosterior().kl(zm.Linear(2, 2).weight)
