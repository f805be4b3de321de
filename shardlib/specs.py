"""Logical axes + rules + mesh shape -> partition specs, with a reason for every dim. No devices, no memory.

In: a tree of abstract arrays (linen boxes, NNX variables, or bare with patterns), rules, a mesh or its shape.
Out: a `Resolution`: specs of the tree's structure, one entry per array, and notices; or every error at once.

    specs = resolve(abstract_params, rules, mesh).specs
"""

import math
import re
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.core import meta
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from meshes.build import shape_of
from meshes.errors import nearest, raise_collected
from meshes.shape import STANDARD_AXES, MeshShape
from shardlib.annotate import LAYERS, METADATA_KEY
from shardlib.batch_spec import ArraySpec
from shardlib.decide import Decision, Names, decide, spec_of
from shardlib.rules import Rules
from shardlib.tree_paths import path_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One array of the tree: where it is, what it is, how it is split and why; a static leaf."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    names: Names
    spec: P
    decisions: tuple[Decision, ...]
    num_shards: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * itemsize(self.dtype)

    @property
    def bytes_per_device(self) -> int:
        """Bytes of the shard each device holds."""
        return self.size_bytes // self.num_shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """Specs of a tree with everything that led to them.

    Args:
        specs: a pytree of `PartitionSpec` with the structure of the tree without boxes.
        entries: one per array, in tree order.
        notices: what a user should know although it is legal.
        dead_patterns: regexes of the rules that named no array of this tree.
    """

    specs: Any
    entries: tuple[Entry, ...]
    notices: tuple[str, ...]
    dead_patterns: tuple[str, ...] = ()


def resolve(tree: Any, rules: Rules, mesh: Mesh | AbstractMesh | MeshShape | str) -> Resolution:
    """Derives a partition spec for every array of a tree.

    Args:
        tree: arrays or `jax.ShapeDtypeStruct`s: a linen variables or params dict with or without boxes, an
            `nnx.State` or `nnx.Module`, a batch spec, or any pytree that the rules' patterns name.
        rules: ordered rules; see `Rules` for what wins.
        mesh: a mesh, an abstract mesh, its shape, or mesh text.

    Returns:
        A `Resolution`.

    Raises:
        ShardingError: every array that cannot be placed, each with its path, the reason and the fix.

    Example:
        >>> rules = Rules.parse(["mlp -> tensor", "embed -> none"], patterns=((".*", ("embed", "mlp")),))
        >>> resolve({"kernel": jax.ShapeDtypeStruct((8, 32), "float32")}, rules, "tensor=4").specs
        {'kernel': PartitionSpec(None, 'tensor')}
    """
    shape = mesh_shape(mesh)
    failures, notices = _unknown_mesh_axes(rules, shape), list[str]()
    entries: list[Entry] = []
    used_patterns: set[str] = set()
    leaves, treedef = _flatten(tree)
    for leaf in leaves:
        names = _names_of(leaf, rules, used_patterns, failures, notices)
        if names is None:
            continue
        decisions = decide(names, leaf.shape, rules=rules, mesh=shape)
        failures += [f"{leaf.path} {list(leaf.shape)} {d.problem}" for d in decisions if d.problem]
        entries.append(entry_of(leaf.path, leaf.shape, leaf.dtype, names, decisions, shape))
        notices += notices_of(entries[-1])
    raise_collected(failures, heading=f"{len(failures)} problem(s) placing arrays on mesh {shape}:")
    specs = jax.tree.unflatten(treedef, [entry.spec for entry in entries])
    dead = tuple(regex for regex, _ in rules.patterns if regex not in used_patterns)
    return Resolution(specs=specs, entries=tuple(entries), notices=tuple(notices), dead_patterns=dead)


def entry_of(
    path: str, shape: tuple[int, ...], dtype: str, names: Names, decisions: tuple[Decision, ...], mesh: MeshShape
) -> Entry:
    """The decisions about one array, with the spec and the number of shards that follow from them."""
    shards = math.prod(mesh.size(axis) for decision in decisions for axis in decision.mesh_axes)
    spec = spec_of(decisions)
    return Entry(path=path, shape=shape, dtype=dtype, names=names, spec=spec, decisions=decisions, num_shards=shards)


def mesh_shape(mesh: Mesh | AbstractMesh | MeshShape | str) -> MeshShape:
    """The shape of whatever names a mesh."""
    return MeshShape.parse(mesh) if isinstance(mesh, str | MeshShape) else shape_of(mesh)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One array of a tree with the logical axes it carries, None when it carries none."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    names: Names | None
    is_parameter: bool


def array_leaves(tree: Any) -> list[Leaf]:
    """The arrays of a tree in tree order, with whatever axes they carry."""
    return _flatten(tree)[0]


def _flatten(tree: Any) -> tuple[list[Leaf], Any]:
    """Leaves with their names, and the structure of the tree without boxes (NNX variables stay in it)."""
    if isinstance(tree, nnx.Module):
        tree = nnx.state(tree)
    is_leaf = lambda node: isinstance(node, meta.AxisMetadata | nnx.Variable)  # noqa: E731
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    has_collections = isinstance(tree, dict) and "params" in tree
    leaves = [_leaf(path, node, has_collections) for path, node in flat]
    unboxed = jax.tree.map(lambda node: node.unbox() if _is_box(node) else node, tree, is_leaf=_is_box)
    return leaves, jax.tree.structure(unboxed)


def _is_box(node: Any) -> bool:
    return isinstance(node, meta.AxisMetadata)


def _leaf(path: tuple[Any, ...], node: Any, has_collections: bool) -> Leaf:
    text, value, names, is_parameter = path_text(path), node, None, True
    if has_collections:
        is_parameter = text.split("/")[0] == "params"
    if isinstance(node, nnx.Variable):
        metadata = node.get_metadata()
        names = metadata.get(METADATA_KEY) or metadata.get("out_sharding")
        value, is_parameter = node.get_raw_value(), isinstance(node, nnx.Param)
    elif isinstance(node, nnx.bridge.variables.NNXMeta):
        names, value = node.metadata.get(METADATA_KEY), node.unbox()
    elif _is_box(node):
        names, value = tuple(node.names), node.value
    elif isinstance(node, ArraySpec):
        names = node.axes
    return Leaf(
        path=text,
        shape=tuple(value.shape),
        dtype=str(value.dtype),
        names=None if names is None else tuple(names),
        is_parameter=is_parameter,
    )


def _names_of(leaf: Leaf, rules: Rules, used: set[str], failures: list[str], notices: list[str]) -> Names | None:
    """The logical axes of an array: its own, or the first matching pattern's; None after a failure."""
    names, origin = leaf.names, "its annotation"
    if names is None:
        for regex, pattern_names in rules.patterns:
            if re.fullmatch(regex, leaf.path):
                used.add(regex)
                names, origin = pattern_names, f"pattern {regex!r}"
                break
    if names is None and (not leaf.shape or not leaf.is_parameter):
        if leaf.shape:
            notices.append(f"{leaf.path} {list(leaf.shape)} is not a parameter and has no logical axes: replicated")
        return (None,) * len(leaf.shape)
    if names is None:
        failures.append(
            f"{leaf.path} {list(leaf.shape)} has no logical axes, so no rule can place it on the mesh; "
            f"fix: annotate it, or add a pattern such as {_pattern_fix(leaf)}"
        )
    elif len(names) != len(leaf.shape):
        stacked = len(leaf.shape) - len(names) == 1
        advice = (
            "if nnx.vmap stacked it, call annotate.name_stack(module)" if stacked else "give one name (or None) per dim"
        )
        failures.append(
            f"{leaf.path} {list(leaf.shape)} has rank {len(leaf.shape)} but {origin} names {len(names)} axes "
            f"{_names_text(names)}; fix: {advice}"
        )
        return None
    return names


