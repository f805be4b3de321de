"""What every context-parallel attention starts from: shapes checked, heads grouped, labels of all tokens.

In: the arrays one shard holds. Out: queries and keys in the layout of `online_softmax`, labels of rows and columns.

    shards = Shards(axis="context", placement="zigzag")
    arguments = prepare(query, key, value, shards=shards, rule=rule, mask=None, segment_ids=None, positions=None)
"""

import functools
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshes.errors import ShardingError
from shardlib.attention_shapes import check_shapes
from shardlib.ops.attention_mask import Labels, Rule, View, cut
from shardlib.ops.context_layout import check_length, shard_positions

NOBODY: Final = np.iinfo(np.int32).min
"""The segment of keys that no query sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """How a sequence is spread, seen from inside a region manual over the axis; a static leaf.

    Args:
        axis: mesh axis that divides the sequence; None when this device holds all of it.
        placement: one of `context_layout.PLACEMENTS`.
        positions_given: tokens stand elsewhere than the placement says.
        degrees: sizes of the rings that the axis falls into, one behind the other; None for one ring.
    """

    axis: str | None
    placement: str = "contiguous"
    positions_given: bool = False
    degrees: tuple[int, ...] | None = None

    @property
    def count(self) -> int:
        """Shards of the sequence."""
        return 1 if self.axis is None else jax.lax.axis_size(self.axis)

    @property
    def index(self) -> jax.Array | int:
        """Which of them this device holds."""
        return 0 if self.axis is None else jax.lax.axis_index(self.axis)

    @property
    def rings(self) -> tuple[int, ...]:
        """Sizes of the rings."""
        return (self.count,) if self.degrees is None else self.degrees

    def source(self, shift: jax.Array | int) -> tuple[jax.Array | int, jax.Array | bool]:
        """The shard that stands `shift` before this one on its ring; False when the ring is too small for that."""
        if self.degrees is None:
            return (self.index - shift) % self.count, True
        first, size = (jnp.asarray(of)[self.index] for of in _ring_of_each(self.degrees))
        return first + (self.index - first - shift) % size, shift < size

    def tile(self, local_length: int, *, largest: int) -> int:
        """Rows to compute at a time: they divide a shard, and each chunk of a zigzag shard, which is skipped alone.

        The greatest such divisor up to `largest`; for lengths with small divisors only, the least above it.
        """
        chunk = local_length // 2 if self.placement == "zigzag" else local_length
        below = next(size for size in range(min(largest, chunk), 0, -1) if chunk % size == 0)
        if below * 8 > min(largest, chunk):
            return below
        return next(size for size in range(largest, chunk + 1) if chunk % size == 0)


def _ring_of_each(degrees: tuple[int, ...]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """For each shard the first one of its ring, and how many these are."""
    starts = np.cumsum([0, *degrees[:-1]])
    return np.repeat(starts, degrees), np.repeat(degrees, degrees)


class Arguments(NamedTuple):
    """A pytree.

    Args:
        query: [batch, kv_heads, group, length, head_dim], local.
        key, value: [batch, kv_heads, length, head_dim], local.
        rows: labels of the local tokens.
        columns: labels of the tokens of all shards, one shard behind the other.
        mask: [batch or 1, heads or 1, length or 1, keys of all shards], or None.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    rows: Labels
    columns: Labels
    mask: jax.Array | None

    def view(self, start: jax.Array | int, size: int, *, counts: jax.Array | bool = True) -> View:
        """The local queries against `size` keys from `start` of all shards'; of none, unless they count."""
        columns = jax.tree.map(lambda x: cut(x, start, size, axis=1), self.columns)
        if counts is not True:
            assert columns.segment_ids is not None, "checked by check_degrees"
            columns = columns._replace(segment_ids=jnp.where(counts, columns.segment_ids, NOBODY))
        return View(rows=self.rows, columns=columns, mask=cut(self.mask, start, size, axis=3))


