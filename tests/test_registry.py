"""Parts of one's own, registered where they are defined, go through everything that ours do."""

import math
from dataclasses import dataclass
from functools import partial

import onnxruntime
import pytest
import torch
from torch import nn

import zeromean as zm
from zeromean import export, registry
from zeromean.distributions.posteriors import WeightLayout
from zeromean.layers.convolution import ConvTransposeNd
from zeromean.samplers import Draws, draws


@zm.register("noise")
def triangular(like):
    return (torch.rand_like(like) - torch.rand_like(like)) * math.sqrt(6)


@zm.register("sampler")
@draws(Draws.WEIGHTS)
def antithetic(op, x, posterior, bias=None):
    """Half of the batch with the noise of the other half, negated."""
    noise = posterior.draw_noise()
    parts = zip(x.chunk(2), (noise, -noise), strict=False)
    return torch.cat([op(part, posterior(e), bias) for part, e in parts])


@zm.register("prior")
@dataclass(frozen=True)
class Wide:
    scale: float = 1.0

    def kl(self, posterior):
        return zm.Normal(self.scale).kl(posterior)


@zm.register("posterior")
class OneScale(zm.FactorizedPosterior):
    """w = mean + σ · ε with one σ for the whole layer, to a power that files must keep."""

    def __init__(
        self,
        shape,
        *,
        power=1.0,
        noise=zm.normal,
        layout=WeightLayout(),
        device=None,
        dtype=None,
    ):
        super().__init__(shape, noise, layout)
        self.power = power
        self.mean = nn.Parameter(torch.empty(self.shape, device=device, dtype=dtype))
        self.log_scale = nn.Parameter(torch.empty((), device=device, dtype=dtype))
        self.reset_parameters()

    def settings(self):
        return {"power": self.power}

    def mean_and_scale(self, rows=None):
        mean = self.mean if rows is None else self.mean[rows]
        scale = (self.power * self.log_scale).exp().expand_as(mean)
        return mean, scale

    def log_variance_per_weight(self):
        return (2 * self.power * self.log_scale).expand(self.shape)

    def log_alpha_per_weight(self):
        return 2 * (self.power * self.log_scale - self.mean.abs().log())

    def reset_parameters(self):
        nn.init.uniform_(self.mean, -self.initial_bound, self.initial_bound)
        nn.init.constant_(self.log_scale, -5.0)

    def set_weight_(self, weight):
        with torch.no_grad():
            self.mean.copy_(weight)


@zm.register("layer")
class ConvTranspose1d(ConvTransposeNd):
    """`nn.ConvTranspose1d` with a random weight."""

    torch_twin = nn.ConvTranspose1d


def networks():
    """A model with each of them, a plain one of its architecture, and inputs."""
    x, images = torch.randn(6, 20), torch.randn(6, 2, 5)
    plain = partial(nn.Sequential, nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 3))
    parts = {
        "noise": {"posterior": partial(zm.Additive, noise=triangular), "prior": None},
        "sampler": {"posterior": zm.Additive, "sampler": antithetic},
        "prior": {"posterior": zm.Additive, "prior": Wide(0.3)},
        "posterior": {"posterior": partial(OneScale, power=2.0), "prior": zm.Normal()},
    }
    for name, options in parts.items():
        model = plain()
        zm.make_stochastic_(model, **options)
        yield name, model, plain(), x
    layers = [nn.ConvTranspose1d(2, 4, 3, stride=2), nn.Flatten(), nn.Linear(44, 3)]
    model = nn.Sequential(*layers)
    zm.make_stochastic_(model)
    yield "layer", model, nn.Sequential(*layers), images


NETWORKS = {name: network for name, *network in networks()}


