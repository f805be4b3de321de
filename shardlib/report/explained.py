"""Explanations on a terminal: one table of arrays, totals, notices; or two meshes side by side.

In: `Explanation` values. Out: rich output on stdout, plain where there is no colour.

    print_explanation(bound.explain())
"""

import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardlib.explanation import Explanation, bytes_text, spec_text
from shardlib.specs import Entry

PLAIN_WIDTH = 160


def console() -> Console:
    """A console on stdout: no colour on a pipe or under NO_COLOR, and wide enough there not to wrap."""
    return Console(
        file=sys.stdout, width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False, soft_wrap=False
    )


def print_explanation(explanation: Explanation) -> None:
    """Every array with its reasons, then totals, then notices."""
    out = console()
    mesh = explanation.mesh
    out.print(f"mesh {mesh} ({mesh.num_devices} devices), {explanation.num_parameters:,} parameters", style="bold")
    for title, entries in (
        ("parameters", explanation.parameters),
        ("batch", explanation.batch),
        ("activations", explanation.activations),
    ):
        if entries:
            out.print(_entries_table(title, entries))
    out.print(_totals_table([explanation]))
    for notice in explanation.notices:
        out.print(Text(f"notice: {notice}", style="yellow"))


def print_comparison(one: Explanation, other: Explanation) -> None:
    """The same parameters on two meshes side by side, then both totals and the notices of each."""
    out = console()
    table = Table(title="parameters", title_justify="left")
    for heading in ("path", "shape", "logical axes"):
        table.add_column(heading, overflow="fold")
    for explanation in (one, other):
        table.add_column(f"{explanation.mesh}", overflow="fold")
        table.add_column("per device", justify="right", no_wrap=True)
    for left, right in zip(one.parameters, other.parameters, strict=True):
        cells = [cell for entry in (left, right) for cell in (spec_text(entry), bytes_text(entry.bytes_per_device))]
        style = "" if left.spec == right.spec else "bold"
        table.add_row(left.path, _shape(left), _names(left), *cells, style=style)
    out.print(table)
    out.print(_totals_table([one, other]))
    for explanation in (one, other):
        for notice in explanation.notices:
            out.print(Text(f"notice ({explanation.mesh}): {notice}", style="yellow"))


def _entries_table(title: str, entries: tuple[Entry, ...]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("path" if title != "activations" else "named", overflow="fold")
    table.add_column("shape", overflow="fold")
    table.add_column("spec", overflow="fold")
    table.add_column("per device", justify="right", no_wrap=True)
    table.add_column("why, dim by dim", overflow="fold")
    for entry in entries:
        per_device = bytes_text(entry.bytes_per_device)
        table.add_row(entry.path, _shape(entry), spec_text(entry), per_device, "\n".join(_reasons(entry)))
    return table


def _reasons(entry: Entry) -> list[str]:
    return [f"{decision.name or 'unnamed'}: {decision.reason}" for decision in entry.decisions] or ["scalar"]


def _totals_table(explanations: list[Explanation]) -> Table:
    table = Table(title="bytes", title_justify="left")
    table.add_column("what")
    table.add_column("whole", justify="right")
    for explanation in explanations:
        table.add_column(f"per device, {explanation.mesh}", justify="right")
    for name, size in explanations[0].totals.items():
        cells = [bytes_text(explanation.totals[name].per_device) for explanation in explanations]
        table.add_row(name.replace("_", " "), bytes_text(size.total), *cells)
    return table


def _shape(entry: Entry) -> str:
    return f"{entry.dtype}[{', '.join(map(str, entry.shape))}]"


def _names(entry: Entry) -> str:
    return "(" + ", ".join(name or "-" for name in entry.names) + ")"
