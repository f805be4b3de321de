"""Ticks of forward passes alone, for evaluation: any placement, any number of microbatches. Imports no JAX.

In: a placement and a number of microbatches. Out: `ForwardOnly`, with the arrays that the executor scans over.

    forward_only(Placement.loop(4), num_microbatches=8).num_ticks    # 11
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardlib.pipeline.placement import Placement
from shardlib.pipeline.slots import assign_slots, most_alive
from shardlib.pipeline.ticks import Channel, channel_index, channels_of

NOTHING = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOnly:
    """Which rank runs which stage of which microbatch in every tick; a static leaf.

    Args:
        placement: which rank holds which virtual stage.
        num_microbatches: m.
        ticks: `ticks[stage][microbatch]`.
    """

    placement: Placement
    num_microbatches: int
    ticks: tuple[tuple[int, ...], ...]

    @property
    def num_ticks(self) -> int:
        """The length of the scan."""
        return 1 + max(max(row) for row in self.ticks)

    @property
    def channels(self) -> tuple[Channel, ...]:
        """The permutes."""
        return tuple(channel for channel in channels_of(self.placement) if channel.kind == "F")

    @property
    def num_slots(self) -> int:
        """Slots of the ring of inputs."""
        return max((most_alive(spans) for spans in self._spans().values()), default=0)

    def _spans(self) -> dict[int, dict[tuple[int, int], tuple[int, int]]]:
        """By rank, the ticks in which the input of (stage, microbatch) waits."""
        spans: dict[int, dict[tuple[int, int], tuple[int, int]]] = {rank: {} for rank in self.placement.ranks}
        for stage in range(1, len(self.placement.ranks)):
            for microbatch in range(self.num_microbatches):
                span = (self.ticks[stage - 1][microbatch] + 1, self.ticks[stage][microbatch])
                spans[self.placement.ranks[stage]][stage, microbatch] = span
        return spans

    def arrays(self) -> dict[str, NDArray[np.int32]]:
        """As `Lowered.arrays`: "F.microbatch", "F.chunk", "input.read.F", "input.write.F+1", "send.F+1" and so on."""
        shape, placement = (self.num_ticks, self.placement.num_ranks), self.placement
        empty = lambda: np.full(shape, NOTHING, np.int32)  # noqa: E731
        found: dict[str, NDArray[np.int32]] = {name: empty() for name in ("F.microbatch", "F.chunk", "input.read.F")}
        for channel in self.channels:
            found[f"input.write.{channel.name}"] = empty()
            found[f"send.{channel.name}"] = np.zeros(self.num_ticks, np.int32)
        slots = {value: slot for spans in self._spans().values() for value, slot in assign_slots(spans).items()}
        for stage, rank in enumerate(placement.ranks):
            for microbatch, tick in enumerate(self.ticks[stage]):
                found["F.microbatch"][tick, rank] = microbatch
                found["F.chunk"][tick, rank] = placement.chunk(stage)
                if stage:
                    index = channel_index(self.channels, placement, kind="F", stage=stage - 1)
                    assert index is not None
                    name, sent = self.channels[index].name, self.ticks[stage - 1][microbatch]
                    found["input.read.F"][tick, rank] = slots[stage, microbatch]
                    found[f"input.write.{name}"][sent, rank] = slots[stage, microbatch]
                    found[f"send.{name}"][sent] = 1
        return found


def forward_only(placement: Placement, *, num_microbatches: int) -> ForwardOnly:
    """In every tick each rank runs, of what is there, the furthest stage of the earliest microbatch."""
    stages = len(placement.ranks)
    ticks = [[NOTHING] * num_microbatches for _ in range(stages)]
    left, tick = stages * num_microbatches, 0
    while left:
        busy: set[int] = set()
        for stage in reversed(range(stages)):
            rank = placement.ranks[stage]
            ready = (
                m
                for m in range(num_microbatches)
                if ticks[stage][m] == NOTHING and (stage == 0 or NOTHING < ticks[stage - 1][m] < tick)
            )
            microbatch = None if rank in busy else next(ready, None)
            if microbatch is not None:
                ticks[stage][microbatch] = tick
                busy.add(rank)
                left -= 1
        tick += 1
    return ForwardOnly(placement=placement, num_microbatches=num_microbatches, ticks=tuple(tuple(row) for row in ticks))
