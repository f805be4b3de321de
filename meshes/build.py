"""MeshShape + devices -> `jax.sharding.Mesh`, or an `AbstractMesh` of any size that needs no device.

In: mesh text or shape. Out: a mesh whose device order follows the topology, slices outermost.

    mesh = make_mesh("data=2,fsdp=2,tensor=2")     # emulated on a CPU machine
    mesh = abstract_mesh("data=16,fsdp=128,tensor=8")
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from meshes import devices as device_source
from meshes.errors import ShardingError
from meshes.shape import INFERRED, MeshShape

MeshText = str | MeshShape | Mapping[str, int]


def make_mesh(
    shape: MeshText,
    *,
    devices: str | Sequence[Any] = "auto",
    axis_type: AxisType = AxisType.Auto,
) -> Mesh:
    """Builds a mesh over real or emulated devices.

    Args:
        shape: mesh text such as `"data=2,tensor=4"`, a `MeshShape`, or a mapping; one size may be -1.
        devices: `"auto"` (the default backend, emulating as many CPU devices as needed on a machine without an
            accelerator), `"real"`, `"cpu"`, or the devices themselves.
        axis_type: JAX's axis type for all axes; Auto lets the compiler partition.

    Returns:
        A `Mesh` with the axes in the given order.

    Raises:
        ShardingError: malformed text, too few devices, or an axis that would straddle slices.
    """
    shape = MeshShape.parse(shape)
    if isinstance(devices, str):
        needed = None if INFERRED in shape.sizes else shape.num_devices
        found = device_source.find(needed, kind=devices)
    else:
        found = list(devices)
    shape = shape.infer(len(found))
    if len(found) < shape.num_devices:
        raise ShardingError(f"mesh {shape} needs {shape.num_devices} devices and {len(found)} were given")
    grid = _arrange(found[: shape.num_devices], shape)
    return Mesh(grid, shape.names, axis_types=(axis_type,) * len(shape.axes))


def with_auto_axes(mesh: Mesh) -> Mesh:
    """The mesh with its axes left to the compiler: Explicit axes are for code that names every sharding."""
    if set(mesh.axis_types) == {AxisType.Auto}:
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def abstract_mesh(shape: MeshText, *, axis_type: AxisType = AxisType.Auto) -> AbstractMesh:
    """Builds an `AbstractMesh`: the shape alone, no devices. Every size must be given."""
    shape = MeshShape.parse(shape)
    if INFERRED in shape.sizes:
        raise ShardingError(f"mesh {shape}: -1 needs devices to count", fix="give every axis its size")
    return AbstractMesh(shape.sizes, shape.names, axis_types=(axis_type,) * len(shape.axes))


def shape_of(mesh: Mesh | AbstractMesh) -> MeshShape:
    """The `MeshShape` of a JAX mesh."""
    return MeshShape(axes=tuple(mesh.shape.items()))


def _arrange(found: Sequence[Any], shape: MeshShape) -> np.ndarray:
    """Devices as an array of the mesh's shape: torus order inside a slice, slices along the outermost axes."""
    slices: dict[int, list[Any]] = {}
    for device in found:
        slices.setdefault(getattr(device, "slice_index", 0) or 0, []).append(device)
    if len(slices) == 1:
        return _arrange_slice(found, shape.sizes)
    inner = _inner_sizes(shape, num_slices=len(slices), per_slice={len(group) for group in slices.values()})
    blocks = [_arrange_slice(slices[index], inner) for index in sorted(slices)]
    # The leading axes, whose product is the number of slices, enumerate whole slices; the rest stays inside one.
    return np.stack(blocks).reshape(shape.sizes)


def _inner_sizes(shape: MeshShape, *, num_slices: int, per_slice: set[int]) -> tuple[int, ...]:
    """Sizes of the part of the mesh within one slice, when the outermost axes cover the slices exactly."""
    if len(per_slice) > 1:
        raise ShardingError(f"mesh {shape}: slices hold different numbers of devices {sorted(per_slice)}")
    remaining, sizes = num_slices, list(shape.sizes)
    for i, size in enumerate(sizes):
        shared = math.gcd(remaining, size)
        remaining //= shared
        sizes[i] = size // shared
        if sizes[i] != 1:
            break
        if remaining == 1:
            return tuple(sizes)
    raise ShardingError(
        f"mesh {shape} over {num_slices} slices puts axis {shape.names[i]!r} inside and across slices: "
        "its collectives would run over the slow network",
        fix=f'put axes first whose sizes multiply to {num_slices}, such as "replica={num_slices},..."',
    )


def _arrange_slice(found: Sequence[Any], sizes: tuple[int, ...]) -> np.ndarray:
    if getattr(found[0], "platform", "cpu") == "tpu":
        return mesh_utils.create_device_mesh(sizes, devices=list(found), allow_split_physical_axes=True)
    return np.array(found, dtype=object).reshape(sizes)
