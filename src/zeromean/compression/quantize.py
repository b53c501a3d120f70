"""Bit widths from the posterior: a weight needs only the digits that its noise leaves readable.

Rounding the mean of a weight from μ to ŵ moves its posterior by KL = (ŵ − μ)² / 2σ² nat.
`quantize_` takes the fewest bits that keep the root mean square of (ŵ − μ)/σ within a tolerance,
for each layer, neuron or weight by itself. Weights that are noise, which `prune_` would take, have
next to no error in units of σ and do not count: many of them would hide what rounding does to the
few that matter. Sizes are measured: those of the file that `export.save_compressed` writes, which
has the bits. Rounded weights run at the speed of any others; it is `zm.to_int8` that makes dense
layers faster.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zeromean import samplers
from zeromean.arguments import (
    require_choice,
    require_model,
    require_numbers,
    require_predicate,
)
from zeromean.compression.bit_widths import fewest_bits, num_readable
from zeromean.compression.compress import plain_copy
from zeromean.compression.export import tensor_codes
from zeromean.compression.export.compressed import compressed_size
from zeromean.compression.export.sizes import size_in_file, size_in_memory
from zeromean.compression.neurons import by_neuron, from_neurons
from zeromean.compression.sparsity import weight_name
from zeromean.conversion.batchnorm import batchnorms, recalibrate_batchnorm_
from zeromean.conversion.make_stochastic import Predicate
from zeromean.distributions.posteriors.factorized import FactorizedPosterior
from zeromean.distributions.posteriors.posterior import Posterior
from zeromean.layers.blocks import sampling
from zeromean.text_table import text_table

MAX_BITS = 24  # The precision of float32.


@dataclass(frozen=True)
class QuantizedWeight:
    """One row of a `Quantization`.

    Attributes:
        name: Name of the layer, or of the weight where a layer has several.
        weights: Number of weights.
        nonzero: Those that are neither pruned nor rounded to zero.
        bits: Average width of the weights that are not pruned.
        size: Bytes in a file, with all that is needed to read the weights back.
        deviation: Root mean square of the rounding errors in posterior standard deviations, by the
            number of weights that are more than noise.
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
        rest: Bytes of everything else in the file: other parameters and buffers, which are not
            quantized, and its header with the architecture.
        original_size: Bytes of the deterministic network in its own precision, with one number for
            every weight, and its buffers.
        whole_file: Whether all of the file was measured. Otherwise its tensors were: where no file
            can describe the architecture, or safetensors is not installed.
        recalibrated: Batches from which BatchNorm got new statistics.
        outdated: Names of BatchNorms behind rounded layers that did not get any.
    """

    layers: tuple[QuantizedWeight, ...]
    left: dict[str, str]
    rest: int
    original_size: int
    whole_file: bool = False
    recalibrated: int = 0
    outdated: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of the quantized network, as `export.save_compressed` writes it."""
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
        lines += [f"{name}: its statistics are those of before" for name in self.outdated]
        what = "in a file" if self.whole_file else "in the tensors of a file"
        after = f"{self.size:,} {what}, {self.compression:.1f}× fewer"
        lines.append(f"{self.original_size:,} bytes become {after}")
        return "\n".join(lines)


def quantize_(
    model: nn.Module,
    *,
    per: Literal["layer", "neuron", "weight"] = "layer",
    tolerance: float = 0.5,
    bits: int | None = None,
    where: Predicate | None = None,
    inputs: Tensor | Mapping[str, Any] | Iterable[Any] | None = None,
) -> Quantization:
    """Round the means of the weights to as few bits as their posteriors allow, in place.

    Every group of weights gets a scale and a symmetric grid of 2^bits − 1 values (±scale for one
    bit). Variances stay as they are, but for Multiplicative posteriors, where they follow the
    means. Predict with means (`zm.sampling(model, zm.mean)`), or make the network plain with
    `zm.compress` or `zm.to_deterministic`, which keep the rounded values. Prune first: pruned
    weights cost nothing but their positions.

    BatchNorm behind rounded layers has the statistics of the weights of before, and predictions can
    lose much by it: give `inputs` to estimate them anew. Without these a warning says so.

    Args:
        per: One width for each "layer", "neuron" (with a scale of its own) or "weight".
        tolerance: Largest root mean square of the rounding errors, in posterior standard
            deviations, by the number of weights that are more than noise (log α ≤ 3). At 1 rounding
            does what one draw of those weights does.
        bits: The same width for all weights, in place of the tolerance.
        where: Predicate of name and layer that selects what is quantized.
        inputs: Training data for the statistics of BatchNorm, as `zm.recalibrate_batchnorm_` takes
            them: a batch, or an iterable of inputs or of `(inputs, targets)`. Means are propagated,
            as in prediction. Not read where there is no BatchNorm.
    """
    require_model(model)
    require_predicate(where)
    _check(per, tolerance, bits)
    left: dict[str, str] = {}
    labels: dict[FactorizedPosterior, str] = {}
    for name, module in model.named_modules():
        for child_name, posterior in module.named_children():
            if not isinstance(posterior, Posterior) or posterior in labels:
                continue
            if posterior.layout.affine:
                continue  # Biases and norms are rounded nowhere.
            label = weight_name(name, child_name)
            if where is not None and not where(name, module):
                left[label] = "not selected"
            elif not isinstance(posterior, FactorizedPosterior):
                left[label] = "its weights depend on each other, so that none has bits of its own"
            elif posterior.positive:
                left[label] = "its weights are positive, and have no grid here; round a plain copy"
            elif not posterior.has_mean:
                left[label] = "all its means are zero; there is nothing to round"
            else:
                _require_sound(label, posterior)
                labels[posterior] = label
    # Only now, so that an error leaves the model as it was.
    before = {p: p.get_parameter("mean").detach().clone() for p in labels}
    rows = [_quantize_weight_(n, p, per, tolerance, bits) for p, n in labels.items()]
    quantized = set(labels)
    if not rows:
        reasons = "; ".join(f"{name}: {why}" for name, why in left.items())
        raise ValueError(
            f"Nothing to quantize ({reasons})."
            if reasons
            else "The model has no posterior to choose bit widths from; convert it with "
            "zm.make_stochastic_(model, posterior=zm.Additive) and train it, before zm.compress."
        )
    outdated = _behind_rounded(model, quantized)
    recalibrated = 0
    if outdated and inputs is not None:
        try:
            with sampling(model, samplers.mean):
                recalibrated = recalibrate_batchnorm_(model, inputs)
        except BaseException:
            _restore_(before)
            raise
        outdated = ()
    plain = plain_copy(model)
    file_size = _file_size(plain)
    total = size_in_file(plain) if file_size is None else file_size
    if outdated:
        warnings.warn(
            f"{', '.join(outdated)} keep{'s' if len(outdated) == 1 else ''} the statistics of the "
            "weights before rounding, with which predictions can be far off; pass inputs= with "
            "training data, or call zm.recalibrate_batchnorm_(model, batches).",
            stacklevel=2,
        )
    return Quantization(
        tuple(rows),
        left,
        rest=total - sum(row.size for row in rows),
        original_size=size_in_memory(model),
        whole_file=file_size is not None,
        recalibrated=recalibrated,
        outdated=outdated,
    )


