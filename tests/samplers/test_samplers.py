"""Samplers agree in mean and variance where theory says so, and differ where it says so."""

from functools import partial

import pytest
import torch
from torch import nn

import zeromean as zm
from cases import LAYERS, POSTERIORS, SAMPLERS, build, is_allowed

NUM_SAMPLES = 4000


def sample(layer, x, num_samples=NUM_SAMPLES):
    draw = torch.func.vmap(lambda _: layer(x), randomness="different", chunk_size=500)
    return draw(torch.empty(num_samples)).detach()


def exact_moments(layer, x):
    """Mean and variance of the outputs from the moments of the weights, by brute force.

    Each output is linear in the weight: its derivative with respect to the weight is the row of
    coefficients that carries the weight's moments to it.
    """
    op, prepared = layer.linear_map(), layer.prepare(x)
    mean, variance = layer.weight.moments()
    mean = torch.zeros_like(variance) if mean is None else mean
    coefficients = torch.autograd.functional.jacobian(lambda w: op(prepared, w), mean.detach())
    coefficients = coefficients.flatten(-variance.dim())
    output_mean = coefficients @ mean.flatten()
    if layer.bias is not None:
        output_mean = output_mean + op.align_bias(layer.bias)
    return output_mean.detach(), (coefficients.square() @ variance.flatten()).detach()


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    ("posterior", "sampler"),
    [
        (posterior, sampler)
        for posterior in ("ZeroMean-uniform", "Multiplicative-neuron", "Additive")
        for sampler in ("local", "weight", "moment_matched", "flipout", "auto")
        if is_allowed(posterior, "None", sampler)
    ],
)
def test_sampler_has_the_exact_mean_and_variance(layer, posterior, sampler):
    model = build(layer, posterior, sampler=sampler, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.weight.parameters():  # not all alike
            parameter.add_(0.3 * torch.randn_like(parameter))
            if layer == "Embedding" and parameter.dim() == 2:
                parameter[2] = 0.0  # the padding row, whose derivative torch hides
    x = LAYERS[layer][1]()
    x = x.double() if x.is_floating_point() else x
    mean, variance = exact_moments(model, x)
    outputs = sample(model, x)
    errors = (outputs.mean(0) - mean) / (variance / NUM_SAMPLES).sqrt().clamp_min(1e-12)
    assert errors.abs().max() < 5
    # The variance of a sample variance needs the fourth moment: 3 for normal outputs, and below
    # 4.2 for sums of uniform terms times signs.
    ratio = outputs.var(0)[variance > 0] / variance[variance > 0]
    assert (ratio - 1).abs().max() < 5 * (3.2 / NUM_SAMPLES) ** 0.5


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("posterior", POSTERIORS)
def test_mean_sampler_gives_the_exact_mean(layer, posterior):
    model = build(layer, posterior, sampler="mean", dtype=torch.float64)
    x = LAYERS[layer][1]()
    x = x.double() if x.is_floating_point() else x
    torch.testing.assert_close(model(x).detach(), exact_moments(model, x)[0])


def test_correlation_between_positions_is_kept_by_weight_and_flipout_and_dropped_by_local():
    x = torch.ones(2, 1, 2)  # two objects, one channel, two positions that see the same weight
    correlations = {}
    for name in ("weight", "flipout", "local"):
        layer = zm.Conv1d(1, 1, 1, bias=False, sampler=SAMPLERS[name])
        outputs = sample(layer, x).flatten(1)  # object 0: columns 0, 1; object 1: columns 2, 3
        matrix = torch.corrcoef(outputs.T)
        correlations[name] = (matrix[0, 1].item(), matrix[0, 2].item())
    noise = 5 / NUM_SAMPLES**0.5
    assert correlations["weight"] == pytest.approx((1, 1))
    assert correlations["flipout"][0] == pytest.approx(1)
    assert abs(correlations["flipout"][1]) < noise
    assert max(map(abs, correlations["local"])) < noise


def test_repeated_tokens_share_noise_under_weight_and_not_under_local():
    tokens = torch.tensor([4, 4])
    for sampler, shared in ((zm.weight, True), (zm.local, False)):
        first, second = zm.Embedding(6, 8, sampler=sampler)(tokens)
        assert torch.equal(first, second) == shared


def test_weight_sampling_gives_one_network_for_the_whole_batch():
    layer = zm.Linear(3, 2, sampler=zm.weight)
    x = torch.randn(4, 3)
    output = layer(torch.cat([x, 2 * x]))
    torch.testing.assert_close(output[4:] - layer.bias, 2 * (output[:4] - layer.bias))


def test_moment_matched_is_local_for_normal_noise():
    x = torch.randn(4, 6)
    layer = build("Linear", "Additive", sampler="local")
    torch.manual_seed(1)
    expected = layer(x)
    with zm.sampling(layer, zm.moment_matched):
        torch.manual_seed(1)
        assert torch.equal(layer(x), expected)


def test_padding_row_has_no_noise():
    tokens = torch.tensor([2, 1])
    for posterior in POSTERIORS:
        for sampler in SAMPLERS:
            if is_allowed(posterior, "None", sampler):
                layer = build("Embedding", posterior, sampler=sampler)
                output = layer(tokens).sum()
                if output.requires_grad:
                    output.backward()
                assert (layer(tokens)[0] == 0).all()
                for parameter in layer.weight.parameters():
                    if parameter.dim() == 2 and parameter.grad is not None:
                        assert (parameter.grad[2] == 0).all()


def test_multiplicative_equals_the_additive_posterior_of_the_same_moments():
    for share in ("layer", "neuron", "weight"):
        multiplicative = build("ConvTranspose2d", f"Multiplicative-{share}", "LogUniform")
        torch.nn.init.normal_(multiplicative.weight.log_alpha)
        additive = build("ConvTranspose2d", "Additive", "LogUniform")
        mean, variance = multiplicative.weight.moments()
        with torch.no_grad():
            additive.weight.mean.copy_(mean)
            additive.weight.log_variance.copy_(variance.log())
        torch.testing.assert_close(additive.kl(), multiplicative.kl())
        torch.testing.assert_close(
            additive.weight.log_alpha_per_weight(), multiplicative.weight.log_alpha_per_weight()
        )


def test_one_alpha_for_each_filter_of_a_grouped_transposed_convolution():
    layer = zm.ConvTranspose2d(
        4, 6, 3, groups=2, posterior=lambda *a, **k: zm.Multiplicative(*a, share="neuron", **k)
    )
    with torch.no_grad():
        layer.weight.log_alpha.copy_(torch.tensor([-100.0, 0, -100, -100, -100, 0]))
    x = torch.randn(2, 4, 5, 5)
    spread = torch.stack([layer(x) for _ in range(8)]).std(0).amax((0, 2, 3))
    assert (spread[[1, 5]] > 0.01).all()
    assert (spread[[0, 2, 3, 4]] < 1e-6).all()


def test_tiny_scales_are_flushed_to_exact_zero():
    posterior = zm.ZeroMean((2, 3))
    with torch.no_grad():
        posterior.scale.copy_(torch.tensor([[1e-21, 1e-18, 1.0], [-1e-30, 0.0, -2.0]]))
    _, variance = posterior.moments()
    assert variance[0, 0] == 0
    assert variance[1, 0] == 0
    assert variance[0, 1] > 0
    variance.sum().backward()
    assert posterior.scale.grad.isfinite().all()


def test_zero_input_gives_zero_noise_and_a_finite_gradient():
    layer = zm.Linear(3, 2, bias=False)
    x = torch.zeros(4, 3, requires_grad=True)
    output = layer(x)
    assert (output == 0).all()
    output.sum().backward()
    assert x.grad.isfinite().all()
    assert layer.weight.scale.grad.isfinite().all()


@pytest.mark.parametrize("noise", [zm.normal, zm.rademacher, zm.uniform])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_noise_has_zero_mean_and_unit_variance(noise, memory_format):
    like = torch.empty(40, 50, 10, 10, dtype=torch.float64).to(memory_format=memory_format)
    drawn = noise(like)
    assert drawn.stride() == like.stride()
    assert drawn.dtype == like.dtype
    assert abs(drawn.mean()) < 5 / like.numel() ** 0.5
    assert abs(drawn.square().mean() - 1) < 5 * (2 / like.numel()) ** 0.5
    if noise is zm.rademacher:
        assert set(drawn.unique().tolist()) == {-1.0, 1.0}
    if noise is zm.uniform:
        assert drawn.abs().max() <= 3**0.5


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(("scale", "value"), [(1.0, 300.0), (1.0, 1e-4), (2e-4, 1.0)])
def test_local_noise_stays_in_the_range_of_float16(autocast, gradients, scale, value):
    torch.manual_seed(0)
    layer = zm.Linear(4, 2000, bias=False)
    torch.nn.init.constant_(layer.weight.scale, scale)
    x = torch.full((10, 4), value)
    if not autocast:
        layer, x = layer.half(), x.half()
    with torch.set_grad_enabled(gradients), torch.autocast("cpu", torch.float16, enabled=autocast):
        output = layer(x)
    assert output.dtype == torch.float16
    # 20,000 numbers know their spread to half a per cent.
    assert output.float().std().item() == pytest.approx(2 * scale * value, rel=0.02)


def covariance(model, x, sampler):
    """Of the outputs of the first example, over samples."""
    outputs = zm.sample_outputs(model, x, 4000, sampler=sampler, seed=0)[:, 0].flatten(1)
    return torch.cov(outputs.T)


@pytest.mark.parametrize("trained", [zm.local, zm.weight, zm.flipout])
@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (partial(zm.Conv2d, 1, 2, 2), torch.ones(2, 1, 3, 3)),
        (partial(zm.Linear, 3, 2), torch.ones(16, 4, 3)),  # steps of a sequence
        (partial(zm.Linear, 3, 2), torch.ones(64, 3)),  # vectors
        (partial(zm.Embedding, 5, 2), torch.zeros(16, 3, dtype=torch.int64)),
    ],
)
def test_auto_keeps_the_distribution_of_an_example(layer, x, trained):
    """Also how the outputs of one example go together, which decides what a network predicts."""
    torch.manual_seed(0)
    model = nn.Sequential(layer(posterior=zm.ZeroMean, sampler=trained))
    own, auto = covariance(model, x, None), covariance(model, x, "auto")
    scale = own.diagonal().max()
    assert scale > 0
    # A covariance of normal outputs is known to √(2/n) of the variances.
    assert (own - auto).abs().max() < 5 * scale * (2 * 2 / 4000) ** 0.5


