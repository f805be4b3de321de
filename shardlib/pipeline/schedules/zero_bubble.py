"""ZB-H1 and ZB-H2: the backward in two, I passed on at once and W kept to fill the bubbles.

Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, figures 2 and 3 and section 2. Both are one
family here: rank r starts `warm_up(r)` forwards, then hands back one I per F until `limit` activations are alive,
and from then on does I, W, F in turn.

    print(zb_h1(stages=4, microbatches=8))
"""

from fractions import Fraction

from shardlib.pipeline.placement import Placement
from shardlib.pipeline.schedules.schedule import Schedule, Size
from shardlib.pipeline.table import FORWARD, INPUT, WEIGHT, Action, Table, action


def zb_h1(*, stages: int, chunks: int = 1, microbatches: int) -> Table:
    """1F1B's memory: p alive on every rank, from F to W, and a third of its idle time at F=I=W."""
    return split_backward(
        name="zb_h1",
        warm_ups=[stages - rank for rank in range(stages)],
        limits=[stages] * stages,
        microbatches=microbatches,
    )


def zb_h2(*, stages: int, chunks: int = 1, microbatches: int) -> Table:
    """Enough forwards up front (2p-1 alive) that no rank waits between its first and last action at F=I=W."""
    return split_backward(
        name="zb_h2",
        warm_ups=[2 * (stages - rank) - 1 for rank in range(stages)],
        limits=[2 * stages - 1] * stages,
        microbatches=microbatches,
    )


def split_backward(*, name: str, warm_ups: list[int], limits: list[int], microbatches: int) -> Table:
    """One chunk per rank: F warm-up, then I and F in turn while memory lasts, then I, W, F; W's left over at the end.

    Args:
        name: the table's name.
        warm_ups: per rank, forwards before the first I; at least 1.
        limits: per rank, the most microbatches alive from F to W; at least the warm-up.
        microbatches: how many there are.
    """
    rows = []
    for warm_up, limit in zip(warm_ups, limits):
        forwards, weights = min(warm_up, microbatches), 0
        row: list[Action] = [action(FORWARD, microbatch) for microbatch in range(forwards)]
        for microbatch in range(microbatches):
            row.append(action(INPUT, microbatch))
            if forwards - weights >= limit or forwards == microbatches:
                row.append(action(WEIGHT, weights))
                weights += 1
            if forwards < microbatches:
                row.append(action(FORWARD, forwards))
                forwards += 1
        row += [action(WEIGHT, microbatch) for microbatch in range(weights, microbatches)]
        rows.append(tuple(row))
    return Table(name=name, placement=Placement.loop(len(rows)), rows=tuple(rows))


def _idle_share(size: Size, *, deferred: int) -> Fraction:
    """(p-1)(F+I-W) idle with one W in the gap, (p-1)(F+I-2W) with two; never less than nothing."""
    gap = (size.stages - 1) * max(size.forward + size.input - deferred * size.weight, Fraction(0))
    return gap / (gap + size.work)


ZB_H1 = Schedule(
    name="zb_h1",
    table=zb_h1,
    summary="backward split in two: a third of 1F1B's idle time in the same memory",
    source="arXiv 2401.10241, section 2",
    chunks=1,
    default_chunks=1,
    bubble=lambda size: _idle_share(size, deferred=1),
    bubble_text="(p-1)(F+I-W) / (m(F+I+W) + (p-1)(F+I-W))",
    peak=lambda size: Fraction(min(size.stages, size.microbatches)),
    peak_text="p",
    exact_from=lambda size: size.stages,
)

ZB_H2 = Schedule(
    name="zb_h2",
    table=zb_h2,
    summary="no wait within a rank's own span, for twice 1F1B's memory; needs staggered optimizer steps",
    source="arXiv 2401.10241, section 2",
    chunks=1,
    default_chunks=1,
    bubble=lambda size: _idle_share(size, deferred=2),
    bubble_text="(p-1)(F+I-2W) / (m(F+I+W) + (p-1)(F+I-2W))",
    on_span=True,
    peak=lambda size: Fraction(min(2 * size.stages - 1, size.microbatches)),
    peak_text="2p-1",
    exact_from=lambda size: 2 * size.stages - 1,
)
