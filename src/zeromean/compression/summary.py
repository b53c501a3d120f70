"""What is random in a model, in numbers: one source for `zm.summary` and `zeromean inspect`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from zeromean.arguments import require_model
from zeromean.compression.candidates import LOG_ALPHA_THRESHOLD, PrunableUnits, PrunableWeights
from zeromean.compression.histograms import draw, in_text
from zeromean.compression.prune import reason_against, reason_against_units
from zeromean.compression.random_weights import Measured, kl_of, measure, weights_in
from zeromean.distributions.posteriors.posterior import Posterior
from zeromean.files.contents import RandomWeight
from zeromean.layers.dropout.unit_noise import UnitNoise
from zeromean.text_table import text_table


@dataclass(frozen=True, kw_only=True)
class WeightSummary:
    """One random weight.

    Attributes:
        layer: The kind of layer that it is the weight of.
        described: Its posterior, and its noise where that is not normal.
        kl: In nats; None without a prior, or where it counts with `tied_to`.
        numbers: None where it is the weight of another layer, `tied_to`, or not known here.
        prunable: How many weights `zm.prune_(model)` would take; None where it leaves the layer
            alone.
    """

    name: str
    layer: str
    described: str
    prior: object | None
    sampler: str | None
    tied_to: str | None
    kl: float | None
    numbers: Measured | None
    prunable: int | None

    @property
    def variance_only(self) -> float | None:
        """Part of the kept weights whose noise drowns the mean, log α > 3, or that have none."""
        if self.numbers is None:
            return None
        log_alpha = self.numbers.log_alpha
        if log_alpha is None:
            return 1.0
        return float((log_alpha > LOG_ALPHA_THRESHOLD).mean()) if len(log_alpha) else 0.0


@dataclass(frozen=True, kw_only=True)
class UnitSummary:
    """Noise on units, such as `zm.LogNormalDropout`.

    Attributes:
        log_alpha: log of variance over squared mean of each unit that is kept.
    """

    name: str
    kind: str
    units: int
    log_alpha: np.ndarray
    kl: float | None
    prunable: int | None


@dataclass(frozen=True)
class Summary:
    """All that is random in a model; `print` shows it as tables, `draw` as pictures."""

    weights: tuple[WeightSummary, ...]
    units: tuple[UnitSummary, ...] = ()

    @property
    def kl(self) -> float:
        """In nats, of everything that has one."""
        return sum(each.kl or 0.0 for each in (*self.weights, *self.units))

    def __iter__(self) -> Iterator[WeightSummary | UnitSummary]:
        return iter((*self.weights, *self.units))

    def __getitem__(self, name: str) -> WeightSummary | UnitSummary:
        for each in self:
            if each.name == name:
                return each
        raise KeyError(name)

    def __str__(self) -> str:
        if not self.weights and not self.units:
            return "No random weights."
        sections = [self._weights(), self._noise(), self._scales(), self._units()]
        return "\n\n".join("\n".join(lines) for lines in sections if lines)

    def draw(self, folder: Path | str) -> list[Path]:
        """Write histograms by layer, and return their paths.

        `log_alpha.png` and `snr.png` are of weights with means, `scale.png` of those without. Needs
        matplotlib (extra `cli`).
        """
        folder = Path(folder)
        known = {w.name: w.numbers for w in self.weights if w.numbers is not None}
        log_alphas = {n: m.log_alpha for n, m in known.items() if m.log_alpha is not None}
        snrs = {n: m.log10_snr for n, m in known.items() if m.log10_snr is not None}
        scales = {n: m.log10_scale for n, m in known.items() if m.log_alpha is None}
        pictures = {
            "log_alpha": (log_alphas, "log α", {"log α = 3, beyond which prune_ prunes": 3.0}),
            "snr": (snrs, "log₁₀ |mean| / σ", {"as much signal as noise": 0.0}),
            "scale": (scales, "log₁₀ σ, mean zero", {}),
        }
        written = []
        folder.mkdir(parents=True, exist_ok=True)
        for name, (by_layer, label, marked) in pictures.items():
            by_layer = {layer: values for layer, values in by_layer.items() if len(values)}
            if by_layer:
                path = folder / f"{name}.png"
                draw(path, by_layer, label, marked)
                written.append(path)
        return written

    def _weights(self) -> list[str]:
        headings = ("name", "layer", "posterior", "prior", "sampler", "shape")
        rows: list[tuple[str, ...]] = []
        if self.weights:
            rows.append((*headings, "parameters", "sparsity", "KL"))
        for weight in self.weights:
            numbers = weight.numbers
            rows.append(
                (
                    weight.name,
                    weight.layer,
                    weight.described,
                    "–" if weight.prior is None else str(weight.prior),
                    weight.sampler or "–",
                    "–" if numbers is None else " × ".join(map(str, numbers.shape)) or "one",
                    "–" if numbers is None else f"{numbers.parameters:,}",
                    "–" if numbers is None else f"{numbers.sparsity:.2%}",
                    _nats(weight.kl),
                )
            )
        if not rows:
            return []
        lines = ["Random weights (KL in nats)", *text_table(rows, left=range(6))]
        known = [w.numbers for w in self.weights if w.numbers is not None]
        count = sum(int(np.prod(each.shape)) for each in known)
        kept = sum(each.kept for each in known)
        if count:
            parameters = sum(each.parameters for each in known)
            kl = sum(weight.kl or 0.0 for weight in self.weights)
            lines.append(
                f"together: {count:,} weights, {kept:,} kept ({1 - kept / count:.2%} pruned), "
                f"{parameters:,} parameters, KL {kl:,.1f}"
            )
        return lines

    def _noise(self) -> list[str]:
        headings = ("name", "mean", "5%", "median", "95%", "of all", "−12 … 12", "median SNR")
        rows: list[tuple[str, ...]] = [(*headings, "variance only", "prune_ takes")]
        for weight in self.weights:
            numbers = weight.numbers
            if numbers is None or numbers.log_alpha is None or not len(numbers.log_alpha):
                continue
            log_alpha, log10_snr = numbers.log_alpha, numbers.log10_snr
            assert log10_snr is not None
            rows.append(
                (
                    weight.name,
                    f"{log_alpha.mean():.2f}",
                    *(f"{each:.2f}" for each in _quantiles(log_alpha)),
                    f"{numbers.effective_log_alpha:.2f}",
                    f"[{in_text(log_alpha, -12, 12)}]",
                    f"{10 ** _quantiles(log10_snr)[1]:.3g}",
                    f"{weight.variance_only:.2%}",
                    "–" if weight.prunable is None else f"{weight.prunable:,}",
                )
            )
        title = "log α = log(variance / mean²) of the kept weights: above 3 noise drowns the mean"
        return [title, *text_table(rows)] if len(rows) > 1 else []

    def _scales(self) -> list[str]:
        rows: list[tuple[str, ...]] = [("name", "5%", "median", "95%", "log₁₀, −8 … 2")]
        for weight in self.weights:
            numbers = weight.numbers
            if numbers is None or numbers.log_alpha is not None or not len(numbers.log10_scale):
                continue
            cells = (f"{10**each:.3g}" for each in _quantiles(numbers.log10_scale))
            rows.append((weight.name, *cells, f"[{in_text(numbers.log10_scale, -8, 2)}]"))
        title = "Scales of the weights with mean zero, whose α is infinite"
        return [title, *text_table(rows)] if len(rows) > 1 else []

    def _units(self) -> list[str]:
        headings = ("name", "noise", "units", "kept", "5%", "median", "95%", "−12 … 12")
        rows: list[tuple[str, ...]] = [(*headings, "KL", "prune_ takes")]
        for each in self.units:
            quantiles = _quantiles(each.log_alpha) if len(each.log_alpha) else [float("nan")] * 3
            rows.append(
                (
                    each.name,
                    each.kind,
                    f"{each.units:,}",
                    f"{len(each.log_alpha):,}",
                    *(f"{value:.2f}" for value in quantiles),
                    f"[{in_text(each.log_alpha, -12, 12)}]",
                    _nats(each.kl),
                    "–" if each.prunable is None else f"{each.prunable:,}",
                )
            )
        title = "Noise on units, and log α of those that are kept"
        return [title, *text_table(rows, left=(0, 1))] if len(rows) > 1 else []


def summary(model: nn.Module) -> Summary:
    """What is random in a model: layer by layer its posterior, prior, noise, signal and KL.

    For every random weight the quantiles of log α, the signal-to-noise ratio, the part that is
    nothing but variance, and what `zm.prune_(model)` would take; of zero-mean weights the scales.
    `zeromean inspect` shows the same of a file.
    """
    require_model(model)
    return summarize(weights_in(model), model)


def summarize(weights: Mapping[str, RandomWeight], model: nn.Module | None = None) -> Summary:
    """The same of weights that were found in a file; noise on units is in the model alone."""
    noise = {} if model is None else _unit_noise(model)
    return Summary(
        tuple(_weight(name, weight) for name, weight in weights.items()),
        tuple(_unit(name, module) for name, module in noise.items()),
    )


def _weight(name: str, weight: RandomWeight) -> WeightSummary:
    own = None if weight.tied_to is not None else weight.posterior
    numbers = None if own is None else measure(own)
    # Of a broken training the rest is to be seen all the same.
    log_alpha = None if numbers is None else numbers.log_alpha
    broken = log_alpha is not None and bool(np.isnan(log_alpha).any())
    return WeightSummary(
        name=name,
        layer=weight.layer,
        described=weight.described,
        prior=weight.prior,
        sampler=weight.sampler,
        tied_to=weight.tied_to,
        kl=None if own is None else kl_of(weight),
        numbers=numbers,
        prunable=None if own is None or broken else _prunable(name, own),
    )


def _prunable(name: str, posterior: Posterior) -> int | None:
    if reason_against(posterior, "snr") is not None:
        return None
    candidate = PrunableWeights(name, posterior, "snr", "weight")
    doomed = candidate.excess > candidate.default_threshold
    return int((doomed if posterior.mask is None else doomed & posterior.mask).sum())


def _unit_noise(model: nn.Module) -> dict[str, UnitNoise]:
    return {name: m for name, m in model.named_modules() if isinstance(m, UnitNoise)}


@torch.no_grad()
def _unit(name: str, noise: UnitNoise) -> UnitSummary:
    prunable = None
    log_alpha = (-2 * noise.log_snr())[noise.keep].double().cpu().numpy()
    if reason_against_units(noise, "snr") is None and not np.isnan(log_alpha).any():
        candidate = PrunableUnits(name, noise)
        prunable = int((noise.keep & (candidate.excess > candidate.default_threshold)).sum())
    return UnitSummary(
        name=name or "the model",
        kind=type(noise).__name__,
        units=noise.num_features,
        log_alpha=log_alpha,
        kl=float(noise.kl()) if noise.kl_terms() else None,
        prunable=prunable,
    )


def _nats(kl: float | None) -> str:
    return "–" if kl is None else f"{kl:,.1f}"


def _quantiles(values: np.ndarray) -> list[float]:
    return [float(each) for each in np.quantile(values, [0.05, 0.5, 0.95])]
