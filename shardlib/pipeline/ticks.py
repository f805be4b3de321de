"""Tables in lockstep: which tick of one `lax.scan` does which action, and how long the ticks take.

In: a legal `Table` and `Costs`. Out: `Ticks`: fused (F, B or I, and W of a rank may share a tick, in that order)
or unit (one action per rank and tick). A message sent in a tick is there in the next. Fused ticks keep the order
of each kind and never move a backward before a forward the table puts first, but start forwards early, which
costs activations: 1F1B has 2p-1 in flight. Unit ticks keep the table's order.
"""

from dataclasses import dataclass
from typing import Final

from meshes.errors import ShardingError
from shardlib.pipeline.costs import Costs, Times
from shardlib.pipeline.graph import Graph, build_graph
from shardlib.pipeline.placement import Placement
from shardlib.pipeline.table import FORWARD, WEIGHT, Table

FUSED: Final = "fused"
UNIT: Final = "unit"
SKIP: Final = "skip"
MASK: Final = "mask"
IN_TICK: Final = {"F": 0, "B": 1, "I": 1, "W": 2}
"""The order of a tick's actions; B and I share a place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """One collective permute: what forwards (`F`) or backwards (`B`) send `shift` ranks further; a static leaf.

    A shift of 0 is a hand-over within a rank (the turn of a V) and needs no permute.

    Args:
        kind: "F" for activations, "B" for cotangents.
        shift: destination minus source, modulo the number of ranks.
        pairs: (source, destination) of every rank that ever sends, as `lax.ppermute` takes them.
    """

    kind: str
    shift: int
    pairs: tuple[tuple[int, int], ...]

    @property
    def name(self) -> str:
        """`F+1`: its kind and its shift."""
        return f"{self.kind}+{self.shift}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticks:
    """A table in lockstep; a static leaf.

    Args:
        table: the table.
        form: "fused" or "unit".
        ticks: the tick of each operation, numbered as in `build_graph(table)`.
        num_ticks: how many ticks there are.
        channels: the permutes the placement needs.
        sends: per channel, for every tick whether some rank sends.
    """

    table: Table
    form: str
    ticks: tuple[int, ...]
    num_ticks: int
    channels: tuple[Channel, ...]
    sends: tuple[tuple[bool, ...], ...]


def channels_of(placement: Placement) -> tuple[Channel, ...]:
    """The distinct hops between consecutive virtual stages, forwards and then backwards."""
    pairs: dict[tuple[str, int], set[tuple[int, int]]] = {}
    for here, there in zip(placement.ranks, placement.ranks[1:]):
        pairs.setdefault(("F", (there - here) % placement.num_ranks), set()).add((here, there))
        pairs.setdefault(("B", (here - there) % placement.num_ranks), set()).add((there, here))
    ordered = sorted(pairs.items(), key=lambda item: (item[0][0] != "F", item[0][1]))
    return tuple(Channel(kind=kind, shift=shift, pairs=tuple(sorted(hops))) for (kind, shift), hops in ordered)


def channel_index(channels: tuple[Channel, ...], placement: Placement, *, kind: str, stage: int) -> int | None:
    """Which channel carries what `kind` at a virtual stage produces; None where the model ends."""
    step = 1 if kind == FORWARD else -1
    if kind == WEIGHT or not 0 <= stage + step < len(placement.ranks):
        return None
    shift = (placement.ranks[stage + step] - placement.ranks[stage]) % placement.num_ranks
    wanted = (FORWARD if kind == FORWARD else "B", shift)
    return next(number for number, channel in enumerate(channels) if (channel.kind, channel.shift) == wanted)


def assign_ticks(table: Table, *, form: str) -> Ticks:
    """The earliest tick of every action in one of the two forms.

    Raises:
        ShardingError: an unknown form, or a table that is not legal.
    """
    graph = build_graph(table)
    if not graph.complete:
        raise ShardingError(f"schedule {table.name!r} is not legal", fix="verify(table) says what is wrong")
    if form not in (FUSED, UNIT):
        raise ShardingError(f"tick form {form!r} is unknown", fix="fused or unit")
    ticks = _unit(graph) if form == UNIT else _fused(graph)
    num_ticks, placement = max(ticks) + 1, table.placement
    channels = channels_of(placement)
    sends = [[False] * num_ticks for _ in channels]
    for index, (kind, stage, _) in enumerate(graph.keys):
        number = channel_index(channels, placement, kind=kind, stage=stage)
        if number is not None:
            sends[number][ticks[index]] = True
    return Ticks(
        table=table,
        form=form,
        ticks=tuple(ticks),
        num_ticks=num_ticks,
        channels=channels,
        sends=tuple(map(tuple, sends)),
    )


def choose_ticks(
    table: Table,
    costs: Costs,
    *,
    form: str | None = None,
    idle: str = SKIP,
    max_activations: float | None = None,
) -> Ticks:
    """The form that is faster under `costs`; where equal, with fewer live activations, then with fewer ticks.

    `form` leaves no choice but that one.

    Raises:
        ShardingError: no form fits `max_activations`, or an unknown form.
    """
    graph, times = build_graph(table), costs.times(table.placement)
    found = []
    for candidate in (UNIT, FUSED) if form is None else (form,):
        ticks = assign_ticks(table, form=candidate)
        order = tick_order(graph, ticks)
        peak = max(live_activations(graph, times, order=order))
        found.append((max(end for _, end in tick_spans(ticks, graph, times=times, idle=idle)), peak, candidate, ticks))
    limit = None if max_activations is None else max_activations * times.size_scale
    fits = [choice for choice in found if limit is None or choice[1] <= limit]
    if not fits:
        needs = " and ".join(f"{form} ticks {peak / times.size_scale:g}" for _, peak, form, _ in found)
        raise ShardingError(
            f"schedule {table.name!r} needs {needs} live activations, more than max_activations={max_activations:g}",
            fix=f"max_activations={min(peak for _, peak, _, _ in found) / times.size_scale:g}, or synthesize one",
        )
    return min(fits, key=lambda choice: (*choice[:2], choice[3].num_ticks))[3]


def tick_order(graph: Graph, ticks: Ticks) -> list[list[int]]:
    """Each rank's operations in the order in which the ticks run them."""
    place = [(ticks.ticks[index], IN_TICK[key[0]]) for index, key in enumerate(graph.keys)]
    return [sorted(graph.row(rank), key=place.__getitem__) for rank in range(ticks.table.num_ranks)]


