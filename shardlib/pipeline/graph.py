"""What must happen before what: the one owner of the dependency rules between actions.

In: a `Table`. Out: a `Graph` of its actions as numbered operations, with their dependencies and one order in
which all of them can run; or, where the table is not legal, what is wrong with it (`verify` prints that).

F needs F one virtual stage earlier; B and I need their own F and the B or I one virtual stage later; W needs its I.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from shardlib.pipeline.placement import stages_by_rank
from shardlib.pipeline.table import BACKWARD, FORWARD, INPUT, WEIGHT, Table

Key = tuple[str, int, int]
"""(kind, virtual stage, microbatch)."""

PRODUCES_COTANGENT: Final = (BACKWARD, INPUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """The actions of a table, numbered rank after rank in the order of the rows; a static leaf.

    Args:
        keys: (kind, virtual stage, microbatch) of each operation.
        ranks: its rank.
        starts: the number of each rank's first operation, and one past the last operation at the end.
        needs: numbers of the operations that must have ended first, the previous one on the same rank left out.
        order: every operation once, each after what it needs; shorter than `keys` if the table deadlocks.
        missing: (operation, key) pairs: what an operation needs and no rank ever does.
    """

    keys: tuple[Key, ...]
    ranks: tuple[int, ...]
    starts: tuple[int, ...]
    needs: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]
    missing: tuple[tuple[int, Key], ...]

    def row(self, rank: int) -> range:
        """The numbers of one rank's operations, in their order."""
        return range(self.starts[rank], self.starts[rank + 1])

    @property
    def complete(self) -> bool:
        """Whether every operation can run."""
        return len(self.order) == len(self.keys) and not self.missing


def needed_keys(key: Key, *, num_stages: int) -> Iterator[tuple[Key, ...]]:
    """What an operation waits for: each item lists the keys that would do."""
    kind, stage, microbatch = key
    if kind == FORWARD:
        if stage > 0:
            yield ((FORWARD, stage - 1, microbatch),)
    elif kind == WEIGHT:
        yield ((INPUT, stage, microbatch),)
    else:
        yield ((FORWARD, stage, microbatch),)
        if stage < num_stages - 1:
            yield tuple((kind, stage + 1, microbatch) for kind in PRODUCES_COTANGENT)


def build_graph(table: Table) -> Graph:
    """Numbers a table's actions and finds an order in which they can run (Kahn's algorithm, rank by rank).

    Of an action that appears twice the first counts; `verify` refuses such tables.
    """
    by_rank, num_stages = stages_by_rank(table.placement), len(table.placement.ranks)
    keys, ranks, starts = list[Key](), list[int](), [0]
    for rank, row in enumerate(table.rows):
        held = by_rank[rank]
        for cell in row:
            # A chunk the rank does not hold gets a stage past the end: it exists, and nothing needs it.
            stage = held[cell.chunk] if cell.chunk < len(held) else num_stages + cell.chunk
            keys.append((cell.kind, stage, cell.microbatch))
        ranks += [rank] * len(row)
        starts.append(len(keys))
    number = dict[Key, int]()
    for index, key in enumerate(keys):
        number.setdefault(key, index)
    needs, missing = list[tuple[int, ...]](), list[tuple[int, Key]]()
    for index, key in enumerate(keys):
        found = list[int]()
        for choices in needed_keys(key, num_stages=num_stages):
            have = [number[choice] for choice in choices if choice in number]
            if have:
                found.append(have[0])
            elif key[1] < num_stages:
                missing.append((index, choices[0]))
        needs.append(tuple(found))
    return Graph(
        keys=tuple(keys),
        ranks=tuple(ranks),
        starts=tuple(starts),
        needs=tuple(needs),
        order=tuple(_run(needs, starts)),
        missing=tuple(missing),
    )


def _run(needs: list[tuple[int, ...]], starts: list[int]) -> list[int]:
    """Operations in an order that respects rows and needs; stops early when every rank waits for another."""
    heads, done, order = starts[:-1], [False] * len(needs), list[int]()
    waiting: dict[int, list[int]] = {}
    active = list(range(len(heads)))
    while active:
        rank = active.pop()
        index = heads[rank]
        while index < starts[rank + 1]:
            blocker = next((need for need in needs[index] if not done[need]), None)
            if blocker is not None:
                waiting.setdefault(blocker, []).append(rank)
                break
            done[index] = True
            order.append(index)
            active += waiting.pop(index, ())
            index += 1
        heads[rank] = index
    return order
