"""The family of schedules: one literal tuple, looked up by name where text must name one.

In: a name and a size. Out: a `Table`, or an error with the nearest name.

    build("zb_h1", stages=8, microbatches=32)
"""

from typing import Final

from meshes.errors import ShardingError, nearest
from shardlib.pipeline.schedules.controllable_memory import V_HALF, V_MIN
from shardlib.pipeline.schedules.dualpipe_v import DUALPIPE_V
from shardlib.pipeline.schedules.gpipe import GPIPE
from shardlib.pipeline.schedules.interleaved import INTERLEAVED_1F1B
from shardlib.pipeline.schedules.one_forward_one_backward import ONE_F_ONE_B
from shardlib.pipeline.schedules.schedule import Schedule
from shardlib.pipeline.schedules.zb_v import ZB_V
from shardlib.pipeline.schedules.zero_bubble import ZB_H1, ZB_H2
from shardlib.pipeline.table import Table

ALL: Final[tuple[Schedule, ...]] = (
    GPIPE,
    ONE_F_ONE_B,
    INTERLEAVED_1F1B,
    ZB_H1,
    ZB_H2,
    ZB_V,
    V_HALF,
    V_MIN,
    DUALPIPE_V,
)


def named(name: str) -> Schedule:
    """The schedule of that name.

    Raises:
        ShardingError: no such schedule; the nearest name is offered.
    """
    for schedule in ALL:
        if schedule.name == name:
            return schedule
    names = [schedule.name for schedule in ALL]
    raise ShardingError(
        f"schedule {name!r} is unknown{nearest(name, names)}", fix=f"one of {', '.join(names)}, or a .csv file"
    )


def build(name: str, *, stages: int, microbatches: int, chunks: int | None = None) -> Table:
    """The table of a named schedule.

    Args:
        name: one of the catalogue's names.
        stages: ranks of the pipeline.
        microbatches: how many there are.
        chunks: virtual stages per rank; by default what the schedule prefers.

    Raises:
        ShardingError: an unknown name, or a size at which the schedule does not exist.

    Example:
        >>> print(build("1f1b", stages=2, microbatches=2))
        # schedule=1f1b placement=loop
        F0 F1 B0 B1
        F0 B0 F1 B1
        <BLANKLINE>
    """
    return named(name).build(stages=stages, microbatches=microbatches, chunks=chunks)