def _pattern_fix(leaf: Leaf) -> str:
    axes = ", ".join(['"..."'] * len(leaf.shape))
    return f'"{re.escape(leaf.path)}" = [{axes}]'


def _names_text(names: Names) -> str:
    return "(" + ", ".join(name or "none" for name in names) + ")"


def notices_of(entry: Entry) -> list[str]:
    """What is legal in this entry and yet worth saying."""
    where, found, seen = f"{entry.path} {list(entry.shape)}", list[str](), set[str]()
    for decision in entry.decisions:
        if decision.remark:
            found.append(f"{where} {decision.remark} ({entry.bytes_per_device:,} bytes on each device)")
        if decision.name == LAYERS and decision.mesh_axes:
            axes = "+".join(decision.mesh_axes)
            found.append(
                f"{where}: layers sharded over {axes} without a pipeline is weight sharding: "
                f"every rank of {axes} repeats the compute of all layers"
            )
        if decision.name in seen:
            found.append(f"{where}: the name {decision.name!r} appears twice; the first dim has the first choice")
        seen |= {decision.name} if decision.name else set()
    return found


def _unknown_mesh_axes(rules: Rules, mesh: MeshShape) -> list[str]:
    known = (*mesh.names, *STANDARD_AXES)
    return [
        f"rule {str(rule)!r}: {axis!r} is no axis of mesh {mesh}, nor a standard one{nearest(axis, known)}; "
        "fix: correct the name"
        for rule in rules.rules
        for axis in rule.mesh_axes
        if axis not in known
    ]


def itemsize(dtype: str) -> int:
    """Bytes per element; a typed PRNG key counts its two 32-bit words."""
    return 8 if dtype.startswith("key<") else np.dtype(dtype).itemsize
