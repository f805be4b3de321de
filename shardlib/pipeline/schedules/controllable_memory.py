"""V-Half and V-Min: half and a third of 1F1B's activations, for a bubble that shrinks as 1/m.

Source: Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, sections 3 and 4, figure 3: the
hops of one microbatch take 2, 1, 2, 1 slots in V-Half and one slot each in V-Min.

    print(v_half(stages=4, microbatches=8))
"""

from fractions import Fraction

from shardlib.pipeline.placement import Placement
from shardlib.pipeline.schedules.building_block import block_offsets, block_rows, squeeze
from shardlib.pipeline.schedules.schedule import Schedule
from shardlib.pipeline.table import Table


def v_half(*, stages: int, chunks: int = 2, microbatches: int) -> Table:
    """(p+2)//2 activations alive, counted from F to W."""
    return _from_block("v_half", stages, hops=(2, 1, 2, 1), limit=(stages + 2) // 2, microbatches=microbatches)


def v_min(*, stages: int, chunks: int = 2, microbatches: int) -> Table:
    """(p+4)//3 activations alive, counted from F to W."""
    return _from_block("v_min", stages, hops=(1, 1, 1, 1), limit=(stages + 4) // 3, microbatches=microbatches)


def _from_block(name: str, stages: int, *, hops: tuple[int, int, int, int], limit: int, microbatches: int) -> Table:
    offsets = block_offsets(stages, hops=hops)
    assert offsets, f"hops {hops} collide on {stages} stages"
    squeezed = squeeze(block_rows(offsets, microbatches=microbatches), limit=2 * limit)
    return Table(name=name, placement=Placement.v_shape(stages), rows=tuple(squeezed or ()))


V_HALF = Schedule(
    name="v_half",
    table=v_half,
    summary="V-shape in half of 1F1B's memory, about half of its bubble",
    source="arXiv 2405.15362, section 4",
    chunks=2,
    default_chunks=2,
    bubble=lambda size: Fraction(size.stages, 2 * size.microbatches),
    bubble_text="about p/(2m)",
    bound=True,
    peak=lambda size: Fraction(min((size.stages + 2) // 2, size.microbatches)),
    peak_text="(p+2)//2",
    exact_from=lambda size: 2 * size.stages,
)

V_MIN = Schedule(
    name="v_min",
    table=v_min,
    summary="V-shape in a third of 1F1B's memory, about two thirds of its bubble",
    source="arXiv 2405.15362, section 4",
    chunks=2,
    default_chunks=2,
    bubble=lambda size: Fraction(2 * size.stages, 3 * size.microbatches),
    bubble_text="about 2p/(3m)",
    bound=True,
    peak=lambda size: Fraction(min((size.stages + 4) // 3, size.microbatches)),
    peak_text="(p+4)//3",
    exact_from=lambda size: 2 * size.stages,
)