def test_auto_draws_weights_where_vectors_are_many():
    model = nn.Sequential(zm.Linear(3, 2, bias=False))
    many, few = torch.ones(64, 3), torch.ones(4, 3)
    shared = zm.sample_outputs(model, many, 1, sampler="auto")[0]
    assert (shared == shared[0]).all()
    apart = zm.sample_outputs(model, few, 1, sampler="auto")[0]
    assert not (apart == apart[0]).all()


@pytest.mark.parametrize("posterior", POSTERIORS)
def test_float16_has_finite_gradients_where_squares_overflow(posterior):
    torch.manual_seed(0)
    layer = build("Conv2d", posterior, sampler="moment_matched").half()
    x = torch.full((2, layer.in_channels, 8, 8), 300.0).half().requires_grad_()
    layer(x).float().mean().backward()
    assert all(t.grad.isfinite().all() for t in (x, *layer.parameters()))


@pytest.mark.parametrize("posterior", [zm.ZeroMean, zm.Additive])
@pytest.mark.parametrize("sampler", [zm.local, zm.flipout, zm.weight, zm.mean])
def test_autocast_gives_the_type_that_torch_gives(posterior, sampler):
    for kind, arguments, x in (
        ("Linear", (4, 6), torch.randn(2, 4)),
        ("Conv2d", (4, 6, 3), torch.randn(2, 4, 5, 5)),
    ):
        layer = getattr(zm, kind)(*arguments, posterior=posterior, sampler=sampler)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer(x).dtype == getattr(nn, kind)(*arguments)(x).dtype == torch.bfloat16


