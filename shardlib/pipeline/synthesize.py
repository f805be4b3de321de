"""A schedule made for given costs and a limit on live activations.

In: `Costs`, a limit, a size. Out: `Synthesis`: a table at least as fast as every schedule of the catalogue that fits
the limit, and at small sizes proved to be the fastest there is.

It takes the catalogue, the families behind it at other limits (`families`), reorders the best of them for the costs
(`retime`), and searches (`search`): exactly where that is affordable, with a beam elsewhere.

    synthesize(Costs.parse("F=1,B=2,W=1,link=0.2"), 3, stages=4, microbatches=8).table
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from meshes.errors import ShardingError
from shardlib.pipeline.costs import Costs, Times
from shardlib.pipeline.graph import build_graph
from shardlib.pipeline.placement import Placement
from shardlib.pipeline.retime import retime, split
from shardlib.pipeline.schedules import ALL, split_backward
from shardlib.pipeline.schedules.building_block import block_offsets, block_rows, squeeze
from shardlib.pipeline.search import search
from shardlib.pipeline.simulate import free_spans
from shardlib.pipeline.table import FORWARD, INPUT, WEIGHT, Action, Table, action
from shardlib.pipeline.ticks import live_activations
from shardlib.pipeline.verify import verify

NAME: Final = "synthesized"
EFFORT: Final = 500_000
EXACT_ACTIONS: Final = 36
BEAM_ACTIONS: Final = 400
UNBOUNDED: Final = 1 << 30
STATE_COST: Final = 60
"""One state of the search costs about as much time as simulating so many actions."""
MOST_CHUNKS: Final = 4
HOPS: Final = ((1, 1, 1, 1), (2, 1, 2, 1), (2, 2, 2, 2), (3, 1, 3, 1), (1, 3, 1, 3), (2, 1, 2, 2))
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

    Returns:
        The schedule; free-running, it is never slower than one of the catalogue with those chunks that fits.

    Raises:
        ShardingError: nothing fits the limit (the least that would is named), or a size below 1.

    Example:
        >>> synthesize(max_activations=2, stages=2, microbatches=4).makespan
        12.5
    """
    ALL[0].build(stages=stages, microbatches=microbatches)  # raises for sizes below 1
    if chunks is not None and chunks < 1:
        raise ShardingError(f"chunks={chunks} must be at least 1", fix="chunks=1, or leave it out")
    pool = _Pool(costs or Costs(), max_activations, effort=effort)
    for origin, table in _catalogue(stages, microbatches, chunks):
        pool.add(table, origin=origin)
    fitting = pool.best()
    for placement in _placements(stages, chunks):
        pool.add(_one_by_one(placement, microbatches), origin="one microbatch after another")
    known = fitting[0] if fitting else None
    for number in (1, 2):
        if chunks in (None, number):
            share = pool.effort - effort // 4
            for origin, table in _families(stages, microbatches, number, max_activations=max_activations):
                pool.add(table, origin=origin)
                if pool.effort < share:
                    break
    if not pool.found:
        raise ShardingError(
            f"max_activations={max_activations:g}: no schedule of {stages} stages fits",
            fix=f"max_activations={pool.least:g} or more",
        )
    _retime_best(pool)
    proofs = [_search(pool, placement, microbatches) for placement in _placements(stages, chunks)]
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


def _catalogue(stages: int, microbatches: int, chunks: int | None) -> Iterator[tuple[str, Table]]:
    for schedule in ALL:
        for count in range(1, MOST_CHUNKS + 1) if chunks is None else (chunks,):
            if schedule.why_not(stages=stages, chunks=count, microbatches=microbatches) is None:
                yield schedule.name, schedule.table(stages=stages, chunks=count, microbatches=microbatches)


def _one_by_one(placement: Placement, microbatches: int) -> Table:
    """Every microbatch through the whole model and back before the next: slow, and no order holds less."""
    rows: list[list[Action]] = [[] for _ in range(placement.num_ranks)]
    for microbatch in range(microbatches):
        for stage, rank in enumerate(placement.ranks):
            rows[rank].append(action(FORWARD, microbatch, chunk=placement.chunk(stage)))
        for stage, rank in reversed(list(enumerate(placement.ranks))):
            rows[rank] += [action(kind, microbatch, chunk=placement.chunk(stage)) for kind in (INPUT, WEIGHT)]
    return Table(name=NAME, placement=placement, rows=tuple(map(tuple, rows)))


def _families(
    stages: int, microbatches: int, chunks: int, *, max_activations: float | None
) -> Iterator[tuple[str, Table]]:
    """The constructions behind the catalogue at other limits, the highest that may fit first."""
    most = stages + 1 if max_activations is None else min(int(max_activations) + 1, 3 * stages)
    if chunks == 1:
        for limit in range(min(microbatches, 2 * most), 0, -1):
            for slope in (1, 2, 3):
                warm_ups = [min(limit, 1 + slope * (stages - 1 - rank)) for rank in range(stages)]
                rows = split_backward(name=NAME, warm_ups=warm_ups, limits=[limit] * stages, microbatches=microbatches)
                yield f"split backward, {limit} alive", rows
    if chunks == 2:
        top = 2 * min(microbatches, most)
        for limit in sorted({top, top - 1, top - 2, 3 * top // 4, top // 2, 2}, reverse=True):
            for hops in HOPS:
                offsets = block_offsets(stages, hops=hops)
                if offsets is None:
                    continue
                squeezed = squeeze(block_rows(offsets, microbatches=microbatches), limit=limit, strict=False)
                if squeezed is not None:
                    table = Table(name=NAME, placement=Placement.v_shape(stages), rows=tuple(squeezed))
                    yield f"V block {'-'.join(map(str, hops))}, {limit / 2:g} alive", table


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


def _placements(stages: int, chunks: int | None) -> list[Placement]:
    if chunks is None:
        return [Placement.loop(stages), Placement.v_shape(stages)]
    return [Placement.v_shape(stages, chunks=chunks)]


def _search(pool: _Pool, placement: Placement, microbatches: int) -> bool:
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
