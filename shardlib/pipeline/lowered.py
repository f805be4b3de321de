"""What one `lax.scan` executes: per tick and rank, what to do, what to send, which slot to use. Whole numbers only.

`lower` makes these values and `prove` checks them. In a tick a rank does F, then B or I, then W. At the end of a
tick messages arrive in the slots named for them; they can be read from the next tick on. -1 stands for nothing to
do and for no slot.

    lower(table).arrays()["F.microbatch"]    # int32, [ticks, ranks]
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardlib.pipeline.table import BACKWARD, FORWARD, INPUT, WEIGHT, Table
from shardlib.pipeline.ticks import Channel, Ticks

NOTHING: Final = -1
Grid = tuple[tuple[int, ...], ...]
"""`grid[tick][rank]`."""

READERS: Final = {
    "input": (FORWARD,),
    "saved_input": (FORWARD, BACKWARD, INPUT),
    "residual_input": (BACKWARD, INPUT),
    "residual_weight": (BACKWARD, WEIGHT),
    "cotangent": (BACKWARD, INPUT),
    "stash": (WEIGHT,),
}
"""Which kinds read each buffer; a value dies with its last reader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Which microbatch and chunk every rank does in every tick, for one kind of action; a static leaf."""

    kind: str
    microbatch: Grid
    chunk: Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Slots that one kind of action, or what arrives by one channel, reads or writes; a static leaf.

    Args:
        by: "F", "B", "I", "W", or a channel's name such as "F+1".
        slots: the slot, per tick and rank.
    """

    by: str
    slots: Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """One ring of slots on every rank; a static leaf.

    `input` holds a stage's input from its arrival to F; `saved_input` (for recomputation) keeps it until B or I,
    the first stage's own from F on; `residual_input` and `residual_weight` hold what F leaves for the two halves of
    the backward; `cotangent` holds what arrives for B or I, on the last stage from its F on; `stash` holds what I
    leaves for W.

    Args:
        name: one of those.
        size: slots, the same on every rank.
        sizes: what each rank needs of them.
        writes: who writes which slot.
        reads: who reads which slot.
    """

    name: str
    size: int
    sizes: tuple[int, ...]
    writes: tuple[Access, ...]
    reads: tuple[Access, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """A table as ticks, messages and slots; a static leaf.

    Args:
        ticks: which tick does what; its `channels` are the permutes, its `sends` the ticks that need them.
        work: one entry per kind that the table has, in the order in which a tick does them.
        buffers: the ring buffers; an executor uses those that its residual policy needs.
    """

    ticks: Ticks
    work: tuple[Work, ...]
    buffers: tuple[Buffer, ...]

    @property
    def table(self) -> Table:
        """The table this came from."""
        return self.ticks.table

    @property
    def num_ticks(self) -> int:
        """The length of the scan."""
        return self.ticks.num_ticks

    @property
    def channels(self) -> tuple[Channel, ...]:
        """The permutes; a shift of 0 is a hand-over within a rank."""
        return self.ticks.channels

    def buffer(self, name: str) -> Buffer:
        """The buffer of that name."""
        return next(buffer for buffer in self.buffers if buffer.name == name)

    def arrays(self) -> dict[str, NDArray[np.int32]]:
        """Everything as int32 arrays, ready to be scanned over.

        Returns:
            `"F.microbatch"`, `"F.chunk"` and the same for other kinds, `"input.write.F+1"`, `"input.read.F"` and the
            same for other buffers: shape [ticks, ranks]; `"send.F+1"`, 0 or 1: shape [ticks].
        """
        grids: dict[str, Grid | tuple[int, ...]] = {}
        for work in self.work:
            grids[f"{work.kind}.microbatch"], grids[f"{work.kind}.chunk"] = work.microbatch, work.chunk
        for buffer in self.buffers:
            for verb, accesses in (("write", buffer.writes), ("read", buffer.reads)):
                grids |= {f"{buffer.name}.{verb}.{access.by}": access.slots for access in accesses}
        for channel, sends in zip(self.ticks.channels, self.ticks.sends):
            grids[f"send.{channel.name}"] = tuple(map(int, sends))
        return {name: np.asarray(grid, dtype=np.int32) for name, grid in grids.items()}


def values_written(name: str, kind: str, *, stage: int, last: int) -> Iterator[tuple[int, bool]]:
    """What one action writes into a buffer: (virtual stage the value belongs to, whether it comes as a message).

    Args:
        name: the buffer.
        kind: the action's kind.
        stage: its virtual stage.
        last: the last virtual stage.
    """
    if name in ("input", "saved_input") and kind == FORWARD:
        if name == "saved_input" and stage == 0:
            yield 0, False
        if stage < last:
            yield stage + 1, True
    elif name == "cotangent":
        if kind in (BACKWARD, INPUT) and stage > 0:
            yield stage - 1, True
        if kind == FORWARD and stage == last:
            yield stage, False
    elif (name.startswith("residual") and kind == FORWARD) or (name == "stash" and kind == INPUT):
        yield stage, False
