"""Slots of ring buffers: values that live for some ticks, none sharing a slot with another while both live.

In: lifetimes in whole ticks, first and last included. Out: a slot per value, as few as possible: colouring an
interval graph from the left needs exactly as many colours as values ever live at once.

    assign_slots({"a": (0, 2), "b": (1, 3), "c": (3, 4)})    # {"a": 0, "b": 1, "c": 0}
"""

import heapq
from collections.abc import Hashable, Mapping
from typing import TypeVar

Value = TypeVar("Value", bound=Hashable)


def assign_slots(lifetimes: Mapping[Value, tuple[int, int]]) -> dict[Value, int]:
    """The lowest free slot for each value, in the order in which they begin to live.

    Source: left-edge algorithm, Hashimoto and Stevens, Wire routing by optimizing channel assignment within large
    apertures, DAC 1971.
    """
    slots, free, busy, highest = dict[Value, int](), list[int](), list[tuple[int, int]](), 0
    for value, (first, last) in sorted(lifetimes.items(), key=lambda item: item[1]):
        while busy and busy[0][0] < first:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            slot = heapq.heappop(free)
        else:
            slot, highest = highest, highest + 1
        slots[value] = slot
        heapq.heappush(busy, (last, slot))
    return slots


def most_alive(lifetimes: Mapping[Value, tuple[int, int]]) -> int:
    """How many values live in the fullest tick: no fewer slots can do."""
    changes = sorted(
        [(first, 1) for first, _ in lifetimes.values()] + [(last + 1, -1) for _, last in lifetimes.values()]
    )
    alive = most = 0
    for _, change in changes:
        alive += change
        most = max(most, alive)
    return most