@pytest.mark.parametrize("kind", NETWORKS)
def test_own_parts_go_through_the_whole_contract(kind, tmp_path):
    model, plain, x = NETWORKS[kind]
    if kind == "layer":
        assert isinstance(model[0], ConvTranspose1d)
    loss = zm.elbo_loss(model(x).square().mean(), zm.kl_divergence(model), num_data=100)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())

    zm.save(model, tmp_path / "model.safetensors")
    loaded = zm.load(tmp_path / "model.safetensors", plain)
    expected = zm.predict_proba(model, x, 10, seed=1)
    torch.testing.assert_close(zm.predict_proba(loaded, x, 10, seed=1), expected, rtol=0, atol=0)
    assert repr(loaded) == repr(model)

    zm.prune_(loaded, sparsity=0.5)
    small = zm.compress(loaded, x)
    with zm.sampling(loaded, zm.mean):
        means = loaded(x)
    torch.testing.assert_close(small(x), means)
    export.save_compressed(small, tmp_path / "small.safetensors")
    again = export.load_compressed(tmp_path / "small.safetensors")
    torch.testing.assert_close(again(x), means)
    export.save_onnx(small, tmp_path / "small.onnx", x)
    session = onnxruntime.InferenceSession(tmp_path / "small.onnx")
    (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.as_tensor(output), means.detach(), rtol=1e-4, atol=1e-5)


def test_a_posterior_that_does_not_think_of_pruning_is_pruned():
    layer = zm.Linear(20, 8, posterior=OneScale, prior=zm.Normal())
    zm.prune_(nn.Sequential(layer), sparsity=0.5)
    pruned = ~layer.weight.mask
    assert pruned.sum() == 80
    for value in (*layer.weight.mean_and_scale(), *layer.weight.moments(), layer.weight.sample()):
        assert (value[pruned] == 0).all()
        assert (value[~pruned] != 0).all()
    rows = torch.tensor([3, 1])
    assert (layer.weight.mean_weight(rows)[pruned[rows]] == 0).all()
    assert (layer.weight.log_alpha_per_weight()[pruned] == math.inf).all()
    assert (layer.weight.log_variance_per_weight()[pruned] == -math.inf).all()


def test_own_noise_and_sampler_of_a_variance_layer_stand_in_compressed_files(tmp_path):
    posterior = partial(zm.ZeroMean, noise=triangular)
    model = nn.Sequential(zm.Linear(20, 8, posterior=posterior, sampler=antithetic))
    zm.prune_(model, sparsity=0.5, by="variance")
    small = zm.compress(model)
    export.save_compressed(small, tmp_path / "small.safetensors")
    again = export.load_compressed(tmp_path / "small.safetensors")
    layer = next(iter(zm.stochastic_layers(again).values()))
    assert layer.weight.noise is triangular
    assert layer.sampler is antithetic


def test_a_layer_that_shares_its_twin_is_loaded_as_itself(tmp_path):
    @zm.register("layer")
    class Doubled(zm.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    model = nn.Sequential(Doubled(4, 2))
    zm.save(model, tmp_path / "m.safetensors")
    assert type(zm.load(tmp_path / "m.safetensors", nn.Sequential(nn.Linear(4, 2)))[0]) is Doubled
    plain = nn.Sequential(nn.Linear(4, 2))
    zm.make_stochastic_(plain)
    assert type(plain[0]) is zm.Linear  # What conversion makes is ours still.


def test_every_part_of_ours_is_registered_under_its_public_name():
    for parts in registry.REGISTRIES.values():
        for name in parts.shipped:
            assert getattr(zm, name) is parts[name]
    assert {"normal", "uniform"} <= set(registry.NOISES)
    assert {"LSTM", "Linear"} <= set(registry.LAYERS)


def test_the_same_definition_may_run_again_but_no_other_takes_its_name():
    def define():
        @zm.register("noise")
        def spiky(like):
            return triangular(like)

        return spiky

    define()
    again = define()
    assert registry.NOISES["spiky"] is again
    with pytest.raises(ValueError, match=r"registered as 'normal' already.*name="):
        zm.register("noise", name="normal")(triangular)


def test_bad_registrations_are_refused():
    with pytest.raises(ValueError, match=r"kind must be one of 'noise'.*got 'nois'"):
        zm.register("nois")
    with pytest.raises(TypeError, match="function or class with a name"):
        zm.register("prior")(Wide(1.0))
