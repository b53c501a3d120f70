"""Every layer × posterior × prior × sampler: what the theory covers works, the rest is refused."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn

import zeromean as zm
from cases import LAYERS, POSTERIORS, PRIORS, SAMPLERS, build, is_allowed, is_normal, is_positive

every_layer = pytest.mark.parametrize("layer", LAYERS)
every_posterior = pytest.mark.parametrize("posterior", POSTERIORS)
every_prior = pytest.mark.parametrize("prior", PRIORS)
every_sampler = pytest.mark.parametrize("sampler", SAMPLERS)

ALLOWED = [(p, s) for p in POSTERIORS for s in SAMPLERS if is_allowed(p, "None", s)]


@every_layer
@every_posterior
@every_prior
@every_sampler
def test_combination_trains_or_is_refused(layer, posterior, prior, sampler):
    if not is_allowed(posterior, prior, sampler):
        with pytest.raises(
            ValueError, match=r"(needs (normal|symmetric) noise|is for .* weights).*; use"
        ):
            build(layer, posterior, prior, sampler, dtype=torch.float64)
        return
    model = build(layer, posterior, prior, sampler, dtype=torch.float64)
    x = LAYERS[layer][1]()
    x = x.double().requires_grad_() if x.is_floating_point() else x
    output = model(x)
    assert output.dtype == torch.float64
    assert output.isfinite().all()
    loss = zm.elbo_loss(output.square().mean(), zm.kl_divergence(model), num_data=100)
    if not loss.requires_grad:  # the means of a variance layer on indices: a constant
        assert sampler == "mean"
        return
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert all(g.isfinite().all() for g in grads.values())
    if sampler != "mean":
        assert grads.keys() >= {n for n, _ in model.named_parameters() if "weight" in n}
    if x.is_floating_point() and not (sampler == "mean" and not model.weight.has_mean):
        assert x.grad.isfinite().all()
        assert x.grad.abs().sum() > 0


@every_layer
@every_posterior
def test_output_has_the_shape_of_the_torch_twin(layer, posterior):
    model = build(layer, posterior)
    plain = model.plain_twin()
    x = LAYERS[layer][1]()
    assert model(x).shape == plain(x.to("meta")).shape


@every_layer
@pytest.mark.parametrize(("posterior", "sampler"), ALLOWED)
def test_samplers_work_under_vmap_and_draw_every_sample_anew(layer, posterior, sampler):
    model = build(layer, posterior, sampler=sampler)
    x = LAYERS[layer][1]()
    draw = torch.func.vmap(lambda _: model(x), randomness="different")
    outputs = draw(torch.empty(3)).detach()
    if sampler == "mean":
        assert torch.equal(outputs[0], outputs[1])
    else:
        assert (outputs[0] != outputs[1]).float().mean() > 0.3


@every_layer
@every_posterior
def test_state_dict_round_trip_deepcopy_and_pickle(layer, posterior):
    model = build(layer, posterior)
    x = LAYERS[layer][1]()
    model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.manual_seed(1)
        expected = model(x)
        torch.manual_seed(1)
        torch.testing.assert_close(twin(x), expected, rtol=0, atol=0)
    fresh = build(layer, posterior)
    fresh.load_state_dict(model.state_dict())
    torch.manual_seed(1)
    torch.testing.assert_close(fresh(x), expected, rtol=0, atol=0)


def test_state_dict_keys_are_the_documented_ones():
    assert set(build("Linear", "ZeroMean").state_dict()) == {"weight.scale", "bias"}
    assert set(build("Linear", "Additive").state_dict()) == {
        "weight.mean",
        "weight.log_variance",
        "bias",
    }
    shapes = {"layer": (), "neuron": (6,), "weight": (4, 3, 3, 3)}
    for share, shape in shapes.items():
        state = build("ConvTranspose2d", f"Multiplicative-{share}").state_dict()
        assert set(state) == {"weight.mean", "weight.log_alpha", "bias"}
        assert state["weight.log_alpha"].shape == shape
    assert not list(build("Conv2d", "Additive").buffers())


@every_layer
@every_posterior
def test_repr_names_everything_that_rebuilds_the_layer(layer, posterior):
    text = repr(build(layer, posterior))
    assert text.startswith(f"{layer}(")
    assert posterior.split("-")[0] in text
    assert "sampler=weight" in text
    assert "prior=None" in text


# Tracing takes a second a case: Linear with everything, the other layers with what differs there.
TRACED = [("Linear", *allowed) for allowed in ALLOWED]
TRACED += [
    (layer, posterior, sampler)
    for layer in LAYERS
    for posterior, sampler in [("ZeroMean", "local"), ("Multiplicative-neuron", "flipout")]
    if layer != "Linear"
]


@pytest.mark.parametrize(("layer", "posterior", "sampler"), TRACED)
def test_compiles_without_graph_breaks(layer, posterior, sampler, fresh_dynamo):
    model = build(layer, posterior, sampler=sampler)
    x = LAYERS[layer][1]()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    output = compiled(x)
    torch.testing.assert_close(output, expected)
    if output.requires_grad:
        output.sum().backward()


COMPILED = ["ZeroMean", "Multiplicative-neuron", "Additive", "Gamma", "Exponential"]
KLS = [(p, prior) for p in COMPILED for prior in PRIORS if is_allowed(p, prior, "weight")]


@pytest.mark.parametrize(("posterior", "prior"), KLS)
def test_kl_compiles_without_graph_breaks(posterior, prior, fresh_dynamo):
    model = build("Linear", posterior, prior)
    compiled = torch.compile(lambda: zm.kl_divergence(model), fullgraph=True, backend="aot_eager")
    if prior.endswith("sample"):
        assert compiled().isfinite()
    else:
        torch.testing.assert_close(compiled(), zm.kl_divergence(model))


@every_layer
@every_posterior
def test_meta_device_and_dtype_are_honoured(layer, posterior):
    model = build(layer, posterior, device="meta", dtype=torch.float64)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert model.weight.device.type == "meta"
    assert model.weight.dtype == torch.float64
    x = LAYERS[layer][1]()
    x = (x.double() if x.is_floating_point() else x).to("meta")
    assert model(x).device.type == "meta"


@every_posterior
def test_default_prior_and_sampler_follow_the_noise(posterior):
    layer = zm.Linear(3, 2, posterior=POSTERIORS[posterior])
    if is_normal(posterior):
        assert layer.prior == zm.LogUniform()
        assert layer.sampler is zm.local
    else:
        assert layer.prior == (zm.GammaPrior() if is_positive(posterior) else None)
        assert layer.sampler is zm.weight


def test_default_layer_is_a_variance_layer():
    layer = zm.Linear(3, 2)
    mean, variance = layer.weight.moments()
    assert mean is None
    torch.testing.assert_close(variance, layer.weight.scale.square())
    assert layer.weight.scale.abs().max() <= 3**-0.5
    assert layer.weight.scale.min() < 0  # signed
    assert zm.kl_divergence(layer) == 0


@every_layer
def test_torch_arguments_are_positional_as_in_torch(layer):
    model = build(layer, "Additive")
    plain = model.plain_twin()
    for name in ("stride", "padding", "dilation", "groups", "output_padding", "padding_mode"):
        if hasattr(plain, name):
            assert getattr(model, name) == getattr(plain, name)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("padding", ["same", "valid", 1, (2, 1)])
@pytest.mark.parametrize("padding_mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("kernel_size", [3, (2, 4)])
def test_padding_is_that_of_torch(padding, padding_mode, kernel_size):
    layer = zm.Conv2d(
        2, 3, kernel_size, padding=padding, padding_mode=padding_mode, posterior=zm.Additive
    )
    plain = nn.Conv2d(2, 3, kernel_size, padding=padding, padding_mode=padding_mode)
    plain.load_state_dict({"weight": layer.weight.mean, "bias": layer.bias})
    for x in (torch.randn(2, 2, 8, 9), torch.randn(2, 8, 9)):
        with zm.sampling(layer, zm.mean):
            torch.testing.assert_close(layer(x), plain(x))
        assert layer(x).shape == plain(x).shape


def test_transposed_convolution_takes_an_output_size():
    layer = zm.ConvTranspose2d(2, 3, 3, stride=2, padding=1, posterior=zm.Additive)
    plain = nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1)
    plain.load_state_dict({"weight": layer.weight.mean, "bias": layer.bias})
    x = torch.randn(2, 2, 5, 5)
    with zm.sampling(layer, zm.mean):
        for size in ((9, 10), (2, 3, 10, 9)):
            torch.testing.assert_close(layer(x, output_size=size), plain(x, output_size=size))
    with pytest.raises(ValueError, match=r"sizes from \(9, 9\) to \(10, 10\)"):
        layer(x, output_size=(12, 9))


def test_channels_last_is_kept_and_float64_stays():
    layer = zm.Conv2d(3, 4, 3, dtype=torch.float64).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64).to(memory_format=torch.channels_last)
    output = layer(x)
    assert output.dtype == torch.float64
    assert output.is_contiguous(memory_format=torch.channels_last)


@every_layer
@every_posterior
def test_bfloat16_autocast_trains(layer, posterior):
    model = build(layer, posterior, sampler="weight")
    x = LAYERS[layer][1]()
    for sampler in (zm.weight, zm.moment_matched):
        with torch.autocast("cpu", dtype=torch.bfloat16), zm.sampling(model, sampler):
            output = model(x)
        output.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def _network():
    return nn.Sequential(
        zm.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), zm.Linear(4 * 36, 3, posterior=zm.Additive)
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, from inside Inductor
def test_inductor_compiles_a_training_step_that_stays_random(fresh_dynamo):
    model, x = _network(), torch.randn(5, 1, 8, 8)

    def loss():
        return zm.elbo_loss(model(x).square().mean(), zm.kl_divergence(model), num_data=100)

    compiled = torch.compile(loss, fullgraph=True)
    first, second = compiled(), compiled()
    assert first != second
    second.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.slow
def test_sampling_changes_a_compiled_model_and_changes_it_back(fresh_dynamo):
    model, x = _network(), torch.randn(5, 1, 8, 8)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert not torch.equal(compiled(x), compiled(x))
    with zm.sampling(compiled, zm.mean):
        assert torch.equal(compiled(x), compiled(x))
    assert not torch.equal(compiled(x), compiled(x))


def test_exports_with_live_noise():
    model, x = _network(), torch.randn(5, 1, 8, 8)
    exported = torch.export.export(model, (x,)).module()
    assert not torch.equal(exported(x), exported(x))
    torch.manual_seed(3)
    expected = model(x)
    torch.manual_seed(3)
    torch.testing.assert_close(exported(x), expected)


def test_per_sample_gradients_by_vmap_of_grad():
    model, x = _network(), torch.randn(5, 1, 8, 8)
    parameters = dict(model.named_parameters())

    def loss(params, image):
        return torch.func.functional_call(model, params, (image[None],)).square().sum()

    gradient = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0), randomness="different")
    gradients = gradient(parameters, x)
    assert gradients["0.weight.scale"].shape == (5, 4, 1, 3, 3)
    assert all(g.isfinite().all() for g in gradients.values())


def test_double_backward_of_a_local_layer():
    layer = zm.Linear(3, 2, posterior=zm.Additive, dtype=torch.float64)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)

    def forward(x, mean, log_variance):
        torch.manual_seed(1)
        state = {"weight.mean": mean, "weight.log_variance": log_variance}
        return torch.func.functional_call(layer, state, (x,))

    parameters = (layer.weight.mean, layer.weight.log_variance)
    assert torch.autograd.gradcheck(forward, (x, *parameters))
    assert torch.autograd.gradgradcheck(forward, (x, *parameters))


@every_layer
def test_input_can_be_given_by_the_name_it_has_in_torch(layer):
    assert build(layer, "Additive")(input=LAYERS[layer][1]()).isfinite().all()


def _step_in_parallel() -> dict[str, torch.Tensor | None]:
    # Without find_unused_parameters: every parameter must take part in the loss.
    model = nn.parallel.DistributedDataParallel(_network())
    output = model(torch.randn(5, 1, 8, 8))
    zm.elbo_loss(output.square().mean(), zm.kl_divergence(model), num_data=100).backward()
    assert not list(model.buffers())
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_trains_under_distributed_data_parallel(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        # In a function of its own: the wrapped model must be gone before the group is. Otherwise it
        # is the last to hold it, and joins gloo's threads while they wait for the interpreter.
        gradients = _step_in_parallel()
    finally:
        torch.distributed.destroy_process_group()
    assert gradients
    assert all(gradient is not None for gradient in gradients.values())


@pytest.mark.parametrize("layer", [n for n in LAYERS if n != "Embedding"])
def test_inputs_of_another_type_than_the_weights_are_refused(layer):
    build_layer, make_input = LAYERS[layer]
    with pytest.raises(
        TypeError, match=r"has weights of torch\.float32, got an input of .*64; use"
    ):
        build_layer()(make_input().double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert build_layer()(make_input().bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"kernel_size": 3}, (2, 5)),
        ({"kernel_size": 2, "dilation": 4}, (5, 4)),
        ({"kernel_size": 3, "padding": 2, "padding_mode": "reflect"}, (2, 5)),
        ({"kernel_size": 3, "padding": 3, "padding_mode": "circular"}, (5, 2)),
    ],
)
def test_inputs_that_are_too_small_are_refused(options, size):
    x = torch.randn(1, 2, *size)
    with pytest.raises(RuntimeError):
        torch.nn.Conv2d(2, 3, **options)(x)
    with pytest.raises(
        ValueError, match=r"Conv2d with kernel_size.* needs a larger input than \(1"
    ):
        zm.Conv2d(2, 3, **options)(x)
    larger = torch.randn(1, 2, *(each + 1 for each in size))
    assert (
        zm.Conv2d(2, 3, **options)(larger).shape == torch.nn.Conv2d(2, 3, **options)(larger).shape
    )


def test_transposed_convolutions_without_an_output_are_refused():
    with pytest.raises(ValueError, match="output_padding must be smaller than stride or dilation"):
        zm.ConvTranspose2d(2, 3, 3, output_padding=1)
    with pytest.raises(ValueError, match=r"ConvTranspose2d with .* needs a larger input"):
        zm.ConvTranspose2d(2, 3, 3, padding=2)(torch.randn(1, 2, 1, 4))


@pytest.mark.parametrize("bias", [torch.ones(2), "no", 0.5, []], ids=str)
def test_biases_are_there_or_not(bias):
    for build_layer in (zm.Linear, partial(zm.Conv2d, kernel_size=3)):
        with pytest.raises(TypeError, match="bias must be True or False, or the posterior"):
            build_layer(2, 3, bias=bias)
    assert zm.Linear(2, 3, bias=None).bias is None
