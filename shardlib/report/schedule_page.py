"""A simulated schedule as one HTML page that opens from disk: chart, figures, and the grid as text.

In: a `Simulation`. Out: HTML text without scripts and without anything from the network.

    Path("zb_h1.html").write_text(schedule_page(simulation))
"""

from html import escape
from typing import Final

from shardlib.pipeline.simulate import Simulation
from shardlib.report.gantt import gantt
from shardlib.report.schedule_grid import plain, timeline
from shardlib.report.schedule_summary import percent, summary, textbook

STYLE: Final = """
body {
  font: 15px/1.45 Helvetica, Arial, sans-serif; color: #111; background: #fff;
  margin: 2rem auto; max-width: 1160px; padding: 0 1rem
}
table { border-collapse: collapse; margin: 1rem 0 }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .9rem .25rem 0; text-align: right }
th:first-child, td:first-child { text-align: left }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; line-height: 1.25 }
.chart { overflow-x: auto }
"""
GRID_WIDTH: Final = 160


def schedule_page(simulation: Simulation) -> str:
    """The page as text."""
    name = escape(simulation.table.name)
    columns = zip(
        simulation.work,
        simulation.idle_time,
        simulation.peak_activations,
        simulation.peak_in_flight,
        simulation.peak_stash,
        simulation.bytes_per_device,
    )
    ranks = "".join(
        f"<tr><td>rank {rank}</td>{''.join(f'<td>{number:g}</td>' for number in numbers)}</tr>"
        for rank, numbers in enumerate(columns)
    )
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{name}</title><style>{STYLE}</style></head><body>
<h1>{name}</h1>
<p>{escape(summary(simulation)[0])}</p>
<div class="chart">{gantt(simulation)}</div>
<h2>Figures</h2>
<table><tr><th>figure</th><th>simulated</th><th>textbook</th></tr>{_figures(simulation)}</table>
<table><tr><th></th><th>work</th><th>idle</th><th>peak live activations</th><th>in flight, F to I</th>
<th>stash, I to W</th><th>bytes sent</th></tr>{ranks}</table>
<h2>Grid</h2>
<pre>{escape(plain(timeline(simulation, width=GRID_WIDTH)))}</pre>
<h2>Table</h2>
<pre>{escape(str(simulation.table))}</pre>
</body></html>
"""


def _figures(simulation: Simulation) -> str:
    book = textbook(simulation)
    on_makespan = f"{escape(book.bubble_text)} = {percent(book.bubble)}" if book and not book.on_span else ""
    on_span = f"{escape(book.bubble_text)} = {percent(book.bubble)}" if book and book.on_span else ""
    peak = f"{escape(book.peak_text)} = {book.peak:g}" if book else ""
    rows = [
        ("makespan", f"{simulation.makespan:g}", ""),
        ("bubble_fraction", percent(simulation.bubble_fraction), on_makespan),
        ("span_bubble_fraction", percent(simulation.span_bubble_fraction), on_span),
        ("peak_activations, worst rank", f"{max(simulation.peak_activations):g}", peak),
        ("messages", str(simulation.num_messages), ""),
    ]
    return "".join(f"<tr><td>{name}</td><td>{value}</td><td>{known}</td></tr>" for name, value, known in rows)
