"""Attention under tensor parallelism when there are fewer KV heads than shards.

In: queries split over heads, keys and values whole. Out: the kernel's or the reference's result, one KV copy per shard.

    op = sharded_heads_attention(axes_of, constrain, mesh=mesh, platform="tpu", manual=False)
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from shardlib.annotate import reference_attention
from shardlib.ops.all_to_all_attention import copies_of_kv_heads
from shardlib.ops.fused_attention import call_refusal, fused_attention, shards_of

Axes = tuple[str, ...]


def sharded_heads_attention(
    axes_of: Callable[[tuple[int, ...]], tuple[Axes, Axes]],
    constrain: Callable[[Any, tuple[str | None, ...]], Any],
    *,
    mesh: Mesh | AbstractMesh,
    platform: str | None,
    manual: bool,
) -> Callable[..., jax.Array]:
    """Builds the attention op of a plan.

    Args:
        axes_of: shape of the queries [batch, length, heads, head_dim] -> mesh axes that split rows and heads.
        constrain: the plan's `(array, names) -> array`.
        mesh: the mesh.
        platform: whose kernel to use where it takes the call; None for the reference alone.
        manual: the trace is inside a region manual over some axes.

    Returns:
        A function with the signature of `annotate.attention`. Shard i of n holds KV head i * kv_heads // n, which
        is the head its query group reads, so scores need no communication.
    """

    def attention(query, key, value, **options):
        batch_axes, head_axes = axes_of(query.shape)
        shards, kv_heads = shards_of(mesh, head_axes), key.shape[2]
        refused = call_refusal(platform, query, key, value, **options)
        if kv_heads % shards and (shards % kv_heads == 0 or refused is None):
            names = ("batch", None, "heads", "head_dim")
            copies = copies_of_kv_heads(kv_heads, shards=shards)
            key, value = (constrain(jnp.repeat(x, copies, axis=2), names) for x in (key, value))
        if refused is not None:
            return reference_attention(query, key, value, **options)
        assert platform is not None
        return fused_attention(
            query,
            key,
            value,
            platform=platform,
            batch_axes=batch_axes,
            head_axes=head_axes,
            mesh=None if manual else mesh,
            **options,
        )

    return attention
