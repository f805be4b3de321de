"""Context-parallel attention on global arrays: any kind, as a region manual over the axes it is told.

In: arrays with the whole sequence, in the order of their placement. Out: attention like on one device.

    out = context_attention(query, key, value, kind="ring", axis="context", placement="zigzag", causal=True, mesh=mesh)
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from meshes.errors import ShardingError, nearest
from shardlib.attention_shapes import check_shapes
from shardlib.ops.all_to_all_attention import all_to_all_attention, copies_of_kv_heads
from shardlib.ops.gather_attention import gather_attention
from shardlib.ops.ring_attention import LARGEST_TILE, ring_attention


def _hybrid(query: jax.Array, key: jax.Array, value: jax.Array, *, axis: tuple[str, str], **options: Any) -> jax.Array:
    return all_to_all_attention(query, key, value, ring_axis=axis[0], axis=axis[1], **options)


KINDS: Final[Mapping[str, Callable[..., jax.Array]]] = {
    "ring": ring_attention,
    "all_to_all": all_to_all_attention,
    "gather": gather_attention,
    "hybrid": _hybrid,
}
"""Per-shard bodies by kind; "hybrid" takes two axes, the ring's first."""


def context_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    kind: str,
    axis: str | tuple[str, str],
    placement: str = "contiguous",
    causal: bool = False,
    window: int | None = None,
    mask: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    degrees: Sequence[int] | None = None,
    batch_axes: tuple[str, ...] = (),
    head_axes: tuple[str, ...] = (),
    mesh: Mesh | AbstractMesh | None = None,
    largest_tile: int = LARGEST_TILE,
    kernels: bool = True,
) -> jax.Array:
    """Attention with the sequence over `axis`, the batch over `batch_axes` and the heads over `head_axes`.

    Inside a region that is manual over some of these axes already (a pipeline's, over stage and data), the arrays
    are local in them, and only the others are made manual here. Under a condition that differs between devices of
    such an axis use "all_to_all" or "gather": the permutes of a ring would wait there for devices that never come.

    Args:
        query: [batch, length, heads, head_dim], in the order of the placement.
        key, value: [batch, length, kv_heads, head_dim]. KV heads that do not divide over `head_axes` are repeated
            as often as needed for that.
        kind: one of `KINDS`.
        axis: the context axis; for the hybrid (ring axis, all-to-all axis).
        placement: one of `context_layout.PLACEMENTS`, over the ring.
        causal, window, largest_tile, kernels: as for `ring_attention`.
        mask: [batch or 1, heads or 1, length or 1, keys], boolean, rows and columns in the order of the placement.
        segment_ids: [batch, length], integer.
        positions: [batch or 1, length], integer, in place of the placement's.
        degrees: sizes of rings into which the axis falls (`ring_attention`); for the ring alone.
        mesh: None for the one in force (`jax.set_mesh`, or the region around).

    Returns:
        [batch, length, heads, head_dim], of the query's dtype, divided as the query.

    Raises:
        ShardingError: an unknown kind or axis, no mesh, sizes that do not divide, and what the kind raises.
    """
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    _check(mesh, kind=kind, axes=axes, others=(*batch_axes, *head_axes))
    # Axes that are manual around us have divided the arrays already.
    batch, heads, length = (
        tuple(name for name in names if name not in mesh.manual_axes) for names in (batch_axes, head_axes, axes)
    )
    # Columns of a mask are those of all shards, also of an axis that is manual around us.
    keys = key.shape[1] * _size(mesh, tuple(name for name in axes if name not in length))
    labels: dict[str, Any] = {"mask": mask, "segment_ids": segment_ids, "positions": positions}
    check_shapes(query, key, value, keys=keys, own=True, **labels)
    _check_sizes(query, key, mesh=mesh, batch=batch, heads=heads, length=length, placement=placement)
    repeats = copies_of_kv_heads(key.shape[2], shards=_size(mesh, heads))
    if repeats > 1:
        key, value = (jnp.repeat(x, repeats, axis=2) for x in (key, value))
    body = functools.partial(
        KINDS[kind],
        axis=axes if kind == "hybrid" else axes[0],
        placement=placement,
        causal=causal,
        window=window,
        largest_tile=largest_tile,
        kernels=kernels,
    )
    if degrees is not None:
        if kind != "ring":
            raise ShardingError(f"{kind} attention with degrees", fix='use kind="ring", which falls into smaller ones')
        body = functools.partial(body, degrees=degrees)
    dims = {"mask": (batch, heads, length, ()), "segment_ids": (batch, length), "positions": (batch, length)}
    given = {name: (x, _spec(x, dims[name])) for name, x in labels.items() if x is not None}
    whole = P(batch or None, length or None, heads or None, None)
    specs = (whole, whole, whole, {name: spec for name, (_, spec) in given.items()})
    operands = (query, key, value, {name: x for name, (x, _) in given.items()})
    return _manual(body, operands, mesh=mesh, specs=specs, axes={*batch, *heads, *length})


