"""A self-test at start: arrays of different layouts, joined on this mesh by this JAX, keep their values.

In: a mesh. Out: nothing, or an error that names the layouts. One small program.

    check_joined_layouts(make_mesh("data=4,model=2"))

A partitioner that sums the copies of a replicated array multiplies its values: jax-ml/jax issues 24576 and 19106.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshes.build import shape_of
from meshes.errors import raise_collected


def check_joined_layouts(mesh: Mesh, *, join: Callable[[Any], jax.Array] = jnp.concatenate) -> None:
    """Joins every two of: an array held whole, and one split over each mesh axis.

    Args:
        mesh: concrete, with Auto axes.
        join: what joins a pair of arrays.

    Raises:
        ShardingError: results that are not those of NumPy.
    """
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    layouts = [(P(), 2), *((P(axis), 2 * size) for axis, size in sizes.items())]
    pairs = list(itertools.product(layouts, repeat=2))
    values = [tuple(np.arange(1, size + 1, dtype=np.float32) for _, size in pair) for pair in pairs]
    placed = [
        tuple(jax.device_put(value, NamedSharding(mesh, spec)) for value, (spec, _) in zip(parts, pair, strict=True))
        for parts, pair in zip(values, pairs, strict=True)
    ]
    joined = jax.jit(lambda given: [join(parts) for parts in given])(placed)
    raise_collected(
        [
            f"{first} beside {second}: {np.asarray(found).tolist()}, not {np.concatenate(parts).tolist()}"
            for ((first, _), (second, _)), parts, found in zip(pairs, values, joined, strict=True)
            if not np.array_equal(found, np.concatenate(parts))
        ],
        heading=f"JAX {jax.__version__} joins arrays of different layouts wrongly on mesh {shape_of(mesh)}; "
        "fix: install another version of JAX:",
    )
