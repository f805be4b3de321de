"""Legality of any table: `verify`, and the picture in words when a table is not legal.

In: a `Table`, and limits on its buffers if wanted. Out: `Bounds`, what its buffers need whatever the timing; or an
error that prints the rows with the cell marked and names what is missing.

    verify(Table.parse("F0 F1 B0 B1")).activations    # (2,)
"""

import collections
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from meshes.errors import ShardingError
from shardlib.pipeline.graph import Graph, build_graph
from shardlib.pipeline.placement import Placement
from shardlib.pipeline.table import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Table

Cell = tuple[int, int]
"""(rank, position in its row)."""

SHOWN_WIDTH: Final = 76
SHOWN_OTHERS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a legal table needs at most, however long its actions and messages take; a static leaf.

    Args:
        activations: per rank, the most chunk activations alive from their F to their B or W.
        messages: per rank, the most messages that can have been sent to it and not yet been used.
    """

    activations: tuple[int, ...]
    messages: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One thing that is wrong: the cell to mark (position past the row's end if a cell is missing) and why."""

    cell: Cell
    why: str
    see: Cell | None = None


def verify(
    table: Table, *, stages: int | None = None, microbatches: int | None = None, max_activations: float | None = None
) -> Bounds:
    """Proves that a table does everything exactly once, in a possible order, without deadlock, in bounded buffers.

    Args:
        table: any table.
        stages: how many ranks it must have; by default as many as it has rows.
        microbatches: how many microbatches it must run; by default the largest it names plus one.
        max_activations: limit on live activations per rank, in whole microbatches of a rank (a chunk is a part).

    Returns:
        The buffers it needs at most, for any duration of its actions and messages.

    Raises:
        ShardingError: every failure, the first with its rows printed and the cell marked.

    Example:
        >>> verify(Table.parse("F0 B0 F1 B1"), microbatches=2).activations
        (1,)
    """
    if stages is not None and stages != table.num_ranks:
        fix = f"run it on {table.num_ranks} stages, or give one row per stage"
        raise ShardingError(f"schedule {table.name!r} has {table.num_ranks} rows for {stages} stages", fix=fix)
    graph = legal_graph(table, microbatches=microbatches)
    live = _activations(table)
    if max_activations is not None:
        failures = [
            Failure(cell=(rank, position), why=_too_many(peak / table.num_chunks, max_activations))
            for rank, (peak, position) in enumerate(live)
            if peak > max_activations * table.num_chunks
        ]
        if failures:
            fix = f"max_activations={max(peak for peak, _ in live) / table.num_chunks:g}, or another schedule"
            raise ShardingError(_report(table, failures), fix=fix)
    return Bounds(activations=tuple(peak for peak, _ in live), messages=_messages(graph, table.placement))


def legal_graph(table: Table, *, microbatches: int | None = None) -> Graph:
    """The graph of a table that is legal: the part of `verify` that everything else starts with.

    Raises:
        ShardingError: as `verify` does.
    """
    count = table.num_microbatches if microbatches is None else microbatches
    failures, graph = list(_exactly_once(table, count)), build_graph(table)
    if not failures and not graph.complete:
        failures = list(_own_order(table, graph)) or list(_deadlock(table, graph))
    if failures:
        raise ShardingError(_report(table, failures), fix=_fix(table, count))
    return graph


def _too_many(live: float, limit: float) -> str:
    return f"{live:g} activations are alive here, more than max_activations={limit:g}"


