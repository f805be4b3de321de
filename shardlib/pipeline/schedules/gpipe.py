"""GPipe: all forwards, then all backwards. Simple, and every microbatch is in flight at once.

Source: Huang et al., GPipe, arXiv 1811.06965, figure 2.

    print(gpipe(stages=4, microbatches=8))
"""

from fractions import Fraction

from shardlib.pipeline.placement import Placement
from shardlib.pipeline.schedules.schedule import Schedule
from shardlib.pipeline.table import BACKWARD, FORWARD, Table, action


def gpipe(*, stages: int, chunks: int = 1, microbatches: int) -> Table:
    """Every rank: F of all microbatches, then B of all, in the same order."""
    row = tuple(action(kind, microbatch) for kind in (FORWARD, BACKWARD) for microbatch in range(microbatches))
    return Table(name="gpipe", placement=Placement.loop(stages, chunks=chunks), rows=(row,) * stages)


GPIPE = Schedule(
    name="gpipe",
    table=gpipe,
    summary="all forwards, then all backwards; memory grows with the microbatches",
    source="arXiv 1811.06965",
    chunks=1,
    default_chunks=1,
    bubble=lambda size: Fraction(size.stages - 1, size.microbatches + size.stages - 1),
    bubble_text="(p-1)/(m+p-1)",
    peak=lambda size: Fraction(size.microbatches),
    peak_text="m",
    exact_from=lambda size: 1,
)
