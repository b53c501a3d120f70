"""Drawing outputs of a random network: many samples in bounded memory, shared work done once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zeromean.objectives import stochastic_layers
from zeromean.replay import Replay, ReplayError
from zeromean.samplers import Sampler, auto, local, mean, moment_matched
from zeromean.sampling import monte_carlo_modes, sampling

Inputs = Tensor | tuple | Mapping[str, Any]

# As many samples run at once as keep their largest noisy activation near the caches.
_ELEMENTS_AT_ONCE = 2**21


def draw_outputs(
    model: nn.Module,
    inputs: Inputs,
    num_samples: int,
    consume: Callable[[Tensor], None],
    *,
    sampler: Sampler | Literal["auto"] | None = None,
    seed: int | None = None,
    chunk_size: int | None = None,
    select: Callable[[Any], Tensor] | None = None,
    differentiable: bool = False,
) -> None:
    """Hand `consume` chunks of outputs, `(k, *output)`, until `num_samples` are drawn.

    A chunk is one `torch.func.vmap` over k samples: what no noise has reached (the deterministic
    prefix, the moments of the first stochastic layer) is computed once, and replayed over the
    chunks. A model that vmap cannot run is run in a loop. Modes, samplers and, with a seed, the
    random state are restored at the end, also after an exception.
    """
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}.")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}.")
    args, kwargs = as_arguments(inputs)
    _require_finite_inputs((*args, *kwargs.values()))

    def run() -> Tensor:
        output = model(*args, **kwargs)
        output = output if select is None else select(output)
        if not isinstance(output, Tensor):
            raise TypeError(
                f"The model must put out a tensor, got {type(output).__name__}; "
                "pass select=lambda output: … to pick one."
            )
        return output

    def finish(chunk: Tensor) -> None:
        if not chunk.isfinite().all():
            raise ValueError(_blame(model))
        consume(chunk)

    with ExitStack() as stack:
        stack.enter_context(monte_carlo_modes(model))
        if sampler is not None:
            stack.enter_context(sampling(model, auto if sampler == "auto" else sampler))
        stack.enter_context(torch.set_grad_enabled(differentiable))
        if seed is not None:
            stack.enter_context(seeded(seed, model))
        if chunk_size is None and not _draws_outputs(model):
            chunk_size = 1  # Samples that each have weights of their own gain nothing together.
        first_size = chunk_size or _first_chunk_size((*args, *kwargs.values()))
        chunks = _vectorized(run, num_samples, first_size, chunk_size)
        try:
            first = next(chunks)
        except Exception:
            # Either vmap cannot run this model or nothing can; the loop tells, in plain words.
            chunks = (run().unsqueeze(0) for _ in range(num_samples))
            first = next(chunks)
        finish(first)
        for chunk in chunks:
            finish(chunk)


def _vectorized(
    run: Callable[[], Tensor], num_samples: int, first_size: int, chunk_size: int | None
) -> Iterator[Tensor]:
    if first_size >= num_samples:
        yield torch.func.vmap(lambda _: run(), randomness="different")(torch.empty(num_samples))
        return
    replay = Replay()

    def sample(_: Tensor | None = None) -> Tensor:
        with replay:
            output = run()
        replay.keep(output)
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
        except ReplayError:
            # The model does something else from call to call: compute every chunk in full.
            replay.replayable = False
            outputs = draw(size)
        yield outputs
        remaining -= size
        if chunk_size is None:
            size = max(1, _ELEMENTS_AT_ONCE // max(replay.largest_noisy, 1))


def _first_chunk_size(values: tuple) -> int:
    """A careful guess, until the first chunk has told how large the noisy part is."""
    elements = sum(value.numel() for value in values if isinstance(value, Tensor))
    return max(1, _ELEMENTS_AT_ONCE // (16 * max(elements, 1)))


def _draws_outputs(model: nn.Module) -> bool:
    samplers = {layer.sampler for layer in stochastic_layers(model).values()}
    return samplers <= {local, moment_matched, mean, auto}


@contextmanager
def seeded(seed: int, model: nn.Module) -> Iterator[None]:
    """Seed the generators of the model's devices inside the block, and restore them after it."""
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=[d.index for d in devices]):
        torch.manual_seed(seed)
        yield


def as_arguments(inputs: Inputs) -> tuple[tuple, dict[str, Any]]:
    """Positional and keyword arguments of the model."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def _require_finite_inputs(values: tuple) -> None:
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and not value.isfinite().all():
            count = int((~value.isfinite()).sum())
            raise ValueError(
                f"The input must be finite, got {count} NaN or infinite values in a tensor of "
                f"shape {tuple(value.shape)}; clean or impute them."
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
