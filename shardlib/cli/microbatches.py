"""The number of microbatches of a pipeline when no option names one: chosen from the batch, and said.

In: a mesh, then a plan and the batch. Out: a plan with a number that the batch divides into, and words about it.

    plan, said = with_microbatches(plan, batch_spec)
"""

from dataclasses import replace
from typing import Any, Final

from meshes.errors import ShardingError
from meshes.shape import MeshShape
from shardlib.batch_spec import with_axis
from shardlib.plan import STAGE, Plan
from shardlib.slices import BATCH

MOST_PER_STAGE: Final = 4
"""From about 4 microbatches per stage on the bubble hardly matters (Huang et al., arXiv 1811.06965, section 2.3)."""


def provisional(mesh: MeshShape) -> dict[str, int]:
    """A number for which every schedule exists, until the batch is known: one microbatch per stage."""
    return {"num_microbatches": mesh.size(STAGE)} if STAGE in mesh.names else {}


def with_microbatches(plan: Plan, batch_spec: Any) -> tuple[Plan, tuple[str, ...]]:
    """The plan with the largest multiple of its stages, up to 4 times, that divides the rows of a data shard.

    Returns:
        The plan and a note to print once it has proved good; a plan without stages as it is, and no note.

    Raises:
        ShardingError: no multiple divides them.
    """
    leaves = with_axis(batch_spec, BATCH)
    if not plan.is_pipeline or not leaves:
        return plan, ()
    stages = plan.mesh.size(STAGE)
    rows = min(leaf.shape[leaf.axes.index(BATCH)] for leaf in leaves) // plan.num_batch_shards
    counts = [times * stages for times in range(MOST_PER_STAGE, 0, -1) if rows and rows % (times * stages) == 0]
    if not counts:
        batch = max(1, round(rows / stages)) * stages * plan.num_batch_shards
        raise ShardingError(
            f"--microbatches is not given, and no multiple of stage={stages} divides the {rows} rows of a data shard",
            fix=f"--batch {batch}, or a number of microbatches that divides the rows: --microbatches {max(rows, 1)}",
        )
    said = (
        f"note: {counts[0]} microbatches, as --microbatches is not given: the largest multiple of stage={stages}, at "
        f"most {MOST_PER_STAGE} times, that divides the {rows} rows of a data shard"
    )
    return replace(plan, num_microbatches=counts[0]), (said,)
