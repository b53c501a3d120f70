"""How many samples run at once, and whether they can."""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zeromean.distributions.posteriors.posterior import Posterior
from zeromean.layers.linear import Linear
from zeromean.layers.recurrent import RecurrentLayer
from zeromean.layers.stochastic_module import stochastic_modules
from zeromean.samplers.kinds import Draws, drawn_by

# So many samples run at once that the largest noisy activation stays near the caches' size.
ELEMENTS_AT_ONCE = 2**21
# With activations and dropout, modules whose outputs have known sizes.
_ON_ROWS = (nn.Sequential, nn.Flatten, nn.Identity, nn.Linear, nn.BatchNorm1d, nn.LayerNorm, Linear)


def samples_at_once(elements: int) -> int:
    """How many samples run at once, if the largest noisy activation of one has so many elements."""
    return max(1, ELEMENTS_AT_ONCE // max(elements, 1))


def first_chunk_size(model: nn.Module, values: tuple) -> int:
    """A careful guess, until the first chunk has told how large the noisy part is."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
    elements = sum(tensor.numel() for tensor in tensors) * (1 if _is_chain_on_rows(model) else 16)
    # Or the widest layer at every position, where that is more: Linear sees whole images at once.
    channels = _widest(model, "out_channels")
    features = _widest(model, "out_features", "embedding_dim", "hidden_size")
    widest = sum(
        max(_num_positions(t) * channels, (len(t) if t.dim() > 3 else _num_positions(t)) * features)
        for t in tensors
    )
    return samples_at_once(max(elements, widest))


def _is_chain_on_rows(model: nn.Module) -> bool:
    """Whether every activation is as large as the input or the output of some layer."""
    kinds = {type(m) for m in model.modules() if not isinstance(m, Posterior)} - set(_ON_ROWS)
    element_wise = ("torch.nn.modules.activation", "torch.nn.modules.dropout")
    return nn.MultiheadAttention not in kinds and all(k.__module__ in element_wise for k in kinds)


def _widest(model: nn.Module, *names: str) -> int:
    """The largest of these sizes in any module."""
    found = [vars(module).get(name, 1) for module in model.modules() for name in names]
    return max((width for width in found if isinstance(width, int)), default=1)


def _num_positions(tensor: Tensor) -> int:
    """Examples, steps, tokens and pixels: elements over features or channels."""
    if tensor.dim() == 0 or not tensor.is_floating_point():
        return tensor.numel()
    features = tensor.shape[1] if tensor.dim() > 3 else tensor.shape[-1]
    return tensor.numel() // max(features, 1)


def must_loop(model: nn.Module) -> bool:
    """Whether the model has noise or code that vmap would not see."""
    recurrent = (nn.RNNBase, RecurrentLayer)
    return any(
        # The dropout between the layers of an LSTM or GRU is drawn once for all samples by vmap.
        (isinstance(module, recurrent) and module.dropout > 0 and module.num_layers > 1)
        or type(module).__name__ == "OptimizedModule"  # torch.compile: its graph is one call
        for module in model.modules()
    )


def has_hooks(model: nn.Module) -> bool:
    return any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def samples_gain_together(model: nn.Module) -> bool:
    """Whether every layer draws outputs, or nothing: then samples share their weights."""
    drawn = {drawn_by(module.sampler) for module in stochastic_modules(model).values()}
    return drawn <= {Draws.OUTPUTS, Draws.NOTHING, Draws.CHEAPER}