def _exactly_once(table: Table, count: int) -> Iterator[Failure]:
    """Each rank: F once, and either B once or I and W once, per microbatch and chunk; and nothing else."""
    for rank, row in enumerate(table.rows):
        seen = collections.defaultdict[tuple[int, int], dict[str, int]](dict)
        for position, cell in enumerate(row):
            kinds, work = seen[cell.microbatch, cell.chunk], (cell.microbatch, cell.chunk)
            if cell.chunk >= table.num_chunks or cell.microbatch >= count:
                limits = f"{count} microbatches and {table.num_chunks} chunks"
                yield Failure(cell=(rank, position), why=f"{cell} does not exist: there are {limits}")
            elif cell.kind in kinds:
                yield Failure(cell=(rank, position), why=f"{cell} is done twice", see=(rank, kinds[cell.kind]))
            elif cell.kind == BACKWARD and (INPUT in kinds or WEIGHT in kinds):
                yield Failure(cell=(rank, position), why=f"{cell} repeats what I and W of {_name(*work)} do")
            elif cell.kind in (INPUT, WEIGHT) and BACKWARD in kinds:
                yield Failure(cell=(rank, position), why=f"{cell} repeats a part of {_name(*work, kind=BACKWARD)}")
            kinds.setdefault(cell.kind, position)
        for microbatch in range(count):
            for chunk in range(table.num_chunks):
                kinds = seen.get((microbatch, chunk), {})
                if FORWARD not in kinds:
                    why = f"{_name(microbatch, chunk, kind=FORWARD)} is missing on rank {rank}"
                    yield Failure(cell=(rank, min(kinds.values(), default=len(row))), why=why)
                absent = [kind for kind in (INPUT, WEIGHT) if kind not in kinds]
                if BACKWARD not in kinds and absent:
                    names = " and ".join(_name(microbatch, chunk, kind=kind) for kind in absent)
                    instead = f" (or {_name(microbatch, chunk, kind=BACKWARD)})" if len(absent) == 2 else ""
                    where = max(kinds.values(), default=len(row))
                    yield Failure(cell=(rank, where), why=f"{names}{instead} is missing on rank {rank}")


def _own_order(table: Table, graph: Graph) -> Iterator[Failure]:
    """What a cell needs from its own rank stands before it in the row."""
    for index, needs in enumerate(graph.needs):
        for need in needs:
            if need > index and graph.ranks[need] == graph.ranks[index]:
                cell, other = _cell(graph, index), _cell(graph, need)
                why = f"{_at(table, cell)} needs {_at(table, other)}, which stands after it in its own row"
                yield Failure(cell=cell, why=why, see=other)


def _deadlock(table: Table, graph: Graph) -> Iterator[Failure]:
    """Every rank that never finishes: the cell it stops at and what that waits for."""
    done = set(graph.order)
    for rank in range(table.num_ranks):
        index = next((index for index in graph.row(rank) if index not in done), None)
        if index is not None:
            need = next(need for need in graph.needs[index] if need not in done)
            cell, other = _cell(graph, index), _cell(graph, need)
            why = f"deadlock: rank {rank} waits at {_at(table, cell)} for {_at(table, other)} on rank {other[0]}"
            stop = next(index for index in graph.row(other[0]) if index not in done)
            why += f", which comes after {_at(table, _cell(graph, stop))} there" if stop != need else ""
            yield Failure(cell=cell, why=why, see=other)


def _activations(table: Table) -> list[tuple[int, int]]:
    """Per rank the most activations alive, F to B or W, and the position where that is first reached."""
    peaks = []
    for row in table.rows:
        live, peak, where = 0, 0, 0
        for position, cell in enumerate(row):
            live += {FORWARD: 1, INPUT: 0}.get(cell.kind, -1)
            if live > peak:
                peak, where = live, position
        peaks.append((peak, where))
    return peaks


