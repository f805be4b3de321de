"""Cutting a batch into microbatches and slices without moving a row between devices, and one key per slice.

In: a batch whose leaves have a batch dim of `parts * rows`. Out: leaves [microbatches, slices, rows, ...].

    pieces = cut(batch, dims, num_microbatches=4, num_slices=8)
"""

from typing import Any

import jax
import jax.numpy as jnp

from meshes.errors import raise_collected
from shardlib import batch_spec as batches
from shardlib.tree_paths import leaves_with_paths

BATCH = "batch"


def batch_dims(spec: Any) -> Any:
    """For every leaf of a batch spec, the position of its batch dim, or -1 for an input shared by all rows."""
    return jax.tree.map(
        lambda leaf: leaf.axes.index(BATCH) if BATCH in leaf.axes else -1, spec, is_leaf=batches.is_spec
    )


def cut(batch: Any, dims: Any, *, num_microbatches: int, num_slices: int, num_shards: int = 1) -> Any:
    """Leaves [.., rows_of_all, ..] to [microbatches, slices, .., rows, ..]; shared inputs are repeated by reference.

    Slice `s` of microbatch `m` is part `s * num_microbatches + m` of the batch: each microbatch takes every
    `num_microbatches`-th part, so that a dim sharded in blocks stays where it is.

    Args:
        batch: arrays.
        dims: from `batch_dims`.
        num_microbatches, num_slices: how many.
        num_shards: blocks that a batch dim is sharded in where a slice spans all of them: it then takes its share of
            each block. Rows that this does not divide are taken in a row, and move between devices.
    """

    def leaf(x: jax.Array, dim: int) -> jax.Array:
        if dim < 0:
            return jnp.broadcast_to(x, (num_microbatches, num_slices, *x.shape))
        shards = num_shards if num_slices == 1 and x.shape[dim] % (num_microbatches * num_shards) == 0 else 1
        rows = x.shape[dim] // (num_microbatches * num_slices * shards)
        parted = x.reshape(*x.shape[:dim], num_slices * shards, num_microbatches, rows, *x.shape[dim + 1 :])
        if shards == 1:
            return jnp.moveaxis(parted, (dim + 1, dim), (0, 1))
        parted = jnp.moveaxis(parted, dim + 1, 0)
        return parted.reshape(num_microbatches, 1, *x.shape[:dim], shards * rows, *x.shape[dim + 1 :])

    return jax.tree.map(leaf, batch, dims)


def part_keys(rng: Any, *, first: Any, num_microbatches: int, num_slices: int) -> Any:
    """Keys [microbatches, slices]: part `first + s * num_microbatches + m` folded into the step's key."""
    m, s = jnp.meshgrid(jnp.arange(num_microbatches), jnp.arange(num_slices), indexing="ij")
    parts = first + s * num_microbatches + m
    return jax.vmap(jax.vmap(lambda part: jax.random.fold_in(rng, part)))(parts)


def check_divides(spec: Any, *, parts: int, why: str) -> None:
    """Raises when a batch dim is not a multiple of the parts it is cut into."""
    raise_collected(
        [
            f"{path} has {leaf.shape[leaf.axes.index(BATCH)]} rows, not a multiple of {parts}"
            for path, leaf in leaves_with_paths(spec, is_leaf=batches.is_spec)
            if BATCH in leaf.axes and leaf.shape[leaf.axes.index(BATCH)] % parts
        ],
        heading=f"the batch cannot be cut into {parts} parts ({why}); fix: change the batch size or the plan:",
    )
