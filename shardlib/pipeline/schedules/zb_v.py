"""ZB-V: two chunks per rank in a V, no bubble within a rank's span, in 1F1B's memory.

Source: Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, sections 4 and 5; the order of
the phases as in the public implementation by the authors and in PyTorch's pipelining.

    print(zb_v(stages=4, microbatches=8))
"""

import collections
from fractions import Fraction

from shardlib.pipeline.placement import Placement
from shardlib.pipeline.schedules.schedule import Schedule
from shardlib.pipeline.table import FORWARD, INPUT, WEIGHT, Action, Table, action


class Row:
    """One rank's row while it is written: it numbers microbatches per kind and chunk, and drops those past the end."""

    def __init__(self, microbatches: int):
        self._microbatches = microbatches
        self._next = collections.Counter[tuple[str, int]]()
        self.actions: list[Action] = []

    def add(self, *steps: tuple[str, int]) -> None:
        """The next microbatch of each (kind, chunk), in turn."""
        for kind, chunk in steps:
            microbatch = self._next[kind, chunk]
            self._next[kind, chunk] += 1
            if microbatch < self._microbatches:
                self.actions.append(action(kind, microbatch, chunk=chunk))

    def count(self, kind: str, chunk: int) -> int:
        """How many of a kind and chunk there have been, dropped ones included."""
        return self._next[kind, chunk]


def zb_v(*, stages: int, chunks: int = 2, microbatches: int) -> Table:
    """Rank r fills the V with 2(p-r)-1 + r forwards of chunk 0, then repeats F I W of both chunks in turn.

    With fewer than 2p microbatches the order is that of 2p, the absent ones left out.
    """
    total = max(microbatches, 2 * stages)
    rows = []
    for rank in range(stages):
        row, behind = Row(microbatches), stages - rank
        row.add(*[(FORWARD, 0)] * (2 * behind - 1))
        row.add(*[(FORWARD, 1), (FORWARD, 0)] * rank)
        row.add(*[(FORWARD, 1), (INPUT, 1), (WEIGHT, 1)] * behind)
        while row.count(FORWARD, 1) < total:
            if row.count(FORWARD, 0) < total:
                row.add((FORWARD, 0))
            row.add((INPUT, 0), (WEIGHT, 0), (FORWARD, 1), (INPUT, 1), (WEIGHT, 1))
        row.add(*[(INPUT, 0), (INPUT, 1)] * rank)
        row.add(*[(INPUT, 0), (WEIGHT, 0)] * behind)
        for chunk in (1, 0):
            row.add(*[(WEIGHT, chunk)] * (total - row.count(WEIGHT, chunk)))
        rows.append(tuple(row.actions))
    return Table(name="zb_v", placement=Placement.v_shape(stages, chunks=chunks), rows=tuple(rows))


ZB_V = Schedule(
    name="zb_v",
    table=zb_v,
    summary="V-shape: no wait within a rank's span in 1F1B's memory, for twice the messages",
    source="arXiv 2405.15362, section 4",
    chunks=2,
    default_chunks=2,
    bubble=lambda size: Fraction(0),
    bubble_text="0 at F=I=W",
    on_span=True,
    peak=lambda size: Fraction(min(size.stages, size.microbatches)),
    peak_text="p",
    exact_from=lambda size: 2 * size.stages,
)
