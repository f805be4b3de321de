"""Explanations on a terminal: arrays with a line per dim, totals, notices; or two meshes side by side.

In: `Explanation` values. Out: text on stdout, readable from 40 columns on.

    print_explanation(bound.explain())
"""

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardlib.explanation import Explanation, bytes_text, spec_text
from shardlib.report.page import page
from shardlib.report.staged import print_pipeline, print_stages
from shardlib.specs import Entry

_UNLIMITED = 10_000


def print_explanation(explanation: Explanation) -> None:
    """Every array with its reasons, then totals, then notices."""
    mesh = explanation.mesh
    with page() as out:
        out.print(f"mesh {mesh} ({mesh.num_devices} devices), {explanation.num_parameters:,} parameters", style="bold")
        for title, entries in (
            ("parameters", explanation.parameters),
            ("batch", explanation.batch),
            ("activations", explanation.activations),
        ):
            if entries:
                _print_entries(out, title, entries)
        _print_totals(out, [explanation])
        _print_promises(out, explanation)
        if explanation.pipeline is not None:
            print_pipeline(out, explanation.pipeline)
        _print_choices(out, explanation)
        for notice in explanation.notices:
            _print_notice(out, f"notice: {notice}")


def print_comparison(one: Explanation, other: Explanation) -> None:
    """The same parameters on two meshes side by side, then both totals and the notices of each."""
    with page() as out:
        table = _comparison_table(one, other)
        if out.measure(table, options=out.options.update_width(_UNLIMITED)).maximum <= out.width:
            out.print(table)
        else:
            _print_stacked(out, one, other)
        _print_totals(out, [one, other])
        for explanation in (one, other):
            if explanation.pipeline is not None:
                print_stages(out, explanation.pipeline, title=str(explanation.mesh))
            for notice in explanation.notices:
                _print_notice(out, f"notice ({explanation.mesh}): {notice}")


def _print_choices(out: Console, explanation: Explanation) -> None:
    out.print("\nthe plan", style="bold")
    for choice in explanation.choices:
        out.print(Text(choice), overflow="fold")


def _print_entries(out: Console, title: str, entries: tuple[Entry, ...]) -> None:
    """A line per array and one per dim, the columns of all dims aligned.

    >>> _print_entries(...)
    embed/embedding float32[256, 128] (tensor, fsdp), 32.0 KiB per device
      vocab=256  tensor  rule 'vocab -> tensor'
      embed=128  fsdp    rule 'embed -> fsdp'
    """
    out.print(f"\n{title}", style="bold")
    rows = [_dim_rows(entry) for entry in entries]
    widths = [max((cell_len(row[column]) for group in rows for row in group), default=0) for column in (0, 1)]
    for entry, group in zip(entries, rows, strict=True):
        what, size = f" {_shape(entry)} {spec_text(entry)},", f"{bytes_text(entry.bytes_per_device)} per device"
        fits = cell_len(f"{entry.path}{what} {size}") <= out.width
        out.print(Text.assemble((entry.path, "bold"), what, " " if fits else "\n  ", size), overflow="fold")
        dims = Table.grid(padding=(0, 2, 0, 0))
        for width in widths:
            dims.add_column(min_width=width, overflow="fold")
        dims.add_column(overflow="fold")
        for row in group:
            dims.add_row(*map(Text, row))
        if group:
            out.print(Padding(dims, (0, 0, 0, 2), expand=False))


def _dim_rows(entry: Entry) -> list[tuple[str, str, str]]:
    return [
        (f"{decision.name or 'unnamed'}={decision.size}", "+".join(decision.mesh_axes) or "-", decision.reason)
        for decision in entry.decisions
    ]


def _comparison_table(one: Explanation, other: Explanation) -> Table:
    table = Table(title="parameters", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("path", "shape"):
        table.add_column(heading, no_wrap=True)
    for explanation in (one, other):
        table.add_column(f"{explanation.mesh}", no_wrap=True)
        table.add_column("per device", justify="right", no_wrap=True)
    for left, right in zip(one.parameters, other.parameters, strict=True):
        cells = [cell for entry in (left, right) for cell in (spec_text(entry), bytes_text(entry.bytes_per_device))]
        style = "" if left.spec == right.spec else "bold"
        table.add_row(*map(Text, (left.path, _shape(left), *cells)), style=style)
    return table


def _print_stacked(out: Console, one: Explanation, other: Explanation) -> None:
    """The comparison where the table is too wide: under each array one line per mesh."""
    out.print("parameters", style="bold")
    meshes = [str(explanation.mesh) for explanation in (one, other)]
    specs = [[spec_text(entry) for entry in explanation.parameters] for explanation in (one, other)]
    wide = max(map(len, meshes)), max(cell_len(text) for side in specs for text in side)
    for left, right in zip(one.parameters, other.parameters, strict=True):
        out.print(Text.assemble((left.path, "bold"), f" {_shape(left)}"), overflow="fold")
        for mesh, entry in zip(meshes, (left, right), strict=True):
            size = bytes_text(entry.bytes_per_device)
            out.print(Text(f"  {mesh:<{wide[0]}}  {spec_text(entry):<{wide[1]}}  {size:>9}"), overflow="fold")


def _print_totals(out: Console, explanations: list[Explanation]) -> None:
    table = Table(title="\nbytes", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("what", overflow="fold")
    table.add_column("whole", justify="right")
    for explanation in explanations:
        mesh = f", {explanation.mesh}" if len(explanations) > 1 else ""
        table.add_column(f"per device{mesh}", justify="right", overflow="fold")
    for name, size in explanations[0].totals.items():
        cells = [bytes_text(explanation.totals[name].per_device) for explanation in explanations]
        table.add_row(name.replace("_", " "), bytes_text(size.total), *cells)
    out.print(table)


def _print_promises(out: Console, explanation: Explanation) -> None:
    """What one step will move: a line per mesh axis, kind and sort of arrays."""
    if not explanation.promises:
        return
    table = Table(
        title="moved in one step", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for heading in ("axis", "collective", "of"):
        table.add_column(heading, overflow="fold")
    for heading in ("times", "per device"):
        table.add_column(heading, justify="right", overflow="fold")
    for promise in explanation.promises:
        size = f"{'' if promise.exact else '~'}{bytes_text(promise.bytes_per_device)}"
        table.add_row(*map(Text, (promise.axis, promise.kind, promise.what, f"{promise.count:,}", size)))
    out.print(table)


def _print_notice(out: Console, text: str) -> None:
    out.print(Text(text, style="yellow"), overflow="fold")


def _shape(entry: Entry) -> str:
    return f"{entry.dtype}[{', '.join(map(str, entry.shape))}]"
