"""Reductions of a program before the backend touches it, with the dtype in which they add.

In: what `jax.jit(...).lower(...)` returns. Out: one `Reduction` for each one that the program itself writes; those
that the partitioner will add for automatic axes are not there yet.

    {reduction.dtype for reduction in reduction_dtypes(trainer.lowered, mesh_shape)}    # {"bf16", "f32"}
"""

import re
from dataclasses import dataclass
from typing import Any

from meshes.errors import ShardingError
from meshes.shape import MeshShape
from shardlib.audit.replica_groups import axes_of_groups

_REDUCTION = re.compile(r'"stablehlo\.(all_reduce|reduce_scatter)"\(')
_ELEMENT = re.compile(r"\^bb0\(%\w+: tensor<(\w+)>")
_OPERANDS = re.compile(r"^\s*\}\) : \(([^)]*)\) ->", re.MULTILINE)
_TENSOR = re.compile(r"tensor<((?:\d+x)*)\w+>")
_GROUPS = re.compile(r"replica_groups = dense<(\[\[[\d, \[\]]*\]\]|\d+)>")
_AXIS = re.compile(r'axis_ref<name = "([^"]+)">')
_MESH_AXES = re.compile(r"replica_groups = #stablehlo\.replica_group_mesh_axes<(.*?)\]>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """One all-reduce or reduce-scatter as the program writes it; a static leaf.

    Args:
        kind: "all-reduce" or "reduce-scatter".
        dtype: in which it adds, XLA's name.
        shapes: dims of its operands.
        axes: mesh axes it runs over, in mesh order; None when its groups lie along none.
    """

    kind: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    axes: tuple[str, ...] | None


def reduction_dtypes(lowered: Any, mesh_shape: MeshShape) -> tuple[Reduction, ...]:
    """The reductions of a lowered program, in the order of its text.

    Compiled text does not tell: XLA's CPU backend widens 16-bit reductions to float32.

    Args:
        lowered: a `jax.stages.Lowered`, or its StableHLO text.
        mesh_shape: the mesh it was lowered for.

    Raises:
        ShardingError: text that cannot be read.
    """
    text = lowered if isinstance(lowered, str) else lowered.as_text()
    if "stablehlo" not in text:
        raise ShardingError("this is not StableHLO text", fix="pass jax.jit(...).lower(...), not a compiled program")
    found = []
    for match in _REDUCTION.finditer(text):
        element, operands = _ELEMENT.search(text, match.end()), _OPERANDS.search(text, match.end())
        if element is None or operands is None:
            line = text.count("\n", 0, match.start()) + 1
            raise ShardingError(f"lowered program, line {line}: this {match[1]} cannot be read")
        shapes = tuple(tuple(map(int, dims.split("x")[:-1])) for dims in _TENSOR.findall(operands[1]))
        header = text[match.end() : element.start()]
        axes = _axes(header, mesh_shape)
        found.append(Reduction(kind=match[1].replace("_", "-"), dtype=element[1], shapes=shapes, axes=axes))
    return tuple(found)


def _axes(header: str, mesh_shape: MeshShape) -> tuple[str, ...] | None:
    by_axes, by_groups = _MESH_AXES.search(header), _GROUPS.search(header)
    if by_axes:
        names = _AXIS.findall(by_axes[1] + "]>")
        return tuple(axis for axis in mesh_shape.names if axis in names and mesh_shape.size(axis) > 1)
    if by_groups is None:
        return None
    if not by_groups[1].startswith("["):
        return ()  # a splat: one group of one device
    groups = tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\[([\d, ]+)\]", by_groups[1]))
    return axes_of_groups(groups, mesh_shape=mesh_shape).axes
