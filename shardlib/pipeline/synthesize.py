"""A schedule made for given costs and a limit on live activations, proved the fastest there is at small sizes.

In: `Costs`, a limit, a size. Out: `Synthesis`, never slower than a schedule of the catalogue that fits. It takes the
catalogue and its families at other limits, reorders the best for the costs (`retime`), searches (`search`) and, where
asked, proves (`integer_program`).

    synthesize(Costs.parse("F=1,B=2,W=1,link=0.2"), 3, stages=4, microbatches=8).table
"""

import math
from dataclasses import dataclass
from typing import Final

from meshes.errors import ShardingError
from shardlib.pipeline.candidates import NAME, catalogue, families, one_by_one
from shardlib.pipeline.costs import Costs, Times
from shardlib.pipeline.graph import build_graph
from shardlib.pipeline.integer_program import solve
from shardlib.pipeline.placement import Placement
from shardlib.pipeline.retime import retime, split
from shardlib.pipeline.schedules import ALL
from shardlib.pipeline.search import search
from shardlib.pipeline.simulate import free_spans
from shardlib.pipeline.table import Table
from shardlib.pipeline.ticks import live_activations
from shardlib.pipeline.verify import verify

EFFORT: Final = 500_000
EXACT_ACTIONS: Final = 36
BEAM_ACTIONS: Final = 400
UNBOUNDED: Final = 1 << 30
STATE_COST: Final = 60
"""One state of the search costs about as much time as simulating so many actions."""
RETIMED: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthesis:
    """A schedule made to measure; a static leaf.

    Args:
        table: the schedule.
        makespan: how long it takes, free-running.
        peak_activations: live activations of its worst rank.
        proved: no order of work on one chunk per rank, nor on a V of two, is faster.
        origin: what it was made from.
        explanation: one line for a person.
    """

    table: Table
    makespan: float
    peak_activations: float
    proved: bool
    origin: str
    explanation: str


@dataclass(frozen=True, slots=True)
class _Candidate:
    makespan: int
    peak: int
    origin: str
    table: Table
    scale: int
    size_scale: int

    @property
    def key(self) -> tuple[float, float]:
        return self.makespan / self.scale, self.peak / self.size_scale


class _Pool:
    """Candidates within the limit, and how much simulating is still allowed."""

    def __init__(self, costs: Costs, max_activations: float | None, *, effort: int):
        self.costs, self.max_activations, self.effort = costs, max_activations, effort
        self.found: list[_Candidate] = []
        self.least = float("inf")

    def limit(self, times: Times) -> int | None:
        """The limit in the sizes of `times`."""
        return None if self.max_activations is None else int(self.max_activations * times.size_scale)

    def add(self, table: Table, *, origin: str) -> _Candidate | None:
        """Simulates a table; keeps it if it fits."""
        graph, times = build_graph(table), self.costs.times(table.placement)
        self.effort -= 2 * len(graph.keys)
        peak = max(live_activations(graph, times, order=[list(graph.row(rank)) for rank in range(table.num_ranks)]))
        self.least = min(self.least, peak / times.size_scale)
        limit = self.limit(times)
        if limit is not None and peak > limit:
            return None
        makespan = max(end for _, end in free_spans(graph, times))
        candidate = _Candidate(makespan, peak, origin, table, times.scale, times.size_scale)
        self.found.append(candidate)
        return candidate

    def best(self, *, chunks: int | None = None) -> list[_Candidate]:
        """The fastest first; of equally fast ones that with the lowest peak, then the earliest added."""
        mine = [one for one in self.found if chunks is None or one.table.num_chunks == chunks]
        return sorted(mine, key=lambda one: one.key)


def synthesize(
    costs: Costs | None = None,
    max_activations: float | None = None,
    *,
    stages: int,
    microbatches: int,
    chunks: int | None = None,
    effort: int = EFFORT,
    prove_seconds: float | None = None,
) -> Synthesis:
    """Makes a schedule for these costs within this limit.

    Args:
        costs: by default F=1, B=2, W=1, links for free.
        max_activations: limit on live activations of every rank, stash included, where 1 is one microbatch's.
        stages: ranks of the pipeline.
        microbatches: how many there are.
        chunks: virtual stages per rank; by default whatever is fastest.
        effort: how many actions to simulate before the best so far is good enough; the result depends on it, not
            on the clock.
        prove_seconds: seconds for an integer program to prove or improve what was found, for sizes where searching
            does not prove it; needs scipy. None: no integer program.

    Returns:
        The schedule; free-running, it is never slower than one of the catalogue with those chunks that fits.

    Raises:
        ShardingError: nothing fits the limit (the least that would is named), or a size below 1.
        ImportError: `prove_seconds` without scipy; the message is the install line.

    Example:
        >>> synthesize(max_activations=2, stages=2, microbatches=4).makespan
        12.5
    """
    ALL[0].build(stages=stages, microbatches=microbatches)  # raises for sizes below 1
    if chunks is not None and chunks < 1:
        raise ShardingError(f"chunks={chunks} must be at least 1", fix="chunks=1, or leave it out")
    if max_activations is not None and not max_activations > 0:
        raise ShardingError(f"max_activations={max_activations:g} must be above 0", fix="max_activations=1, or None")
    if max_activations == math.inf:
        max_activations = None
    pool = _Pool(costs or Costs(), max_activations, effort=effort)
    known = _fill(pool, stages=stages, microbatches=microbatches, chunks=chunks)
    _retime_best(pool)
    placements = _placements(stages, chunks=chunks)
    proofs = [_search(pool, placement, microbatches=microbatches) for placement in placements]
    if prove_seconds is not None and not all(proofs):
        unproved = [placement for placement, proof in zip(placements, proofs) if not proof]
        share = prove_seconds / len(unproved)
        proofs = [_prove(pool, placement, microbatches=microbatches, seconds=share) for placement in unproved]
    proved, best = all(proofs), pool.best()[0]
    table = Table(name=NAME, placement=best.table.placement, rows=best.table.rows)
    verify(table, microbatches=microbatches)
    makespan, peak = best.key
    beside = (
        "nothing in the catalogue fits"
        if known is None
        else f"the catalogue's best is {known.origin}, {known.key[0]:g}"
    )
    how = "proved optimal" if proved else "not proved optimal"
    return Synthesis(
        table=table,
        makespan=makespan,
        peak_activations=peak,
        proved=proved,
        origin=best.origin,
        explanation=f"synthesized from {best.origin}: makespan {makespan:g}, peak {peak:g}, {how}; {beside}",
    )


