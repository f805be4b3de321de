"""V-shaped schedules from one repeated building block, squeezed until no rank waits without need.

In: how many time slots each hop of one microbatch's four passes takes (down F, up F, down I, up I), and a limit on
live chunk activations. Out: rows of actions. Longer hops hold activations longer and wait less: the hops set the
trade between memory and bubble.

Source: Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, section 3 (building blocks,
lifespans) and section 4 (squeezing, reordering). The construction here is our own list scheduling over the block.
"""

import functools
import itertools
from typing import Final

from shardlib.pipeline.placement import Placement
from shardlib.pipeline.table import FORWARD, INPUT, WEIGHT, Action, action

INTERVAL: Final = 6
"""Slots between two microbatches: F, I and W of two chunks, one slot each, keep a rank busy."""
PASSES: Final = ((FORWARD, 0), (FORWARD, 1), (INPUT, 1), (INPUT, 0))
LOOK_AHEAD: Final = 64


Offsets = tuple[tuple[int, ...], ...]


@functools.lru_cache(maxsize=512)
def block_offsets(stages: int, *, hops: tuple[int, int, int, int]) -> Offsets | None:
    """Per rank the slots of the four passes of microbatch 0, so that repeating them every 6 slots never collides.

    Args:
        stages: ranks of the V.
        hops: slots from one rank to the next, for each pass.

    Returns:
        The offsets with the shortest waits at the three turns; None if some rank collides whatever the waits.
    """
    best: tuple[int, Offsets] | None = None
    for waits in itertools.product(range(1, INTERVAL + 1), repeat=3):
        offsets, slot = [[0] * 4 for _ in range(stages)], 0
        for number, (hop, wait) in enumerate(zip(hops, (*waits, 0))):
            down = number % 2 == 0
            for step in range(stages):
                offsets[step if down else stages - 1 - step][number] = slot + step * hop
            slot += (stages - 1) * hop + wait
        if all(len({offset % INTERVAL for offset in row}) == 4 for row in offsets):
            total = sum(waits)
            best = (total, tuple(map(tuple, offsets))) if best is None or total < best[0] else best
    return best[1] if best else None


def block_rows(offsets: Offsets, *, microbatches: int) -> list[list[Action]]:
    """The block repeated every 6 slots; each W takes the first free slot after its I."""
    rows = []
    for row_offsets in offsets:
        at = {
            offset + INTERVAL * microbatch: action(kind, microbatch, chunk=chunk)
            for microbatch in range(microbatches)
            for offset, (kind, chunk) in zip(row_offsets, PASSES)
        }
        row, waiting, slot = list[Action](), list[Action](), 0
        while len(row) < len(at) * 3 // 2:
            cell = at.get(slot)
            if cell is None and waiting:
                done = waiting.pop(0)
                cell = action(WEIGHT, done.microbatch, chunk=done.chunk)
            elif cell is not None and cell.kind == INPUT:
                waiting.append(cell)
            if cell is not None:
                row.append(cell)
            slot += 1
        rows.append(row)
    return rows


def squeeze(rows: list[list[Action]], *, limit: int, strict: bool = True) -> list[tuple[Action, ...]] | None:
    """Runs the rows slot by slot; a rank that would wait does the next thing it can instead, if memory allows.

    A forward may overtake what stands before it only if the rows, run in their order from there, stay within
    `limit` live chunk activations (F to W): so overtaking never blocks what it overtook. A limit below what the
    block itself needs may still block everything: an error if `strict`, otherwise None.
    """
    placement = Placement.v_shape(len(rows))
    stage_of = [[placement.stage(rank, chunk=chunk) for chunk in (0, 1)] for rank in range(len(rows))]
    ends: dict[tuple[str, int, int], int] = {}
    left, result, live = [list(row) for row in rows], [list[Action]() for _ in rows], [0] * len(rows)
    slot = 0
    while any(left):
        started = []
        for rank, row in enumerate(left):
            pick = _next_action(row, stage_of[rank], ends=ends, live=live[rank], limit=limit)
            if pick is not None:
                cell = row.pop(pick)
                live[rank] += _change(cell)
                result[rank].append(cell)
                started.append((cell.kind, stage_of[rank][cell.chunk], cell.microbatch))
        if not started and not strict:
            return None
        assert started, f"no rank can go on at slot {slot}"
        ends.update(dict.fromkeys(started, slot + 1))
        slot += 1
    return [tuple(row) for row in result]


def _next_action(
    row: list[Action], stages: list[int], *, ends: dict[tuple[str, int, int], int], live: int, limit: int
) -> int | None:
    """The first of the row that can run now: the next of its kind and chunk, its inputs there, memory for it."""
    last = stages[0] + stages[1]
    seen, highest = set[tuple[str, int]](), live
    for position, cell in enumerate(row[:LOOK_AHEAD]):
        if (cell.kind, cell.chunk) not in seen:
            seen.add((cell.kind, cell.chunk))
            stage = stages[cell.chunk]
            ready = {
                FORWARD: stage == 0 or (FORWARD, stage - 1, cell.microbatch) in ends,
                INPUT: (FORWARD, stage, cell.microbatch) in ends
                and (stage == last or (INPUT, stage + 1, cell.microbatch) in ends),
                WEIGHT: (INPUT, stage, cell.microbatch) in ends,
            }[cell.kind]
            if ready and (cell.kind != FORWARD or highest < limit):
                return position
        live += _change(cell)
        highest = max(highest, live)
    return None


def _change(cell: Action) -> int:
    return {FORWARD: 1, INPUT: 0, WEIGHT: -1}[cell.kind]
