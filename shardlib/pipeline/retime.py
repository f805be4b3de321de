"""An order of work improved for given costs: ranks that would wait do the next thing they can instead.

In: a legal table, `Times`, a limit on live activations. Out: the table in a better order, never above the limit
where the original was not, and legal again; its makespan may or may not be better: simulate it.

    retime(split(build("1f1b", stages=4, microbatches=8)), times, limit=None, careful=True)
"""

import heapq

from shardlib.pipeline.costs import Times
from shardlib.pipeline.graph import build_graph
from shardlib.pipeline.simulate import free_spans
from shardlib.pipeline.table import BACKWARD, FORWARD, INPUT, WEIGHT, Table, action

LOOK_AHEAD = 48


def split(table: Table) -> Table:
    """Every whole backward as I followed by W: the same work, with one more place to cut."""
    rows = []
    for row in table.rows:
        cells = []
        for cell in row:
            kinds = (INPUT, WEIGHT) if cell.kind == BACKWARD else (cell.kind,)
            cells += [action(kind, cell.microbatch, chunk=cell.chunk) for kind in kinds]
        rows.append(tuple(cells))
    return Table(name=table.name, placement=table.placement, rows=tuple(rows))


def retime(table: Table, times: Times, *, limit: int | None, careful: bool) -> Table:
    """Runs the table; where a rank would wait for its next action, it starts a later one that is ready.

    A later action may only start if the rest of the row, run in order after it, stays within the limit: so nothing
    it overtook is blocked for ever.

    Args:
        table: a legal table without whole backwards.
        times: the costs.
        limit: on live activations per rank, in the sizes of `times`.
        careful: only overtake if that ends before the overtaken action would have started.
    """
    return _Run(table, times, limit=limit, careful=careful).run()


class _Run:
    """One pass over a table, event after event."""

    def __init__(self, table: Table, times: Times, *, limit: int | None, careful: bool):
        graph = build_graph(table)
        self.table, self.graph, self.times, self.limit, self.careful = table, graph, times, limit, careful
        self.before = free_spans(graph, times)
        self.left = [list(graph.row(rank)) for rank in range(table.num_ranks)]
        self.live, self.free = [0] * table.num_ranks, [0] * table.num_ranks
        self.ends: dict[int, int] = {}
        self.order: list[list[int]] = [[] for _ in range(table.num_ranks)]
        self.users: dict[int, list[int]] = {}
        for index, needs in enumerate(graph.needs):
            for need in needs:
                self.users.setdefault(need, []).append(graph.ranks[index])

    def run(self) -> Table:
        """Wakes ranks in the order of time until nothing is left."""
        wakes = [(0, rank) for rank in range(self.table.num_ranks)]
        while wakes:
            now, rank = heapq.heappop(wakes)
            if now < self.free[rank] or not self.left[rank]:
                continue
            position = self._next(rank, now)
            if position is None:
                continue
            index = self.left[rank].pop(position)
            kind, stage, _ = self.graph.keys[index]
            end = now + self.times.of(kind)[stage]
            self.ends[index] = self.free[rank] = end
            self.live[rank] += self._change(index)
            self.order[rank].append(index)
            heapq.heappush(wakes, (end, rank))
            for user in self.users.get(index, ()):
                heapq.heappush(wakes, (end + (self.times.link if user != rank else 0), user))
        assert not any(self.left), "retiming blocked itself"
        starts, rows = self.graph.starts, self.table.rows
        new = tuple(tuple(rows[rank][index - starts[rank]] for index in order) for rank, order in enumerate(self.order))
        return Table(name=self.table.name, placement=self.table.placement, rows=new)

    def _next(self, rank: int, now: int) -> int | None:
        """The first of the row that is ready, the first in its kind and chunk, and safe to start."""
        row, seen, live = self.left[rank], set[tuple[str, int]](), self.live[rank]
        highest, patience = live, None
        for position, index in enumerate(row[:LOOK_AHEAD]):
            kind, stage, _ = self.graph.keys[index]
            change = self._change(index)
            if (kind, stage) not in seen:
                seen.add((kind, stage))
                fits = self.limit is None or position == 0 or highest + max(change, 0) <= self.limit
                in_time = patience is None or now + self.times.of(kind)[stage] <= patience
                if fits and in_time and self._ready(index, now):
                    return position
                if position == 0 and self.careful:
                    patience = max(self.before[index][0], now)
            live += change
            highest = max(highest, live)
        return None

    def _ready(self, index: int, now: int) -> bool:
        ranks = self.graph.ranks
        for need in self.graph.needs[index]:
            end = self.ends.get(need)
            if end is None or end + (self.times.link if ranks[need] != ranks[index] else 0) > now:
                return False
        return True

    def _change(self, index: int) -> int:
        """What an action adds to its rank's live activations."""
        kind, stage, _ = self.graph.keys[index]
        activation, stash = self.times.activation[stage], self.times.stash[stage]
        return {FORWARD: activation, INPUT: stash - activation, WEIGHT: -stash}[kind]
