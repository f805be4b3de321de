"""Is a loss the sum of its rows? A plan that cuts the batch needs it; one small comparison answers.

In: a loss and a few rows of a batch. Out: nothing, or an error that names what differs.

    metrics = jax.jit(compared(loss, dims, active=active))(params, rows, None)
    check_same(*metrics, compute_dtype="float32", why="4 microbatches")
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from meshes.errors import ShardingError
from shardlib import annotate
from shardlib.explicit import cast
from shardlib.objective import LossFunction, Metrics, folded, sums_of
from shardlib.slices import cut

# Four rows in two halves: two rows apart would hide batch statistics, which make single rows constant.
NUM_ROWS, NUM_PARTS = 4, 2
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}


def compared(
    loss: LossFunction, dims: Any, *, active: annotate.Active, compute_dtype: Any
) -> Callable[[Any, Any, Any], tuple[Metrics, Metrics]]:
    """`(params, rows, collections) -> (metrics of the rows together, metrics of their halves added up)`."""

    def compare(params: Any, rows: Any, collections: Any) -> tuple[Metrics, Metrics]:
        params = cast(params, compute_dtype)
        halves = jax.tree.map(lambda leaf: leaf[:, 0], cut(rows, dims, num_microbatches=NUM_PARTS, num_slices=1))
        together = sums_of(loss, params, rows, None, state=collections)
        apart = jax.lax.map(lambda half: sums_of(loss, params, half, None, state=collections), halves)
        return together.metrics(), folded(apart).metrics()

    return annotate.under(active, compare)


def first_rows(batch: Any, dims: Any) -> Any:
    """The first rows of a batch; inputs shared by all rows as they are."""
    take = lambda leaf, dim: leaf if dim < 0 else np.take(np.asarray(leaf), range(NUM_ROWS), axis=dim)  # noqa: E731
    return jax.tree.map(take, batch, dims)


def check_same(together: Metrics, apart: Metrics, *, compute_dtype: str, why: str) -> None:
    """Raises when a metric of some rows together is not that of their halves added up.

    Args:
        why: what cuts the batch, for the message.
    """
    tolerance = TOLERANCE[compute_dtype]
    for name, value in together.items():
        if name == "weight":  # a scalar loss counts one part, whatever its rows
            continue
        whole, parts = float(value), float(apart[name])
        if abs(whole - parts) > tolerance * max(abs(whole), abs(parts), 1e-3):
            raise ShardingError(
                f"the loss is not the sum of its rows, and the plan cuts the batch ({why}): "
                f"{name} of {NUM_ROWS} rows is {whole:.6g}, and {parts:.6g} from their halves",
                fix="return Loss(total=sum, weight=count) instead of a mean over unequal rows; or, when rows see each "
                "other (batch statistics), use lowering=automatic with one microbatch",
            )
