"""What a node of a network can do to the units that pass through it."""

from __future__ import annotations

from enum import Enum, auto


class Role(Enum):
    """What a node does to the units of its input."""

    AFFINE = auto()
    """A linear layer or a convolution: makes units of its own."""
    DEPTHWISE = auto()
    """A convolution of every channel by itself."""
    GROUPED = auto()
    """A convolution of groups of channels, whose units cannot go one by one."""
    EMBEDDING = auto()
    RECURRENT = auto()
    """LSTM or GRU."""
    BUNDLE = auto()
    """The last states of a recurrent layer, all together."""
    STATES = auto()
    """Picks the output of a recurrent layer, or a last state."""
    POINTWISE = auto()
    NORM = auto()
    """BatchNorm with running statistics."""
    SCALE = auto()
    """A multiplier for each unit."""
    RESAMPLE = auto()
    """Maxima over windows, or interpolation: what is constant stays so."""
    AVERAGE_POOL = auto()
    FLATTEN = auto()
    """(N, C, *) to (N, F): every unit becomes as many as it has positions."""
    MERGE = auto()
    """(*, F) to (N, F)."""
    PICK = auto()
    """x[index] (this one and those below: see `units/layout.py`)."""
    JOIN = auto()
    """x.flatten(2): all positions in a row."""
    PERMUTE = auto()
    TRANSPOSE = auto()
    REDUCE = auto()
    """Mean or maximum over positions."""
    SUM = auto()
    """Sum over positions."""
    GUARD = auto()
    """Passes on what it gets, or refuses it."""
    NOTHING = auto()
    """Passes on what it gets: `trace` takes it out."""
    COMBINE = auto()
    """A sum, difference, product, maximum or minimum of two activations."""
    CAT = auto()
    OTHER = auto()
    """Unknown: reads everything and tells nothing."""
