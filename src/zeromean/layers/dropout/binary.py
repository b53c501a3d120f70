"""Binary noise on units, with a fixed rate or one that is learned in either of two ways."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from zeromean.arguments import require_choice, require_numbers
from zeromean.layers.dropout.rate import RatedNoise


class BinaryDropout(RatedNoise):
    """Multipliers that are 0 at the drop rate p, and 1 / (1 − p) otherwise.

    Like `nn.Dropout`, but in training and prediction alike, and with a rate that can be learned:
    log α = log p − log(1 − p) is the parameter, as α = p / (1 − p) is the variance. The prior of a
    learned rate is binary dropout at the rate `prior_p`, whose KL counts the units.

    Args:
        num_features: Number of units: C of an input `(N, C, *)`.
        p: Drop rate, or where it starts.
        share: One rate for the "layer" or for each "unit".
        learn: "concrete" draws relaxed multipliers between 0 and 1 / (1 − p), through which
            gradients pass (Gal, Hron & Kendall, 2017), biased by the relaxation; "reinforce" draws
            binary ones, and `zm.reinforce_term` gives the gradient, unbiased and noisier. None
            keeps the rate as it is, without a KL term.
        prior_p: Drop rate of the prior.
        temperature: Of the relaxation; binary multipliers at 0.
    """

    def __init__(
        self,
        num_features: int,
        p: float = 0.5,
        *,
        share: Literal["layer", "unit"] = "layer",
        learn: Literal["concrete", "reinforce"] | None = None,
        prior_p: float = 0.5,
        temperature: float = 0.1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        require_numbers(p=p, prior_p=prior_p, temperature=temperature)
        if not 0 <= p < 1 or (learn is not None and p == 0):
            learned = "" if learn is None else ", and above 0 to be learned"
            raise ValueError(
                f"p must lie in [0, 1){learned}, got {p}; it is the rate at which units drop."
            )
        if not 0 < prior_p < 1:
            raise ValueError(f"prior_p must lie between 0 and 1, got {prior_p}.")
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature must be a positive number, got {temperature}.")
        if learn is not None:
            require_choice("learn", learn, ("concrete", "reinforce"))
        super().__init__(num_features, p, share, learn is not None, device, dtype)
        self.prior_p, self.temperature = prior_p, temperature
        self.learn = learn
        self.reset_parameters()

    @property
    def rate(self) -> Tensor:
        """The drop rate, of the layer or of each unit."""
        return self.log_alpha.sigmoid()

    def draw_noise(self, num_objects: int = 1) -> Tensor:
        return torch.rand_like(self.log_alpha.detach().new_empty(num_objects, self.num_features))

    def multipliers(self, noise: Tensor) -> Tensor:
        kept = (-self.log_alpha).sigmoid()  # 1 − p, also where p is as good as 1.
        if self.learn != "concrete":
            return (noise >= self.rate).to(noise.dtype) / kept
        smallest = torch.finfo(noise.dtype).tiny
        logistic = noise.clamp_min(smallest).log() - (-noise).log1p()
        return ((logistic - self.log_alpha) / self.temperature).sigmoid() / kept

    def log_prob(self, noise: Tensor) -> Tensor:
        """log q of the binary multipliers that this noise gives, summed over units that are kept.

        Args:
            noise: From `draw_noise`, `(num_objects, num_features)`.
        """
        dropped = noise < self.rate
        per_unit = torch.where(dropped, F.logsigmoid(self.log_alpha), F.logsigmoid(-self.log_alpha))
        return torch.where(self.keep, per_unit, 0.0).sum(-1)

    def kl_per_unit(self) -> Tensor:
        log_p, log_kept = F.logsigmoid(self.log_alpha), F.logsigmoid(-self.log_alpha)
        dropped = self.rate * (log_p - math.log(self.prior_p))
        kept = (-self.log_alpha).sigmoid() * (log_kept - math.log1p(-self.prior_p))
        return (dropped + kept).expand(self.num_features)

    def extra_repr(self) -> str:
        learned = "" if self.learn is None else f", learn={self.learn!r}, prior_p={self.prior_p:g}"
        return f"{self.num_features}, p={self.p:g}, share={self.share!r}{learned}"