def prepare(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    shards: Shards,
    rule: Rule,
    mask: jax.Array | None,
    segment_ids: jax.Array | None,
    positions: jax.Array | None,
) -> Arguments:
    """Checks what one shard holds and brings it into the layout of `online_softmax`.

    Labels of all shards are gathered (4 bytes a token); the rest stays where it is.

    Args:
        query: [batch, length_local, heads, head_dim].
        key, value: [batch, length_local, kv_heads, head_dim].
        mask: [batch or 1, heads or 1, length_local or 1, keys], boolean, keys of all shards in the order of storage.
        segment_ids: [batch, length_local], integer.
        positions: [batch or 1, length_local], integer; None for what the placement says.

    Raises:
        ShardingError: every shape that does not fit, at once.
    """
    batch, length, heads, head_dim = query.shape
    check_length(length * shards.count, shards=shards.count, placement=shards.placement)
    rule.check_window(length * shards.count)
    check_shapes(
        query,
        key,
        value,
        keys=length * shards.count,
        mask=mask,
        segment_ids=segment_ids,
        positions=positions,
        own=True,
        where=" on one shard",
    )
    kv_heads = key.shape[2]
    if positions is None:
        place = {"local_length": length, "shards": shards.count, "placement": shards.placement}
        held = functools.partial(shard_positions, jnp.arange(length, dtype=jnp.int32), **place)
        rows = held(shards.index)[None]
        columns = jax.vmap(held)(jnp.arange(shards.count, dtype=jnp.int32)).reshape(1, -1)
    else:
        rows = positions.astype(jnp.int32)
        columns = _gathered(rows, shards)
    segments = None if segment_ids is None else segment_ids.astype(jnp.int32)
    return Arguments(
        query=query.reshape(batch, length, kv_heads, heads // kv_heads, head_dim).transpose(0, 2, 3, 1, 4),
        key=key.transpose(0, 2, 1, 3),
        value=value.transpose(0, 2, 1, 3),
        rows=Labels(positions=rows, segment_ids=segments),
        columns=Labels(positions=columns, segment_ids=None if segments is None else _gathered(segments, shards)),
        mask=mask,
    )


def check_degrees(shards: Shards, *, has_segments: bool, has_positions: bool) -> None:
    """Raises for rings that do not fill the axis, and for tokens that do not say where they belong."""
    if shards.degrees is None:
        return
    if min(shards.degrees, default=0) < 1 or sum(shards.degrees) != shards.count:
        raise ShardingError(
            f"degrees {list(shards.degrees)} are not the sizes of rings that fill {shards.axis}={shards.count}",
            fix="give `Grouping.degrees`, planned with ranks equal to the size of the axis",
        )
    missing = [name for name, has in (("segment_ids", has_segments), ("positions", has_positions)) if not has]
    if missing:
        raise ShardingError(
            f"degrees without {' and '.join(missing)}: which tokens belong together is not known",
            fix="give those of `shardlib.data.arrange`",
        )


def cotangents(arguments: Arguments, query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
    """The arguments' cotangents, in their dtypes, from wide ones of their arrays; labels have none."""
    wide = ((query, arguments.query), (key, arguments.key), (value, arguments.value))
    found = (x.astype(of.dtype) for x, of in wide)
    return Arguments(*found, rows=None, columns=None, mask=None)  # pyright: ignore[reportArgumentType]


def merged_heads(out: jax.Array) -> jax.Array:
    """From [batch, kv_heads, group, length, head_dim] to [batch, length, heads, head_dim]."""
    batch, kv_heads, group, length, head_dim = out.shape
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, kv_heads * group, head_dim)


def _gathered(labels: jax.Array, shards: Shards) -> jax.Array:
    return labels if shards.axis is None else jax.lax.all_gather(labels, shards.axis, axis=1, tiled=True)


def check_heads(heads: int, kv_heads: int, *, shards: int, axis: str) -> None:
    """Raises when the query heads cannot be exchanged between the shards of an all-to-all axis."""
    if heads % kv_heads:
        raise ShardingError(f"{heads} query heads are no multiple of {kv_heads} KV heads")
    if heads % shards:
        fits = [size for size in range(1, shards) if heads % size == 0 and shards % size == 0]
        raise ShardingError(
            f"all-to-all attention: {heads} query heads on a device do not divide over {axis}={shards}",
            fix=f'use kind="ring", which needs no heads to divide, or an all-to-all axis of {fits[-1]}'
            + (f" with a ring axis of {shards // fits[-1]}" if fits[-1] > 1 else ""),
        )