def _messages(graph: Graph, placement: Placement) -> tuple[int, ...]:
    """Per rank the most messages sent to it and unused: those whose sending does not wait for the next use.

    `after[r]` is the first operation of rank r that can only run once a given operation has run.
    """
    ranks, num_ranks = graph.ranks, placement.num_ranks
    users = collections.defaultdict[int, list[int]](list)
    senders: list[list[int]] = [[] for _ in range(num_ranks)]
    for index, needs in enumerate(graph.needs):
        for need in needs:
            users[need].append(index)
            if ranks[need] != ranks[index]:
                senders[ranks[index]].append(need)
    after = dict[int, list[int]]()
    peaks = [0] * num_ranks
    used = [len(sent) for sent in senders]
    for index in reversed(graph.order):
        rank = ranks[index]
        first = list(after[index + 1]) if index + 1 < graph.starts[rank + 1] else list(graph.starts[1:])
        for user in users[index]:
            first = [min(mine, theirs) for mine, theirs in zip(first, after[user])]
        first[rank] = index
        after[index] = first
        arrivals = sum(ranks[need] != rank for need in graph.needs[index])
        if arrivals:
            used[rank] -= arrivals
            ahead = sum(send < first[ranks[send]] for send in senders[rank])
            peaks[rank] = max(peaks[rank], ahead - used[rank])
    return tuple(peaks)


def _name(microbatch: int, chunk: int, *, kind: str = "") -> str:
    if not kind:
        return f"microbatch {microbatch}" + (f" chunk {chunk}" if chunk else "")
    return str(Action(kind=kind, microbatch=microbatch, chunk=chunk))


def _cell(graph: Graph, index: int) -> Cell:
    rank = graph.ranks[index]
    return rank, index - graph.starts[rank]


def _at(table: Table, cell: Cell) -> Action:
    return table.rows[cell[0]][cell[1]]


def _report(table: Table, failures: list[Failure]) -> str:
    """The first failure with its rows drawn, a line for each of the next, and how many more there are."""
    first = failures[0]
    lines = [f"schedule {table.name!r} is not legal: rank {first.cell[0]}, cell {first.cell[1] + 1}: {first.why}"]
    ranks = sorted({first.cell[0], *((first.see[0],) if first.see else ())})
    for rank in ranks:
        marked = {cell[1] for cell in (first.cell, first.see) if cell and cell[0] == rank}
        centre = first.cell[1] if rank == first.cell[0] else first.see[1] if first.see else 0
        lines.append(draw_row(table, rank, marked=marked, centre=centre))
    others = [f"also rank {other.cell[0]}, cell {other.cell[1] + 1}: {other.why}" for other in failures[1:]]
    lines += others[:SHOWN_OTHERS]
    if len(others) > SHOWN_OTHERS:
        lines.append(f"and {len(others) - SHOWN_OTHERS} more failures")
    return "\n".join(lines)


def draw_row(table: Table, rank: int, *, marked: set[int], centre: int) -> str:
    """One row as text with cells in brackets, cropped around `centre`; a cell past the end is drawn as `[ ]`."""
    row = [str(cell) for cell in table.rows[rank]] + ([" "] if len(table.rows[rank]) in marked else [])
    cells = [f"[{cell}]" if position in marked else cell for position, cell in enumerate(row)]
    head, low, high = f"  rank {rank}: ", min(centre, len(cells)), min(centre, len(cells) - 1) + 1
    width = len(head) + 8 + sum(len(cell) + 1 for cell in cells[low:high])
    while low > 0 or high < len(cells):
        grow = [position for position in (low - 1, high) if 0 <= position < len(cells)]
        position = min(grow, key=lambda position: abs(position - centre))
        width += len(cells[position]) + 1
        if width > SHOWN_WIDTH:
            break
        low, high = min(low, position), max(high, position + 1)
    return head + "... " * (low > 0) + " ".join(cells[low:high]) + " ..." * (high < len(cells))


def _fix(table: Table, count: int) -> str:
    """What to change; if another named placement makes the table legal, that."""
    for name, build in (("v", Placement.v_shape), ("loop", Placement.loop)):
        placement = build(table.num_ranks, chunks=table.num_chunks)
        if placement != table.placement:
            other = Table(name=table.name, placement=placement, rows=table.rows)
            if not list(_exactly_once(other, count)) and build_graph(other).complete:
                return f"it is legal with another placement: put the line '# placement={name}' first"
    return "every rank does F, then B (or I, then W), of each microbatch and chunk, once, after what it needs"
