"""From a table to ticks, messages and slots: `lower`.

In: a legal `Table` and `Costs`. Out: a proved `Lowered`, with buffers as small as its ticks allow.

    lower(build("1f1b", stages=4, microbatches=8)).buffer("saved_input").size    # 2p-1 = 7
"""

from collections.abc import Callable, Iterator

from shardlib.pipeline.costs import Costs
from shardlib.pipeline.graph import Graph
from shardlib.pipeline.lowered import NOTHING, READERS, Access, Buffer, Grid, Lowered, Work, values_written
from shardlib.pipeline.prove import check
from shardlib.pipeline.slots import assign_slots, most_alive
from shardlib.pipeline.table import INPUT, KINDS, Table
from shardlib.pipeline.ticks import SKIP, Ticks, channel_index, choose_ticks
from shardlib.pipeline.verify import legal_graph


def lower(
    table: Table,
    costs: Costs | None = None,
    *,
    form: str | None = None,
    idle: str = SKIP,
    max_activations: float | None = None,
) -> Lowered:
    """Fixes ticks, messages and slots of a table, and proves them.

    Args:
        table: any legal table.
        costs: they choose between fused and unit ticks; by default F=1, B=2, W=1.
        form: "fused" or "unit" ticks, whatever the costs say.
        idle: what idle slots will cost: nothing ("skip") or everything ("mask").
        max_activations: only ticks with at most so many live activations per rank.

    Returns:
        The lowered table.

    Raises:
        ShardingError: the table is not legal, or no form fits the limit.

    Example:
        >>> lowered = lower(Table.parse("F0 F1 B0 B1"))
        >>> lowered.num_ticks, lowered.buffer("residual_input").size
        (3, 2)
    """
    graph = legal_graph(table)
    ticks = choose_ticks(table, costs or Costs(), form=form, idle=idle, max_activations=max_activations)
    kinds = [kind for kind in KINDS if any(key[0] == kind for key in graph.keys)]
    work = tuple(_work(kind, graph, ticks=ticks) for kind in kinds)
    buffers = tuple(
        _buffer(name, graph, ticks=ticks, kinds=kinds) for name in READERS if name != "stash" or INPUT in kinds
    )
    lowered = Lowered(ticks=ticks, work=work, buffers=buffers)
    check(lowered)
    return lowered


def _grid(ticks: Ticks, entries: Iterator[tuple[int, int, int]]) -> Grid:
    """(tick, rank, number) triples as a grid, -1 elsewhere."""
    rows = [[NOTHING] * ticks.table.num_ranks for _ in range(ticks.num_ticks)]
    for tick, rank, number in entries:
        assert rows[tick][rank] == NOTHING, f"tick {tick}, rank {rank}: two entries"
        rows[tick][rank] = number
    return tuple(map(tuple, rows))


def _work(kind: str, graph: Graph, *, ticks: Ticks) -> Work:
    chunk_of = [ticks.table.placement.chunk(stage) for stage in range(len(ticks.table.placement.ranks))]

    def entries(number: Callable[[int, int], int]) -> Grid:
        found = (
            (ticks.ticks[index], graph.ranks[index], number(stage, microbatch))
            for index, (this, stage, microbatch) in enumerate(graph.keys)
            if this == kind
        )
        return _grid(ticks, found)

    return Work(
        kind=kind,
        microbatch=entries(lambda stage, microbatch: microbatch),
        chunk=entries(lambda stage, microbatch: chunk_of[stage]),
    )


def _buffer(name: str, graph: Graph, *, ticks: Ticks, kinds: list[str]) -> Buffer:
    """Lifetimes of a buffer's values, their slots, and the grids of who writes and reads them."""
    placement, last = ticks.table.placement, len(ticks.table.placement.ranks) - 1
    at = {key: ticks.ticks[index] for index, key in enumerate(graph.keys)}
    writers: dict[tuple[int, int], tuple[str, int, int]] = {}
    lifetimes: dict[tuple[int, int], tuple[int, int]] = {}
    for kind, stage, microbatch in graph.keys:
        for target, arrives in values_written(name, kind, stage=stage, last=last):
            tick, value = at[kind, stage, microbatch], (target, microbatch)
            number = channel_index(ticks.channels, placement, kind=kind, stage=stage) if arrives else None
            by = kind if number is None else ticks.channels[number].name
            writers[value] = (by, tick, placement.ranks[target])
            reads = [at[reader, *value] for reader in READERS[name] if (reader, *value) in at]
            lifetimes[value] = (tick + arrives, max(reads))
    slots, sizes = dict[tuple[int, int], int](), list[int]()
    for rank in range(placement.num_ranks):
        mine = {value: span for value, span in lifetimes.items() if placement.ranks[value[0]] == rank}
        slots |= assign_slots(mine)
        sizes.append(most_alive(mine))
    writes = [
        Access(by=by, slots=_grid(ticks, ((w[1], w[2], slots[value]) for value, w in writers.items() if w[0] == by)))
        for by in dict.fromkeys(by for by, _, _ in writers.values())
    ]
    reads = list[Access]()
    for kind in (kind for kind in READERS[name] if kind in kinds):
        # What an action writes itself it need not read back: the first stage's F makes its own input.
        found = {value: slot for value, slot in slots.items() if (kind, *value) in at and writers[value][0] != kind}
        cells = ((at[kind, *value], placement.ranks[value[0]], slot) for value, slot in found.items())
        reads.append(Access(by=kind, slots=_grid(ticks, cells)))
    return Buffer(name=name, size=max(sizes, default=0), sizes=tuple(sizes), writes=tuple(writes), reads=tuple(reads))