def live_activations(graph: Graph, times: Times, *, order: list[list[int]]) -> list[int]:
    """Per rank the most that is alive at once: activations from F to B or I, then the stash until W."""
    peaks = []
    for row in order:
        live = peak = 0
        for index in row:
            kind, stage, _ = graph.keys[index]
            if kind == FORWARD:
                live += times.activation[stage]
                peak = max(peak, live)
            elif kind == WEIGHT:
                live -= times.stash[stage]
            else:
                live -= times.activation[stage] - (times.stash[stage] if kind == "I" else 0)
                peak = max(peak, live)
        peaks.append(peak)
    return peaks


def tick_spans(ticks: Ticks, graph: Graph, *, times: Times, idle: str = SKIP) -> list[tuple[int, int]]:
    """(start, end) of every operation in lockstep.

    A tick ends for all ranks at once: when the slowest rank is done and every permute of the tick has been
    received. A permute runs only in ticks where some rank sends. Under "mask" every rank does the work of every
    kind in every tick.
    """
    num_ranks, keys = ticks.table.num_ranks, graph.keys
    work: list[list[tuple[int, int]]] = [[] for _ in range(ticks.num_ticks)]
    for rank, row in enumerate(tick_order(graph, ticks)):
        for index in row:
            work[ticks.ticks[index]].append((rank, index))
    masked = _masked_work(graph, times, num_ranks=num_ranks) if idle == MASK else [[0, 0, 0]] * num_ranks
    spans: list[tuple[int, int]] = [(0, 0)] * len(keys)
    tick_start = 0
    for tick in range(ticks.num_ticks):
        done = (
            [tick_start + sum(masked[rank]) for rank in range(num_ranks)] if idle == MASK else [tick_start] * num_ranks
        )
        arrival = tick_start
        for rank, index in work[tick]:
            kind, stage, _ = keys[index]
            start = tick_start + sum(masked[rank][: IN_TICK[kind]]) if idle == MASK else done[rank]
            end = start + times.of(kind)[stage]
            spans[index] = (start, end)
            done[rank] = max(done[rank], end)
            if sends_message(ticks.table.placement, kind=kind, stage=stage):
                arrival = max(arrival, done[rank] + times.link)
        tick_start = max(arrival, *done)
    return spans


def sends_message(placement: Placement, *, kind: str, stage: int) -> bool:
    """Whether another rank waits for what this kind of action produces at a virtual stage."""
    there = stage + (1 if kind == FORWARD else -1)
    return kind != WEIGHT and 0 <= there < len(placement.ranks) and placement.ranks[there] != placement.ranks[stage]


def _masked_work(graph: Graph, times: Times, *, num_ranks: int) -> list[list[int]]:
    """What one masked tick costs each rank, per place in the tick: the dearest chunk of every kind it has."""
    dearest = [[0, 0, 0] for _ in range(num_ranks)]
    for rank, (kind, stage, _) in zip(graph.ranks, graph.keys):
        place = IN_TICK[kind]
        dearest[rank][place] = max(dearest[rank][place], times.of(kind)[stage])
    return dearest


def _unit(graph: Graph) -> list[int]:
    ticks = [0] * len(graph.keys)
    for index in graph.order:
        first = ticks[index - 1] + 1 if index > graph.starts[graph.ranks[index]] else 0
        ticks[index] = max([first, *(ticks[need] + 1 for need in graph.needs[index])])
    return ticks


def _fused(graph: Graph) -> list[int]:
    ticks = [0] * len(graph.keys)
    last = [[-1, -1, -1] for _ in graph.starts[1:]]
    for index in graph.order:
        kind, stage, _ = graph.keys[index]
        place, mine = IN_TICK[kind], last[graph.ranks[index]]
        tick = mine[place] + 1
        if place == 1:
            tick = max(tick, mine[0])
        for need in graph.needs[index]:
            same_stage = graph.keys[need][1] == stage
            tick = max(tick, ticks[need] + (0 if same_stage else 1))
        ticks[index] = mine[place] = tick
    return ticks
