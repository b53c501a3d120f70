"""Drawing outputs of a random network: many samples in bounded memory, shared work done once."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from numbers import Number
from threading import RLock
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from zeromean.arguments import FLOATING, require_integer, require_model, require_seed, shown
from zeromean.escaped import take_escaped_
from zeromean.held import DrawnOnce
from zeromean.recurrent import RecurrentLayer
from zeromean.replay import Replay
from zeromean.samplers import Sampler, auto, local, mean, moment_matched, weight
from zeromean.sampling import monte_carlo_modes, sampling
from zeromean.stochastic import stochastic_modules, swapped_samplers

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any]
InputsOrLoader = Inputs | DataLoader[Any]

# As many samples run at once as keep their largest noisy activation near the caches.
_ELEMENTS_AT_ONCE = 2**21
_SEEDING = RLock()
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
        stack.enter_context(swapped_samplers({m: drawn for m in layers if m.sampler is weight}))
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


def _batches(inputs: InputsOrLoader, batch_size: int | None) -> list[tuple[tuple, dict[str, Any]]]:
    """The arguments of the calls that one sample takes, checked."""
    if isinstance(inputs, DataLoader):
        if batch_size is not None:
            raise ValueError("A DataLoader has batches of its own; leave batch_size= out.")
        batches = _batches_of(inputs)
    else:
        batches = [as_arguments(inputs)]
    for args, kwargs in batches:
        _require_finite_inputs((*args, *kwargs.values()))
    return batches if batch_size is None else _split(batches[0], batch_size)


def _batches_of(loader: DataLoader[Any]) -> list[tuple[tuple, dict[str, Any]]]:
    """Arguments for every batch of a loader, which is read once: each sample needs all of them."""
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    shuffling = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
    if any(isinstance(s, shuffling) or getattr(s, "shuffle", False) for s in samplers):
        raise ValueError(
            "The DataLoader draws its objects in random order, so that nobody could tell whose "
            "predictions these are; build it with shuffle=False."
        )
    batches = []
    for batch in loader:
        inputs = batch
        if isinstance(batch, (list, tuple)) and not isinstance(batch, PackedSequence):
            if len(batch) not in (1, 2):
                raise ValueError(
                    "A DataLoader must give inputs, (inputs, targets) or a mapping of keyword "
                    f"arguments, got {len(batch)} things a batch; predict batch by batch, with a "
                    "tuple of the model's arguments as inputs."
                )
            inputs = batch[0]
        batches.append(as_arguments(inputs))
    if not batches:
        raise ValueError("The DataLoader is empty; there is nothing to predict.")
    return batches


def _logits_in(output: Any) -> Any:
    """The tensor called logits, where a model returns several things under names."""
    if isinstance(output, Tensor):
        return output
    found = output.get("logits") if isinstance(output, Mapping) else None
    found = getattr(output, "logits", None) if found is None else found
    return found if isinstance(found, Tensor) else output


def _described(output: Any) -> str:
    """A class by its name, with the names of what is in it."""
    names: Any = getattr(output, "_fields", ())
    if isinstance(output, Mapping):
        names = output
    elif dataclasses.is_dataclass(output):
        names = [field.name for field in dataclasses.fields(output)]
    inside = ", ".join(map(str, names))
    return f"{type(output).__name__} of {inside}" if inside else type(output).__name__


def _split(
    arguments: tuple[tuple, dict[str, Any]], batch_size: int
) -> list[tuple[tuple, dict[str, Any]]]:
    """Arguments for at most so many objects at a time, which lie along dimension 0."""
    if any(isinstance(value, PackedSequence) for value in (*arguments[0], *arguments[1].values())):
        raise ValueError("batch_size cannot split a PackedSequence; split the sequences first.")
    count = num_objects_in(*arguments)

    def part(start: int) -> Any:
        here = slice(start, start + batch_size)
        # What is not one for each object (a mask for all, say) every batch gets as it is.
        return tree_map_only(
            Tensor, lambda t: t[here] if t.dim() and len(t) == count else t, arguments
        )

    return [part(start) for start in range(0, max(count, 1), batch_size)]


def num_objects_in(args: tuple, kwargs: dict[str, Any]) -> int:
    """How many objects there are, by the first tensor that has dimensions."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.dim()]
    if not tensors:
        raise ValueError("inputs must hold a tensor with the objects along dimension 0, got none.")
    return len(tensors[0])


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
    samplers = {module.sampler for module in stochastic_modules(model).values()}
    return samplers <= {local, moment_matched, mean, auto}


@contextmanager
def seeded(seed: int, model: nn.Module) -> Iterator[None]:
    """Seed the generators of the model's devices inside the block, and restore them after it."""
    seed = require_seed(seed)
    with forked_generators(model) as devices:
        # Not torch.manual_seed, which seeds generators that are not restored.
        torch.default_generator.manual_seed(seed)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.default_generators[device.index].manual_seed(seed)
            elif device.type in ("mps", "xpu"):
                getattr(torch, device.type).manual_seed(seed)  # Nothing would restore these.
        yield


@contextmanager
def forked_generators(model: nn.Module) -> Iterator[set[torch.device]]:
    """Restore the generators of the model's devices, which it gives, after the block.

    One block at a time in a process: the generators are those of all threads.
    """
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    on_cuda = sorted(device.index for device in devices if device.type == "cuda")
    with _SEEDING, torch.random.fork_rng(devices=on_cuda):
        yield devices


def as_arguments(inputs: Inputs) -> tuple[tuple, dict[str, Any]]:
    """Positional and keyword arguments of the model."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple) and not isinstance(inputs, PackedSequence):
        return inputs, {}
    if inputs is None or isinstance(inputs, str | bytes | Number | set | type):
        raise TypeError(
            "inputs must be a tensor, a tuple of positional or a mapping of keyword arguments, got "
            f"{shown(inputs)}."
        )
    if isinstance(inputs, list | np.ndarray):
        raise TypeError(
            "inputs must be a tensor, a tuple of positional or a mapping of keyword arguments, got "
            f"{type(inputs).__name__}; use torch.as_tensor(inputs), or a tuple for several "
            "arguments."
        )
    return (inputs,), {}


def _require_finite_inputs(values: tuple) -> None:
    for value in tree_leaves(values):
        if not isinstance(value, Tensor) or value.dtype not in FLOATING:
            continue  # float8 cannot be asked; what takes it, or refuses it, is the model.
        wrong = value.isnan() | value.isposinf()  # −∞ is what masks of attention are made of.
        if wrong.any():
            raise ValueError(
                f"The input must be finite, got {int(wrong.sum())} NaN or infinite values in a "
                f"tensor of shape {tuple(value.shape)}; clean or impute them."
            )


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
