"""Which devices a collective joins: XLA's three spellings of replica groups, and the mesh axes they stand for.

In: attribute text. Out: groups of device ids, and for a mesh the axes whose lines the groups are.

    read_groups("[2,4]<=[8]")                                                        # ((0, 1, 2, 3), (4, 5, 6, 7))
    axes_of_groups(((0, 2), (1, 3)), mesh_shape=MeshShape.parse("data=2,tensor=2")).axes    # ("data",)
"""

import itertools
import math
import re
from dataclasses import dataclass

import numpy as np

from meshes.errors import ShardingError
from meshes.shape import MAX_DEVICES, MeshShape

Groups = tuple[tuple[int, ...], ...]

_NUMBERS = r"\d{1,8}(?:,\d{1,8})*"
_LISTS = re.compile(rf"\{{(?:\{{{_NUMBERS}\}}(?:,\s?\{{{_NUMBERS}\}})*)?\}}", re.ASCII)
_IOTA = re.compile(rf"\[({_NUMBERS})\]<=\[({_NUMBERS})\](?:T\(({_NUMBERS})\))?", re.ASCII)
_MESH = re.compile(
    rf"mesh\[([^\]]*)\](?:, device_ids=\((?:\[({_NUMBERS})\](?:T\(({_NUMBERS})\))?|({_NUMBERS}))\))? ?\{{([^}}]*)\}}",
    re.ASCII,
)
_AXIS_SIZE = re.compile(r"'?([^'=]+)'?=(\d{1,8})", re.ASCII)
_AXIS_PART = re.compile(r"'?([^':]+)'?(?::\((\d{1,8})\)(\d{1,8}))?", re.ASCII)
_ENDS = re.compile(r"\s*(?:,|\Z)")


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisMatch:
    """The mesh axes a collective runs over, and why; a static leaf.

    Args:
        axes: mesh axis names in mesh order; empty when nothing moves; None when no set of axes gives the groups.
        reason: one line.
    """

    axes: tuple[str, ...] | None
    reason: str


def read_groups(text: str, /) -> Groups:
    """Device ids of each group, from the text after `replica_groups=` (what follows the value is ignored).

    Spellings: lists `{{0,1},{2,3}}`; iota `[2,4]<=[4,2]T(1,0)`, count 0 to 7 as shape [4,2], transpose, reshape to
    2 groups of 4; mesh `mesh['a'=2,'b'=4] {'b'}`, one group per line along the named axes, where `'b':(2)2` is the
    part of axis b of size 2 below the outermost 2, and `device_ids=` permutes the devices first.

    Raises:
        ShardingError: none of the three, or sizes that do not agree.
    """
    for pattern, build in ((_LISTS, _from_lists), (_IOTA, _from_iota), (_MESH, _from_mesh)):
        match = pattern.match(text)
        if match and _ENDS.match(text, match.end()):
            groups = build(match)
            members = [device for group in groups for device in group]
            if len(set(members)) != len(members):
                raise ShardingError(f"replica groups {match[0]} hold a device twice")
            return groups
    raise ShardingError(f"replica groups {text[:80]!r} are in none of the three spellings (lists, iota, mesh)")


def read_pairs(text: str, /) -> tuple[tuple[int, int], ...]:
    """Source and target device of each message, from the text after `source_target_pairs=`.

    Raises:
        ShardingError: not a list of pairs, or a device that sends or receives twice.
    """
    match = _LISTS.match(text)
    if match is None or not _ENDS.match(text, match.end()) or any(len(pair) != 2 for pair in _from_lists(match)):
        raise ShardingError(f"source_target_pairs {text[:80]!r} are not a list of pairs")
    pairs = _from_lists(match)
    if any(len({pair[end] for pair in pairs}) != len(pairs) for end in (0, 1)):
        raise ShardingError(f"source_target_pairs {text[:80]!r}: a device sends or receives twice")
    return tuple((pair[0], pair[1]) for pair in pairs)


def axes_of_groups(groups: Groups, *, mesh_shape: MeshShape) -> AxisMatch:
    """The mesh axes along which the groups lie; device ids are positions in the row-major mesh."""
    members = [device for group in groups for device in group]
    if sorted(members) != list(range(mesh_shape.num_devices)):
        return AxisMatch(
            axes=None, reason=f"the groups do not cover the {mesh_shape.num_devices} devices of {mesh_shape}"
        )
    indices = np.unravel_index(np.array(groups[0]), mesh_shape.sizes)
    varying = [dim for dim, index in enumerate(indices) if len(set(index.tolist())) > 1]
    names = tuple(mesh_shape.names[dim] for dim in varying)
    if all(len(group) == 1 for group in groups):
        return AxisMatch(axes=(), reason="every group is a single device: nothing moves")
    expected = _lines(np.arange(mesh_shape.num_devices).reshape(mesh_shape.sizes), varying)
    if {frozenset(group) for group in groups} != {frozenset(group) for group in expected}:
        over = "+".join(names) or "one device"
        what = f"group {groups[0]} spans {over}, but the groups are not the lines of {mesh_shape} along {over}"
        return AxisMatch(axes=None, reason=f"{what}: part of an axis, or devices in another order")
    return AxisMatch(axes=names, reason=f"the groups are the lines of {mesh_shape} along {'+'.join(names)}")


