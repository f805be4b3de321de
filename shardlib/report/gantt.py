"""A simulated schedule as a Gantt chart with its memory curve: one self-contained SVG.

In: a `Simulation`. Out: SVG text, the same for the same input. Forward, input gradient and weight gradient have
colours the colour-blind can tell apart; idle time is hatched; every bar that has room shows its microbatch.

    Path("zb_h1.svg").write_text(gantt(simulation))
"""

import math
from html import escape
from typing import Final

from shardlib.pipeline.simulate import Simulation, memory_steps
from shardlib.pipeline.table import BACKWARD, INPUT, WEIGHT
from shardlib.report.schedule_colors import HUES, NAMES, fill, ink
from shardlib.report.schedule_summary import caption

WIDTH: Final = 1120
LEFT, RIGHT, TOP, ROW, GAP, CURVE = 64, 24, 62, 26, 5, 110
FONT: Final = "font-family='Helvetica, Arial, sans-serif'"
MAX_BARS: Final = 60_000
LINE_DARK, LINE_LIGHT = (8, 48, 107), (158, 202, 225)


def gantt(simulation: Simulation, *, title: str | None = None, width: int = WIDTH) -> str:
    """The chart of a simulation.

    Args:
        simulation: what to draw.
        title: the heading; by default the schedule's name and size.
        width: in pixels; the height follows from the number of ranks.

    Returns:
        An SVG document.
    """
    num_ranks = simulation.table.num_ranks
    scale = (width - LEFT - RIGHT) / simulation.makespan
    rows_end = TOP + num_ranks * (ROW + GAP)
    curve_top = rows_end + 46
    height = curve_top + CURVE + 40
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' "
        f"viewBox='0 0 {width} {height}' role='img' {FONT}>",
        f"<title>{escape(title or _title(simulation))}</title>",
        "<defs><pattern id='idle' width='6' height='6' patternUnits='userSpaceOnUse' patternTransform='rotate(45)'>"
        "<rect width='6' height='6' fill='#F4F4F4'/><line x1='0' y1='0' x2='0' y2='6' stroke='#CFCFCF' "
        "stroke-width='2'/></pattern></defs>",
        f"<rect width='{width}' height='{height}' fill='white'/>",
        _text(LEFT, 22, title or _title(simulation), size=16, weight="bold"),
        _text(LEFT, 42, caption(simulation), size=12, color="#444444"),
        _legend(simulation, right=width - RIGHT),
        *(_row(simulation, rank, scale=scale) for rank in range(num_ranks)),
        _axis(simulation, y=rows_end + 2, scale=scale),
        _curves(simulation, top=curve_top, scale=scale),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _title(simulation: Simulation) -> str:
    table = simulation.table
    chunks = f" x {table.num_chunks} chunks" if table.num_chunks > 1 else ""
    ticks = f", lockstep ({simulation.ticks.form} ticks)" if simulation.ticks else ""
    return f"{table.name}: {table.num_ranks} stages{chunks}, {table.num_microbatches} microbatches{ticks}"


