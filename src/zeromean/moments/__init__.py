"""Means and variances through a network in one pass, in place of samples.

`propagating(model)` makes a model compute them; `register` gives functions and modules of your own
a rule. Predictions use it by `method="moments"`.
"""

from zeromean.moments import attention as _attention
from zeromean.moments import layers as _layers
from zeromean.moments import pooling as _pooling
from zeromean.moments import recurrent as _recurrent
from zeromean.moments import shapes as _shapes
from zeromean.moments.activations import elementwise
from zeromean.moments.propagation import propagated, propagating
from zeromean.moments.random_tensor import RandomTensor
from zeromean.moments.rules import NoRuleError, register

# They put their rules into the table.
_RULES = (_attention, _layers, _pooling, _recurrent, _shapes)

__all__ = ["NoRuleError", "RandomTensor", "elementwise", "propagated", "propagating", "register"]