def _file_size(plain: nn.Module) -> int | None:
    try:
        return compressed_size(plain)
    except (ValueError, ImportError):
        return None


def _behind_rounded(model: nn.Module, rounded: set[FactorizedPosterior]) -> tuple[str, ...]:
    """BatchNorms with statistics that rounded weights may have changed.

    Containers show what comes before them; elsewhere any BatchNorm may be behind any layer.
    """
    containers = [
        module
        for module in model.modules()
        if any(isinstance(part, Posterior) for part in module.modules())
        and not any(isinstance(part, Posterior) for part in (module, *module.children()))
    ]
    in_order = all(type(module).forward is nn.Sequential.forward for module in containers)
    norms = set(batchnorms(model))
    found: dict[nn.Module, str] = {}
    rounded_before = False
    for name, module in model.named_modules(remove_duplicate=False):
        rounded_before = rounded_before or module in rounded
        if module in norms and (rounded_before or not in_order):
            found.setdefault(module, name or "the model")
    return tuple(found.values())


def _restore_(before: dict[FactorizedPosterior, Tensor]) -> None:
    with torch.no_grad():
        for posterior, means in before.items():
            posterior.get_parameter("mean").copy_(means)


@torch.no_grad()
def _require_sound(name: str, posterior: FactorizedPosterior) -> None:
    for what, values in zip(
        ("means", "standard deviations"), posterior.mean_and_scale(), strict=True
    ):
        if values is not None and not values.isfinite().all():
            raise ValueError(
                f"{name} has {what} that are not finite; go back to a sound checkpoint."
            )


def _quantize_weight_(
    name: str, posterior: FactorizedPosterior, per: str, tolerance: float, bits: int | None
) -> QuantizedWeight:
    with torch.no_grad():
        mean, scale = posterior.mean_and_scale()
        assert mean is not None
        mask = _random(posterior)
        by_neurons = per == "neuron"
        keep, means, scales = (_groups(t, posterior, by_neurons) for t in (mask, mean, scale))
        readable = int(num_readable(means.double(), scales.double(), keep).sum())
        values, widths, deviations = fewest_bits(
            means.double(),
            scales.double().abs(),
            keep,
            each=per == "weight",
            tolerance=tolerance,
            widths=range(1, MAX_BITS + 1) if bits is None else (int(bits),),
        )
        values = torch.where(keep, values, 0.0)
        rounded = from_neurons(values, posterior) if by_neurons else values.view(posterior.shape)
        parameter = posterior.get_parameter("mean")
        parameter.copy_(torch.where(mask, rounded.to(mean.dtype), parameter))
        rounded_mean = posterior.mean_weight()
        assert rounded_mean is not None
    return QuantizedWeight(
        name=name,
        weights=posterior.numel(),
        nonzero=int(values.count_nonzero()),
        bits=float(widths[keep].double().mean()) if keep.any() else 0.0,
        size=tensor_codes.size(rounded_mean),
        deviation=math.sqrt(float(deviations[keep].square().sum()) / max(readable, 1)),
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


def _check(per: str, tolerance: float, bits: int | None) -> None:
    require_choice("per", per, ("layer", "neuron", "weight"))
    require_numbers(tolerance=tolerance, **({} if bits is None else {"bits": bits}))
    if not 0 < tolerance < math.inf:
        raise ValueError(f"tolerance must be a positive number, got {tolerance}.")
    if bits is not None and not (1 <= bits <= MAX_BITS and bits == int(bits)):
        raise ValueError(f"bits must be a whole number from 1 to {MAX_BITS}, got {bits}.")