def _row(simulation: Simulation, rank: int, *, scale: float) -> str:
    """One rank: the hatched background is idle time, the bars on it are work."""
    table, y = simulation.table, TOP + rank * (ROW + GAP)
    length = _number(simulation.makespan * scale)
    parts = [
        _text(LEFT - 8, y + 17, f"rank {rank}", size=12, anchor="end"),
        f"<rect x='{LEFT}' y='{y}' width='{length}' height='{ROW}' fill='url(#idle)'/>",
    ]
    longest = len(str(table.num_microbatches - 1))
    drawn = list(zip(table.rows[rank], simulation.spans[rank]))[: MAX_BARS // table.num_ranks]
    for cell, (start, end) in drawn:
        x, bar = LEFT + start * scale, (end - start) * scale
        if bar <= 0:
            continue
        kinds = [INPUT, WEIGHT] if cell.kind == BACKWARD else [cell.kind]
        stage = table.placement.stage(rank, chunk=cell.chunk)
        shares = _shares(simulation, kinds, stage)
        colors = [fill(kind, chunk=cell.chunk, num_chunks=table.num_chunks) for kind in kinds]
        tip = f"{cell} rank {rank} stage {stage}: {start:g} to {end:g}"
        parts.append(f"<g><title>{tip}</title>")
        at = x
        for color, share in zip(colors, shares):
            parts.append(_bar(at, y, bar * share, color))
            at += bar * share
        parts.append(f"<rect x='{_number(x)}' y='{y}' width='{_number(bar)}' height='{ROW}' fill='none' "
                     f"stroke='white' stroke-width='{0.8 if bar > 4 else 0.2}'/>")  # fmt: skip
        label, room = str(cell.microbatch), bar * shares[0]
        size = min(12.0, (room - 2) / (0.6 * longest))
        if size >= 6:
            ink_color = ink(colors[0])
            parts.append(_text(x + room / 2, y + 13 + size * 0.36, label, size=size, anchor="middle", color=ink_color))
        parts.append("</g>")
    return "\n".join(parts)


def _shares(simulation: Simulation, kinds: list[str], stage: int) -> list[float]:
    """How a bar splits into its kinds: a whole backward is its input part and its weight part."""
    if len(kinds) == 1:
        return [1.0]
    times = simulation.costs.times(simulation.table.placement)
    whole = times.backward[stage]
    return [times.input[stage] / whole, times.weight[stage] / whole]


def _bar(x: float, y: float, width: float, color: str) -> str:
    return f"<rect x='{_number(x)}' y='{y}' width='{_number(width)}' height='{ROW}' fill='{color}'/>"


def _legend(simulation: Simulation, *, right: int) -> str:
    """Top right: one swatch per kind (one per chunk, side by side), and idle time."""
    chunks = simulation.table.num_chunks
    shown = min(chunks, 4)
    entries = [(NAMES[kind], [fill(kind, chunk=chunk, num_chunks=chunks) for chunk in range(shown)]) for kind in HUES]
    entries.append(("idle", ["url(#idle)"]))
    parts, x = list[str](), float(right)
    for name, colors in reversed(entries):
        x -= 6.2 * len(name) + 4
        parts.append(_text(x, 22, name, size=12))
        x -= 4
        for color in reversed(colors):
            x -= 13
            parts.append(f"<rect x='{_number(x)}' y='11' width='12' height='13' fill='{color}'/>")
        x -= 14
    return "\n".join(parts)


def _axis(simulation: Simulation, *, y: int, scale: float) -> str:
    """Time, with round ticks."""
    step = _round_step(simulation.makespan / 12)
    parts = [
        f"<line x1='{LEFT}' y1='{y}' x2='{_number(LEFT + simulation.makespan * scale)}' y2='{y}' stroke='#555555'/>"
    ]
    for number in range(int(simulation.makespan / step + 1e-9) + 1):
        x = LEFT + number * step * scale
        parts.append(f"<line x1='{_number(x)}' y1='{y}' x2='{_number(x)}' y2='{y + 4}' stroke='#555555'/>")
        parts.append(_text(x, y + 16, f"{number * step:g}", size=11, anchor="middle", color="#444444"))
    return "\n".join(parts)


def _curves(simulation: Simulation, *, top: int, scale: float) -> str:
    """Live activations of every rank over time, dark for rank 0 and light for the last, with the peak marked."""
    num_ranks, peak = simulation.table.num_ranks, max(simulation.peak_activations)
    bottom, end = top + CURVE, LEFT + simulation.makespan * scale
    lift = CURVE / peak
    step = _round_step(peak / 4)
    parts = [_text(LEFT, top - 8, "live activations per rank, in microbatches", size=12, weight="bold")]
    for number in range(int(peak / step + 1e-9) + 1):
        y = bottom - number * step * lift
        parts.append(f"<line x1='{LEFT}' y1='{_number(y)}' x2='{_number(end)}' y2='{_number(y)}' stroke='#E3E3E3'/>")
        parts.append(_text(LEFT - 8, y + 4, f"{number * step:g}", size=11, anchor="end", color="#444444"))
    colors = [_line_color(rank, num_ranks) for rank in range(num_ranks)]
    for rank in reversed(range(num_ranks)):
        points = [f"M{LEFT} {bottom}"]
        for time, live in [*memory_steps(simulation, rank), (simulation.makespan, None)]:
            points.append(f"H{_number(LEFT + time * scale)}")
            if live is not None:
                points.append(f"V{_number(bottom - live * lift)}")
        parts.append(f"<path d='{''.join(points)}' fill='none' stroke='{colors[rank]}' stroke-width='1.6'/>")
    y = bottom - peak * lift
    parts.append(f"<line x1='{LEFT}' y1='{_number(y)}' x2='{_number(end)}' y2='{_number(y)}' stroke='#B00020' "
                 "stroke-dasharray='5 4'/>")  # fmt: skip
    parts.append(_text(end, y - 4, f"peak {peak:g}", size=11, anchor="end", color="#B00020"))
    x = float(LEFT)
    for rank in _shown_ranks(num_ranks):
        parts.append(f"<line x1='{_number(x)}' y1='{bottom + 20}' x2='{_number(x + 18)}' y2='{bottom + 20}' "
                     f"stroke='{colors[rank]}' stroke-width='3'/>")  # fmt: skip
        parts.append(_text(x + 23, bottom + 24, f"rank {rank}", size=11))
        x += 78
    return "\n".join(parts)


def _shown_ranks(num_ranks: int) -> list[int]:
    """At most 12 ranks for the legend, first and last among them."""
    step = max(1, math.ceil((num_ranks - 1) / 11))
    return sorted({*range(0, num_ranks, step), num_ranks - 1})


def _line_color(rank: int, num_ranks: int) -> str:
    share = rank / max(1, num_ranks - 1)
    return "#" + "".join(f"{round(dark + (light - dark) * share):02X}" for dark, light in zip(LINE_DARK, LINE_LIGHT))


def _round_step(target: float) -> float:
    """1, 2 or 5 times a power of ten, at least `target`."""
    power = 10.0 ** math.floor(math.log10(target))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= target * (1 - 1e-9))


def _text(
    x: float, y: float, text: str, *, size: float, anchor: str = "start", color: str = "#111111", weight: str = "normal"
) -> str:
    attributes = f"x='{_number(x)}' y='{_number(y)}' font-size='{_number(size)}' fill='{color}'"
    attributes += f" text-anchor='{anchor}'" if anchor != "start" else ""
    attributes += f" font-weight='{weight}'" if weight != "normal" else ""
    return f"<text {attributes}>{escape(text)}</text>"


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
