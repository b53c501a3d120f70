"""Members of an ensemble and stored states predict through the same functions as noise does."""

import copy

import pytest
import torch
from torch import nn

import zeromean as zm


def stochastic(seed, out=3):
    torch.manual_seed(seed)
    return nn.Sequential(zm.Linear(4, 8, posterior=zm.Additive), nn.Tanh(), nn.Linear(8, out))


def plain(seed, out=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, out))


def noisy(seed, out=3):
    model = stochastic(seed, out)
    with torch.no_grad():
        model[0].weight.log_variance.fill_(-1.0)
    return model


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(5, 4)


@pytest.mark.parametrize(
    "predict", [zm.predict_proba, zm.predictive_uncertainty, zm.predict_moments, zm.sample_outputs]
)
def test_a_list_of_one_is_the_network_itself(predict, x):
    model = noisy(1)
    alone, listed = (predict(source, x, 6, seed=3) for source in (model, [model]))
    torch.testing.assert_close(listed, alone, rtol=0, atol=0)


def test_probabilities_are_the_average_over_members(x):
    members = [plain(seed) for seed in range(4)]
    expected = torch.stack([m(x).softmax(-1) for m in members]).mean(0)
    for source in (members, tuple(members), nn.ModuleList(members), iter(members)):
        proba, error = zm.predict_proba(source, x, 5, return_stderr=True)
        torch.testing.assert_close(proba, expected)
        assert error.max() < 1e-7  # Nothing is drawn.
    assert zm.sample_outputs(members, x, 2).shape == (8, 5, 3)


def test_uncertainty_of_members_is_that_of_their_mixture(x):
    members = [plain(seed) for seed in range(4)]
    p = torch.stack([m(x).softmax(-1) for m in members])
    found = zm.predictive_uncertainty(members, x, 1)
    entropy = torch.distributions.Categorical
    torch.testing.assert_close(found.predictive_entropy, entropy(p.mean(0)).entropy())
    torch.testing.assert_close(found.expected_entropy, entropy(p).entropy().mean(0))


def test_moments_of_members_are_those_of_the_mixture(x):
    members = [plain(seed) for seed in range(3)]
    outputs = torch.stack([m(x) for m in members]).detach()
    for num_samples in (1, 2, 20):
        found = zm.predict_moments(members, x, num_samples)
        torch.testing.assert_close(found.mean, outputs.mean(0))
        torch.testing.assert_close(found.epistemic, outputs.var(0, correction=0))


def test_moments_of_random_members_obey_the_law_of_total_variance(x):
    members = [noisy(seed) for seed in range(3)]
    each = [zm.predict_moments(m, x, 20_000, seed=seed) for seed, m in enumerate(members)]
    means = torch.stack([moments.mean for moments in each])
    within = torch.stack([moments.epistemic for moments in each]).mean(0)
    total = within + means.var(0, correction=0)
    # The estimate is unbiased at any number of samples: average many small ones.
    few = torch.stack(
        [zm.predict_moments(members, x, 2, seed=seed).epistemic for seed in range(400)]
    )
    z = (few.mean(0) - total) / (few.std(0) / 400**0.5)
    assert z.abs().max() < 4.5
    found, errors = zm.predict_moments(members, x, 2000, seed=9, return_stderr=True)
    assert ((found.epistemic - total) / errors.epistemic).abs().max() < 4.5
    assert ((found.mean - means.mean(0)) / errors.mean).abs().max() < 4.5


def test_standard_errors_are_those_of_the_noise_within_members(x):
    members = [noisy(seed) for seed in range(3)]
    runs = [zm.predict_proba(members, x, 8, seed=s, return_stderr=True) for s in range(300)]
    proba = torch.stack([p for p, _ in runs])
    errors = torch.stack([e for _, e in runs])
    # Against the spread that repeated predictions really have.
    ratio = errors.square().mean(0).sqrt() / proba.std(0)
    assert ((ratio - 1).abs() < 0.2).all()
    moments = [zm.predictive_uncertainty(members, x, 200, seed=s) for s in range(200)]
    information = torch.stack([m.mutual_information for m in moments])
    _, claimed = zm.predictive_uncertainty(members, x, 200, seed=0, return_stderr=True)
    assert ((claimed.mutual_information / information.std(0) - 1).abs() < 0.4).all()


