"""What every schedule of the catalogue says of itself: `Schedule`, a value around one pure function.

In: a function (stages, chunks, microbatches) -> Table. Out: the same with its name, source, textbook figures and
the sizes for which it is defined.

    ONE_F_ONE_B.textbook(stages=8, chunks=1, microbatches=32, costs=Costs())    # 7/39
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from meshes.errors import ShardingError
from shardlib.pipeline.table import Table

MOST_FORWARDS: Final = 500_000
ANY: Final = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of a schedule and the times of one rank's F, I and W, as the textbook formulas use them."""

    stages: int
    chunks: int
    microbatches: int
    forward: Fraction = Fraction(1)
    input: Fraction = Fraction(1)
    weight: Fraction = Fraction(1)

    @property
    def work(self) -> Fraction:
        """What one rank does for all microbatches."""
        return self.microbatches * (self.forward + self.input + self.weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One entry of the catalogue; a static leaf.

    Args:
        name: as a Plan and the command line write it.
        table: the pure function from a size to a table.
        summary: one line for a person choosing.
        source: where it was published.
        chunks: the numbers of chunks it takes: one number, or `ANY`.
        default_chunks: what it uses when nobody says.
        bubble: the textbook idle share, given a size; see `on_span`.
        bubble_text: that formula as written; p stages, m microbatches, v chunks, I the input gradient.
        on_span: the formula is about each rank's own span (the papers' figure), not the makespan.
        bound: the formula is an upper bound that grows as O(1/m), not exact.
        peak: the textbook peak of activations on the worst rank, given a size.
        peak_text: that formula as written.
        exact_from: the fewest microbatches for which both formulas are meant.
        divides: whether the number of stages must divide the number of microbatches.
    """

    name: str
    table: Callable[..., Table]
    summary: str
    source: str
    chunks: int | None
    default_chunks: int
    bubble: Callable[[Size], Fraction]
    bubble_text: str
    on_span: bool = False
    bound: bool = False
    peak: Callable[[Size], Fraction]
    peak_text: str
    exact_from: Callable[[Size], int]
    divides: bool = False

    def why_not(self, *, stages: int, chunks: int, microbatches: int) -> str | None:
        """Why this schedule does not exist at a size, or None where it does."""
        for word, number in (("stages", stages), ("chunks", chunks), ("microbatches", microbatches)):
            if number < 1:
                return f"{word}={number} must be at least 1"
        if stages * chunks * microbatches > MOST_FORWARDS:
            return f"stages={stages} x chunks={chunks} x microbatches={microbatches} is above {MOST_FORWARDS:,}"
        if self.chunks is not ANY and chunks != self.chunks:
            return f"chunks={chunks}: it has {self.chunks} per rank"
        if self.divides and chunks > 1 and microbatches % stages:
            return f"stages={stages} does not divide microbatches={microbatches}"
        return None

    def build(self, *, stages: int, microbatches: int, chunks: int | None = None) -> Table:
        """The table of a size.

        Raises:
            ShardingError: the schedule does not exist at that size; the fix names the nearest one.
        """
        chunks = self.default_chunks if chunks is None else chunks
        why = self.why_not(stages=stages, chunks=chunks, microbatches=microbatches)
        if why:
            raise ShardingError(
                f"schedule {self.name!r} is not defined here: {why}", fix=self._fix(stages, microbatches)
            )
        return self.table(stages=stages, chunks=chunks, microbatches=microbatches)

    def _fix(self, stages: int, microbatches: int) -> str:
        stages = min(max(stages, 1), MOST_FORWARDS // 100)
        microbatches = min(max(microbatches, 1), max(1, MOST_FORWARDS // (stages * self.default_chunks) - stages))
        if self.divides:
            microbatches = -(-microbatches // stages) * stages
        return f"{self.name} with stages={stages}, chunks={self.default_chunks}, microbatches={microbatches}"
