"""A picture of one array on a mesh: which block lies where, without devices and for any number of them.

In: an array's shape, its spec, a mesh, an abstract mesh or mesh text. Out: a `Picture`, for terminals and notebooks.

    print(sharding_picture((4096, 16384), P("fsdp", "tensor"), "fsdp=128,tensor=8"))
"""

import html
import math
from dataclasses import dataclass
from typing import Final

from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from meshes.errors import ShardingError
from meshes.shape import MeshShape
from shardlib.spec_axes import axes_of
from shardlib.specs import mesh_shape

MAX_CELLS: Final = 8
_MORE: Final = "…"


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """The blocks of an array as a grid of text; a static value.

    Args:
        title: shape, spec and mesh.
        rows: a heading and the rows; first cells name device coordinates, the others which indices lie there. A long
            row or column is cut in its middle.
        footer: what every device holds.
    """

    title: str
    rows: tuple[tuple[str, ...], ...]
    footer: str

    def __str__(self) -> str:
        width = max(len(cell) for row in self.rows for cell in row)
        rule = "+" + "+".join("-" * (width + 2) for _ in self.rows[0]) + "+"
        lines = [self.title, rule]
        for row in self.rows:
            lines += ["| " + " | ".join(cell.center(width) for cell in row) + " |", rule]
        return "\n".join([*lines, self.footer])

    def _repr_html_(self) -> str:
        style = "border:1px solid #888;padding:4px 8px;text-align:center"
        body = "".join(
            "<tr>" + "".join(f'<td style="{style}">{html.escape(cell)}</td>' for cell in row) + "</tr>"
            for row in self.rows
        )
        return f"<p>{html.escape(self.title)}</p><table>{body}</table><p>{html.escape(self.footer)}</p>"


def sharding_picture(shape: tuple[int, ...], spec: P, mesh: Mesh | AbstractMesh | MeshShape | str) -> Picture:
    """Draws how an array of one dim or more is divided.

    Args:
        shape: global sizes.
        spec: at most two of its dims may be split; the first runs down, the second across.
        mesh: its axes and sizes are enough.

    Returns:
        A `Picture`: rows and columns name mesh coordinates, cells the indices of the split dims that lie there.

    Raises:
        ShardingError: more than two split dims, more entries than dims, or a size that does not divide.
    """
    sizes = mesh_shape(mesh)
    split = [(dim, axes_of(entry)) for dim, entry in enumerate(spec) if axes_of(entry)]
    if len(spec) > len(shape) or len(split) > 2:
        raise ShardingError(
            f"{spec} of an array {list(shape)} splits {len(split)} dims of {len(shape)}",
            fix="a picture has two directions: give the spec of at most two split dims",
        )
    factors = [math.prod(sizes.size(axis) for axis in axes) for _, axes in split]
    for (dim, axes), factor in zip(split, factors, strict=True):
        if shape[dim] % factor:
            raise ShardingError(f"dim {dim} of {list(shape)} is not divisible by {'+'.join(axes)}={factor}")
    down = _positions(split[0][1], sizes) if split else [(0, "")]
    across = _positions(split[1][1], sizes) if len(split) == 2 else [(0, "")]
    steps = [shape[dim] // factor for (dim, _), factor in zip(split, factors, strict=True)]
    rows = [("", *(label for _, label in across))]
    for i, label in down:
        rows.append((label, *(_cell((i, j)[: len(steps)], steps) for j, _ in across)))
    local = list(shape)
    for (dim, _), factor in zip(split, factors, strict=True):
        local[dim] //= factor
    copies = sizes.num_devices // math.prod(factors)
    footer = f"each device holds {local}; {copies} of {sizes.num_devices} devices hold each block"
    return Picture(title=f"{list(shape)} as {spec} on mesh {sizes}", rows=tuple(rows), footer=footer)


def _positions(axes: tuple[str, ...], sizes: MeshShape) -> list[tuple[int, str]]:
    """`[(0, "data=0 fsdp=0"), ...]` in the order of blocks, cut in the middle when there are many."""
    count = math.prod(sizes.size(axis) for axis in axes)
    half = MAX_CELLS // 2
    shown = range(count) if count <= MAX_CELLS else [*range(half), -1, *range(count - half + 1, count)]
    return [(index, _MORE if index < 0 else _coordinates(index, axes, sizes)) for index in shown]


def _coordinates(index: int, axes: tuple[str, ...], sizes: MeshShape) -> str:
    parts: list[str] = []
    for axis in reversed(axes):
        index, position = divmod(index, sizes.size(axis))
        parts.append(f"{axis}={position}")
    return " ".join(reversed(parts))


def _cell(blocks: tuple[int, ...], steps: list[int]) -> str:
    """`8:16, 0:2`, the indices of a block; a cut row or column has none."""
    if any(block < 0 for block in blocks):
        return _MORE
    ranges = [f"{block * step}:{(block + 1) * step}" for block, step in zip(blocks, steps, strict=True)]
    return ", ".join(ranges) or "all"
