"""What layers with several random weights have in common: LSTM, GRU, attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self

from torch import Tensor, nn

from zeromean.distributions.posteriors.posterior import Posterior
from zeromean.distributions.priors import Prior
from zeromean.layers.stochastic_module import StochasticModule


class MultiWeightLayer(StochasticModule):
    """A layer with a posterior in place of each of the weights that torch's layer has.

    Posteriors and biases have the names of torch's weights and biases.
    """

    torch_twin: Callable[..., Any]
    prior: Prior | None

    def posteriors(self) -> dict[str, Posterior]:
        """The random weights by torch's names."""
        modules = self.named_modules(remove_duplicate=False)
        return {name: module for name, module in modules if isinstance(module, Posterior)}

    def biases(self) -> dict[str, nn.Parameter]:
        """The parameters that are not random, by torch's names."""
        random = tuple(f"{name}." for name in self.posteriors())
        return {n: p for n, p in self.named_parameters() if not n.startswith(random)}

    def distributions(self) -> dict[str, nn.Module]:
        return {**self.posteriors()}

    def kl_terms(self) -> dict[nn.Module, Callable[[], Tensor]]:
        if self.prior is None:
            return {}
        return {p: partial(self.prior.kl, p) for p in self.posteriors().values()}

    def plain_twin(self) -> Any:
        """torch's layer of the same geometry, on the meta device."""
        raise NotImplementedError

    @classmethod
    def from_torch(cls, module: Any, **options: Any) -> Self:
        """A layer of the geometry of torch's, with weights of its own.

        Args:
            options: The posterior, prior, sampler, device and dtype.
        """
        raise NotImplementedError