def _fill(pool: _Pool, *, stages: int, microbatches: int, chunks: int | None) -> _Candidate | None:
    """Fills the pool; returns the best of the catalogue that fits.

    Raises:
        ShardingError: nothing fits.
    """
    for origin, table in catalogue(stages=stages, microbatches=microbatches, chunks=chunks):
        pool.add(table, origin=origin)
    known = next(iter(pool.best()), None)
    for placement in _placements(stages, chunks=chunks):
        pool.add(one_by_one(placement, microbatches=microbatches), origin="one microbatch after another")
    limit, whole = pool.max_activations, pool.effort
    for number in (1, 2) if chunks is None else (chunks,):
        spare = pool.effort - whole // 4
        for origin, table in families(stages=stages, microbatches=microbatches, chunks=number, max_activations=limit):
            pool.add(table, origin=origin)
            if pool.effort < spare:
                break
    if not pool.found:
        raise ShardingError(
            f"max_activations={limit:g}: no schedule of {stages} stages fits",
            fix=f"max_activations={pool.least:g} or more",
        )
    return known


def _retime_best(pool: _Pool) -> None:
    """Reorders the best few of each number of chunks for the costs, again and again while that helps."""
    for chunks in sorted({one.table.num_chunks for one in pool.found}):
        for candidate in pool.best(chunks=chunks)[:RETIMED]:
            for careful in (True, False):
                current = candidate
                while pool.effort > 0:
                    times = pool.costs.times(current.table.placement)
                    table = retime(split(current.table), times, limit=pool.limit(times), careful=careful)
                    pool.effort -= 4 * sum(map(len, table.rows))
                    better = pool.add(table, origin=_retimed(candidate.origin))
                    if better is None or better.key >= current.key:
                        break
                    current = better


def _retimed(origin: str) -> str:
    return origin if origin.endswith("retimed") else f"{origin}, retimed"


def _placements(stages: int, *, chunks: int | None) -> list[Placement]:
    if chunks is None:
        return [Placement.loop(stages), Placement.v_shape(stages)]
    return [Placement.v_shape(stages, chunks=chunks)]


def _search(pool: _Pool, placement: Placement, *, microbatches: int) -> bool:
    """Looks for something faster still; says whether it is proved that there is nothing faster."""
    times = pool.costs.times(placement)
    actions = 3 * len(placement.ranks) * microbatches
    best = pool.best()[0]
    beat = -(-best.makespan * times.scale // best.scale)  # the makespan to beat, on this placement's grid
    width = UNBOUNDED if actions <= EXACT_ACTIONS else pool.effort // (STATE_COST * actions)
    if actions > BEAM_ACTIONS or width < 1:
        return False
    found = search(placement, times, microbatches=microbatches, limit=pool.limit(times), beat=beat, width=width)
    if found.rows is not None:
        pool.add(Table(name=NAME, placement=placement, rows=found.rows), origin="search")
    return found.proved


def _prove(pool: _Pool, placement: Placement, *, microbatches: int, seconds: float) -> bool:
    """The same by an integer program. Its rows count only as simulated: exactly, whatever its rounding."""
    times = pool.costs.times(placement)
    best = pool.best()[0]
    known = -(-best.makespan * times.scale // best.scale)
    # On another placement than the best one's, `known` may be impossible: then the program has no solution.
    solved = solve(placement, times, microbatches=microbatches, limit=pool.limit(times), known=known, seconds=seconds)
    if solved.rows is not None:
        table = Table(name=NAME, placement=placement, rows=solved.rows)
        if build_graph(table).complete:
            pool.add(table, origin="integer program")
    best = pool.best()[0]
    return solved.at_least * best.scale >= best.makespan * times.scale
