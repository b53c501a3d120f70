"""Held noise: one network inside the block, whichever layers it has, against explicit weights."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zeromean as zm
from zeromean.distributions.noise import factorized


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class TiedReader(nn.Module):
    """An embedding whose weight is also the last layer's."""

    def __init__(self):
        super().__init__()
        self.embedding = zm.Embedding(7, 5, posterior=zm.Additive)
        self.head = zm.Linear(5, 7, bias=False, posterior=zm.Additive)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


def dense():
    return nn.Sequential(
        nn.Linear(4, 6), zm.Linear(6, 6), nn.ReLU(), zm.Linear(6, 3, posterior=zm.Additive)
    )


def convolutional():
    return nn.Sequential(
        zm.Conv2d(2, 4, 3, padding=1, posterior=partial(zm.Multiplicative, log_alpha=0.0)),
        zm.LogNormalDropout(4, log_scale=0.0),
        nn.ReLU(),
        zm.Conv2d(4, 4, 3, groups=2),
        nn.Flatten(),
        zm.GaussianDropout(16),
        zm.Linear(16, 3),
    )


MODELS = {
    "dense": (dense, lambda n: torch.randn(n, 4)),
    "convolutional": (convolutional, lambda n: torch.randn(n, 2, 4, 4)),
    "tied": (TiedReader, lambda n: torch.randint(7, (n, 3))),
}
every_model = pytest.mark.parametrize("name", MODELS)


@every_model
def test_the_same_network_inside_and_fresh_noise_outside(name):
    build, inputs = MODELS[name]
    model, x = build(), inputs(5)
    samplers = [layer.sampler for layer in zm.stochastic_layers(model).values()]
    with zm.held_noise(model) as held:
        first = model(x)
        assert torch.equal(model(x), first)
        torch.testing.assert_close(model(x[:2]), first[:2])
        held.redraw()
        assert not torch.allclose(model(x), first)
    assert not torch.equal(model(x), model(x))
    assert [layer.sampler for layer in zm.stochastic_layers(model).values()] == samplers


def test_the_network_is_the_one_that_the_noise_says():
    model, x = dense(), torch.randn(5, 4)
    noise = zm.draw_noise(model)
    assert {n: tuple(v.shape) for n, v in noise.items()} == {"1.weight": (6, 6), "3.weight": (3, 6)}
    with zm.held_noise(model, noise):
        output = model(x)
    hidden = F.linear(model[0](x), model[1].weight.scale * noise["1.weight"], model[1].bias).relu()
    additive = model[3].weight
    last = additive.mean + (0.5 * additive.log_variance).exp() * noise["3.weight"]
    torch.testing.assert_close(output, F.linear(hidden, last, model[3].bias))


def test_gradients_and_updates_reach_the_parameters_while_the_noise_stays():
    model, x = nn.Sequential(zm.Linear(4, 3, bias=False)), torch.randn(5, 4)
    with zm.held_noise(model) as held:
        model(x).sum().backward()
        expected = x.sum(0).expand(3, 4) * held.noise["0.weight"]
        torch.testing.assert_close(model[0].weight.scale.grad, expected)
        before = model(x)
        with torch.no_grad():
            model[0].weight.scale.mul_(2)
        torch.testing.assert_close(model(x), 2 * before)


@every_model
def test_every_object_its_own_network(name):
    build, inputs = MODELS[name]
    model, x = build(), inputs(4)
    with zm.held_noise(model, num_objects=4) as held:
        outputs = model(x)
        noise = held.noise
    for i in range(4):
        alone = {key: value[i] for key, value in noise.items()}
        with zm.held_noise(model, alone):
            torch.testing.assert_close(model(x[i : i + 1])[0], outputs[i])


@pytest.mark.parametrize("chosen", [torch.tensor([1, 3]), torch.tensor([False, True, False, True])])
def test_redrawing_some_objects_leaves_the_others(chosen):
    model, x = convolutional(), torch.randn(4, 2, 4, 4)
    with zm.held_noise(model, num_objects=4) as held:
        before = model(x)
        held.redraw(chosen)
        changed = (model(x) != before).any(1)
        assert changed.tolist() == [False, True, False, True]
        held.redraw(torch.zeros(4, dtype=torch.bool))
        assert (model(x) != before).any(1).tolist() == changed.tolist()


