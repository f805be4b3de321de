"""Schedules on a terminal: the grid in colour, the figures under it, comparisons as a table.

In: a `Simulation` or a `Comparison`. Out: text on stdout; plain on a pipe and under NO_COLOR.

    print_simulation(simulation)
"""

import os
import shutil
import sys
from typing import Final

from rich.console import Console
from rich.text import Text

from shardlib.pipeline.compare import Comparison
from shardlib.pipeline.simulate import Simulation
from shardlib.report.schedule_colors import HUES, NAMES, fill, ink
from shardlib.report.schedule_grid import Line, Piece, timeline
from shardlib.report.schedule_summary import HEADINGS, comparison_rows, summary, verdict

DEFAULT_WIDTH: Final = 80


def print_simulation(simulation: Simulation) -> None:
    """The grid, a key to its letters, and every figure beside the textbook's."""
    width = shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns
    num_chunks = simulation.table.num_chunks
    lines: list[Line] = timeline(simulation, width=width)
    lines += [(), _key(simulation)]
    lines += [(Piece(text=line),) for line in summary(simulation)]
    console = _console()
    for line in lines:
        console.print(_colored(line, num_chunks=num_chunks), soft_wrap=True)


def print_comparison(comparison: Comparison) -> None:
    """One line per schedule, the fastest first, then who wins."""
    rows = [list(HEADINGS), *comparison_rows(comparison)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    wide = sum(widths) + 2 * (len(widths) - 1) <= shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns
    best = comparison.winner()
    console = _console()
    for number, row in enumerate(rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
        bold = number == 0 or (best is not None and row[0] == best.name)
        console.print(Text(("  " if wide else " ").join(cells), style="bold" if bold else ""), soft_wrap=True)
    for name, why in comparison.undefined:
        console.print(Text(f"{name}: not defined here: {why}"), soft_wrap=True)
    for line in verdict(comparison):
        console.print(Text(line, style="bold"), soft_wrap=True)


def _console() -> Console:
    return Console(file=sys.stdout, highlight=False, no_color=bool(os.environ.get("NO_COLOR")) or None)


def _key(simulation: Simulation) -> Line:
    """What the letters mean; with two chunks that capital and small letters tell them apart."""
    pieces = [Piece(text="key: ")]
    for kind in HUES:
        pieces += [Piece(text=kind, kind=kind), Piece(text=f" {NAMES[kind]}  ")]
    if any(cell.kind == "B" for row in simulation.table.rows for cell in row):
        pieces += [Piece(text="B", kind="B"), Piece(text=" both gradients  ")]
    if simulation.table.num_chunks == 2:
        pieces += [Piece(text="f", kind="F", chunk=1), Piece(text=" chunk 1  ")]
    return (*pieces, Piece(text=". idle"))


def _colored(line: Line, *, num_chunks: int) -> Text:
    text = Text()
    for piece in line:
        style = ""
        if piece.kind:
            color = fill("I" if piece.kind == "B" else piece.kind, chunk=piece.chunk, num_chunks=num_chunks)
            style = f"{ink(color)} on {color}"
        text.append(piece.text, style=style)
    return text