def test_members_draw_nothing_alike_and_a_seed_repeats_all(x):
    model = noisy(1)
    samples = zm.sample_outputs([model, model], x, 3, seed=5)
    assert (samples[:3] != samples[3:]).all()
    state = torch.get_rng_state()
    torch.testing.assert_close(zm.sample_outputs([model, model], x, 3, seed=5), samples)
    assert torch.equal(torch.get_rng_state(), state)


def test_states_are_networks_of_one_architecture(x):
    members = [plain(seed) for seed in range(3)]
    model = plain(9)
    before = copy.deepcopy(model.state_dict())
    states = zm.States(model, [m.state_dict() for m in members])
    assert len(states) == 3
    for predict in (zm.predict_proba, zm.predictive_uncertainty, zm.predict_moments):
        torch.testing.assert_close(predict(states, x, 2), predict(members, x, 2))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_what_a_state_leaves_out_is_the_models(x):
    model = plain(9)
    heads = [{"2.weight": torch.randn(3, 8)}, {"2.bias": torch.randn(3)}]
    first, second = zm.sample_outputs(zm.States(model, heads), x, 1)
    hidden = model[1](model[0](x))
    torch.testing.assert_close(first, hidden @ heads[0]["2.weight"].T + model[2].bias)
    torch.testing.assert_close(second, hidden @ model[2].weight.T + heads[1]["2.bias"])


def test_a_chain_may_be_drawn_while_it_is_read(x):
    def chain():
        for seed in range(3):
            yield plain(seed)

    expected = zm.predict_proba([plain(seed) for seed in range(3)], x, 1)
    torch.testing.assert_close(zm.predict_proba(chain(), x, 1), expected)


def test_bad_sources_are_refused(x):
    with pytest.raises(ValueError, match="at least one network"):
        zm.predict_proba([], x)
    with pytest.raises(TypeError, match="network 1 must be a torch module, got"):
        zm.predict_proba([plain(0), "model.pt"], x)
    with pytest.raises(TypeError, match=r"model must be a torch module.*load_state_dict"):
        zm.predict_proba(plain(0).state_dict(), x)
    with pytest.raises(ValueError, match=r"Network 1 returns outputs of shape \(5, 2\)"):
        zm.predict_proba([plain(0), plain(1, out=2)], x)
    broken = plain(1)
    with torch.no_grad():
        broken[2].bias.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"2\.bias of network 1 is not finite"):
        zm.predict_proba([plain(0), broken], x)
    with pytest.raises(ValueError, match=r"ends in nn\.Softmax"):
        zm.predict_proba([plain(0), nn.Sequential(plain(1), nn.Softmax(-1))], x)
    with pytest.raises(ValueError, match="num_samples of at least 2"):
        zm.predict_moments([plain(0), plain(1)], x, 1, return_stderr=True)


def test_bad_states_are_refused():
    model = plain(0)
    with pytest.raises(TypeError, match="list of at least one state dict"):
        zm.States(model, model.state_dict())
    with pytest.raises(ValueError, match=r"states\[1\] has '7.weight'"):
        zm.States(model, [model.state_dict(), {"7.weight": torch.zeros(2)}])
    with pytest.raises(ValueError, match=r"states\[0\].*shape \(3, 8\) for '2.weight'.*\(2,\)"):
        zm.States(model, [{"2.weight": torch.zeros(2)}])
    with pytest.raises(TypeError, match=r"states\[0\] must be a state dict"):
        zm.States(model, [{}])


# --- inputs that are changed


