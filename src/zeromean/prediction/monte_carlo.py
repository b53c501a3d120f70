"""Drawing outputs of a random network: many samples in bounded memory, shared work done once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from zeromean.arguments import require_integer, require_seed, shown
from zeromean.layers.blocks import monte_carlo_modes, sampling
from zeromean.layers.stochastic_module import stochastic_modules, swapped_samplers
from zeromean.prediction.chunks import (
    first_chunk_size,
    has_hooks,
    must_loop,
    samples_at_once,
    samples_gain_together,
)
from zeromean.prediction.inputs import (
    InputsOrLoader,
    _batches,
    _described,
    logits_in,
    num_examples_in,
)
from zeromean.prediction.parallel import Turn, alone, shared_turns
from zeromean.prediction.randomness import seeded
from zeromean.prediction.replay import Replay
from zeromean.prediction.sources import Source, is_one, networks_of
from zeromean.prediction.unbatch import take_escaped_
from zeromean.samplers.fixed_noise import DrawnOnce
from zeromean.samplers.kinds import Draws, drawn_by
from zeromean.samplers.sampler import Sampler
from zeromean.samplers.weights import auto

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Consumer:
    """What is done with the outputs of one network.

    Attributes:
        take: Called with every chunk of its samples, `(k, *output)`.
        finish: Called in this order after the last one.
    """

    take: Callable[[Tensor], None]
    finish: tuple[Callable[[], None], ...] = ()


_IGNORE = Consumer(lambda _: None)


def draw_outputs(
    source: Source,
    inputs: InputsOrLoader,
    num_samples: int,
    consumer: Callable[[nn.Module], Consumer],
    *,
    sampler: Sampler | Literal["auto"] | None = None,
    seed: int | None = None,
    chunk_size: int | None = None,
    batch_size: int | None = None,
    select: Callable[[Any], Tensor] | None = None,
    differentiable: bool = False,
    devices: int | None = None,
    turn: Turn = alone,
) -> None:
    """Hand the `consumer` of each network its outputs in chunks, `num_samples` of each network.

    A chunk is one `torch.func.vmap` over k samples: what no noise has reached (the deterministic
    prefix, the moments of the first stochastic layer) is computed once, and replayed over the
    chunks. A model that vmap cannot run is run in a loop. Modes, samplers and, with a seed, the
    random state are restored at the end, also after an exception.

    With a seed each chunk has draws that do not depend on those before, so that processes can
    share the chunks: `turn` says which are this one's.
    """
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
    if devices is not None and require_integer("devices", devices, at_least=1) > 1:
        if differentiable:
            raise ValueError("devices= draws in other processes, where gradients do not reach.")
        if isinstance(source, Iterator):
            raise TypeError(
                "devices= needs networks that every process can go through: a list, or zm.States; "
                "got a generator."
            )
        options = {
            "sampler": sampler,
            "seed": int(torch.randint(2**62, ())) if seed is None else seed,
            "chunk_size": chunk_size,
            "batch_size": batch_size,
            "select": select,
        }
        with shared_turns(_help_to_draw, (source, inputs, num_samples, options), devices) as turn:
            draw_outputs(source, inputs, num_samples, consumer, **options, turn=turn)
        return
    batches = _batches(inputs, batch_size)
    needs_examples = None
    if batch_size is not None or isinstance(inputs, DataLoader):
        needs_examples = "a DataLoader" if batch_size is None else "batch_size"
    shape: torch.Size | None = None
    for index, network in enumerate(networks_of(source)):
        consume = consumer(network)

        def take(chunk: Tensor, index: int = index, consume: Consumer = consume) -> None:
            nonlocal shape
            shape = chunk.shape[1:] if shape is None else shape
            if chunk.shape[1:] != shape:
                raise ValueError(
                    f"Network {index} returns outputs of shape {tuple(chunk.shape[1:])} where "
                    f"those before it return {tuple(shape)}; networks of one prediction must agree."
                )
            consume.take(chunk)

        _draw_from(
            network,
            _call(network, batches, select, needs_examples),
            batches[0],
            num_samples,
            take,
            sampler=sampler,
            seed=None if seed is None else _seed_of(seed, index),
            chunk_size=chunk_size,
            differentiable=differentiable,
            name="" if is_one(source) else f" of network {index}",
            turn=turn,
        )
        for finish in consume.finish:
            finish()


def _help_to_draw(work: tuple[Source, InputsOrLoader, int, dict[str, Any]], turn: Turn) -> None:
    source, inputs, num_samples, options = work
    draw_outputs(source, inputs, num_samples, lambda _: _IGNORE, **options, turn=turn)


def _seed_of(seed: int, network: int) -> int:
    """A seed for each network, all different; a single network has the given one."""
    if network == 0:
        return seed
    return int(np.random.SeedSequence((seed, network)).generate_state(1, np.uint64)[0] >> 1)


def _call(
    network: nn.Module,
    batches: list[tuple[tuple, dict[str, Any]]],
    select: Callable[[Any], Tensor] | None,
    needs_examples: str | None,
) -> Callable[[], Tensor]:
    """A function that gives one sample of the outputs for all batches.

    Args:
        needs_examples: What needs the examples along dimension 0 of the outputs, if anything does.
    """

    def call() -> Tensor:
        outputs = [call_batch(*batch) for batch in batches]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def call_batch(args: tuple, kwargs: dict[str, Any]) -> Tensor:
        # A model may write into what it is given: every sample gets it as it was.
        fresh_args, fresh_kwargs = tree_map_only(Tensor, Tensor.clone, (args, kwargs))
        output = network(*fresh_args, **fresh_kwargs)
        output = logits_in(output) if select is None else select(output)
        if not isinstance(output, Tensor):
            raise TypeError(
                f"The model must return a tensor, or something with a tensor called logits, got "
                f"{_described(output)}; pass select=lambda output: … to pick one."
            )
        if needs_examples and output.shape[:1] != (count := num_examples_in(args, kwargs),):
            raise ValueError(
                f"{needs_examples} needs outputs with the examples along dimension 0: for "
                f"{count} examples the model returned {tuple(output.shape)}."
            )
        return output

    return call


def _draw_from(
    model: nn.Module,
    call: Callable[[], Tensor],
    first_batch: tuple[tuple, dict[str, Any]],
    num_samples: int,
    take: Callable[[Tensor], None],
    *,
    sampler: Sampler | Literal["auto"] | None,
    seed: int | None,
    chunk_size: int | None,
    differentiable: bool,
    name: str,
    turn: Turn,
) -> None:
    """Draw the samples of one network."""
    drawn = DrawnOnce()

    def run() -> Tensor:
        drawn.forget()  # A new network.
        outputs = call()
        drawn.forget()
        return outputs

    def finish(chunk: Tensor) -> None:
        # −inf is a masked class; NaN and +inf are nobody's intention.
        if chunk.isnan().any() or (chunk.isinf() if chunk.is_complex() else chunk.isposinf()).any():
            raise ValueError(_blame(model, name))
        take(chunk)

    with ExitStack() as stack:
        stack.callback(take_escaped_, model)
        if sampler is not None:
            stack.enter_context(sampling(model, auto if sampler == "auto" else sampler))
        stack.enter_context(monte_carlo_modes(model))
        stack.enter_context(torch.set_grad_enabled(differentiable))
        seed_from = _ignore if seed is None else stack.enter_context(seeded(seed, model))
        if chunk_size is None and not samples_gain_together(model):
            chunk_size = 1  # Each has weights of its own.
        # Under `zm.weight`, a layer that is called twice, or tied, has the same weight both times.
        layers = stochastic_modules(model).values()
        by_weight = [m for m in layers if drawn_by(m.sampler) is Draws.WEIGHTS]
        stack.enter_context(swapped_samplers(dict.fromkeys(by_weight, drawn)))
        first_size = chunk_size or first_chunk_size(model, first_batch)
        if must_loop(model):
            chunks = _looped(run, num_samples, seed_from)
        else:
            watched = has_hooks(model)
            chunks = _vectorized(run, num_samples, first_size, chunk_size, watched, seed_from)
        for draw in chunks:
            chunk = turn(draw)
            if chunk is not None:
                finish(chunk)


def _ignore(sample: int) -> None:
    """Without a seed draws go on wherever the generator is."""


def _looped(
    run: Callable[[], Tensor], num_samples: int, seed_from: Callable[[int], None]
) -> Iterator[Callable[[], Tensor]]:
    def draw(sample: int) -> Tensor:
        seed_from(sample)
        return run().unsqueeze(0)

    for sample in range(num_samples):
        yield partial(draw, sample)


def _vectorized(
    run: Callable[[], Tensor],
    num_samples: int,
    first_size: int,
    chunk_size: int | None,
    watched: bool,
    seed_from: Callable[[int], None],
) -> Iterator[Callable[[], Tensor]]:
    """What draws each chunk; where there are several, the first is drawn in every process."""

    def loop(error: Exception) -> Iterator[Callable[[], Tensor]]:
        # Either vmap cannot run this model or nothing can: then the loop raises a plain error.
        _log.debug("vmap cannot run the model, samples are drawn one by one: %s", error)
        return _looped(run, num_samples, seed_from)

    if first_size >= num_samples:

        def draw_all() -> Tensor:
            seed_from(0)
            samples = torch.empty(num_samples)
            try:
                return torch.func.vmap(lambda _: run(), randomness="different")(samples)
            except Exception as error:
                return torch.cat([draw() for draw in loop(error)])

        yield draw_all
        return
    replay = Replay(keep_all=watched)

    def sample(_: Tensor | None = None) -> Tensor:
        with replay:
            output = run()
        return output

    def draw_once(start: int, size: int) -> Tensor:
        seed_from(start)
        if size == 1 and replay.recorded:
            return sample().unsqueeze(0)  # Known by now: which results are noisy.
        return torch.func.vmap(sample, randomness="different")(torch.empty(size))

    def draw(start: int, size: int) -> Tensor:
        try:
            return draw_once(start, size)
        except Exception:
            # The model does something else from call to call, or computes where no torch function
            # shows it (TorchScript): compute every chunk in full.
            if not (replay.recorded and replay.replayable):
                raise
            replay.replayable = False
            return draw_once(start, size)

    try:
        first = draw(0, first_size)  # It shows what no noise reaches, and how large the rest is.
    except Exception as error:
        yield from loop(error)
        return
    yield partial(_given, first)
    del first
    size = samples_at_once(replay.largest_noisy) if chunk_size is None else chunk_size
    for start in range(first_size, num_samples, size):
        yield partial(draw, start, min(size, num_samples - start))


def _given(chunk: Tensor) -> Tensor:
    return chunk


def _blame(model: nn.Module, name: str) -> str:
    for parameter_name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            return (
                f"The parameter {parameter_name}{name} is not finite, so the outputs are not "
                "either; training has diverged: go back to an earlier checkpoint and lower the "
                "learning rate."
            )
    return (
        f"The outputs{name or ' of the model'} are not finite though the parameters are; an "
        "activation overflows: check the scale of the inputs, or use float64."
    )
