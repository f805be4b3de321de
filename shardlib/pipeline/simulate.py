"""When everything in a table happens, exactly: makespan, bubbles, idle time, memory, messages.

In: a legal `Table` and `Costs`, free-running (a rank goes on as soon as what it needs has arrived) or in lockstep
(one scan over ticks). Out: a `Simulation`. Arithmetic is in whole numbers, so formulas hold with `==`.

    simulate(schedules.build("1f1b", stages=8, microbatches=32)).bubble_fraction    # 7/39
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from meshes.errors import ShardingError
from shardlib.pipeline.costs import Costs, Times
from shardlib.pipeline.graph import Graph, build_graph
from shardlib.pipeline.table import FORWARD, Table
from shardlib.pipeline.ticks import MASK, SKIP, Ticks, choose_ticks, tick_order, tick_spans
from shardlib.pipeline.verify import legal_graph

Span = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a table does under given costs; a static leaf. Times are in the costs' unit.

    Args:
        table: what was simulated.
        costs: under which costs.
        ticks: the ticks, in lockstep; None when free-running.
        idle: what idle slots cost in lockstep: "skip" or "mask".
        spans: (start, end) of every action, in the order of the table's rows.
        makespan: the end of the last action.
        work: per rank, the time of its actions.
        bubble_fraction: 1 - work / (ranks x makespan): what one jitted step pays.
        span_bubble_fraction: the papers' figure: the idle share between the first and last action of the worst rank.
        peak_activations: per rank, the most alive at once, where 1 is one microbatch's activations on a rank:
            whole from F to B or I, then the stash, by its own size, until W.
        peak_in_flight: the same, counting activations from F to B or I only.
        peak_stash: the same, counting stashes from I to W only.
        num_messages: messages between ranks, forwards and backwards.
        permutes: in lockstep, collective permutes; otherwise 0.
        bytes_per_device: bytes each rank sends; in lockstep a rank sends in every permute it takes part in.
    """

    table: Table
    costs: Costs
    ticks: Ticks | None
    idle: str
    spans: tuple[tuple[Span, ...], ...]
    makespan: float
    work: tuple[float, ...]
    bubble_fraction: float
    span_bubble_fraction: float
    peak_activations: tuple[float, ...]
    peak_in_flight: tuple[float, ...]
    peak_stash: tuple[float, ...]
    num_messages: int
    permutes: int
    bytes_per_device: tuple[int, ...]

    @property
    def idle_time(self) -> tuple[float, ...]:
        """Per rank, the makespan without its work."""
        return tuple(self.makespan - work for work in self.work)

    @property
    def lockstep(self) -> bool:
        """Whether this is one scan over ticks."""
        return self.ticks is not None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: every figure, the grid (each rank's actions in order) and their spans."""
        return {
            "schedule": self.table.name,
            "stages": self.table.num_ranks,
            "chunks": self.table.num_chunks,
            "microbatches": self.table.num_microbatches,
            "placement": list(self.table.placement.ranks),
            "costs": str(self.costs),
            "lockstep": self.lockstep,
            "tick_form": self.ticks.form if self.ticks else None,
            "num_ticks": self.ticks.num_ticks if self.ticks else None,
            "makespan": self.makespan,
            "bubble_fraction": self.bubble_fraction,
            "span_bubble_fraction": self.span_bubble_fraction,
            "idle_time": list(self.idle_time),
            "peak_activations": list(self.peak_activations),
            "peak_in_flight": list(self.peak_in_flight),
            "peak_stash": list(self.peak_stash),
            "num_messages": self.num_messages,
            "permutes": self.permutes,
            "bytes_per_device": list(self.bytes_per_device),
            "grid": [[str(cell) for cell in row] for row in self.table.rows],
            "spans": [[list(span) for span in row] for row in self.spans],
        }


def simulate(
    table: Table, costs: Costs | None = None, *, lockstep: bool = False, idle: str = SKIP, form: str | None = None
) -> Simulation:
    """Runs a table on paper.

    Args:
        table: any legal table.
        costs: by default F=1, B=2, W=1 and messages for free.
        lockstep: run it as one scan over ticks instead of letting every rank go on when it can.
        idle: in lockstep, what idle slots cost: nothing ("skip") or everything ("mask").
        form: in lockstep, "fused" or "unit" ticks; by default whichever is faster.

    Returns:
        Everything `Simulation` lists.

    Raises:
        ShardingError: the table is not legal, costs that do not fit its size, an unknown `idle` or `form`.

    Example:
        >>> simulate(Table.parse("F0 B0")).makespan
        3.0
    """
    costs = Costs() if costs is None else costs
    if idle not in (SKIP, MASK):
        raise ShardingError(f"idle={idle!r} is unknown", fix=f"idle={SKIP!r} or idle={MASK!r}")
    graph, times = legal_graph(table), costs.times(table.placement)
    if not lockstep:
        return _summary(table, costs, graph=graph, times=times, spans=free_spans(graph, times), ticks=None, idle=idle)
    ticks = choose_ticks(table, costs, form=form, idle=idle)
    spans = tick_spans(ticks, graph, times=times, idle=idle)
    return _summary(table, costs, graph=graph, times=times, spans=spans, ticks=ticks, idle=idle)


def free_spans(graph: Graph, times: Times) -> list[tuple[int, int]]:
    """(start, end) of every operation, each as early as its rank and its messages allow."""
    spans: list[tuple[int, int]] = [(0, 0)] * len(graph.keys)
    ranks, link = graph.ranks, times.link
    durations = {kind: times.of(kind) for kind in "FBIW"}
    for index in graph.order:
        rank = ranks[index]
        start = spans[index - 1][1] if index > graph.starts[rank] else 0
        for need in graph.needs[index]:
            arrival = spans[need][1] + (link if ranks[need] != rank else 0)
            if arrival > start:
                start = arrival
        kind, stage, _ = graph.keys[index]
        spans[index] = (start, start + durations[kind][stage])
    return spans


def memory_steps(simulation: Simulation, rank: int) -> list[tuple[float, float]]:
    """(time, live activations from then on) of one rank: the curve under a Gantt chart."""
    graph, times = build_graph(simulation.table), simulation.costs.times(simulation.table.placement)
    changes = list[tuple[float, int]]()
    for index, (start, end) in zip(graph.row(rank), simulation.spans[rank]):
        kind, stage, _ = graph.keys[index]
        changes.append((start if kind == FORWARD else end, _both(times, kind, stage=stage)))
    curve, live = [(0.0, 0.0)], 0
    for time, change in sorted(changes):
        live += change
        if curve[-1][0] == time:  # what a moment frees is free for what it allocates: only the sum shows
            curve.pop()
        curve.append((time, live / times.size_scale))
    return curve


def _summary(
    table: Table,
    costs: Costs,
    *,
    graph: Graph,
    times: Times,
    spans: list[tuple[int, int]],
    ticks: Ticks | None,
    idle: str,
) -> Simulation:
    num_ranks, scale = table.num_ranks, times.scale
    makespan = max(end for _, end in spans)
    rows = [graph.row(rank) for rank in range(num_ranks)]
    work = [sum(times.of(graph.keys[index][0])[graph.keys[index][1]] for index in row) for row in rows]
    own = [max(spans[index][1] for index in row) - min(spans[index][0] for index in row) for row in rows]
    order = tick_order(graph, ticks) if ticks else [list(row) for row in rows]
    peaks = [_peaks(graph, times, order=order, count=count) for count in (_both, _live, _stashed)]
    messages, sent = _messages(graph, table, ticks=ticks)
    return Simulation(
        table=table,
        costs=costs,
        ticks=ticks,
        idle=idle,
        spans=tuple(tuple((spans[i][0] / scale, spans[i][1] / scale) for i in row) for row in rows),
        makespan=makespan / scale,
        work=tuple(each / scale for each in work),
        bubble_fraction=float(1 - Fraction(sum(work), num_ranks * makespan)),
        span_bubble_fraction=float(max(1 - Fraction(work, span) for work, span in zip(work, own))),
        peak_activations=peaks[0],
        peak_in_flight=peaks[1],
        peak_stash=peaks[2],
        num_messages=messages,
        permutes=sum(sum(sends) for channel, sends in zip(ticks.channels, ticks.sends) if channel.shift)
        if ticks
        else 0,
        bytes_per_device=tuple(count * int(costs.message_bytes) for count in sent),
    )


def _both(times: Times, kind: str, *, stage: int) -> int:
    return _live(times, kind, stage=stage) + _stashed(times, kind, stage=stage)


def _live(times: Times, kind: str, *, stage: int) -> int:
    return {"F": times.activation[stage], "W": 0}.get(kind, -times.activation[stage])


def _stashed(times: Times, kind: str, *, stage: int) -> int:
    return {"I": times.stash[stage], "W": -times.stash[stage]}.get(kind, 0)


def _peaks(graph: Graph, times: Times, *, order: list[list[int]], count: Callable[..., int]) -> tuple[float, ...]:
    peaks = []
    for row in order:
        live = peak = 0
        for index in row:
            live += count(times, graph.keys[index][0], stage=graph.keys[index][1])
            peak = max(peak, live)
        peaks.append(peak / times.size_scale)
    return tuple(peaks)


def _messages(graph: Graph, table: Table, *, ticks: Ticks | None) -> tuple[int, list[int]]:
    """(messages, what each rank sends): a permute sends from every rank it joins, useful or not."""
    useful = [0] * table.num_ranks
    for index, needs in enumerate(graph.needs):
        for need in needs:
            useful[graph.ranks[need]] += graph.ranks[need] != graph.ranks[index]
    if ticks is None:
        return sum(useful), useful
    sent = [0] * table.num_ranks
    for channel, sends in zip(ticks.channels, ticks.sends):
        for source, _ in channel.pairs if channel.shift else ():
            sent[source] += sum(sends)
    return sum(useful), sent
