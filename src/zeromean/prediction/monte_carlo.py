"""Drawing outputs of a random network: many samples in bounded memory, shared work done once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import (
    DataLoader,
)

from zeromean.arguments import require_integer, require_model, require_seed, shown
from zeromean.layers.blocks import monte_carlo_modes, sampling
from zeromean.layers.recurrent import RecurrentLayer
from zeromean.layers.stochastic_module import stochastic_modules, swapped_samplers
from zeromean.prediction.inputs import (
    InputsOrLoader,
    _batches,
    _described,
    _logits_in,
    num_objects_in,
)
from zeromean.prediction.randomness import seeded
from zeromean.prediction.replay import Replay
from zeromean.prediction.unbatch import take_escaped_
from zeromean.samplers.fixed_noise import DrawnOnce
from zeromean.samplers.kinds import Draws, drawn_by
from zeromean.samplers.sampler import Sampler
from zeromean.samplers.weights import auto

# As many samples run at once as keep their largest noisy activation near the caches.
_ELEMENTS_AT_ONCE = 2**21
_log = logging.getLogger(__name__)


def draw_outputs(
    model: nn.Module,
    inputs: InputsOrLoader,
    num_samples: int,
    consume: Callable[[Tensor], None],
    *,
    sampler: Sampler | Literal["auto"] | None = None,
    seed: int | None = None,
    chunk_size: int | None = None,
    batch_size: int | None = None,
    select: Callable[[Any], Tensor] | None = None,
    differentiable: bool = False,
) -> None:
    """Hand `consume` chunks of outputs, `(k, *output)`, until `num_samples` are drawn.

    A chunk is one `torch.func.vmap` over k samples: what no noise has reached (the deterministic
    prefix, the moments of the first stochastic layer) is computed once, and replayed over the
    chunks. A model that vmap cannot run is run in a loop. Modes, samplers and, with a seed, the
    random state are restored at the end, also after an exception.
    """
    require_model(model)
    num_samples = require_integer("num_samples", num_samples, at_least=1)
    if chunk_size is not None:
        chunk_size = require_integer("chunk_size", chunk_size, at_least=1)
    if batch_size is not None:
        batch_size = require_integer("batch_size", batch_size, at_least=1)
    if seed is not None:
        seed = require_seed(seed)
    if select is not None and not callable(select):
        raise TypeError(
            "select must be a function of the model's output, such as lambda output: output[0], "
            f"got {shown(select)}."
        )
    batches = _batches(inputs, batch_size)
    by_object = batch_size is not None or isinstance(inputs, DataLoader)

    drawn = DrawnOnce()

    def run() -> Tensor:
        drawn.forget()  # A new network.
        outputs = [run_batch(*batch) for batch in batches]
        drawn.forget()
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def run_batch(args: tuple, kwargs: dict[str, Any]) -> Tensor:
        # A model may write into what it is given: every sample gets it as it was.
        fresh_args, fresh_kwargs = tree_map_only(Tensor, Tensor.clone, (args, kwargs))
        output = model(*fresh_args, **fresh_kwargs)
        output = _logits_in(output) if select is None else select(output)
        if not isinstance(output, Tensor):
            raise TypeError(
                f"The model must return a tensor, or something with a tensor called logits, got "
                f"{_described(output)}; pass select=lambda output: … to pick one."
            )
        if by_object and output.shape[:1] != (num_objects := num_objects_in(args, kwargs),):
            what = "a DataLoader" if batch_size is None else "batch_size"
            raise ValueError(
                f"{what} needs outputs with the objects along dimension 0: for "
                f"{num_objects} objects the model returned {tuple(output.shape)}."
            )
        return output

    def finish(chunk: Tensor) -> None:
        # −inf is a masked class; NaN and +inf are nobody's intention.
        if chunk.isnan().any() or (chunk.isinf() if chunk.is_complex() else chunk.isposinf()).any():
            raise ValueError(_blame(model))
        consume(chunk)

    with ExitStack() as stack:
        stack.callback(take_escaped_, model)
        if sampler is not None:
            stack.enter_context(sampling(model, auto if sampler == "auto" else sampler))
        stack.enter_context(monte_carlo_modes(model))
        stack.enter_context(torch.set_grad_enabled(differentiable))
        if seed is not None:
            stack.enter_context(seeded(seed, model))
        if chunk_size is None and not _samples_gain_together(model):
            chunk_size = 1  # Each has weights of its own.
        # Where `zm.weight` draws, what is called twice, or tied, is the same both times.
        layers = stochastic_modules(model).values()
        by_weight = [m for m in layers if drawn_by(m.sampler) is Draws.WEIGHTS]
        stack.enter_context(swapped_samplers(dict.fromkeys(by_weight, drawn)))
        first_size = chunk_size or _first_chunk_size(model, batches[0])
        if _must_loop(model):
            chunks = _looped(run, num_samples)
        else:
            chunks = _vectorized(run, num_samples, first_size, chunk_size, _has_hooks(model))
        try:
            first = next(chunks)
        except Exception as error:
            # Either vmap cannot run this model or nothing can; the loop tells, in plain words.
            _log.debug("vmap cannot run the model, samples are drawn one by one: %s", error)
            chunks = _looped(run, num_samples)
            first = next(chunks)
        finish(first)
        for chunk in chunks:
            finish(chunk)


def _looped(run: Callable[[], Tensor], num_samples: int) -> Iterator[Tensor]:
    for _ in range(num_samples):
        yield run().unsqueeze(0)


def _vectorized(
    run: Callable[[], Tensor],
    num_samples: int,
    first_size: int,
    chunk_size: int | None,
    watched: bool,
) -> Iterator[Tensor]:
    if first_size >= num_samples:
        yield torch.func.vmap(lambda _: run(), randomness="different")(torch.empty(num_samples))
        return
    replay = Replay(keep_all=watched)

    def sample(_: Tensor | None = None) -> Tensor:
        with replay:
            output = run()
        return output

    def draw(size: int) -> Tensor:
        if size == 1 and replay.recorded:
            return sample().unsqueeze(0)  # It is known what is noisy: no vmap needed to tell.
        return torch.func.vmap(sample, randomness="different")(torch.empty(size))

    size, remaining = first_size, num_samples
    while remaining:
        size = min(size, remaining)
        try:
            outputs = draw(size)
        except Exception:
            # The model does something else from call to call, or computes where no torch function
            # shows it (TorchScript): compute every chunk in full.
            if not (replay.recorded and replay.replayable):
                raise
            replay.replayable = False
            outputs = draw(size)
        yield outputs
        remaining -= size
        if chunk_size is None:
            size = max(1, _ELEMENTS_AT_ONCE // max(replay.largest_noisy, 1))


def _first_chunk_size(model: nn.Module, values: tuple) -> int:
    """A careful guess, until the first chunk has told how large the noisy part is."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
    elements = 16 * sum(tensor.numel() for tensor in tensors)
    # Or, where that is more: the widest layer at every position. Linear sees whole images at once.
    channels = _widest(model, "out_channels")
    features = _widest(model, "out_features", "embedding_dim", "hidden_size")
    widest = sum(
        max(_num_positions(t) * channels, (len(t) if t.dim() > 3 else _num_positions(t)) * features)
        for t in tensors
    )
    return max(1, _ELEMENTS_AT_ONCE // max(elements, widest, 1))


def _widest(model: nn.Module, *names: str) -> int:
    """The largest of these sizes in any module."""
    found = [vars(module).get(name, 1) for module in model.modules() for name in names]
    return max((width for width in found if isinstance(width, int)), default=1)


def _num_positions(tensor: Tensor) -> int:
    """Objects, steps, tokens and pixels: elements over features or channels."""
    if tensor.dim() == 0 or not tensor.is_floating_point():
        return tensor.numel()
    features = tensor.shape[1] if tensor.dim() > 3 else tensor.shape[-1]
    return tensor.numel() // max(features, 1)


def _must_loop(model: nn.Module) -> bool:
    """Whether the model has noise or code that vmap would not see."""
    recurrent = (nn.RNNBase, RecurrentLayer)
    return any(
        # The dropout between the layers of an LSTM or GRU is drawn once for all samples by vmap.
        (isinstance(module, recurrent) and module.dropout > 0 and module.num_layers > 1)
        or type(module).__name__ == "OptimizedModule"  # torch.compile: its graph is one call
        for module in model.modules()
    )


def _has_hooks(model: nn.Module) -> bool:
    return any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def _samples_gain_together(model: nn.Module) -> bool:
    """Whether every layer draws outputs, or none: nothing that each sample has for itself."""
    drawn = {drawn_by(module.sampler) for module in stochastic_modules(model).values()}
    return drawn <= {Draws.OUTPUTS, Draws.NOTHING, Draws.CHEAPER}


def _blame(model: nn.Module) -> str:
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            return (
                f"The parameter {name} is not finite, so the outputs are not either; training has "
                "diverged: go back to an earlier checkpoint and lower the learning rate."
            )
    return (
        "The model's outputs are not finite though its parameters are; an activation overflows: "
        "check the scale of the inputs, or use float64."
    )
