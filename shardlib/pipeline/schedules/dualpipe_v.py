"""DualPipe-V: DualPipe cut in half, a V in which a forward and a backward run as a pair to hide their messages.

Source: DeepSeek-V3 report, arXiv 2412.19437, section 3.2.1, and the DualPipe README and code (dualpipev.py). A pair
is written as F then B; `simulate` does not credit the overlap within it.

    print(dualpipe_v(stages=4, microbatches=8))
"""

from fractions import Fraction

from shardlib.pipeline.placement import Placement
from shardlib.pipeline.schedules.schedule import Schedule, Size
from shardlib.pipeline.schedules.zb_v import Row
from shardlib.pipeline.table import BACKWARD, FORWARD, INPUT, WEIGHT, Table, action


def dualpipe_v(*, stages: int, chunks: int = 2, microbatches: int) -> Table:
    """Eight phases per rank; backwards are whole in the middle and split where the pipeline fills and drains.

    With fewer than 2p microbatches the order is that of 2p, the absent ones left out.
    """
    total = max(microbatches, 2 * stages)
    rows = []
    for rank in range(stages):
        behind, row = stages - 1 - rank, _Row(microbatches)
        row.add(*[(FORWARD, 0)] * (2 * behind))
        row.add(*[(FORWARD, 0), (FORWARD, 1)] * (rank + 1))
        for _ in range(behind):
            row.backward(1, split=True)
            row.weight()
            row.add((FORWARD, 1))
        for paired in range(total - 2 * stages + rank + 1 + behind):
            if paired < total - 2 * stages + rank + 1:
                row.add((FORWARD, 0))
            row.backward(1)
            row.add((FORWARD, 1))
            row.backward(0)
        for step in range(rank + 1):  # from the middle of this phase on, W's are kept for the next two
            row.backward(1, split=2 * step >= rank + 1)
            row.backward(0, split=2 * step >= rank)
        for _ in range(behind):
            row.weight()
            row.backward(0, split=True)
        for _ in range(rank + 1):
            row.weight()
        rows.append(tuple(row.actions))
    return Table(name="dualpipe_v", placement=Placement.v_shape(stages, chunks=chunks), rows=tuple(rows))


class _Row(Row):
    """A row with whole and split backwards, whose W's wait in a queue."""

    def __init__(self, microbatches: int):
        super().__init__(microbatches)
        self._waiting: list[tuple[int, int]] = []

    def backward(self, chunk: int, *, split: bool = False) -> None:
        microbatch = self.count(INPUT, chunk) + self.count(BACKWARD, chunk)
        self._next[INPUT if split else BACKWARD, chunk] += 1
        if microbatch < self._microbatches:
            self.actions.append(action(INPUT if split else BACKWARD, microbatch, chunk=chunk))
            if split:
                self._waiting.append((microbatch, chunk))

    def weight(self) -> None:
        if self._waiting:
            microbatch, chunk = self._waiting.pop(0)
            self.actions.append(action(WEIGHT, microbatch, chunk=chunk))


def _idle_share(size: Size) -> Fraction:
    """(p-1)(F&B + B - 3W) chunk times, p the ranks of the V (half of DualPipe's), F&B at its worst, F+B."""
    backward = size.input + size.weight
    idle = (size.stages - 1) * max(size.forward + 2 * backward - 3 * size.weight, Fraction(0)) / 2
    return idle / (idle + size.work)


DUALPIPE_V = Schedule(
    name="dualpipe_v",
    table=dualpipe_v,
    summary="V-shape with forward and backward in pairs, which hides their messages (all-to-all of experts)",
    source="arXiv 2412.19437, section 3.2.1; DualPipe README",
    chunks=2,
    default_chunks=2,
    bubble=_idle_share,
    bubble_text="at most (p-1)(F&B+B-3W)/2 idle",
    bound=True,
    peak=lambda size: min(Fraction(2 * size.stages + 1, 2), Fraction(size.microbatches)),
    peak_text="p+1/2 (2p+1 chunks)",
    exact_from=lambda size: 2 * size.stages,
)
