"""Single layers: any geometry, posterior, prior, sampler and type, next to torch's own layer."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import zeromean as zm
from fuzzing.outcomes import CHECKED, REFUSED, refused, require, spoil

NUM_DRAWS = 200
# Of 10⁷ checks none should fail by chance: seven standard errors of a mean, and the tail of a χ².
MOST_ERRORS = 7.0
MOST_RATIO = 0.85

NOISES = (*[zm.normal] * 6, zm.rademacher, zm.uniform, zm.factorized)
PRIORS = (
    "default", None, zm.LogUniform(), zm.LogUniform(kl="approx"), zm.LogUniform(kl="sample"),
    zm.StudentT(df=1e-3), zm.ARD(), zm.Normal(scale=0.5), zm.Normal(learn=True),
)  # fmt: skip
SAMPLERS = ("default", zm.local, zm.weight, zm.moment_matched, zm.flipout, zm.mean, zm.auto)
DTYPES = (None, None, torch.float32, torch.float64, torch.float64, torch.float16, torch.bfloat16)


def prepare(folder: Path) -> Callable[[random.Random], str]:
    return partial(case, folder)


def case(folder: Path, generator: random.Random) -> str:
    cls, geometry, x = _geometry(generator)
    posterior, parameters = _posterior(generator)
    choices = {
        "posterior": posterior,
        "prior": generator.choice(PRIORS),
        "sampler": generator.choice(SAMPLERS),
        "dtype": generator.choice(DTYPES),
    }
    arguments = {**geometry, **choices}
    spoiled = spoil(arguments, generator, 0.25)
    twin = _twin(cls, arguments, spoiled)
    try:
        layer = cls(**arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        sound = spoiled is None and twin is not None and _is_covered(parameters, choices)
        require(not sound, f"refused, though there is nothing wrong with it: {error!r}")
        return refused(error)
    if twin is None or spoiled is not None:
        return _take(layer, x)  # Nothing to compare it with; it must work all the same.
    _set_parameters(layer, generator)
    input_spoiled = generator.random() < 0.15
    x = _spoiled_input(x, generator) if input_spoiled else _cast(x, layer.weight.dtype)
    try:
        expected = _twin_output(twin, layer, x)
    except Exception:
        expected = None  # torch refuses it too.
    try:
        output = layer(x)
    except Exception as error:
        # Whether torch makes an empty output of too small an input depends on its backend.
        sound = not input_spoiled and expected is not None and expected.numel() > 0
        require(not sound, f"a sound input was refused: {error!r}")
        if isinstance(error, IndexError):  # What torch says of an index that is out of range.
            return REFUSED
        return refused(error)
    require(expected is not None or input_spoiled, "torch refuses this input, we take it")
    require(isinstance(output, Tensor), f"the output is {type(output)}")
    if expected is not None:
        require(output.shape == expected.shape, f"{output.shape} in place of {expected.shape}")
        require(output.dtype == expected.dtype, f"{output.dtype} in place of {expected.dtype}")
    if expected is None or not output.numel():
        return CHECKED
    require(output.isfinite().all(), "the output is not finite")
    _check_kl(layer)
    _check_copy(layer, x)
    if generator.random() < 0.06:
        _check_file(layer, x, folder / "layer.safetensors")
    precise = layer.weight.dtype in (torch.float32, torch.float64)
    if precise and generator.random() < 0.4:  # It takes as long as all the rest.
        _check_moments(layer, twin, x)
        _check_sharing(layer, x)
    return CHECKED


def _geometry(generator: random.Random) -> tuple[Any, dict[str, Any], Any]:
    """A class, the arguments that torch has too, and an input."""
    pick = generator.choice
    batch = pick((0, 1, 2, 3, 5))
    kind = pick(("Linear", "Linear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose2d", "Embedding"))
    if kind == "Linear":
        sizes = {"in_features": pick((1, 2, 5, 9)), "out_features": pick((1, 3, 4))}
        shape = (*pick(((), (batch,), (batch, 2), (1, batch, 3))), sizes["in_features"])
        return zm.Linear, {**sizes, "bias": pick((True, False))}, torch.randn(shape)
    if kind == "Embedding":
        rows = pick((1, 4, 7))
        sizes = {"num_embeddings": rows, "embedding_dim": pick((1, 3))}
        sizes["padding_idx"] = pick((None, 0, rows - 1, -1, -rows))
        shape = pick(((), (batch,), (batch, 3)))
        return (
            zm.Embedding,
            sizes,
            torch.randint(rows, shape, dtype=pick((torch.int64, torch.int32))),
        )
    dims = {"Conv1d": 1, "Conv2d": 2, "Conv3d": 3, "ConvTranspose2d": 2}[kind]
    groups = pick((1, 1, 1, 2))

    def per_dim(values: tuple[int, ...]) -> Any:
        return pick(values) if pick((True, False)) else tuple(pick(values) for _ in range(dims))

    sizes = {
        "in_channels": groups * pick((1, 2)),
        "out_channels": groups * pick((1, 2, 3)),
        "kernel_size": per_dim((1, 2, 3)),
        "stride": per_dim((1, 1, 2)),
        "padding": per_dim((0, 0, 1, 2)),
        "dilation": per_dim((1, 1, 2)),
        "groups": groups,
        "bias": pick((True, False)),
    }
    if kind == "ConvTranspose2d":
        sizes["output_padding"] = per_dim((0, 0, 1))
    else:
        sizes["padding_mode"] = pick(("zeros", "zeros", "reflect", "replicate", "circular"))
        if generator.random() < 0.15:
            sizes["padding"] = pick(("same", "valid"))
    shape = (
        *pick(((), (batch,))),
        sizes["in_channels"],
        *(pick((1, 3, 4, 6)) for _ in range(dims)),
    )
    x = torch.randn(shape)
    if len(shape) == 4 and generator.random() < 0.2:
        x = x.contiguous(memory_format=torch.channels_last)
    return getattr(zm, kind), sizes, x


def _posterior(generator: random.Random) -> tuple[Any, dict[str, Any]]:
    noise = generator.choice(NOISES)
    options: dict[str, Any] = {"noise": noise}
    cls = generator.choice((zm.ZeroMean, zm.Multiplicative, zm.Additive))
    if cls is zm.Multiplicative:
        options["share"] = generator.choice(("layer", "neuron", "weight"))
        options["log_alpha"] = generator.uniform(-6, 3)
    elif cls is zm.Additive and generator.random() < 0.5:
        options[generator.choice(("log_variance", "log_alpha"))] = generator.uniform(-6, 2)
    plain = noise is zm.normal and len(options) == 1 and generator.random() < 0.5
    return cls if plain else partial(cls, **options), options


def _is_covered(options: dict[str, Any], choices: dict[str, Any]) -> bool:
    """Whether the theory covers it: local reparameterization and the KLs need normal noise."""
    of_normal = choices["prior"] not in (None, "default")
    return options["noise"] is zm.normal or (not of_normal and choices["sampler"] is not zm.local)


def _twin(cls: Any, arguments: dict[str, Any], spoiled: str | None) -> nn.Module | None:
    """torch's layer of the same geometry, in float64; None where there is none."""
    names = ("posterior", "prior", "sampler", "dtype")
    geometry = {key: value for key, value in arguments.items() if key not in names}
    if spoiled in geometry:
        return None  # torch takes some of it, and dies of some more.
    try:
        twin = cls.torch_twin(**geometry, dtype=torch.float64)
    except Exception:
        return None
    # What torch says at every call, we say at once.
    extra = getattr(twin, "output_padding", ())
    fits = (
        (e < max(s, d) for e, s, d in zip(extra, twin.stride, twin.dilation, strict=True))
        if extra
        else ()
    )
    return twin if all(fits) else None


