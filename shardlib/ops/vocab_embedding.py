"""Rows of an embedding table that is split over its vocabulary: by mask and one sum, with no gather between devices.

In: a table [vocab, embed] and token ids [batch, length]. Out: [batch, length, embed], of the table's dtype.

    x = embed_tokens(table, ids, axes=("tensor",), mesh=mesh)
    x = embed_tokens(table, ids, vocab=50257, mesh=mesh)    # of 50260 stored rows
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from meshes.errors import ShardingError
from shardlib.ops.vocab_shards import BATCH_AXES, LENGTH_AXES, VOCAB_AXES, Shards, check_sizes, find_shards


def embed_tokens(
    table: jax.Array,
    ids: jax.Array,
    *,
    vocab: int | None = None,
    axes: str | tuple[str, ...] = VOCAB_AXES,
    batch_axes: tuple[str, ...] = BATCH_AXES,
    length_axes: tuple[str, ...] = LENGTH_AXES,
    mesh: Mesh | AbstractMesh | None = None,
    reduce_dtype: Any = jnp.float32,
) -> jax.Array:
    """Looks up token ids; every shard finds the rows it has, and one all-reduce adds the others' zeros.

    Works on whole arrays under automatic axes, in regions manual over other axes, and on the slices of a region that
    is manual over `axes` (`find_shards` says how each axis is taken). Inside a region made with `check_vma=False`,
    differentiate inside it too: JAX divides what crosses its boundary by the size of the axes.

    Args:
        table: [vocab or more, embed], floating. Rows from `vocab` on are padding: never read, zero gradients.
        ids: [batch, length], integer.
        vocab: the logical vocabulary; None for every stored row.
        axes: mesh axes that split the rows, major first.
        batch_axes, length_axes: mesh axes that split the ids.
        mesh: for a caller outside any manual region; None for the mesh in force, or one device when there is none.
        reduce_dtype: of the sum over devices, which is exact in any floating dtype as wide as the table's. In a partly
            manual region XLA's CPU backend aborts on bfloat16 sums (JAX 0.10.2, 0.12.0), hence the default.

    Returns:
        [batch, length, embed]. NaN for an id outside 0 to vocab - 1: a mistake in the data that should be seen.

    Raises:
        ShardingError: ranks, dtypes, axes or sizes that do not fit.

    Communication: forward one all-reduce of batch x length x embed, 2 (t-1)/t times its bytes per device with t shards;
    backward none over `axes`, and one reduction of the table's gradient over the axes of tokens.

    Source: Shoeybi et al. 2019 (1909.08053) section 3.
    """
    if table.ndim != 2 or ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ShardingError(
            f"embed_tokens takes a table [vocab, embed] and integer ids [batch, length], not {table.dtype}"
            f"{list(table.shape)} and {ids.dtype}{list(ids.shape)}"
        )
    shards = find_shards(axes, batch_axes=batch_axes, length_axes=length_axes, mesh=mesh)
    vocab = table.shape[0] * shards.num_outside if vocab is None else vocab
    check_sizes(shards, parameter="table", stored=table.shape[0], vocab=vocab, tokens=ids.shape)
    table, ids = shards.aligned(table, ids.astype(jnp.int32))
    lookup = _Lookup(shards=shards, dtype=table.dtype, reduce_dtype=jnp.dtype(reduce_dtype))
    is_known = (ids >= 0) & (ids < vocab)
    return jnp.where(is_known[..., None], _rows(lookup, table, ids), jnp.asarray(jnp.nan, table.dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lookup:
    """What a lookup knows before it sees arrays; one static leaf."""

    shards: Shards
    dtype: Any
    reduce_dtype: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows(lookup: _Lookup, table: jax.Array, ids: jax.Array) -> jax.Array:
    shards = lookup.shards

    def body(table: jax.Array, ids: jax.Array) -> jax.Array:
        local, is_here = _local(shards, ids, table.shape[0])
        table = _rows_together(table)
        rows = jnp.where(is_here[..., None], jnp.take(table, jnp.where(is_here, local, 0), axis=0, mode="clip"), 0)
        if not shards.vocab:
            return rows
        return shards.total(rows.astype(lookup.reduce_dtype)).astype(table.dtype)

    return shards.run(body, (shards.vocab_spec(2, 0), shards.token_spec(2)), shards.token_spec(3))(table, ids)


def _forward(lookup: _Lookup, table: jax.Array, ids: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # The table is kept for its shape and its axes alone; nothing reads it, so it is not held in memory.
    return _rows(lookup, table, ids), (table, ids)


def _backward(lookup: _Lookup, kept: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, None]:
    """Each shard adds up the cotangents of the ids it has, in float32."""
    shards, (table, ids) = lookup.shards, kept

    def body(table: jax.Array, ids: jax.Array, cotangent: jax.Array) -> jax.Array:
        num_rows = table.shape[0]
        local, is_here = _local(shards, ids, num_rows)
        at = jnp.where(is_here, local, num_rows)  # past the end: dropped
        gradient = (
            _rows_together(jnp.zeros_like(table, jnp.float32)).at[at].add(cotangent.astype(jnp.float32), mode="drop")
        )
        return _rows_together(gradient)[None]

    in_specs = (shards.vocab_spec(2, 0), shards.token_spec(2), shards.token_spec(3))
    gradients = shards.run(body, in_specs, shards.gradient_spec(2, 0))(table, ids, cotangent)
    return gradients.sum(axis=0).astype(lookup.dtype), None


_rows.defvjp(_forward, _backward)


def _rows_together(table: jax.Array) -> jax.Array:
    """The table with rows that no axis still automatic splits.

    XLA's partitioner aborts on some gathers from split rows in a partly manual region (seen in JAX 0.12.0).
    """
    context = jax.sharding.get_abstract_mesh()
    if all(context.shape[axis] == 1 for axis in context.auto_axes):
        return table
    return jax.lax.with_sharding_constraint(table, P(None, P.UNCONSTRAINED))


def _local(shards: Shards, ids: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Ids counted from this shard's first row, and whether it has them."""
    local = ids - shards.index() * num_rows
    return local, (local >= 0) & (local < num_rows)
