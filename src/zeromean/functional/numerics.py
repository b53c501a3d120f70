"""Square roots, means of exponentials and gradients, accurate for tiny and huge numbers."""

import math

import torch
from torch import Tensor

from zeromean.functional import _dawson


def safe_sqrt(variance: Tensor) -> Tensor:
    """Square root that is 0, with gradient 0, wherever `variance` is not a positive normal number.

    Fast convolutions can return tiny negatives; sqrt would turn them into NaN.
    """
    positive = variance > smallest_normal(variance.dtype)
    # The inner `where` keeps sqrt's infinite slope at 0 out of the gradient's 0 * inf.
    return torch.where(positive, torch.where(positive, variance, 1.0).sqrt(), 0.0)


def smallest_normal(dtype: torch.dtype) -> float:
    """Smaller numbers lose digits and speed. 0 for float16, in which such numbers are common."""
    return 0.0 if dtype == torch.float16 else torch.finfo(dtype).tiny


def wide(tensor: Tensor) -> Tensor:
    """The tensor in float32 at least: sums over many weights overflow in half precision."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def log_mean_exp(values: Tensor, dim: int) -> Tensor:
    """log of the mean of exp(values) along a dimension, without overflow."""
    return values.logsumexp(dim) - math.log(values.shape[dim])


def dawson(z: Tensor) -> Tensor:
    """Dawson's function D(z) = exp(-z²) ∫₀ᶻ exp(v²) dv, for which D' = 1 - 2 z D."""
    if z.dtype not in _dawson.VALUE:
        return dawson(z.float()).to(z.dtype)
    largest = torch.finfo(z.dtype).max ** 0.5 / 4
    far = z.abs() > largest
    near = torch.where(far, 0.0, z)
    # 1 / (2 z) is exact to the last digit long before z² overflows.
    return torch.where(far, 0.5 / torch.where(far, z, 1.0), 2 * near * _slope(2 * near.square()))


def can_branch() -> bool:
    """Whether values may decide what is computed: nothing traces or transforms."""
    return not (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
    )


def _in_chunks(integrals, *arguments: Tensor) -> tuple[Tensor, ...]:
    """Value and two derivatives of a function of two tensors, in pieces that fit the cache."""
    chunks = zip(
        *(argument.reshape(-1).split(_dawson.CHUNK_SIZE) for argument in arguments), strict=True
    )
    results = zip(*(integrals(*chunk) for chunk in chunks), strict=True)
    return tuple(torch.cat(parts).reshape(arguments[0].shape) for parts in results)


def _save_derivatives(ctx, inputs, output) -> None:
    _, *derivatives = output
    ctx.mark_non_differentiable(*derivatives)
    ctx.save_for_backward(*inputs, *derivatives)
    ctx.set_materialize_grads(False)


def _by_derivatives(ctx, grad, integrals) -> tuple[Tensor | None, Tensor | None]:
    if grad is None:
        return None, None
    first, second, *derivatives = ctx.saved_tensors
    if torch.is_grad_enabled():
        # Costs memory for every node, but makes the second derivative right.
        _, *derivatives = integrals(first, second)
    return grad * derivatives[0], grad * derivatives[1]


def _slope(inverse_alpha: Tensor) -> Tensor:
    """Derivative of `log_uniform_kl`."""
    return _dawson.LogUniformKL.apply(inverse_alpha)[1]


def _mean_over_std(mean: Tensor, log_variance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean / std and 1 / std, where 1 / std is capped so that (mean / std)² stays finite."""
    largest = torch.finfo(mean.dtype).max ** 0.5 / 4
    cap = largest / mean.detach().abs().clamp_min(4 / largest)
    # Capped before exp too: an infinite value would make the gradient 0 · ∞.
    log_inverse_std = (-0.5 * log_variance).clamp_max(2 * math.log(largest) - math.log(4))
    inverse_std = torch.minimum(log_inverse_std.exp(), cap)
    return mean * inverse_std, inverse_std


def _squared(ratio: Tensor) -> Tensor:
    return ratio * ratio
