"""A self-test at start: running sums along a dim that this mesh splits, by this JAX, are those of NumPy.

In: a mesh. Out: nothing, or an error that names the masks. One small program.

    check_running_sums(make_mesh("data=4,context=2"))

Positions that are made from masks are such sums; jax-ml/jax issue 21403.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshes.build import shape_of
from meshes.errors import raise_collected

LENGTH = 128
"""Positions per shard of the axis that splits them."""


def check_running_sums(mesh: Mesh, *, count: Callable[..., Any] = jnp.cumsum) -> None:
    """Counts along a dim split over the last axis of the mesh, rows split over the first: all ones, and padded left.

    Args:
        mesh: concrete, with Auto axes.
        count: `(mask, axis=1) -> running sums`.

    Raises:
        ShardingError: sums that are not those of NumPy.
    """
    axes = [axis for axis, size in mesh.shape.items() if size > 1]
    rows, columns = (axes[0] if len(axes) > 1 else None), (axes[-1] if axes else None)
    shape = (2 * mesh.shape.get(rows, 1), LENGTH * mesh.shape.get(columns, 1))
    starts = np.arange(shape[0])[:, None] * (shape[1] // shape[0])
    masks = {
        "ones": np.ones(shape, np.int32),
        "a mask with padding on the left": (np.arange(shape[1])[None] >= starts).astype(np.int32),
    }
    placed = NamedSharding(mesh, P(rows, columns))
    running = jax.jit(lambda mask: count(mask, axis=1), in_shardings=placed, out_shardings=placed)
    raise_collected(
        [f"of {name}" for name, mask in masks.items() if not np.array_equal(running(mask), np.cumsum(mask, axis=1))],
        heading=f"JAX {jax.__version__} makes wrong running sums along a dim split over {columns} on mesh "
        f"{shape_of(mesh)}; fix: install another version of JAX:",
    )
