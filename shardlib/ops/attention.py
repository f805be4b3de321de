"""Attention under tensor parallelism when there are fewer KV heads than shards.

In: queries split over heads, keys and values whole. Out: the reference's result with one KV copy per shard.

    op = sharded_heads_attention(shards_of_heads, constrain)
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.annotate import reference_attention


def sharded_heads_attention(
    shards_of: Callable[[tuple[int, ...]], int], constrain: Callable[[Any, tuple[str | None, ...]], Any]
) -> Callable[..., jax.Array]:
    """Builds the attention op of a plan.

    Args:
        shards_of: shape of the queries [batch, length, heads, head_dim] -> into how many shards heads are split.
        constrain: the plan's `(array, names) -> array`.

    Returns:
        A function with the signature of `annotate.attention`. Shard i of n holds KV head i * kv_heads // n, which
        is the head its query group reads, so scores need no communication.
    """

    def attention(query, key, value, **options):
        shards, kv_heads = shards_of(query.shape), key.shape[2]
        if kv_heads % shards and shards % kv_heads == 0:
            names = ("batch", None, "heads", "head_dim")
            key, value = (constrain(jnp.repeat(x, shards // kv_heads, axis=2), names) for x in (key, value))
        return reference_attention(query, key, value, **options)

    return attention
