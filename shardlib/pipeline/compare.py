"""All schedules at one size: who is fastest, and who within a limit on live activations.

In: a size, costs and a limit. Out: a `Comparison`, sorted by makespan, each schedule simulated free-running and in
lockstep, and the reasons why others do not exist at that size.

    compare(stages=8, microbatches=32, max_activations=5).winner().name    # 'v_half'
"""

from dataclasses import dataclass

from shardlib.pipeline.costs import Costs
from shardlib.pipeline.schedules import ALL
from shardlib.pipeline.simulate import Simulation, simulate
from shardlib.pipeline.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One schedule of a comparison; a static leaf."""

    free: Simulation
    lockstep: Simulation

    @property
    def name(self) -> str:
        """The schedule's name."""
        return self.free.table.name

    def makespan(self, *, lockstep: bool = False) -> float:
        """How long it takes."""
        return (self.lockstep if lockstep else self.free).makespan

    def peak(self, *, lockstep: bool = False) -> float:
        """Live activations of its worst rank."""
        return max((self.lockstep if lockstep else self.free).peak_activations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Many schedules at one size, the fastest first; a static leaf.

    Args:
        entries: free-running and in lockstep, sorted by free-running makespan, then by peak.
        undefined: (name, why) of schedules that do not exist at this size.
        max_activations: the limit on live activations per rank, or None.
    """

    entries: tuple[Entry, ...]
    undefined: tuple[tuple[str, str], ...]
    max_activations: float | None

    def fits(self, simulation: Simulation) -> bool:
        """Whether a schedule stays within the limit on every rank."""
        return self.max_activations is None or max(simulation.peak_activations) <= self.max_activations

    def winner(self, *, lockstep: bool = False) -> Entry | None:
        """The fastest that fits; among equally fast ones the one with the lowest peak; None if none fits."""
        fitting = [entry for entry in self.entries if self.fits(entry.lockstep if lockstep else entry.free)]
        return min(
            fitting,
            key=lambda entry: (entry.makespan(lockstep=lockstep), entry.peak(lockstep=lockstep)),
            default=None,
        )

    def leanest(self, *, lockstep: bool = False) -> Entry:
        """The one with the lowest peak."""
        return min(self.entries, key=lambda entry: entry.peak(lockstep=lockstep))


def compare(
    *,
    stages: int,
    microbatches: int,
    chunks: int | None = None,
    costs: Costs | None = None,
    max_activations: float | None = None,
    extra: tuple[Table, ...] = (),
) -> Comparison:
    """Simulates every schedule of the catalogue, and `extra` tables, at one size.

    Args:
        stages: ranks of the pipeline.
        microbatches: how many there are.
        chunks: for schedules that take any number; the others keep theirs.
        costs: by default F=1, B=2, W=1, links for free.
        max_activations: the limit for `fits` and `winner`.
        extra: further tables of the same size, such as a user's own.

    Raises:
        ShardingError: costs that do not fit the size, or no schedule exists at it.
    """
    entries, undefined = list[Entry](), list[tuple[str, str]]()
    tables = list[Table]()
    for schedule in ALL:
        wanted = schedule.default_chunks if schedule.chunks or chunks is None else chunks
        why = schedule.why_not(stages=stages, chunks=wanted, microbatches=microbatches)
        if why:
            undefined.append((schedule.name, why))
        else:
            tables.append(schedule.table(stages=stages, chunks=wanted, microbatches=microbatches))
    if not tables:
        ALL[0].build(stages=stages, microbatches=microbatches)  # raises: even the simplest does not exist here
    for table in (*tables, *extra):
        free, lockstep = (simulate(table, costs, lockstep=lockstep) for lockstep in (False, True))
        entries.append(Entry(free=free, lockstep=lockstep))
    entries.sort(key=lambda entry: (entry.makespan(), entry.peak(), entry.name))
    return Comparison(entries=tuple(entries), undefined=tuple(undefined), max_activations=max_activations)
