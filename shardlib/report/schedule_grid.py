"""A simulated schedule as text: one line per rank, time to the right, idle time as dots.

In: a `Simulation` and a width in characters. Out: lines of (text, kind, chunk) pieces, for a terminal to colour,
or plain text. A picture wider than the terminal is cut into panels.

    print(plain(timeline(simulation, width=80)))
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from shardlib.pipeline.simulate import Simulation
from shardlib.pipeline.table import Action

IDLE: Final = "."
HELD: Final = "-"
MAX_COLUMNS: Final = 20_000
MIN_WIDTH: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A run of characters of one action (or of idle time, with kind ""); a static leaf."""

    text: str
    kind: str = ""
    chunk: int = 0


Line = tuple[Piece, ...]


def timeline(simulation: Simulation, *, width: int = 80) -> list[Line]:
    """Lines of at most `width` characters: every rank's actions on a common time axis.

    With two chunks, capital letters are chunk 0 and small letters chunk 1. Actions that take no time are left out;
    where others are too short to be drawn to scale, all get the same width and idle time is left out.
    """
    rows = [_cells(simulation, rank) for rank in range(simulation.table.num_ranks)]
    label = len(f"rank {len(rows) - 1} ")
    room = max(width, MIN_WIDTH) - label
    scale = _characters_per_time(rows, room=room)
    if scale * _exact(simulation.makespan) > MAX_COLUMNS:
        rows = [
            [(text, cell, Fraction(at), Fraction(at + 1)) for at, (text, cell, *_) in enumerate(row)] for row in rows
        ]
        scale = _characters_per_time(rows, room=room)
    drawn = [_draw(row, scale) for row in rows]
    total = max(sum(len(piece.text) for piece in line) for line in drawn)
    cut = scale.numerator if scale.denominator == 1 else 1
    step = max(1, room // cut) * cut
    lines = list[Line]()
    for start in range(0, total, step):
        if start:
            lines.append((Piece(text=""),))
        for rank, line in enumerate(drawn):
            head = Piece(text=f"rank {rank}".ljust(label))
            lines.append((head, *_slice(line, start=start, end=start + step)))
    return lines


def plain(lines: list[Line]) -> str:
    """The lines without colour."""
    return "\n".join("".join(piece.text for piece in line).rstrip() for line in lines)


def cell_text(cell: Action, *, num_chunks: int) -> str:
    """`F3`; with two chunks `f3` for chunk 1; with more `F3.1`."""
    if num_chunks == 2 and cell.chunk == 1:
        return f"{cell.kind.lower()}{cell.microbatch}"
    return str(cell)


_Cell = tuple[str, Action, Fraction, Fraction]


def _cells(simulation: Simulation, rank: int) -> list[_Cell]:
    """A rank's actions with their text and exact times, in the order of time."""
    table = simulation.table
    cells = [
        (cell_text(cell, num_chunks=table.num_chunks), cell, _exact(start), _exact(end))
        for cell, (start, end) in zip(table.rows[rank], simulation.spans[rank])
        if end > start
    ]
    return sorted(cells, key=lambda cell: cell[2:])


def _exact(time: float) -> Fraction:
    return Fraction(time).limit_denominator(10**6)


def _characters_per_time(rows: list[list[_Cell]], *, room: int) -> Fraction:
    """The scale at which every action has room for its text; a blank between texts if all then fits in one panel.

    Whole characters per time unit where times have a common unit that is not much finer than the text needs.
    """
    needs = [(len(text), end - start) for row in rows for text, _, start, end in row]
    times = {time for row in rows for *_, start, end in row for time in (start, end)}
    grain = math.lcm(*(time.denominator for time in times))
    unit = Fraction(math.gcd(*(int(time * grain) for time in times)), grain)
    length = max(times)
    for blank in (1, 0):
        scale = max(math.ceil((letters + blank) * unit / time) for letters, time in needs) / unit
        if scale * length <= room:
            return scale
    rounded = max((letters + 1) / time for letters, time in needs)
    return scale if scale <= 2 * rounded else rounded


def _draw(row: list[_Cell], scale: Fraction) -> Line:
    pieces, at = list[Piece](), 0
    for text, cell, start, end in row:
        first, after = int(start * scale), int(end * scale)
        if first > at:
            pieces.append(Piece(text=IDLE * (first - at)))
        pieces.append(Piece(text=text.ljust(after - first, HELD), kind=cell.kind, chunk=cell.chunk))
        at = after
    return tuple(pieces)


def _slice(line: Line, *, start: int, end: int) -> Line:
    pieces, at = list[Piece](), 0
    for piece in line:
        text = piece.text[max(0, start - at) : max(0, end - at)]
        if text:
            pieces.append(Piece(text=text, kind=piece.kind, chunk=piece.chunk))
        at += len(piece.text)
    return tuple(pieces)
