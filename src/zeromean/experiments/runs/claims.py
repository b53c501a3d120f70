"""What is claimed, and by whom, to stand next to what was measured."""

from __future__ import annotations

from dataclasses import dataclass

from zeromean.experiments.runs.documents import Author

DIRECTIONS = ("at least", "at most", "equal")
STATISTICS = ("mean", "median")


@dataclass(frozen=True)
class Claim:
    """One number, of a document or of ours.

    Attributes:
        metric: Key of the final metrics; a dot leads into a nested one ("layer.elbo").
        value: What its author says.
        author: A document, with the place where it says so, or `ours`. A bound that we chose is
            ours, whatever document it is about.
        tolerance: How far ours may be off. Tolerances are always our own.
        direction: "equal" (within the tolerance), "at least" (the value or more) or "at most" (the
            value or less).
        label: The claim in words.
        unit: Unit of the number ("%", "nat").
        statistic: "mean" over the seeds, or "median" (of times, which have outliers).
        seeds_in_run: Field of the configuration with the number of seeds that each run has by
            itself. The metric then has `.low` and `.high`, an interval over these.
    """

    metric: str
    value: float
    author: Author
    tolerance: float = 0.0
    direction: str = "equal"
    label: str = ""
    unit: str = ""
    statistic: str = "mean"
    seeds_in_run: str = ""

    def __post_init__(self):
        if not isinstance(self.author, Author):
            raise TypeError(
                "author must be a document with a place, as in PAPER('Table 1'), or ours(), got "
                f"{self.author!r}."
            )
        for name, known in (("direction", DIRECTIONS), ("statistic", STATISTICS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}."
                )

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that it is judged by."""
        if self.seeds_in_run:
            return f"{self.metric}.low", f"{self.metric}.high"
        return (self.metric,)
