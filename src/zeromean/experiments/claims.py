"""What a document claims, to stand beside what was measured."""

from __future__ import annotations

from dataclasses import dataclass

DIRECTIONS = ("at least", "at most", "equal")


@dataclass(frozen=True)
class Claim:
    """One number of a document.

    Attributes:
        metric: Key of the final metrics; a dot leads into a nested one ("layer.elbo").
        paper_value: What the document says.
        source: Where it says so.
        tolerance: How far ours may be off.
        direction: "equal" (within the tolerance), "at least" (the document's or more) or
            "at most" (the document's or less).
        label: The claim in words.
        unit: Unit of the number ("%", "nat").
    """

    metric: str
    paper_value: float
    source: str
    tolerance: float = 0.0
    direction: str = "equal"
    label: str = ""
    unit: str = ""

    def __post_init__(self):
        if self.direction not in DIRECTIONS:
            raise ValueError(
                f"direction must be one of {', '.join(DIRECTIONS)}, got {self.direction!r}."
            )
