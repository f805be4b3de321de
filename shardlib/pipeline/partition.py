"""Which layers run on which virtual stage, and in which order a rank stores them. Imports no JAX.

In: a number of layers, a placement, costs of a layer, of what comes before and after. Out: `Partition`, with the rows
of stored parameters.

    Partition.balanced(7, Placement.loop(4), head=1.3).counts    # (2, 2, 2, 1)
"""

from dataclasses import dataclass
from fractions import Fraction

from meshes.errors import ShardingError
from shardlib.pipeline.placement import Placement

NO_LAYER = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """L layers over virtual stages, each layer once and in order; a static leaf.

    Args:
        placement: which rank holds which virtual stage.
        counts: layers of each virtual stage, at least one.

    Raises:
        ShardingError: a virtual stage without layers.
    """

    placement: Placement
    counts: tuple[int, ...]

    def __post_init__(self):
        stages = len(self.placement.ranks)
        if len(self.counts) != stages or min(self.counts) < 1:
            raise ShardingError(
                f"layers per virtual stage {self.counts}: there are {stages} virtual stages, each with at least one "
                "layer",
                fix=f"name {stages} positive counts",
            )

    @classmethod
    def even(cls, num_layers: int, placement: Placement) -> "Partition":
        """Equal counts, or counts that differ by one where L is no multiple: the first stages get the extra ones."""
        _check(num_layers, placement)
        stages = len(placement.ranks)
        base, extra = divmod(num_layers, stages)
        return cls(placement=placement, counts=tuple(base + (stage < extra) for stage in range(stages)))

    @classmethod
    def balanced(cls, num_layers: int, placement: Placement, *, embedding: float = 0, head: float = 0) -> "Partition":
        """Counts that make the dearest rank as cheap as possible; among those, the fewest layers on any stage.

        Args:
            num_layers: L.
            placement: which rank holds which virtual stage.
            embedding, head: what the first and the last virtual stage do besides, in layers.
        """
        _check(num_layers, placement)
        ranks, stages = placement.ranks, len(placement.ranks)
        counts = [1] * stages
        load = [Fraction(placement.num_chunks)] * placement.num_ranks
        load[ranks[0]] += Fraction(embedding)
        load[ranks[-1]] += Fraction(head)
        for _ in range(num_layers - stages):
            # The cheapest rank takes the next layer, on its smallest stage; earlier stages first.
            stage = min(range(stages), key=lambda s: (load[ranks[s]], counts[s], s))
            counts[stage] += 1
            load[ranks[stage]] += 1
        return cls(placement=placement, counts=tuple(counts))

    @property
    def num_layers(self) -> int:
        """L."""
        return sum(self.counts)

    @property
    def most(self) -> int:
        """Layers of the largest virtual stage: rows that every stage is stored with."""
        return max(self.counts)

    @property
    def is_even(self) -> bool:
        """Whether all virtual stages have equally many layers."""
        return min(self.counts) == self.most

    @property
    def starts(self) -> tuple[int, ...]:
        """The first layer of every virtual stage."""
        return tuple(sum(self.counts[:stage]) for stage in range(len(self.counts)))

    @property
    def rows(self) -> tuple[int, ...]:
        """The layer in every stored row, rank by rank, chunk by chunk; `NO_LAYER` where a stage is smaller."""
        placement, starts = self.placement, self.starts
        rows: list[int] = []
        for rank in range(placement.num_ranks):
            for chunk in range(placement.num_chunks):
                stage = placement.stage(rank, chunk=chunk)
                own = range(starts[stage], starts[stage] + self.counts[stage])
                rows += [*own, *[NO_LAYER] * (self.most - self.counts[stage])]
        return tuple(rows)

    @property
    def row_of(self) -> tuple[int, ...]:
        """The stored row of every layer."""
        where = {layer: row for row, layer in enumerate(self.rows) if layer != NO_LAYER}
        return tuple(where[layer] for layer in range(self.num_layers))

    @property
    def in_order(self) -> bool:
        """Whether stored rows are the layers in order, so that storing moves nothing."""
        return self.rows == tuple(range(self.num_layers))

    def loads(self, *, embedding: float = 0, head: float = 0) -> tuple[float, ...]:
        """What every rank does per microbatch, in layers."""
        load = [0.0] * self.placement.num_ranks
        for stage, count in enumerate(self.counts):
            load[self.placement.ranks[stage]] += count
        load[self.placement.ranks[0]] += embedding
        load[self.placement.ranks[-1]] += head
        return tuple(load)


def _check(num_layers: int, placement: Placement) -> None:
    stages = len(placement.ranks)
    if num_layers < stages:
        chunks = "" if placement.num_chunks == 1 else f" x {placement.num_chunks} chunks"
        raise ShardingError(
            f"{num_layers} layers cannot fill {placement.num_ranks} stages{chunks}: every stage needs a layer",
            fix=f"use stage={_largest_divisor(num_layers, placement)}"
            + (", or fewer chunks" if placement.num_chunks > 1 else ", or a model with more layers"),
        )


def _largest_divisor(num_layers: int, placement: Placement) -> int:
    return max(s for s in range(1, placement.num_ranks + 1) if s * placement.num_chunks <= num_layers or s == 1)
