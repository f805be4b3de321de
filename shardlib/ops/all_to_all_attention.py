"""All-to-all attention: shards of the sequence become shards of the heads and back; with a ring axis, the hybrid.

In: one shard of a sequence, inside a region manual over the axes. Out: the attention of its queries over the whole
sequence. Four all-to-alls forward (queries, keys, values, result), four backward.

    out = all_to_all_attention(query, key, value, axis="heads_axis", ring_axis="context", placement="zigzag")
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from meshes.errors import ShardingError
from shardlib.ops.context_arguments import check_heads
from shardlib.ops.ring_attention import LARGEST_TILE, ring_attention


def all_to_all_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    axis: str,
    ring_axis: str | None = None,
    placement: str = "contiguous",
    causal: bool = False,
    window: int | None = None,
    mask: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    largest_tile: int = LARGEST_TILE,
    kernels: bool = True,
) -> jax.Array:
    """Softmax attention over a sequence divided over one or two mesh axes; the rest as for `ring_attention`.

    KV heads that do not divide over the axis are repeated as often as needed for that, and no more.

    Args:
        query: [batch, length_local, heads, head_dim], heads a multiple of the size of `axis`.
        key, value: [batch, length_local, kv_heads, head_dim].
        axis: mesh axis whose shards exchange heads.
        ring_axis: mesh axis around it: the sequence is divided as `P((ring_axis, axis))`. None for one axis only.
        placement: of the sequence over the ring axis, its shards then cut into equal runs over `axis`.
        mask: [batch or 1, heads or 1, 1, keys]: a padding mask. A mask with rows would be gathered to
            [length, length] on each device and is refused; segment ids and windows are not.
        causal, window, segment_ids, positions, largest_tile, kernels: as for `ring_attention`.

    Returns:
        [batch, length_local, heads, head_dim], of the query's dtype.

    Raises:
        ShardingError: query heads that do not divide over the axis, a mask with rows, and what `ring_attention` raises.

    Source: Jacobs et al. 2023 (2309.14509) section 3; the hybrid: Fang and Zhao 2024 (2405.07719) section 3.
    """
    shards, heads, kv_heads = jax.lax.axis_size(axis), query.shape[2], key.shape[2]
    check_heads(heads, kv_heads, shards=shards, axis=axis)
    if placement != "contiguous" and ring_axis is None:
        raise ShardingError(
            f"all-to-all attention without a ring axis computes on whole sequences: placement {placement!r} gains "
            "nothing",
            fix='use placement="contiguous"',
        )
    repeats = copies_of_kv_heads(kv_heads, shards=shards)
    if repeats > 1:
        key, value = (jnp.repeat(x, repeats, axis=2) for x in (key, value))
    query, key, value = (
        jax.lax.all_to_all(x, axis, split_axis=2, concat_axis=1, tiled=True) for x in (query, key, value)
    )
    segment_ids, positions = (
        None if labels is None else jax.lax.all_gather(labels, axis, axis=1, tiled=True)
        for labels in (segment_ids, positions)
    )
    out = ring_attention(
        query,
        key,
        value,
        axis=ring_axis,
        placement=placement,
        causal=causal,
        window=window,
        mask=_mask_of_heads(mask, axis=axis, heads=heads, shards=shards),
        segment_ids=segment_ids,
        positions=positions,
        largest_tile=largest_tile,
        kernels=kernels,
    )
    return jax.lax.all_to_all(out, axis, split_axis=1, concat_axis=2, tiled=True)


def copies_of_kv_heads(kv_heads: int, *, shards: int) -> int:
    """How often each KV head is repeated so that KV heads divide over the shards: 1 when they do already."""
    return shards // math.gcd(kv_heads, shards)


def _mask_of_heads(mask: Any, *, axis: str, heads: int, shards: int) -> Any:
    """The mask of the heads that this shard computes."""
    if mask is None:
        return None
    if mask.ndim != 4 or mask.shape[2] != 1:
        raise ShardingError(
            f"all-to-all attention: mask {list(mask.shape)} has rows; every device would hold all of [length, keys]",
            fix='give padding as [batch, 1, 1, keys] and documents as segment_ids, or use kind="ring"',
        )
    if mask.shape[1] != heads or heads == 1:
        return mask
    local = heads // shards
    return jax.lax.dynamic_slice_in_dim(mask, jax.lax.axis_index(axis) * local, local, axis=1)