def test_a_sequence_of_steps_meets_the_network_of_its_object():
    model, x = dense(), torch.randn(3, 9, 4)
    with zm.held_noise(model, num_objects=3):
        together = model(x)
        for step in range(9):
            torch.testing.assert_close(model(x[:, step]), together[:, step])


def test_under_vmap_every_sample_holds_noise_of_its_own():
    model, x = dense(), torch.randn(5, 4)

    def twice(_):
        with zm.held_noise(model):
            return model(x), model(x)

    first, second = torch.func.vmap(twice, randomness="different")(torch.empty(3))
    assert torch.equal(first, second)
    assert not torch.allclose(first[0], first[1])


@every_model
def test_given_noise_under_vmap_is_a_loop_over_networks(name):
    build, inputs = MODELS[name]
    model, x = build(), inputs(5)
    noise = zm.draw_noise(model, num_samples=3)

    def run(noise):
        with zm.held_noise(model, noise):
            return model(x)

    mapped = torch.func.vmap(run)(noise)
    for i in range(3):
        torch.testing.assert_close(mapped[i], run({n: v[i] for n, v in noise.items()}))


def test_many_parameters_at_once_through_functional_call():
    models = [dense() for _ in range(3)]
    x = torch.randn(3, 5, 4)
    parameters, _ = torch.func.stack_module_state(models)
    noise = zm.draw_noise(models[0], num_samples=3)

    def run(parameters, noise, x):
        with zm.held_noise(models[0], noise):
            return torch.func.functional_call(models[0], parameters, x)

    mapped = torch.func.vmap(run)(parameters, noise, x)
    for i, model in enumerate(models):
        with zm.held_noise(model, {n: v[i] for n, v in noise.items()}):
            torch.testing.assert_close(mapped[i], model(x[i]))


def test_redrawn_weights_have_the_moments_of_the_posterior():
    model = nn.Sequential(zm.Linear(3, 2, posterior=partial(zm.Additive, log_variance=-1.0)))
    inputs = torch.eye(3)
    outputs = []
    with torch.no_grad(), zm.held_noise(model) as held:
        for _ in range(4000):
            held.redraw()
            outputs.append(model(inputs) - model[0].bias)
    drawn = torch.stack(outputs)
    mean, variance = model[0].weight.moments()
    assert ((drawn.mean(0).T - mean).abs() < 5 * (variance / 4000).sqrt()).all()
    assert ((drawn.var(0).T - variance).abs() < 5 * variance * (2 / 4000) ** 0.5).all()


def test_a_recurrent_layer_keeps_its_weights_from_call_to_call():
    model = zm.LSTM(4, 3, batch_first=True)
    nn.init.constant_(model.weight_ih_l0.log_variance, -1.0)
    x = torch.randn(2, 6, 4)
    with zm.held_noise(model):
        whole, _ = model(x)
        first, state = model(x[:, :3])
        second, _ = model(x[:, 3:], state)
        torch.testing.assert_close(torch.cat([first, second], 1), whole)
    with (
        zm.held_noise(model, num_objects=2),
        pytest.raises(ValueError, match=r"vmap over .* with zm\.draw_noise"),
    ):
        model(x)
    noise = zm.draw_noise(model, num_samples=2)

    def run(noise, x):
        with zm.held_noise(model, noise):
            return model(x)[0]

    each = torch.func.vmap(run)(noise, x)
    for i in range(2):
        torch.testing.assert_close(each[i], run({n: v[i] for n, v in noise.items()}, x[i]))


def test_pruned_weights_and_the_padding_row_stay_silent():
    model = zm.Embedding(4, 3, padding_idx=0)
    zm.prune_(model, by="variance", sparsity=0.5)
    with zm.held_noise(model) as held:
        rows = model(torch.arange(4))
    assert (rows[0] == 0).all()
    assert ((rows == 0) == ~(model.weight.mask & (torch.arange(4) > 0).unsqueeze(1))).all()
    assert held.noise["weight"].shape == (4, 3)


