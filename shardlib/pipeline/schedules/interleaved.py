"""Interleaved 1F1B: v chunks per rank, so that the pipeline fills v times faster, for v times the messages.

Source: Narayanan et al., Megatron-LM, arXiv 2104.04473, figure 4 and section 2.2.2; peak memory in Korthikanti et
al., arXiv 2205.05198. Defined where the number of stages divides the number of microbatches.

    print(interleaved(stages=4, chunks=2, microbatches=8))
"""

from fractions import Fraction

from shardlib.pipeline.placement import Placement
from shardlib.pipeline.schedules.schedule import ANY, Schedule
from shardlib.pipeline.table import BACKWARD, FORWARD, Action, Table, action


def interleaved(*, stages: int, chunks: int = 2, microbatches: int) -> Table:
    """Microbatches go round in groups of p: a group through chunk 0, then through chunk 1, ...; backwards mirrored.

    Rank r warms up with 2(p-1-r) + (v-1)p forwards, then alternates F and B.
    """
    total = chunks * microbatches
    rows = []
    for rank in range(stages):
        warm_up = min(2 * (stages - 1 - rank) + (chunks - 1) * stages, total)
        if chunks == 1:
            warm_up = min(stages - 1 - rank, total)
        row = [_turn(FORWARD, turn, stages=stages, chunks=chunks) for turn in range(warm_up)]
        for turn in range(total):
            if warm_up + turn < total:
                row.append(_turn(FORWARD, warm_up + turn, stages=stages, chunks=chunks))
            row.append(_turn(BACKWARD, turn, stages=stages, chunks=chunks))
        rows.append(tuple(row))
    return Table(name="interleaved_1f1b", placement=Placement.loop(stages, chunks=chunks), rows=tuple(rows))


def _turn(kind: str, turn: int, *, stages: int, chunks: int) -> Action:
    """The `turn`-th forward or backward of a rank: with p=2, v=2 microbatch, chunk run 0.0 1.0 0.1 1.1 2.0 ..."""
    if chunks == 1:
        return action(kind, turn)
    group, within = divmod(turn, stages * chunks)
    chunk, member = divmod(within, stages)
    if kind == BACKWARD:
        chunk = chunks - 1 - chunk
    return action(kind, group * stages + member, chunk=chunk)


INTERLEAVED_1F1B = Schedule(
    name="interleaved_1f1b",
    table=interleaved,
    summary="1F1B with v chunks per rank: a v-th of the bubble for v times the messages",
    source="arXiv 2104.04473, section 2.2.2",
    chunks=ANY,
    default_chunks=2,
    bubble=lambda size: Fraction(size.stages - 1, size.chunks * size.microbatches + size.stages - 1),
    bubble_text="(p-1)/(vm+p-1)",
    peak=lambda size: (
        Fraction(min(size.stages, size.microbatches))
        if size.chunks == 1
        else min(Fraction(size.stages * size.chunks + size.stages - 1, size.chunks), Fraction(size.microbatches))
    ),
    peak_text="p(1+(p-1)/(pv))",
    exact_from=lambda size: size.stages,
    divides=True,
)
