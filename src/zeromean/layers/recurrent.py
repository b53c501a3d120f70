"""Recurrent layers with random weights: the twins of torch's LSTM and GRU.

The weights are drawn once for a call and stay the same over the whole sequence, so that the noise
of a weight does not average out over time (Gal & Ghahramani, 2016; Lobacheva, Chirkova & Vetrov,
2017). One draw serves the batch, and Monte-Carlo prediction draws anew for every sample. Each
weight matrix has a posterior of its own, named as in torch: `weight_ih_l0`, `weight_hh_l0`, …

The drawn weights go through torch's fused kernels wherever these can run (`recurrent_kernels.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from zeromean.arguments import require_dtype, require_floating, require_integer, require_numbers
from zeromean.distributions.posteriors.additive import Additive
from zeromean.distributions.posteriors.posterior import Posterior, PosteriorFactory, WeightLayout
from zeromean.layers.multi_weight_layer import MultiWeightLayer
from zeromean.layers.recurrent_kernels import State, run_recurrent
from zeromean.layers.stochastic_layer import (
    PriorChoice,
    build_posterior,
    checked_prior,
    require_factory,
)
from zeromean.registry import register
from zeromean.samplers.fixed_noise import KeptNoise
from zeromean.samplers.kinds import Draws, drawn_by
from zeromean.samplers.sampler import Sampler
from zeromean.samplers.weights import weight


class RecurrentLayer(MultiWeightLayer):
    """A stack of recurrent layers with random weights and deterministic biases.

    The default posterior is `zm.Additive`, not the zero mean of the other layers: with one draw for
    a whole batch and all steps, zero-mean gates do not learn (on digits read row by row they stay
    at chance, where `zm.Additive` reaches the accuracy of torch's layer).

    Args:
        input_size: Features of the input at each step.
        hidden_size: Features of the hidden state.
        num_layers: Layers, each reading the output of the one below.
        bias: Whether there are biases.
        batch_first: Inputs and outputs are `(N, T, features)` in place of `(T, N, features)`.
        dropout: Rate of the binary dropout between layers, in training and Monte-Carlo prediction.
        bidirectional: Read the sequence in both directions.
        posterior: What q(W) of every weight matrix is.
        prior: What the KL term compares it with, None for no KL term.
            Default: LogUniform() for normal noise, None for other noise.
    """

    torch_twin: Callable[..., nn.RNNBase]
    kernel: Callable[..., tuple[Tensor, ...]]
    num_gates: int
    num_states: int
    proj_size = 0  # torch's projections are not supported.

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        posterior: PosteriorFactory = Additive,
        prior: PriorChoice = "default",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        input_size = require_integer("input_size", input_size, at_least=1)
        hidden_size = require_integer("hidden_size", hidden_size, at_least=1)
        num_layers = require_integer("num_layers", num_layers, at_least=1)
        require_factory(posterior)
        require_dtype(dtype)
        require_numbers(dropout=dropout)
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout must lie between 0 and 1, got {dropout}.")
        if dropout > 0 and num_layers == 1:
            warnings.warn(
                "dropout acts between layers and does nothing for num_layers=1.", stacklevel=3
            )
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first = bias, batch_first
        self.dropout, self.bidirectional = dropout, bidirectional
        self.sampler = weight
        num_rows = self.num_gates * hidden_size
        layout = WeightLayout(fan_in=hidden_size)
        for index, suffix in self._suffixes():
            width = input_size if index == 0 else hidden_size * self.num_directions
            for kind, size in (("ih", width), ("hh", hidden_size)):
                shape = (num_rows, size)
                distribution = build_posterior(
                    posterior, shape, layout=layout, device=device, dtype=dtype
                )
                self.prior = checked_prior(prior, distribution)
                setattr(self, f"weight_{kind}_{suffix}", distribution)
                if bias:
                    values = torch.empty(num_rows, device=device, dtype=dtype)
                    setattr(self, f"bias_{kind}_{suffix}", nn.Parameter(values))
        self._reset_biases()

    @staticmethod
    def step(gates: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
        """The next state, from the input's part of the gates."""
        raise NotImplementedError

    def forward(self, input: Any, hx: Any = None) -> tuple[Any, Any]:
        packed = isinstance(input, PackedSequence)
        data = input.data if packed else input
        self._check_input(data, packed)
        single = not packed and data.dim() == 2
        if single:
            data = data.unsqueeze(0 if self.batch_first else 1)
        if packed:
            num_objects = int(input.batch_sizes[0])
        else:
            num_objects = data.shape[0 if self.batch_first else 1]
        state = self._initial_state(hx, data, num_objects, single)
        if packed and hx is not None and input.sorted_indices is not None:
            state = tuple(s.index_select(1, input.sorted_indices) for s in state)
        output, *state = run_recurrent(
            self,
            data,
            input.batch_sizes if packed else None,
            state,
            self._with_hidden_noise(self._draw(), data),
        )
        if packed:
            if input.unsorted_indices is not None:
                state = [s.index_select(1, input.unsorted_indices) for s in state]
            output = PackedSequence(
                output, input.batch_sizes, input.sorted_indices, input.unsorted_indices
            )
        elif single:
            output = output.squeeze(0 if self.batch_first else 1)
            state = [s.squeeze(1) for s in state]
        return output, state[0] if self.num_states == 1 else tuple(state)

    def accepted_sampler(self, sampler: Sampler) -> Sampler:
        if isinstance(sampler, KeptNoise) or drawn_by(sampler) is Draws.NOTHING:
            return sampler
        return weight

    def plain_twin(self) -> nn.RNNBase:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "dropout option adds dropout")  # Said already.
            return self.torch_twin(
                self.input_size,
                self.hidden_size,
                self.num_layers,
                self.bias,
                self.batch_first,
                self.dropout,
                self.bidirectional,
                device="meta",
            )

    @classmethod
    def from_torch(cls, module: nn.RNNBase, *, sampler: Any = None, **options: Any) -> Self:
        """The same, whatever the sampler: the weights are drawn once for a sequence."""
        return cls(
            module.input_size,
            module.hidden_size,
            module.num_layers,
            module.bias,
            module.batch_first,
            module.dropout,
            module.bidirectional,
            **options,
        )

    def flatten_parameters(self) -> None:
        """Do nothing. Models call it on torch's layers, to put weights in one block on a GPU."""

    def reset_parameters(self) -> None:
        for posterior in self.posteriors().values():
            posterior.reset_parameters()
        self._reset_biases()

    @property
    def num_directions(self) -> int:
        return 2 if self.bidirectional else 1

    def extra_repr(self) -> str:
        options = {
            "num_layers": (self.num_layers, 1),
            "bias": (self.bias, True),
            "batch_first": (self.batch_first, False),
            "dropout": (self.dropout, 0.0),
            "bidirectional": (self.bidirectional, False),
        }
        said = [f"{name}={value}" for name, (value, usual) in options.items() if value != usual]
        return ", ".join(
            [str(self.input_size), str(self.hidden_size), *said, f"prior={self.prior}"]
        )

    def _suffixes(self) -> list[tuple[int, str]]:
        """Index and torch's suffix of every layer and direction."""
        directions = ("", "_reverse")[: self.num_directions]
        return [(k, f"l{k}{direction}") for k in range(self.num_layers) for direction in directions]

    def _draw(self) -> list[Tensor]:
        """One weight of every kind in torch's order, biases included."""
        weights: list[Tensor] = []
        for _, suffix in self._suffixes():
            for kind in ("ih", "hh"):
                posterior: Posterior = getattr(self, f"weight_{kind}_{suffix}")
                if isinstance(self.sampler, KeptNoise):
                    weights.append(self.sampler.one_weight(posterior))
                elif drawn_by(self.sampler) is Draws.NOTHING:
                    weight_mean = posterior.mean_weight()
                    if weight_mean is None:
                        options = {"dtype": posterior.dtype, "device": posterior.device}
                        weight_mean = torch.zeros(posterior.shape, **options)
                    weights.append(weight_mean)
                else:
                    weights.append(posterior.sample())
            if self.bias:
                weights.extend(getattr(self, f"bias_{kind}_{suffix}") for kind in ("ih", "hh"))
        return weights

    def _with_hidden_noise(self, weights: list[Tensor], data: Tensor) -> list[Tensor]:
        """What `zm.add_unit_noise_` has put on the hidden units multiplies what reads them."""
        noise: Any = self._modules.get("hidden_noise")
        if noise is None:
            return weights
        kinds = ("weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if self.bias else ()))
        names = [f"{kind}_{suffix}" for _, suffix in self._suffixes() for kind in kinds]
        return noise.scaled(self, dict(zip(names, weights, strict=True)), data)

    def _initial_state(self, hx: Any, data: Tensor, num_objects: int, single: bool) -> State:
        shape = (self.num_layers * self.num_directions, num_objects, self.hidden_size)
        if hx is None:
            return (data.new_zeros(shape),) * self.num_states
        state = (hx,) if self.num_states == 1 or isinstance(hx, Tensor) else tuple(hx)
        for part in state:
            require_floating(f"An initial state of {type(self).__name__}", part)
        wanted = (shape[0], shape[2]) if single else shape
        if len(state) != self.num_states or any(s.shape != wanted for s in state):
            raise ValueError(
                f"{type(self).__name__} needs {self.num_states} initial state(s) of shape "
                f"{wanted}, got {[tuple(s.shape) for s in state]}."
            )
        return tuple(s.unsqueeze(1) for s in state) if single else state

    def _check_input(self, data: Tensor, packed: bool) -> None:
        require_floating(type(self).__name__, data)
        if (not packed and data.dim() not in (2, 3)) or data.shape[-1] != self.input_size:
            order = "(N, T" if self.batch_first else "(T, N"
            raise ValueError(
                f"{type(self).__name__} needs an input of shape {order}, {self.input_size}) or "
                f"(T, {self.input_size}), got {tuple(data.shape)}."
            )

    def _reset_biases(self) -> None:
        bound = self.hidden_size**-0.5
        for parameter in self._parameters.values():
            if parameter is not None:
                nn.init.uniform_(parameter, -bound, bound)


@register("layer")
class LSTM(RecurrentLayer):
    """`nn.LSTM` with random weights; `proj_size` is not supported.

    Called as torch's: `output, (h_n, c_n) = lstm(input, (h_0, c_0))`, states optional.
    """

    torch_twin = nn.LSTM
    kernel = staticmethod(torch.lstm)
    num_gates = 4
    num_states = 2

    @staticmethod
    def step(gates: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
        hidden, cell = state
        into, forget, value, out = (gates + F.linear(hidden, weight, bias)).chunk(4, -1)
        cell = forget.sigmoid() * cell + into.sigmoid() * value.tanh()
        return out.sigmoid() * cell.tanh(), cell


@register("layer")
class GRU(RecurrentLayer):
    """`nn.GRU` with random weights. Called as torch's: `output, h_n = gru(input, h_0)`."""

    torch_twin = nn.GRU
    kernel = staticmethod(torch.gru)
    num_gates = 3
    num_states = 1

    @staticmethod
    def step(gates: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
        (hidden,) = state
        reset, update, value = gates.chunk(3, -1)
        reset_h, update_h, value_h = F.linear(hidden, weight, bias).chunk(3, -1)
        update = (update + update_h).sigmoid()
        value = (value + (reset + reset_h).sigmoid() * value_h).tanh()
        return (value + update * (hidden - value),)