def axes_of_pairs(pairs: tuple[tuple[int, int], ...], *, mesh_shape: MeshShape) -> AxisMatch:
    """The mesh axes whose index some message changes: the smallest set of axes that every message stays within."""
    if any(device >= mesh_shape.num_devices for pair in pairs for device in pair):
        return AxisMatch(
            axes=None, reason=f"the pairs name devices beyond the {mesh_shape.num_devices} of {mesh_shape}"
        )
    moves = [pair for pair in pairs if pair[0] != pair[1]]
    if not moves:
        return AxisMatch(axes=(), reason="no device sends to another: nothing moves")
    sources, targets = (np.unravel_index(np.array(ends), mesh_shape.sizes) for ends in zip(*moves, strict=True))
    changed = [bool((source != target).any()) for source, target in zip(sources, targets, strict=True)]
    names = tuple(name for name, moved in zip(mesh_shape.names, changed, strict=True) if moved)
    return AxisMatch(axes=names, reason=f"messages change the index along {'+'.join(names)} only")


def _from_lists(match: re.Match[str]) -> Groups:
    return tuple(tuple(map(int, group.split(","))) for group in re.findall(rf"\{{({_NUMBERS})\}}", match[0], re.ASCII))


def _from_iota(match: re.Match[str]) -> Groups:
    shape = _numbers(match[1])
    devices = _iota(match[2], match[3], text=match[0])
    if len(shape) != 2 or math.prod(shape) != devices.size:
        raise ShardingError(f"replica groups {match[0]}: {match[1]} is not groups x size of {devices.size} devices")
    return _tuples(devices.reshape(shape))


def _from_mesh(match: re.Match[str]) -> Groups:
    sizes: dict[str, int] = {}
    for entry in match[1].split(","):
        axis = _AXIS_SIZE.fullmatch(entry.strip())
        if axis is None or axis[1] in sizes:
            raise ShardingError(f"replica groups {match[0]}: mesh axis {entry!r} is not name=size, or appears twice")
        sizes[axis[1]] = int(axis[2])
    count = math.prod(sizes.values())
    _check_count(count, text=match[0])
    if match[2]:
        devices = _iota(match[2], match[3], text=match[0]).reshape(-1)
    else:
        devices = np.array(_numbers(match[4])) if match[4] else np.arange(count)
    if devices.size != count:
        raise ShardingError(f"replica groups {match[0]}: {devices.size} device ids for a mesh of {count}")
    # (axis, devices before the part, its size) for each named axis or part of one
    parts: list[tuple[str, int, int]] = []
    for entry in match[5].split(",") if match[5].strip() else ():
        part = _AXIS_PART.fullmatch(entry.strip())
        if part is None or part[1] not in sizes:
            raise ShardingError(f"replica groups {match[0]}: {entry.strip()!r} is not an axis of that mesh")
        parts.append((part[1], int(part[2] or 1), int(part[3] or sizes[part[1]])))
    dims: list[int] = []
    grouped: dict[tuple[str, int], int] = {}
    for axis, size in sizes.items():
        cuts = {1, size} | {cut for name, before, width in parts if name == axis for cut in (before, before * width)}
        edges = sorted(cuts)
        if any(below == 0 or above % below for below, above in itertools.pairwise(edges)) or edges[-1] != size:
            raise ShardingError(f"replica groups {match[0]}: axis {axis!r} of size {size} cannot be cut so")
        for below, above in itertools.pairwise(edges):
            grouped[axis, below] = len(dims)
            dims.append(above // below)
    order = [grouped[name, before] for name, before, width in parts if width > 1]
    if len(set(order)) != len(order) or math.prod(dims[dim] for dim in order) != math.prod(w for _, _, w in parts):
        raise ShardingError(f"replica groups {match[0]}: the parts of an axis overlap")
    return _lines(devices.reshape(dims), order)


def _lines(devices: np.ndarray, dims: list[int]) -> Groups:
    """One group per line of the device array along `dims`."""
    rest = [dim for dim in range(devices.ndim) if dim not in dims]
    size = math.prod(devices.shape[dim] for dim in dims)
    return _tuples(devices.transpose(*rest, *dims).reshape(-1, size))


def _iota(sizes: str, permutation: str | None, *, text: str) -> np.ndarray:
    shape = _numbers(sizes)
    _check_count(math.prod(shape), text=text)
    order = _numbers(permutation) if permutation else tuple(range(len(shape)))
    if sorted(order) != list(range(len(shape))):
        raise ShardingError(f"replica groups {text}: T({permutation}) does not permute [{sizes}]")
    return np.arange(math.prod(shape)).reshape(shape).transpose(order)


def _check_count(count: int, *, text: str) -> None:
    if not 0 < count <= MAX_DEVICES:
        raise ShardingError(f"replica groups {text}: {count} devices, outside 1 to {MAX_DEVICES}")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _tuples(devices: np.ndarray) -> Groups:
    return tuple(map(tuple, devices.tolist()))
