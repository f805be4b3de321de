"""Tables for `synthesize` to start from: the catalogue, and the families behind it at other limits.

In: a size and a limit on live activations. Out: (origin, table) pairs, legal whatever the limit; not all fit it.

    for origin, table in families(stages=4, microbatches=8, chunks=2, max_activations=3): ...
"""

from collections.abc import Iterator
from typing import Final

from shardlib.pipeline.placement import Placement
from shardlib.pipeline.schedules import ALL, split_backward
from shardlib.pipeline.schedules.building_block import block_offsets, block_rows, squeeze
from shardlib.pipeline.table import FORWARD, INPUT, WEIGHT, Action, Table, action

NAME: Final = "synthesized"
MOST_CHUNKS: Final = 4
HOPS: Final = ((1, 1, 1, 1), (2, 1, 2, 1), (2, 2, 2, 2), (3, 1, 3, 1), (1, 3, 1, 3), (2, 1, 2, 2))
"""Building blocks to try, from quick passes (little memory) to slow ones (little waiting)."""


def catalogue(*, stages: int, microbatches: int, chunks: int | None) -> Iterator[tuple[str, Table]]:
    """Every schedule with every number of chunks it takes, up to `MOST_CHUNKS`; or with the chunks asked for."""
    for schedule in ALL:
        for count in range(1, MOST_CHUNKS + 1) if chunks is None else (chunks,):
            if schedule.why_not(stages=stages, chunks=count, microbatches=microbatches) is None:
                yield schedule.name, schedule.table(stages=stages, chunks=count, microbatches=microbatches)


def one_by_one(placement: Placement, *, microbatches: int) -> Table:
    """Every microbatch through the whole model and back before the next: slow, and no order holds less."""
    rows: list[list[Action]] = [[] for _ in range(placement.num_ranks)]
    for microbatch in range(microbatches):
        for stage, rank in enumerate(placement.ranks):
            rows[rank].append(action(FORWARD, microbatch, chunk=placement.chunk(stage)))
        for stage, rank in reversed(list(enumerate(placement.ranks))):
            rows[rank] += [action(kind, microbatch, chunk=placement.chunk(stage)) for kind in (INPUT, WEIGHT)]
    return Table(name=NAME, placement=placement, rows=tuple(map(tuple, rows)))


def families(
    *, stages: int, microbatches: int, chunks: int, max_activations: float | None
) -> Iterator[tuple[str, Table]]:
    """The constructions behind the catalogue at other limits, the highest that may fit first."""
    most = stages + 1 if max_activations is None else min(int(max_activations) + 1, 3 * stages)
    if chunks == 1:
        for limit in range(min(microbatches, 2 * most), 0, -1):
            for slope in (1, 2, 3):
                warm_ups = [min(limit, 1 + slope * (stages - 1 - rank)) for rank in range(stages)]
                rows = split_backward(name=NAME, warm_ups=warm_ups, limits=[limit] * stages, microbatches=microbatches)
                yield f"split backward, {limit} alive", rows
    if chunks == 2:
        top = 2 * min(microbatches, most)
        for limit in sorted({top, top - 1, top - 2, 3 * top // 4, top // 2, 2}, reverse=True):
            for hops in HOPS:
                offsets = block_offsets(stages, hops=hops)
                if offsets is None:
                    continue
                squeezed = squeeze(block_rows(offsets, microbatches=microbatches), limit=limit, strict=False)
                if squeezed is not None:
                    table = Table(name=NAME, placement=Placement.v_shape(stages), rows=tuple(squeezed))
                    yield f"V block {'-'.join(map(str, hops))}, {limit / 2:g} alive", table