def _manual(body: Callable[..., jax.Array], operands: Any, *, mesh: Any, specs: Any, axes: set[str]) -> jax.Array:
    """The body of the operands (the last one its options) in a region manual over the axes."""

    def local(query, key, value, options):
        return body(query, key, value, **options)

    if not axes:
        return local(*operands)
    if AxisType.Explicit in mesh.axis_types:
        operands = jax.tree.map(jax.sharding.reshard, operands, specs)
    region = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[0], axis_names=axes, check_vma=False)
    return region(*operands)


def _size(mesh: Mesh | AbstractMesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[name] for name in axes)


def _spec(x: jax.Array, dims: tuple[tuple[str, ...], ...]) -> P:
    """Dims over their axes; those of size 1 stand for all and stay whole."""
    return P(*(names if names and size != 1 else None for size, names in zip(x.shape, dims, strict=True)))


def _check(mesh: Mesh | AbstractMesh, *, kind: str, axes: tuple[str, ...], others: tuple[str, ...]) -> None:
    if kind not in KINDS:
        raise ShardingError(
            f"attention kind {kind!r} is unknown{nearest(kind, KINDS)}", fix=f"use one of {', '.join(KINDS)}"
        )
    wanted = 2 if kind == "hybrid" else 1
    if len(axes) != wanted:
        raise ShardingError(
            f"{kind} attention over the axes {list(axes)}",
            fix='give axis=("ring_axis", "all_to_all_axis")' if wanted == 2 else f"give one axis, axis={axes[0]!r}",
        )
    if not mesh.axis_names:
        raise ShardingError("context attention without a mesh", fix="pass mesh=, or call it under jax.set_mesh(mesh)")
    for name in (*axes, *others):
        if name not in mesh.axis_names:
            raise ShardingError(
                f"the mesh has no axis {name!r}{nearest(name, mesh.axis_names)}", fix=f"its axes: {mesh.axis_names}"
            )


def _check_sizes(query, key, *, mesh, batch, heads, length, placement: str) -> None:
    rows, tokens, query_heads, _ = query.shape
    if rows % _size(mesh, batch):
        raise ShardingError(
            f"batch {rows} does not divide over {_size(mesh, batch)} shards", fix="pad or resize the batch"
        )
    if query_heads % _size(mesh, heads) or query_heads % key.shape[2]:
        raise ShardingError(
            f"{query_heads} query heads, {key.shape[2]} KV heads: query heads must be a multiple of the KV heads "
            f"and divide over {_size(mesh, heads)} shards of heads",
            fix="leave head_axes out, or use a tensor axis that divides the heads",
        )
    if tokens % _size(mesh, length):
        chunks = _size(mesh, length) * (2 if placement == "zigzag" else 1)
        raise ShardingError(
            f"length {tokens} is not divisible by {'x'.join(length)}={_size(mesh, length)}",
            fix=f"pad the sequence to length {-(-tokens // chunks) * chunks} and mask the padding",
        )
