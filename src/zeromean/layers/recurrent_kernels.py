"""Running recurrent layers with given weights: torch's fused kernels, or step by step.

Only under `torch.func.vmap`, for which the kernels have no rule, and in compiled training the steps
are unrolled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_gradtrackingtensor
from torch.overrides import handle_torch_function, has_torch_function

if TYPE_CHECKING:
    from zeromean.layers.recurrent import RecurrentLayer

State = tuple[Tensor, ...]


def run_recurrent(
    layer: RecurrentLayer,
    data: Tensor,
    batch_sizes: Tensor | None,
    state: State,
    weights: list[Tensor],
) -> tuple[Tensor, ...]:
    """The output of a recurrent layer with these weights, and its last states.

    Args:
        data: A batch of sequences or, with `batch_sizes`, the data of a packed one.
        weights: For every layer and direction the weights and, if there are any, the biases.
    """
    tensors = (data, *state, *weights)
    if has_torch_function(tensors):
        # One call to a torch function mode, whichever way it runs: see replay.py.
        return handle_torch_function(
            run_recurrent, tensors, layer, data, batch_sizes, state, weights
        )
    if _must_unroll(tensors):
        if batch_sizes is not None:
            return _unrolled(layer, data, batch_sizes.tolist(), state, weights)
        data = data.transpose(0, 1) if layer.batch_first else data
        num_steps, num_objects = data.shape[:2]
        sizes = [num_objects] * num_steps
        output, *last = _unrolled(layer, data.flatten(0, 1), sizes, state, weights)
        output = output.unflatten(0, (num_steps, num_objects))
        return (output.transpose(0, 1) if layer.batch_first else output, *last)
    dropout = layer.dropout if layer.training else 0.0
    hx = state if layer.num_states > 1 else state[0]
    options = (layer.bias, layer.num_layers, dropout, dropout > 0, layer.bidirectional)
    if batch_sizes is None:
        return layer.kernel(data, hx, weights, *options, layer.batch_first)
    return layer.kernel(data, batch_sizes, hx, weights, *options)


def _unrolled(
    layer: RecurrentLayer, data: Tensor, sizes: list[int], state: State, weights: list[Tensor]
) -> tuple[Tensor, ...]:
    """Step by step over a packed batch, `(sum of sizes, features)`, `sizes` examples each."""
    per_direction = 4 if layer.bias else 2
    last: list[State] = []
    for index in range(layer.num_layers):
        if index > 0 and layer.training and layer.dropout > 0:
            data = F.dropout(data, layer.dropout)
        outputs = []
        for backwards in (False, True)[: layer.num_directions]:
            k = len(last)
            weight_ih, weight_hh, *biases = weights[k * per_direction : (k + 1) * per_direction]
            bias_ih, bias_hh = biases or (None, None)
            gates = F.linear(data, weight_ih, bias_ih).split(sizes)
            step = partial(layer.step, weight=weight_hh, bias=bias_hh)
            output, final = _scan(step, gates, tuple(s[k] for s in state), backwards)
            outputs.append(output)
            last.append(final)
        data = torch.cat(outputs, -1)
    return data, *(torch.stack(states) for states in zip(*last, strict=True))


def _scan(
    step: Callable[[Tensor, State], State],
    gates: tuple[Tensor, ...],
    state: State,
    backwards: bool,
) -> tuple[Tensor, State]:
    """Outputs of all steps, and the last state. Longer sequences come first in a batch."""
    outputs: list[Tensor] = []
    for piece in reversed(gates) if backwards else gates:
        running = piece.shape[0]
        new = step(piece, tuple(s[:running] for s in state))
        outputs.append(new[0])
        pairs = zip(new, state, strict=True)
        state = tuple(torch.cat([after, before[running:]]) for after, before in pairs)
    return torch.cat(outputs[::-1] if backwards else outputs), state


def _must_unroll(tensors: Sequence[Tensor]) -> bool:
    """Whether torch's kernel cannot run on these tensors."""
    if torch.compiler.is_compiling():
        # Its compiled gradient fails (torch 2.13), and the compiler would unroll it itself.
        return torch.is_grad_enabled()
    return any(map(_is_batched, tensors))


def _is_batched(tensor: Tensor) -> bool:
    """Whether a vmap, around a gradient or not, has reached the tensor."""
    while is_gradtrackingtensor(tensor):
        tensor = get_unwrapped(tensor)
    return is_batchedtensor(tensor)