def test_held_noise_by_object_under_autocast():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), zm.Conv2d(4, 6, 3))
    with torch.autocast("cpu", dtype=torch.bfloat16), zm.held_noise(model, num_objects=2):
        assert model(torch.randn(2, 3, 8, 8)).dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own jvp
@pytest.mark.parametrize("noise", [zm.normal, zm.rademacher, zm.uniform])
@pytest.mark.parametrize("sampler", [zm.weight, zm.flipout])
def test_forward_mode_differentiation_through_a_draw(noise, sampler):
    layer = zm.Linear(4, 3, posterior=partial(zm.Additive, noise=noise), sampler=sampler).double()
    x, direction = torch.randn(2, 5, 4, dtype=torch.float64)

    def draw(x):
        torch.manual_seed(0)
        return layer(x)

    _, slope = torch.func.jvp(draw, (x,), (direction,))
    # Linear in x, for given noise.
    torch.testing.assert_close(slope, draw(x + direction) - draw(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_traces_with_gradients():
    model = nn.Sequential(zm.Linear(4, 2, posterior=zm.Additive))
    x = torch.randn(8, 4)
    traced = torch.jit.trace(model, x, check_trace=False)
    outputs = torch.stack([traced(x) for _ in range(2)])
    assert outputs.shape == (2, 8, 2)
    assert not torch.equal(*outputs)


@pytest.mark.parametrize("posterior", [zm.ZeroMean, zm.Multiplicative, zm.Additive])
def test_replicas_of_data_parallel_predict(posterior):
    layer = zm.Linear(4, 2, posterior=posterior)
    replica = layer._replicate_for_data_parallel()
    weight = layer.weight._replicate_for_data_parallel()
    weight._former_parameters = {n: p.detach() for n, p in layer.weight.named_parameters()}
    for name, tensor in weight._former_parameters.items():
        setattr(weight, name, tensor)
    replica._modules["weight"] = weight
    replica.bias = layer.bias.detach()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert replica(torch.randn(5, 4)).shape == (5, 2)
        with zm.sampling(replica, zm.mean):
            assert replica(torch.randn(5, 4)).shape == (5, 2)


def test_held_look_ups_under_autocast():
    layer, tokens = zm.Embedding(9, 4), torch.randint(9, (6,))
    with torch.autocast("cpu", dtype=torch.bfloat16), zm.held_noise(layer, num_objects=6):
        assert layer(tokens).dtype == torch.float32


@pytest.mark.parametrize("share", ["layer", "neuron", "weight"])
def test_a_single_token_has_the_shape_that_torch_gives_it(share):
    layer = zm.Embedding(6, 3, posterior=partial(zm.Multiplicative, share=share))
    assert layer(torch.tensor(2)).shape == (3,)
    assert torch.func.vmap(layer, randomness="different")(torch.arange(4)).shape == (4, 3)


@pytest.mark.parametrize("noise", [zm.normal, zm.rademacher])
def test_drawn_weight_of_an_additive_layer_has_the_gradients_of_its_definition(noise):
    posterior = zm.Additive((5, 4), log_variance=-1.0, noise=noise, dtype=torch.float64)
    parameters = (posterior.mean, posterior.log_variance)
    torch.manual_seed(2)
    drawn = posterior.sample()
    torch.manual_seed(2)
    epsilon = noise(posterior.mean.detach())
    defined = posterior.mean + (0.5 * posterior.log_variance).exp() * epsilon
    results = []
    for weight in (drawn, defined):
        total = weight.pow(3).sum()
        plain = torch.autograd.grad(total, parameters, retain_graph=True)
        first = torch.autograd.grad(total, parameters, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), parameters)
        results.append([weight, *plain, *second])
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference)


def test_drawn_weight_of_an_additive_layer_keeps_one_tensor():
    posterior = zm.Additive((50, 40))
    own = {parameter.data_ptr() for parameter in posterior.parameters()}
    kept = {}

    def note(tensor):
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        weight = posterior.sample()
    assert sum(size for pointer, size in kept.items() if pointer not in own) == weight.nbytes
