"""Which rank holds which part of the model: `Placement`, beside every schedule table.

In: the rank of each virtual stage, in model order. Out: lookups both ways between a virtual stage and a
(rank, chunk), and the text forms `loop`, `v` and `0-1-1-0`.

    Placement.v_shape(4).stage(0, chunk=1)    # 7: rank 0 holds the first and the last part
"""

import functools
from dataclasses import dataclass

from meshes.errors import ShardingError, nearest

LOOP, V_SHAPE = "loop", "v"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The rank of each virtual stage, in model order; a static leaf.

    A rank's chunks are numbered in model order: chunk 0 is the first virtual stage it holds.

    Args:
        ranks: `ranks[s]` is the rank that holds virtual stage s; every rank holds equally many.

    Raises:
        ShardingError: a rank is missing or holds more virtual stages than another.

    Example:
        >>> str(Placement(ranks=(0, 1, 1, 0)))
        'v'
    """

    ranks: tuple[int, ...]

    def __post_init__(self):
        if not self.ranks:
            raise ShardingError("a placement needs at least one virtual stage", fix="placement=loop")
        num_ranks = max(self.ranks) + 1
        counts = [self.ranks.count(rank) for rank in range(num_ranks)]
        if min(self.ranks) < 0 or len(set(counts)) != 1:
            held = ", ".join(f"rank {rank} holds {count}" for rank, count in enumerate(counts))
            raise ShardingError(
                f"placement {'-'.join(map(str, self.ranks))}: every rank must hold equally many virtual stages; {held}",
                fix=f"placement=loop is {'-'.join(map(str, range(num_ranks)))}, once per chunk",
            )

    @classmethod
    def loop(cls, stages: int, *, chunks: int = 1) -> "Placement":
        """Virtual stage s on rank s mod p: with one chunk the plain pipeline, with more the interleaved one."""
        return cls(ranks=tuple(range(stages)) * chunks)

    @classmethod
    def v_shape(cls, stages: int, *, chunks: int = 2) -> "Placement":
        """Down the ranks and back up again, so that the first and the last virtual stage share rank 0."""
        down = tuple(range(stages))
        return cls(ranks=sum((down if chunk % 2 == 0 else down[::-1] for chunk in range(chunks)), ()))

    @classmethod
    def parse(cls, text: str, *, stages: int, chunks: int) -> "Placement":
        """`loop`, `v` or the ranks joined by dashes -> a placement of `stages` ranks with `chunks` chunks each.

        Raises:
            ShardingError: another word, or ranks that do not fit the size.
        """
        if text == LOOP:
            return cls.loop(stages, chunks=chunks)
        if text == V_SHAPE:
            return cls.v_shape(stages, chunks=chunks)
        if not all(part.isdecimal() for part in text.split("-")):
            close = nearest(text, (LOOP, V_SHAPE))
            raise ShardingError(
                f"placement {text!r} is unknown{close}", fix="placement=loop, v, or ranks as in 0-1-1-0"
            )
        placement = cls(ranks=tuple(int(part) for part in text.split("-")))
        if (placement.num_ranks, placement.num_chunks) != (stages, chunks):
            raise ShardingError(
                f"placement {text} has {placement.num_ranks} ranks with {placement.num_chunks} chunks each, "
                f"the table has {stages} rows and uses {chunks} chunks",
                fix="name one rank per virtual stage, in model order",
            )
        return placement

    def __str__(self) -> str:
        for name, same in ((LOOP, Placement.loop), (V_SHAPE, Placement.v_shape)):
            if self == same(self.num_ranks, chunks=self.num_chunks):
                return name
        return "-".join(map(str, self.ranks))

    @property
    def num_ranks(self) -> int:
        """How many ranks (pipeline stages in the sense of the mesh axis) there are."""
        return max(self.ranks) + 1

    @property
    def num_chunks(self) -> int:
        """How many virtual stages each rank holds."""
        return len(self.ranks) // self.num_ranks

    def stage(self, rank: int, *, chunk: int) -> int:
        """The virtual stage that `rank` holds as its `chunk`."""
        return stages_by_rank(self)[rank][chunk]

    def chunk(self, stage: int) -> int:
        """Which chunk of its rank virtual stage `stage` is."""
        return stages_by_rank(self)[self.ranks[stage]].index(stage)


@functools.lru_cache(maxsize=256)
def stages_by_rank(placement: Placement) -> tuple[tuple[int, ...], ...]:
    """`stages_by_rank(placement)[rank][chunk]` is a virtual stage: the inverse of `placement.ranks`."""
    held: list[list[int]] = [[] for _ in range(placement.num_ranks)]
    for stage, rank in enumerate(placement.ranks):
        held[rank].append(stage)
    return tuple(tuple(stages) for stages in held)
