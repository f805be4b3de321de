"""Pipeline schedules as pure functions; `ALL` lists them, `build` makes one by name."""

from shardlib.pipeline.schedules.catalogue import ALL, build, named
from shardlib.pipeline.schedules.controllable_memory import v_half, v_min
from shardlib.pipeline.schedules.dualpipe_v import dualpipe_v
from shardlib.pipeline.schedules.gpipe import gpipe
from shardlib.pipeline.schedules.interleaved import interleaved
from shardlib.pipeline.schedules.one_forward_one_backward import one_forward_one_backward
from shardlib.pipeline.schedules.schedule import Schedule, Size
from shardlib.pipeline.schedules.zb_v import zb_v
from shardlib.pipeline.schedules.zero_bubble import split_backward, zb_h1, zb_h2

__all__ = [
    "ALL",
    "Schedule",
    "Size",
    "build",
    "dualpipe_v",
    "gpipe",
    "interleaved",
    "named",
    "one_forward_one_backward",
    "split_backward",
    "v_half",
    "v_min",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
