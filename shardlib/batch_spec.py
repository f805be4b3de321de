"""What one batch looks like: a pytree of `ArraySpec`, sizes by name, no arrays.

In: shapes with logical axes. Out: abstract batches of any size.

    spec = {"inputs": ArraySpec(shape=(16, 256), dtype="int32", axes=("batch", "length"))}
    spec = resized(spec, batch=32)
"""

from dataclasses import dataclass, replace
from typing import Any

import jax

from meshes.errors import ShardingError, nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """Shape, dtype and logical axes of one input array; a static leaf.

    Args:
        shape: global sizes.
        dtype: NumPy dtype name.
        axes: one logical axis per dim, None for a dim that is never sharded.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]

    def __post_init__(self):
        if len(self.shape) != len(self.axes):
            raise ShardingError(f"an input of shape {self.shape} has {len(self.axes)} axis names {self.axes}")

    def abstract(self) -> jax.ShapeDtypeStruct:
        """The same as a `jax.ShapeDtypeStruct`, its dtype as JAX holds it (float64 is float32 unless enabled)."""
        return jax.ShapeDtypeStruct(self.shape, jax.dtypes.canonicalize_dtype(self.dtype))


def is_spec(leaf: Any) -> bool:
    """True for the leaves of a batch spec."""
    return isinstance(leaf, ArraySpec)


def abstract(spec: Any) -> Any:
    """The batch as a pytree of `jax.ShapeDtypeStruct`."""
    return jax.tree.map(lambda leaf: leaf.abstract(), spec, is_leaf=is_spec)


def with_axis(spec: Any, axis: str) -> list[ArraySpec]:
    """The inputs that have a logical axis."""
    return [leaf for leaf in jax.tree.leaves(spec, is_leaf=is_spec) if axis in leaf.axes]


def resized(spec: Any, **sizes: int | None) -> Any:
    """The spec with new sizes for the named axes; None keeps a size.

    Raises:
        ShardingError: an axis no input has, or a size below 1.
    """
    known = {axis for leaf in jax.tree.leaves(spec, is_leaf=is_spec) for axis in leaf.axes if axis}
    for axis, size in sizes.items():
        if size is None:
            continue
        if axis not in known:
            raise ShardingError(
                f"no input has an axis {axis!r}{nearest(axis, known)}", fix=f"the axes are {sorted(known)}"
            )
        if size < 1:
            raise ShardingError(f"{axis} size {size} is not positive")

    def change(leaf: ArraySpec) -> ArraySpec:
        shape = tuple((sizes.get(a) if a else None) or n for a, n in zip(leaf.axes, leaf.shape, strict=True))
        return replace(leaf, shape=shape)

    return jax.tree.map(change, spec, is_leaf=is_spec)
