"""Bit widths from the posterior: a weight needs only the digits that its noise leaves readable.

Rounding the mean of a weight from μ to ŵ moves its posterior by KL = (ŵ − μ)² / 2σ² nat.
`quantize_` takes the fewest bits that keep the root mean square of (ŵ − μ)/σ within a tolerance,
for each layer, neuron or weight by itself. Sizes are those of a format that anyone can write
(scales, widths and positions included). Rounded weights run at the speed of any others; it is
`zm.to_int8` that makes dense layers faster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from zeromean.convert import Predicate
from zeromean.neurons import by_neuron, from_neurons
from zeromean.posteriors import Posterior
from zeromean.sparsity import text_table, weight_name

MAX_BITS = 24  # The precision of float32.
_SCALE_BITS, _WIDTH_BITS = 32, 8  # What a group of weights costs besides its weights.


@dataclass(frozen=True)
class QuantizedWeight:
    """One row of a `Quantization`.

    Attributes:
        name: Name of the layer, or of the weight where a layer has several.
        weights: Number of weights.
        nonzero: Those that are neither pruned nor rounded to zero.
        bits: Average width of the weights that are not pruned.
        size: Bytes, with everything that is needed to read the weights back.
        deviation: Root mean square of the rounding errors in posterior standard deviations.
    """

    name: str
    weights: int
    nonzero: int
    bits: float
    size: int
    deviation: float


@dataclass(frozen=True)
class Quantization:
    """What `quantize_` did; `print` shows it as a table.

    Attributes:
        layers: The quantized weights.
        left: Names of the other layers with a posterior, and why they were left.
        rest: Bytes of all other parameters, which are not quantized.
        original_size: Bytes of the deterministic network in its own precision.
    """

    layers: tuple[QuantizedWeight, ...]
    left: dict[str, str]
    rest: int
    original_size: int

    @property
    def size(self) -> int:
        """Bytes of the quantized network."""
        return sum(layer.size for layer in self.layers) + self.rest

    @property
    def compression(self) -> float:
        """original_size / size."""
        return self.original_size / self.size if self.size else math.inf

    def __str__(self) -> str:
        rows = [("layer", "weights", "nonzero", "bits", "bytes", "deviation")]
        rows += [
            (
                row.name,
                f"{row.weights:,}",
                f"{row.nonzero:,}",
                f"{row.bits:.2f}",
                f"{row.size:,}",
                f"{row.deviation:.2f}",
            )
            for row in self.layers
        ]
        lines = text_table(rows)
        lines += [f"left {name}: {why}" for name, why in self.left.items()]
        total = f"{self.original_size:,} bytes become {self.size:,}, {self.compression:.1f}× fewer"
        return "\n".join([*lines, total])


def quantize_(
    model: nn.Module,
    *,
    per: Literal["layer", "neuron", "weight"] = "layer",
    tolerance: float = 0.5,
    bits: int | None = None,
    where: Predicate | None = None,
) -> Quantization:
    """Round the means of the weights to as few bits as their posteriors allow, in place.

    Every group of weights gets a scale and a symmetric grid of 2^bits − 1 values (±scale for one
    bit). Variances stay as they are, but for Multiplicative posteriors, where they follow the
    means. Predict with means (`zm.sampling(model, zm.mean)`), or make the network plain with
    `zm.compress` or `zm.to_deterministic`, which keep the rounded values. Prune first: pruned
    weights cost nothing but their positions.

    Args:
        per: One width for each "layer", "neuron" (with a scale of its own) or "weight".
        tolerance: Largest root mean square of the rounding errors, in posterior standard
            deviations. At 1 rounding does what one draw of the weights does.
        bits: The same width everywhere, in place of the tolerance.
        where: Predicate of name and layer that selects what is quantized.
    """
    _check(per, tolerance, bits)
    rows: list[QuantizedWeight] = []
    left: dict[str, str] = {}
    seen: set[Posterior] = set()
    quantized: set[Posterior] = set()
    for name, module in model.named_modules():
        for child_name, posterior in module.named_children():
            if not isinstance(posterior, Posterior) or posterior in quantized:
                continue
            seen.add(posterior)
            label = weight_name(name, child_name)
            if where is not None and not where(name, module):
                left[label] = "not selected"
            elif not posterior.has_mean:
                left[label] = "all its means are zero; there is nothing to round"
            else:
                quantized.add(posterior)
                rows.append(_quantize_weight_(label, posterior, per, tolerance, bits))
    if not rows:
        reasons = "; ".join(f"{name}: {why}" for name, why in left.items())
        raise ValueError(
            f"Nothing to quantize ({reasons})."
            if reasons
            else "The model has no posterior to choose bit widths from; convert it with "
            "zm.make_stochastic_(model, posterior=zm.Additive) and train it, before zm.compress."
        )
    of_posteriors = {p for posterior in seen for p in posterior.parameters()}
    plain = sum(p.nbytes for p in model.parameters() if p not in of_posteriors)
    whole = {p: p.numel() * p.dtype.itemsize for p in seen}
    rest = plain + sum(size for posterior, size in whole.items() if posterior not in quantized)
    return Quantization(tuple(rows), left, rest, plain + sum(whole.values()))


def _quantize_weight_(
    name: str, posterior: Posterior, per: str, tolerance: float, bits: int | None
) -> QuantizedWeight:
    with torch.no_grad():
        mean, scale = posterior.mean_and_scale()
        assert mean is not None
        for what, values in (("means", mean), ("standard deviations", scale)):
            if not values.isfinite().all():
                raise ValueError(
                    f"{name} has {what} that are not finite; go back to a sound checkpoint."
                )
        mask = _random(posterior)
        by_neurons = per == "neuron"
        keep, means, scales = (_groups(t, posterior, by_neurons) for t in (mask, mean, scale))
        values, widths, deviations = _fewest_bits(
            means.double(),
            scales.double().abs(),
            keep,
            each=per == "weight",
            tolerance=tolerance,
            widths=range(1, MAX_BITS + 1) if bits is None else (bits,),
        )
        values = torch.where(keep, values, 0.0)
        rounded = from_neurons(values, posterior) if by_neurons else values.view(posterior.shape)
        parameter = posterior.get_parameter("mean")
        parameter.copy_(torch.where(mask, rounded.to(mean.dtype), parameter))
    kept = max(int(keep.sum()), 1)
    return QuantizedWeight(
        name=name,
        weights=posterior.numel(),
        nonzero=int(values.count_nonzero()),
        bits=float(widths[keep].double().mean()) if keep.any() else 0.0,
        size=math.ceil(_count_bits(values, widths, each=per == "weight") / 8),
        deviation=math.sqrt(float(deviations[keep].square().sum()) / kept),
    )


def _groups(per_weight: Tensor, posterior: Posterior, by_neurons: bool) -> Tensor:
    """(*shape) -> (groups, weights of each): the whole layer, or its neurons."""
    return by_neuron(per_weight, posterior) if by_neurons else per_weight.reshape(1, -1)


def _random(posterior: Posterior) -> Tensor:
    """Which weights are neither pruned nor in the noiseless row, which is zero."""
    mask = torch.ones(posterior.shape, dtype=torch.bool, device=posterior.device)
    if posterior.mask is not None:
        mask &= posterior.mask
    if posterior.layout.noiseless_row is not None:
        mask[posterior.layout.noiseless_row] = False
    return mask


def _fewest_bits(
    mean: Tensor,
    std: Tensor,
    keep: Tensor,
    *,
    each: bool,
    tolerance: float,
    widths: range | tuple[int, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """Rounded values, their widths and errors in standard deviations, all `(groups, weights)`.

    Args:
        each: Choose the width of each weight, not of each group.
    """
    count = keep.sum(1, keepdim=True).clamp_min(1)
    values, chosen = torch.zeros_like(mean), torch.zeros_like(mean, dtype=torch.int64)
    deviations = torch.zeros_like(mean)
    rough = torch.ones_like(keep)
    for width in widths:
        rounded = _on_grid(mean, keep, width)
        error = torch.where(keep, rounded - mean, 0.0)
        deviation = torch.where(error == 0, 0.0, error / std)
        values = torch.where(rough, rounded, values)
        chosen = torch.where(rough, width, chosen)
        deviations = torch.where(rough, deviation, deviations)
        if each:
            rough = deviations.abs() > tolerance
        else:
            rms = (deviations.square().sum(1, keepdim=True) / count).sqrt()
            rough = (rms > tolerance).expand_as(keep)
        if not rough.any():
            break
    return values, chosen, deviations


def _on_grid(mean: Tensor, keep: Tensor, width: int) -> Tensor:
    """Every group on its symmetric grid; pruned weights do not count."""
    magnitude = torch.where(keep, mean.abs(), 0.0)
    if width == 1:
        average = magnitude.sum(1, keepdim=True) / keep.sum(1, keepdim=True).clamp_min(1)
        return torch.where(mean < 0, -average, average)
    step = magnitude.amax(1, keepdim=True) / (2 ** (width - 1) - 1)
    return torch.where(step > 0, (mean / step).round() * step, 0.0)


def _count_bits(values: Tensor, widths: Tensor, *, each: bool) -> int:
    """The cheaper of two formats: all weights in order, or the nonzero ones and their positions."""
    total = values.numel()
    nonzero = values != 0
    used = nonzero.any(1)
    distinct = len(widths[nonzero].unique())
    overhead = (_SCALE_BITS + _WIDTH_BITS) * int(used.sum())
    width_code = 0
    if each:
        overhead = _SCALE_BITS + _WIDTH_BITS * distinct
        width_code = math.ceil(math.log2(max(distinct, 1)))
    count = int(nonzero.sum())
    positions = min(total, count * math.ceil(math.log2(max(total, 2))))
    sparse = int(widths[nonzero].sum()) + count * width_code + positions
    # One bit has no zero.
    in_order = int(widths[used].clamp_min(1 if count == total else 2).sum()) + total * width_code
    return overhead + min(sparse, in_order)


def _check(per: str, tolerance: float, bits: int | None) -> None:
    if per not in ("layer", "neuron", "weight"):
        raise ValueError(f"per must be 'layer', 'neuron' or 'weight', got {per!r}.")
    if not 0 < tolerance < math.inf:
        raise ValueError(f"tolerance must be a positive number, got {tolerance}.")
    if bits is not None and not (1 <= bits <= MAX_BITS and bits == int(bits)):
        raise ValueError(f"bits must be a whole number from 1 to {MAX_BITS}, got {bits}.")
