"""Inputs that the stages hold in parts: every microbatch goes to the stage that reads it, one tick ahead.

In: a `Lowered`, and which leaves of a microbatch the first and the last virtual stage read. Out: `Feeds`: whole numbers
for every tick, and what a tick does with them. Rank r holds microbatches r*share to (r+1)*share-1.

    feeds = feeds_of(lowered, {0: frames}, first=(0,), last=(), again=(0,), specs=None)
    arrived = feeds.start(pieces)                       # before the ticks
    arrived = feeds.fetched(pieces, now, axis="stage")  # in each: what the next one reads
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from shardlib.pipeline.lowered import NOTHING, Lowered
from shardlib.pipeline.rings import Leaves, Packing, read
from shardlib.pipeline.table import BACKWARD, FORWARD

INPUT_SCOPE: Final = "pipeline_input"
"""The scope that permutes of inputs are named by in a compiled program."""

FIRST: Final = "F.first"
LAST: Final = "F.last"
AGAIN: Final = "B.first"
"""Who reads: the embedding, the head, and the embedding's backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """What one action of one virtual stage reads of inputs held in parts; a static leaf.

    Args:
        reader: `F.first`, `F.last` or `B.first`.
        rank: which reads.
        leaves: positions in a microbatch.
        packing: how they travel.
        due: per tick, the microbatch that the rank reads in it, or -1.
    """

    reader: str
    rank: int
    leaves: tuple[int, ...]
    packing: Packing
    due: tuple[int, ...]

    @property
    def next_due(self) -> tuple[int, ...]:
        """Per tick, the microbatch that must be there when it ends, or -1."""
        return (*self.due[1:], NOTHING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Feeds:
    """All of them; a static leaf.

    Args:
        feeds: one per reader that has something to read.
        leaves: positions in a microbatch of everything that is held in parts.
        num_ranks: how many ranks hold a part.
        share: microbatches of a part.
    """

    feeds: tuple[Feed, ...]
    leaves: tuple[int, ...]
    num_ranks: int
    share: int

    def away(self, feed: Feed) -> tuple[int, ...]:
        """Per tick, from how many ranks further on the next microbatch comes; 0 where it is here, or none is due."""
        return tuple(0 if m == NOTHING else (m // self.share - feed.rank) % self.num_ranks for m in feed.next_due)

    def starts_elsewhere(self, feed: Feed) -> bool:
        """Whether the first tick reads what another rank holds: nothing can have brought it."""
        return feed.due[0] != NOTHING and feed.due[0] // self.share != feed.rank

    def serve(self, reader: str | None, reads: Collection[int]) -> bool:
        """Whether a reader gets all that it reads of what is held in parts; the layers (None) get nothing."""
        given = {leaf for feed in self.feeds if feed.reader == reader for leaf in feed.leaves}
        return set(reads) & set(self.leaves) <= given

    def arrays(self) -> dict[str, Any]:
        """`"F.first.away"` and `"F.first.slot"`, int32 [ticks], and the same for other readers."""
        grids: dict[str, Any] = {}
        for feed in self.feeds:
            grids[f"{feed.reader}.away"] = np.asarray(self.away(feed), np.int32)
            grids[f"{feed.reader}.slot"] = np.asarray([max(m, 0) % self.share for m in feed.next_due], np.int32)
        return grids

    def start(self, pieces: Leaves) -> dict[str, Leaves]:
        """What the first tick reads, by reader.

        Args:
            pieces: [share, ...] each where held in parts.
        """
        return {feed.reader: self._own(feed, pieces, max(feed.due[0], 0) % self.share) for feed in self.feeds}

    def fetched(self, pieces: Leaves, now: Mapping[str, Any], *, axis: str) -> dict[str, Leaves]:
        """What the next tick reads, by reader: right on the rank that reads, and anything on the others.

        Inside a region manual over `axis`. It waits for nothing that the tick computes.
        """
        return {feed.reader: self._fetched(feed, pieces, now, axis) for feed in self.feeds}

    def _fetched(self, feed: Feed, pieces: Leaves, now: Mapping[str, Any], axis: str) -> Leaves:
        def sent_from(away: int) -> Callable[[Leaves], Leaves]:
            pairs = [((feed.rank + away) % self.num_ranks, feed.rank)]

            def permuted(packed: Leaves) -> Leaves:
                with jax.named_scope(INPUT_SCOPE):
                    return [jax.lax.ppermute(leaf, axis, pairs) for leaf in packed]

            return permuted

        packed = feed.packing.pack(self._own(feed, pieces, now[f"{feed.reader}.slot"]))
        # Every rank takes the same branch: it depends on the tick alone.
        branches = [lambda packed: packed, *map(sent_from, range(1, self.num_ranks))]
        packed = jax.lax.switch(now[f"{feed.reader}.away"], branches, packed)
        return feed.packing.placed(feed.packing.unpack(packed))

    def _own(self, feed: Feed, pieces: Leaves, slot: Any) -> Leaves:
        return feed.packing.placed(read([pieces[leaf] for leaf in feed.leaves], jnp.int32(slot)))

    def completed(self, piece: Leaves, arrived: Mapping[str, Any], reader: str | None) -> Leaves:
        """A microbatch with what has arrived for a reader; zeros for all else that is held in parts."""
        given = {
            leaf: value
            for feed in self.feeds
            if feed.reader == reader
            for leaf, value in zip(feed.leaves, arrived[feed.reader], strict=True)
        }
        return [
            given.get(i, jnp.zeros(leaf.shape, leaf.dtype)) if i in self.leaves else leaf
            for i, leaf in enumerate(piece)
        ]


NO_FEEDS: Final = Feeds(feeds=(), leaves=(), num_ranks=1, share=1)


def feeds_of(
    lowered: Lowered,
    values: Mapping[int, Any],
    *,
    first: Sequence[int],
    last: Sequence[int],
    again: Sequence[int],
    specs: Mapping[int, P] | None,
) -> Feeds:
    """Who brings what to whom, in every tick of a schedule whose microbatches its ranks divide equally.

    Args:
        lowered: the schedule.
        values: one microbatch of everything held in parts, abstract, by position.
        first, last: positions that F of the first and of the last virtual stage reads.
        again: positions that B of the first one reads.
        specs: where each lies over mesh axes that the compiler manages; None where there are none.
    """
    placement, num_stages = lowered.table.placement, len(lowered.table.placement.ranks)
    readers = ((FIRST, FORWARD, 0, first), (LAST, FORWARD, num_stages - 1, last), (AGAIN, BACKWARD, 0, again))
    feeds = [
        Feed(
            reader=reader,
            rank=placement.ranks[stage],
            leaves=tuple(leaves),
            packing=Packing(
                value=tuple(values[leaf] for leaf in leaves),
                specs=None if specs is None else tuple(specs[leaf] for leaf in leaves),
            ),
            due=_due(lowered, kind, stage),
        )
        for reader, kind, stage, leaves in readers
        if leaves
    ]
    return Feeds(
        feeds=tuple(feeds),
        leaves=tuple(values),
        num_ranks=placement.num_ranks,
        share=lowered.table.num_microbatches // placement.num_ranks,
    )


def _due(lowered: Lowered, kind: str, stage: int) -> tuple[int, ...]:
    """Per tick, the microbatch of this kind of action at a virtual stage, or -1."""
    placement = lowered.table.placement
    rank, chunk = placement.ranks[stage], placement.chunk(stage)
    (work,) = (work for work in lowered.work if work.kind == kind)
    cells = zip(work.microbatch, work.chunk, strict=True)
    return tuple(m[rank] if c[rank] == chunk else NOTHING for m, c in cells)
