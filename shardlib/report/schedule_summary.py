"""A simulation's figures in words: beside the textbook formula, one schedule or many in a table.

In: `Simulation` values. Out: plain lines and rows, which the terminal, the chart and the page show.

    for line in summary(simulation): print(line)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from shardlib.pipeline.compare import Comparison
from shardlib.pipeline.schedules import ALL, Schedule, Size
from shardlib.pipeline.simulate import Simulation

MAX_LISTED: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Textbook:
    """What the literature says of a schedule at this size, or that it says nothing; a static leaf."""

    bubble_text: str
    bubble: float
    on_span: bool
    bound: bool
    peak_text: str
    peak: float


def textbook(simulation: Simulation) -> Textbook | None:
    """The published formulas; None for a user's table, uneven costs, or fewer microbatches than they are meant for."""
    schedule, size = _schedule_and_size(simulation)
    if schedule is None or size is None or size.microbatches < schedule.exact_from(size):
        return None
    return Textbook(
        bubble_text=schedule.bubble_text,
        bubble=float(schedule.bubble(size)),
        on_span=schedule.on_span,
        bound=schedule.bound,
        peak_text=schedule.peak_text,
        peak=float(schedule.peak(size)),
    )


def _schedule_and_size(simulation: Simulation) -> tuple[Schedule | None, Size | None]:
    table, costs = simulation.table, simulation.costs
    schedule = next((schedule for schedule in ALL if schedule.name == table.name), None)
    numbers = [costs.forward, costs.backward, costs.weight]
    uneven = any(isinstance(number, tuple) for number in numbers) or costs.embedding or costs.head or costs.link
    if schedule is None or uneven:
        return None, None
    times = costs.times(table.placement)
    forward, backward, weight = (
        Fraction(kind[0] * table.num_chunks, times.scale) for kind in (times.forward, times.backward, times.weight)
    )
    return schedule, Size(
        stages=table.num_ranks,
        chunks=table.num_chunks,
        microbatches=table.num_microbatches,
        forward=forward,
        input=backward - weight,
        weight=weight,
    )


def caption(simulation: Simulation) -> str:
    """The figures in one line, for under a title."""
    return (
        f"makespan              {simulation.makespan:g}, bubble {percent(simulation.bubble_fraction)} of the makespan, "
        f"{percent(simulation.span_bubble_fraction)} of the worst rank's span; "
        f"peak {max(simulation.peak_activations):g} live activations; costs {simulation.costs}"
    )


def summary(simulation: Simulation) -> list[str]:
    """Every figure, a line each, with the textbook's beside it where there is one."""
    table, book = simulation.table, textbook(simulation)
    chunks = f" x {table.num_chunks} chunks ({table.placement})" if table.num_chunks > 1 else ""
    mode = "each rank goes on when it can"
    if simulation.ticks:
        mode = f"lockstep, {simulation.ticks.num_ticks} {simulation.ticks.form} ticks, idle={simulation.idle}"
    lines = [
        f"{table.name}: {table.num_ranks} stages{chunks}, {table.num_microbatches} microbatches, "
        f"{simulation.costs}, {mode}",
        f"makespan              {simulation.makespan:g}",
    ]
    for on_span, name, value in (
        (False, "bubble_fraction", simulation.bubble_fraction),
        (True, "span_bubble_fraction", simulation.span_bubble_fraction),
    ):
        beside = ""
        if book and book.on_span == on_span:
            beside = f"   textbook: {book.bubble_text} = {percent(book.bubble)}"
        lines.append(f"{name:<22}{percent(value)}{beside}")
    peaks = f"peak_activations      {listed(simulation.peak_activations)}"
    lines.append(peaks + (f"   textbook, worst: {book.peak_text} = {book.peak:g}" if book else ""))
    if any(simulation.peak_stash):
        lines.append(f"  in flight F to I    {listed(simulation.peak_in_flight)}")
        lines.append(f"  stash I to W        {listed(simulation.peak_stash)}")
    lines.append(f"idle time per rank    {listed(simulation.idle_time)}")
    permutes = f", {simulation.permutes} permutes" if simulation.lockstep else ""
    sent = (
        f", {max(simulation.bytes_per_device)} bytes sent by the busiest rank" if simulation.costs.message_bytes else ""
    )
    lines.append(f"messages              {simulation.num_messages}{permutes}{sent}")
    return lines


def percent(fraction: float) -> str:
    """`17.9%`."""
    return f"{100 * fraction:.1f}%"


def listed(numbers: Sequence[float]) -> str:
    """Numbers with a blank between, the middle left out where there are many."""
    texts = [f"{number:.4g}" for number in numbers]
    if len(texts) > MAX_LISTED:
        texts = [*texts[:6], "...", *texts[-6:]]
    return " ".join(texts)


HEADINGS: Final = ("schedule", "makespan", "bubble", "span", "peak", "msgs", "lockstep", "bubble", "peak", "fits")
"""The columns of `comparison_rows`: free-running figures, then those in lockstep, then whether it fits the limit."""


def comparison_rows(comparison: Comparison) -> list[list[str]]:
    """One row of texts per schedule, the fastest first."""
    return [
        [
            entry.name,
            f"{entry.free.makespan:.5g}",
            percent(entry.free.bubble_fraction),
            percent(entry.free.span_bubble_fraction),
            f"{max(entry.free.peak_activations):.3g}",
            str(entry.free.num_messages),
            f"{entry.lockstep.makespan:.5g} {entry.lockstep.ticks.form if entry.lockstep.ticks else ''}",
            percent(entry.lockstep.bubble_fraction),
            f"{max(entry.lockstep.peak_activations):.3g}",
            {(True, True): "yes", (True, False): "free", (False, True): "lockstep"}.get(
                (comparison.fits(entry.free), comparison.fits(entry.lockstep)), "no"
            ),
        ]
        for entry in comparison.entries
    ]


def verdict(comparison: Comparison) -> list[str]:
    """Who wins, free-running and in lockstep, under the limit if there is one."""
    limit = comparison.max_activations
    limit_text = "" if limit is None else f" with at most {limit:g} live activations"
    lines = []
    for lockstep, mode in ((False, "free-running"), (True, "in lockstep")):
        best = comparison.winner(lockstep=lockstep)
        if best is None:
            least = comparison.leanest(lockstep=lockstep)
            lines.append(f"none fits {mode}{limit_text}: {least.name} needs least, {least.peak(lockstep=lockstep):g}")
        else:
            makespan, peak = best.makespan(lockstep=lockstep), best.peak(lockstep=lockstep)
            lines.append(f"fastest {mode}{limit_text}: {best.name}, makespan {makespan:g}, peak {peak:g}")
    return lines


def comparison_dict(comparison: Comparison) -> dict[str, Any]:
    """Plain values for JSON: every schedule's figures, the winners, and what does not exist at this size."""
    winners = {mode: comparison.winner(lockstep=lockstep) for mode, lockstep in (("free", False), ("lockstep", True))}
    return {
        "max_activations": comparison.max_activations,
        "schedules": [
            {
                "name": entry.name,
                "fits": comparison.fits(entry.free),
                "fits_in_lockstep": comparison.fits(entry.lockstep),
                **{key: _figures(one) for key, one in (("free", entry.free), ("lockstep", entry.lockstep))},
            }
            for entry in comparison.entries
        ],
        "winner": {mode: best.name if best else None for mode, best in winners.items()},
        "undefined": dict(comparison.undefined),
    }


def _figures(simulation: Simulation) -> dict[str, Any]:
    return {key: value for key, value in simulation.to_dict().items() if key not in ("grid", "spans")}
