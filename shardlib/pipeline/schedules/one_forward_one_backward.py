"""1F1B: after a warm-up, every rank alternates one forward and one backward. GPipe's bubble, p in flight.

Source: PipeDream-Flush in Narayanan et al., Megatron-LM, arXiv 2104.04473, figure 3 and section 2.2.1.

    print(one_forward_one_backward(stages=4, microbatches=8))
"""

from fractions import Fraction

from shardlib.pipeline.placement import Placement
from shardlib.pipeline.schedules.schedule import Schedule
from shardlib.pipeline.table import BACKWARD, FORWARD, Action, Table, action


def one_forward_one_backward(*, stages: int, chunks: int = 1, microbatches: int) -> Table:
    """Rank r: p-1-r forwards to fill the pipeline behind it, then F and B in turn, then the backwards left over."""
    rows = []
    for rank in range(stages):
        warm_up = min(stages - 1 - rank, microbatches)
        row: list[Action] = [action(FORWARD, microbatch) for microbatch in range(warm_up)]
        for microbatch in range(microbatches):
            if warm_up + microbatch < microbatches:
                row.append(action(FORWARD, warm_up + microbatch))
            row.append(action(BACKWARD, microbatch))
        rows.append(tuple(row))
    return Table(name="1f1b", placement=Placement.loop(stages, chunks=chunks), rows=tuple(rows))


ONE_F_ONE_B = Schedule(
    name="1f1b",
    table=one_forward_one_backward,
    summary="GPipe's bubble with at most p microbatches in flight; the default",
    source="arXiv 2104.04473, section 2.2.1",
    chunks=1,
    default_chunks=1,
    bubble=lambda size: Fraction(size.stages - 1, size.microbatches + size.stages - 1),
    bubble_text="(p-1)/(m+p-1)",
    peak=lambda size: Fraction(min(size.stages, size.microbatches)),
    peak_text="p",
    exact_from=lambda size: 1,
)
