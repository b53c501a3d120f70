"""Yesterday's posterior is today's prior: learning over time."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from zeromean.arguments import require_model, require_predicate
from zeromean.distributions.from_posterior import FromPosterior, remember_, why_not_a_prior
from zeromean.distributions.posteriors.factorized import FactorizedPosterior
from zeromean.distributions.posteriors.posterior import Posterior
from zeromean.layers.multi_weight_layer import MultiWeightLayer
from zeromean.layers.stochastic_layer import StochasticLayer
from zeromean.layers.stochastic_module import stochastic_modules

RandomLayer = StochasticLayer | MultiWeightLayer


def become_prior_(
    model: nn.Module,
    *,
    of: nn.Module | None = None,
    where: Callable[[str, nn.Module], bool] | None = None,
) -> None:
    """Make the posteriors of a model, as they are now, the priors of its layers, in place.

    From then on the KL term is zero at first and counts what the posteriors move away, so that what
    has been learned is kept where new data say nothing else. Call it between two tasks. Whatever
    prior a layer had, or none, it has this one afterwards; pruned weights stay pruned.

    Parameters that are not random (biases, the affine part of BatchNorm) have no prior and may
    forget; `bias=False` leaves none, and random ones have a prior too. Noise on units keeps the
    prior that it has.

    Args:
        of: Take the posteriors of another model with the same layers instead.
        where: Predicate of name and module that selects the layers. Default: all.
    """
    require_model(model)
    require_predicate(where)
    layers = {n: m for n, m in random_layers(model).items() if where is None or where(n, m)}
    if not layers:
        raise ValueError(
            "There is no layer with random weights to give a prior to; convert the model with "
            "zm.make_stochastic_, or check where=."
        )
    others = _posteriors(layers if of is None else _layers_of(of, layers))
    pairs = {name: (p, others.get(name)) for name, p in _posteriors(layers).items()}
    for name, (posterior, other) in pairs.items():
        _require_prior(name, posterior, other)
    for posterior, other in pairs.values():
        remember_(posterior, other)
    for layer in layers.values():
        layer.prior = FromPosterior()


def remember_layer_(layer: RandomLayer) -> None:
    """The same for one layer, whose posteriors are known to be fit for it."""
    for posterior in _posteriors({"": layer}).values():
        remember_(posterior)
    layer.prior = FromPosterior()


def random_layers(model: nn.Module) -> dict[str, RandomLayer]:
    """The layers with one random weight or several, by name, shared ones once."""
    modules = stochastic_modules(model).items()
    return {name: m for name, m in modules if isinstance(m, (StochasticLayer, MultiWeightLayer))}


def _layers_of(of: nn.Module, layers: dict[str, RandomLayer]) -> dict[str, RandomLayer]:
    require_model(of, "of")
    found = random_layers(of)
    return {name: found[name] for name in layers if name in found}


def _posteriors(layers: dict[str, RandomLayer]) -> dict[str, Posterior]:
    return {
        f"{name}.{part}".lstrip("."): posterior
        for name, layer in layers.items()
        for part, posterior in layer.distributions().items()
        if isinstance(posterior, Posterior)
    }


def _require_prior(name: str, posterior: Posterior, other: Posterior | None) -> None:
    """Refuse what cannot be compared, before anything is changed."""
    if other is None:
        raise ValueError(
            f"The other model has no random weight {name}; its layers must be those of the model, "
            "or select some by where=."
        )
    if other.shape != posterior.shape:
        raise ValueError(
            f"{name} has the shape {tuple(posterior.shape)}, and {tuple(other.shape)} in the other "
            "model; a prior needs the same layers."
        )
    for each in (posterior, other):
        why = why_not_a_prior(each)
        if why is not None:
            raise ValueError(
                f"{name} cannot become a prior: {why}; leave it out by "
                f"where=lambda name, layer: name != {name.rpartition('.')[0]!r}."
            )
    if posterior.positive != other.positive:
        raise ValueError(
            f"{name} is {type(posterior).__name__}, and {type(other).__name__} in the other model: "
            "positive weights cannot be compared with others."
        )
    kinds = [isinstance(each, FactorizedPosterior) for each in (posterior, other)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"{name} is {type(posterior).__name__}, and {type(other).__name__} in the other model: "
            "independent weights cannot be compared with others."
        )