def test_blocks_nest_and_end_with_an_exception():
    model, x = dense(), torch.randn(5, 4)
    with zm.held_noise(model):
        outer = model(x)
        with zm.held_noise(model):
            assert not torch.allclose(model(x), outer)
        with zm.sampling(model, zm.mean):
            assert not torch.allclose(model(x), outer)
        assert torch.equal(model(x), outer)
    with pytest.raises(RuntimeError, match="stop"), zm.held_noise(model):
        raise RuntimeError("stop")
    assert not torch.equal(model(x), model(x))


def test_a_deterministic_model_has_no_noise_to_hold():
    model = nn.Linear(2, 2)
    assert zm.draw_noise(model) == {}
    with zm.held_noise(model) as held:
        held.redraw()
        model(torch.zeros(1, 2))


def test_bad_input_gets_a_sentence():
    model = dense()
    with pytest.raises(ValueError, match="num_objects must be at least 1, got 0"):
        zm.held_noise(model, num_objects=0).__enter__()
    with pytest.raises(ValueError, match="num_samples must be at least 1, got -1"):
        zm.draw_noise(model, -1)
    with pytest.raises(ValueError, match=r"needs noise for 1\.weight, 3\.weight, got it for nothi"):
        zm.held_noise(model, {}).__enter__()
    with zm.held_noise(model, num_objects=3), pytest.raises(ValueError, match=r"for 3 .* got"):
        model(torch.zeros(2, 4))
    with zm.held_noise(model) as held, pytest.raises(ValueError, match="num_objects=…"):
        held.redraw(torch.tensor([0]))


def test_factorized_noise_has_rank_one_unit_variance_and_no_correlation():
    count = 40_000
    draws = torch.stack([factorized(torch.empty(3, 2, dtype=torch.float64)) for _ in range(count)])
    assert torch.linalg.matrix_rank(draws[:10]).max() == 1
    flat = draws.flatten(1)
    covariance = flat.T @ flat / count
    # E f⁴ = E x² = 1, so squares of entries have the moments below.
    error = ((torch.pi**2 / 4 - 1) / count) ** 0.5
    assert ((covariance - torch.eye(6)).abs() < 5 * 1.3 * error).all()
    assert (flat.mean(0).abs() < 5 / count**0.5).all()


def test_factorized_noise_trains_and_is_drawn_by_weight():
    layer = zm.Linear(4, 3, posterior=partial(zm.Additive, noise=zm.factorized))
    assert layer.sampler is zm.weight
    assert layer.prior is None
    layer(torch.randn(5, 4)).square().sum().backward()
    assert layer.weight.log_variance.grad.abs().sum() > 0
    with pytest.raises(ValueError, match="needs normal noise"):
        zm.Linear(4, 3, posterior=partial(zm.Additive, noise=zm.factorized), sampler=zm.local)


def test_redraw_leaves_the_noise_that_was_kept():
    model, x = dense(), torch.randn(4, 4)
    with torch.no_grad(), zm.held_noise(model, num_objects=4) as held:
        kept, first = held.noise, model(x)
        held.redraw([1, -1])
        second = model(x)
        assert (second != first).any(1).tolist() == [False, True, False, True]
        held.redraw([])
        held.redraw(torch.zeros(4, dtype=torch.bool))
        assert torch.equal(model(x), second)
    # An update after the episode: the networks as they were in it.
    with zm.held_noise(model, kept, num_objects=4):
        torch.testing.assert_close(model(x), first)


@pytest.mark.parametrize(
    ("noise", "num_objects"), [(None, 5), (5, None), (4, 5)], ids=["one", "many", "others"]
)
@every_model
def test_noise_of_another_shape_gets_a_sentence(name, noise, num_objects):
    model = MODELS[name][0]()
    drawn = zm.draw_noise(model, noise)
    with pytest.raises(ValueError, match=r"must have shape \(.*\), got \("):
        with zm.held_noise(model, drawn, num_objects=num_objects):
            pass


@pytest.mark.parametrize("objects", [[4], [-5], [0.5], [True, False]], ids=str)
def test_redraw_of_objects_that_are_not_there_gets_a_sentence(objects):
    with zm.held_noise(dense(), num_objects=4) as held:
        with pytest.raises(ValueError, match=r"redraw needs .* 4 "):
            held.redraw(objects)