def test_transforms_are_networks_that_count_alike(x):
    model = plain(1)
    transforms = [lambda x: x, lambda x: -x, lambda x: x.flip(-1)]
    source = zm.Augmented(model, transforms)
    expected = torch.stack([model(t(x)).softmax(-1) for t in transforms])
    torch.testing.assert_close(zm.predict_proba(source, x, 2), expected.mean(0))
    found = zm.predictive_uncertainty(source, x, 2)
    entropies = torch.distributions.Categorical(expected).entropy()
    torch.testing.assert_close(found.expected_entropy, entropies.mean(0))
    moments = zm.predict_moments(source, x, 2)
    outputs = torch.stack([model(t(x)) for t in transforms]).detach()
    torch.testing.assert_close(moments.epistemic, outputs.var(0, correction=0))
    by_moments = zm.predict_proba(zm.Augmented(noisy(1), transforms), x, method="moments")
    sampled = zm.predict_proba(zm.Augmented(noisy(1), transforms), x, 20_000, seed=0)
    assert (by_moments - sampled).abs().max() < 0.02
    assert "3 transforms" in repr(source)


def test_each_network_of_a_source_sees_every_transform(x):
    members = [plain(1), plain(2)]
    states = zm.States(plain(0), [member.state_dict() for member in members])
    expected = torch.stack([m(t * x) for m in members for t in (1, -1)])
    for source in (members, states):
        augmented = zm.Augmented(source, [lambda x: x, lambda x: -x])
        for _ in range(2):  # A source can be asked again.
            torch.testing.assert_close(zm.sample_outputs(augmented, x, 1), expected)


def test_outputs_can_be_turned_back():
    torch.manual_seed(0)
    model, image = nn.Conv2d(1, 2, 3, padding=1), torch.randn(2, 1, 5, 5)
    source = zm.Augmented(model, [(lambda x: x.flip(-1), lambda y: y.flip(-1)), (lambda x: x,)])
    expected = (model(image.flip(-1)).flip(-1).softmax(1) + model(image).softmax(1)) / 2
    torch.testing.assert_close(zm.predict_proba(source, image, 1, dim=1), expected)


def test_random_transforms_are_drawn_for_every_sample(x):
    def shaken(x):
        return x + torch.randn_like(x)

    for model in (plain(1), noisy(1)):
        samples = zm.sample_outputs(zm.Augmented(model, [shaken, shaken]), x, 3, seed=0)
        assert len({tuple(each.flatten().tolist()) for each in samples}) == 6
        again = zm.sample_outputs(zm.Augmented(model, [shaken, shaken]), x, 3, seed=0)
        assert torch.equal(samples, again)


def test_transforms_that_are_none_are_refused(x):
    model = plain(1)
    with pytest.raises(TypeError, match=r"transforms must be a list of functions"):
        zm.Augmented(model, torch.flip)
    with pytest.raises(ValueError, match=r"at least one function; lambda x: x"):
        zm.Augmented(model, [])
    with pytest.raises(TypeError, match=r"transforms\[1\] must be a function"):
        zm.Augmented(model, [lambda x: x, 3])
    with pytest.raises(ValueError, match=r"transforms\[0\] .* got 3 things"):
        zm.Augmented(model, [(torch.relu, torch.relu, torch.relu)])
    with pytest.raises(TypeError, match=r"generator gives them once.*zm\.States"):
        zm.Augmented((m for m in [model]), [torch.relu])
    with pytest.raises(TypeError, match="transform must return a tensor"):
        zm.predict_proba(zm.Augmented(model, [lambda x: None]), x)
    with pytest.raises(TypeError, match="model must be a torch module"):
        zm.predict_proba(zm.Augmented(3, [torch.relu]), x)
    ends_in_softmax = nn.Sequential(model, nn.Softmax(-1))
    with pytest.raises(ValueError, match=r"ends in nn\.Softmax"):
        zm.predict_proba(zm.Augmented(ends_in_softmax, [torch.relu]), x)