def _take(layer: nn.Module, x: Any) -> str:
    """A layer from unusual arguments: it may refuse the input, which was made for another."""
    try:
        output = layer(_cast(x, layer.weight.dtype))
    except Exception as error:
        return REFUSED if isinstance(error, IndexError) else refused(error)
    require(isinstance(output, Tensor), f"the output is {type(output)}")
    require(output.isfinite().all(), "the output is not finite")
    return CHECKED


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def _spoiled_input(x: Tensor, generator: random.Random) -> Any:
    return generator.choice(
        (
            lambda: x.to(torch.complex64),
            lambda: x > 0,
            lambda: x.to(torch.int64),
            lambda: x.float().to(torch.float8_e4m3fn),
            lambda: x.numpy(),
            lambda: x.tolist(),
            lambda: None,
            lambda: "x",
            lambda: x.unsqueeze(0).unsqueeze(0).unsqueeze(0),
            lambda: x.flatten()[:0],
            lambda: x.sum(),
            lambda: torch.cat([x, x], dim=-1) if x.dim() else x,
            lambda: torch.utils.data.DataLoader(x) if x.dim() else [x],
            lambda: x + 10**6,
            lambda: np.ones(3),
        )
    )()


def _set_parameters(layer: Any, generator: random.Random) -> None:
    """Parameters as training could leave them, and weights that have been pruned."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if generator.random() < 0.3 and "log" in name:
                parameter.add_(torch.randn_like(parameter))
            if generator.random() < 0.1 and "log" not in name:
                parameter.mul_((torch.rand_like(parameter) < 0.5).to(parameter.dtype))
    if generator.random() < 0.2:
        layer.weight.mask = torch.rand(layer.weight.shape) < generator.choice((0.0, 0.5, 1.0))


def _moments_of_weight(layer: Any) -> tuple[Tensor, Tensor]:
    """Mean and variance of every weight in float64, from the documented parameters."""
    posterior = layer.weight
    state = {key: value.detach().double() for key, value in posterior.state_dict().items()}
    if isinstance(posterior, zm.ZeroMean):
        mean, variance = torch.zeros_like(state["scale"]), state["scale"] ** 2
    elif isinstance(posterior, zm.Additive):
        mean, variance = state["mean"], state["log_variance"].exp()
    else:
        mean = state["mean"]
        alpha = state["log_alpha"].exp()
        if posterior.share == "neuron":
            alpha = _per_neuron(alpha, layer)
        variance = alpha * mean**2
    if posterior.mask is not None:
        mean, variance = mean * posterior.mask, variance * posterior.mask
    padding = getattr(layer, "padding_idx", None)
    if padding is not None:
        variance = variance.clone()
        variance[padding] = 0
    return mean, variance


def _per_neuron(alpha: Tensor, layer: Any) -> Tensor:
    """One α for every output unit, by torch's layouts of weights."""
    shape = layer.weight.shape
    if isinstance(layer, zm.Embedding):
        return alpha.expand(shape)
    if not isinstance(layer, zm.ConvTranspose2d):
        return alpha.view(-1, *[1] * (len(shape) - 1)).expand(shape)
    # (in, out / groups, …): the inputs of a group give the outputs of that group.
    by_group = alpha.view(layer.groups, 1, shape[1], 1, 1)
    return by_group.expand(layer.groups, shape[0] // layer.groups, *shape[1:]).reshape(shape)


def _apply(twin: nn.Module, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    parameters = {"weight": weight}
    if getattr(twin, "bias", None) is not None:
        parameters["bias"] = torch.zeros_like(twin.bias) if bias is None else bias.detach().double()
    x = x.double() if x.is_floating_point() else x
    return torch.func.functional_call(twin, parameters, (x,))


def _twin_output(twin: nn.Module, layer: Any, x: Any) -> Tensor:
    """What torch's layer gives, in the type that it would have as well."""
    dtype = layer.weight.dtype
    same = copy.deepcopy(twin).to(dtype)
    with torch.no_grad():
        return same(x)


def _check_moments(layer: Any, twin: nn.Module, x: Tensor) -> None:
    """Means and variances of the outputs, from draws, next to those that torch's layer gives."""
    mean, variance = _moments_of_weight(layer)
    with torch.no_grad():
        wanted = _apply(twin, mean, layer.bias, x)
        spread = _apply(twin, variance, None, x**2 if x.is_floating_point() else x).clamp_min(0)
        draws = torch.vmap(lambda _: layer(x), randomness="different")(torch.arange(NUM_DRAWS))
    draws = draws.double()
    rounding = 1e-4 if layer.weight.dtype is torch.float32 else 1e-9
    size = rounding * (1 + wanted.abs() + spread.sqrt())
    if layer.sampler is zm.mean:
        spread = torch.zeros_like(spread)
    errors = (draws.mean(0) - wanted).abs()
    factor = 4.0 if layer.weight.noise is zm.factorized else 1.0  # Its tails are heavy.
    bound = factor * MOST_ERRORS * (spread / NUM_DRAWS).sqrt() + size
    require((errors <= bound).all(), f"means are off by {(errors / bound).max() * 7:.1f} errors")
    silent = spread == 0
    require(
        ((draws - wanted).abs().amax(0)[silent] <= size[silent]).all(), "noise where there is none"
    )
    if layer.weight.noise is zm.factorized:
        return
    loud = spread > size**2 * 1e4
    ratio = (draws - wanted).square().mean(0)[loud] / spread[loud]
    # One weight of two values has no spread of its square; more of it than a normal never.
    require(((ratio - 1).abs() < MOST_RATIO).all(), f"variances are off by {ratio.tolist()}")


def _check_sharing(layer: Any, x: Tensor) -> None:
    """`weight` gives equal examples equal outputs; `local` gives each noise of its own."""
    if x.dim() != 2 or not isinstance(layer, zm.Linear) or len(x) < 2:
        return
    both = x[:1].expand(2, -1)
    if layer.sampler is zm.weight:
        outputs = layer(both)
        torch.testing.assert_close(outputs[0], outputs[1])
    elif layer.sampler is zm.local:
        _, variance = _moments_of_weight(layer)
        if ((x[:1].double() ** 2) @ variance.T).max() > 1e-6:
            outputs = layer(both)
            require(not torch.equal(outputs[0], outputs[1]), "two examples share their noise")


def _check_kl(layer: Any) -> None:
    kl = zm.kl_divergence(layer)
    require(kl.shape == () and kl.isfinite(), f"the KL is {kl}")
    mean, variance = _moments_of_weight(layer)
    keep = torch.ones(layer.weight.shape, dtype=torch.bool)
    if layer.weight.mask is not None:
        keep &= layer.weight.mask
    if getattr(layer, "padding_idx", None) is not None:
        keep[layer.padding_idx] = False
    mean, variance = mean[keep], variance[keep]
    if isinstance(layer.prior, zm.ARD) and layer.weight.has_mean and (mean != 0).all():
        expected = 0.5 * torch.log1p(mean**2 / variance).sum()
    elif layer.prior == zm.Normal(scale=0.5) and (variance > 1e-30).all():
        square = 0.25
        terms = (mean**2 + variance) / square - 1 - (variance / square).log()
        expected = 0.5 * terms.sum()
    else:
        return
    loose = 2e-2 if layer.weight.dtype in (torch.float16, torch.bfloat16) else 1e-3
    require(
        math.isclose(float(kl), float(expected), rel_tol=loose, abs_tol=loose * (1 + keep.sum())),
        f"the KL is {float(kl)}, not {float(expected)}",
    )


def _check_copy(layer: Any, x: Tensor) -> None:
    other = copy.deepcopy(layer)
    require(repr(other) == repr(layer), "a copy has another repr")
    _require_same(layer, other, x)


def _check_file(layer: Any, x: Tensor, path: Path) -> None:
    zm.save(layer, path)
    plain = layer.plain_twin().to(layer.weight.dtype).to_empty(device="cpu")
    fresh = zm.load(path, plain)
    require(fresh.prior == layer.prior and fresh.sampler is layer.sampler, "a file lost a choice")
    _require_same(layer, fresh, x)


def _require_same(layer: Any, other: Any, x: Tensor) -> None:
    states = layer.state_dict(), other.state_dict()
    require(states[0].keys() == states[1].keys(), "a copy has other parameters")
    require(all(torch.equal(states[0][k], states[1][k]) for k in states[0]), "a copy differs")
    outputs = []
    for each in (layer, other):
        torch.manual_seed(0)
        with torch.no_grad():
            outputs.append(each(x))
    require(torch.equal(*outputs), "a copy draws otherwise")
