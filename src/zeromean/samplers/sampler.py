"""How op(x, W) is drawn when W is random.

A sampler is a function `(op, x, posterior, bias) -> output`. All of them agree in the mean of
each output, and all but `mean` in its variance; they differ in what shares one draw:

| sampler | noise | drawn for | exact for |
| --- | --- | --- | --- |
| `local` | normal | every output, example and position | each output by itself |
| `moment_matched` | any | every output, example and position | two moments of each output |
| `weight` | any | every weight, once for the batch | everything |
| `flipout` | any | every weight, with random signs by example | each example by itself |
| `mean` | any | nothing | – |
| `auto` | any | weights where that is cheaper and no example can tell, else outputs | as `local` |
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from zeromean.distributions.posteriors.posterior import Posterior
from zeromean.samplers.linear_maps import LinearMap

Sampler = Callable[[LinearMap, Tensor, Posterior, Tensor | None], Tensor]
