"""ZeRO on the data axis: specs of optimizer state and reduced gradients, split further than their parameters.

In: parameter specs and shapes, a mesh. Out: specs with the data axis added to one dim each, where a dim divides.

    specs, notices = zero_specs(param_specs, abstract_params, mesh=shape)
"""

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from meshes.shape import MeshShape
from shardlib.spec_axes import axes_of, is_spec, make_entry
from shardlib.tree_paths import leaves_with_paths


def zero_specs(specs: Any, params: Any, *, mesh: MeshShape, axis: str = "data") -> tuple[Any, tuple[str, ...]]:
    """Adds `axis` to the largest dim of every array that it still divides.

    Returns:
        The specs, and one notice that lists arrays no dim of which divides: they stay whole along the axis.

    Source: Rajbhandari et al. 2019 (1910.02054) section 5, stages 1 and 2.
    """
    degree = mesh.size(axis)
    if degree == 1:
        return specs, ()
    whole: list[str] = []
    paths = iter([path for path, _ in leaves_with_paths(specs, is_leaf=is_spec)])

    def split(spec: P, leaf: Any) -> P:
        path = next(paths)
        if axis in [name for entry in spec for name in axes_of(entry)]:
            return spec
        local = [size // _factor(entry, mesh) for entry, size in zip(spec, leaf.shape, strict=True)]
        candidates = [dim for dim, size in enumerate(local) if size % degree == 0]
        if not candidates:
            whole.append(path)
            return spec
        dim = max(candidates, key=lambda d: local[d])
        entries = list(spec)
        entries[dim] = make_entry((*axes_of(entries[dim]), axis))
        return P(*entries)

    found = jax.tree.map(split, specs, params, is_leaf=is_spec)
    listed = ", ".join(whole)
    notice = f"zero over {axis}={degree}: no dim divides of {listed}; their optimizer state stays whole along {axis}"
    return found, (notice,) if whole else ()


def _factor(entry: Any, mesh: MeshShape) -> int:
    factor = 1
    for axis in axes_of(entry):
        factor *= mesh.size(axis)
    return factor
