"""Posteriors and priors of the documents, by the names that settings and records have for them."""

from __future__ import annotations

from functools import partial
from typing import Any

import zeromean as zm

POSTERIORS: dict[str, Any] = {
    "zero-mean": zm.ZeroMean,
    "layer": partial(zm.Multiplicative, share="layer"),
    "neuron": partial(zm.Multiplicative, share="neuron"),
    "weight": partial(zm.Multiplicative, share="weight"),
    "additive": zm.Additive,
}
PRIORS: dict[str, Any] = {
    "log-uniform": zm.LogUniform(),
    "student-t": zm.StudentT(kl="quadrature"),
    "student-t-sample": zm.StudentT(kl="sample"),
    "ard": zm.ARD(),
}
