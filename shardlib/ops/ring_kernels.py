"""The blocks of a ring by splash attention, the TPU kernel: a block that counts whole, or the own one, causal.

In: queries of one shard and the keys and values of another. Out: the running softmax of `online_softmax`, continued,
and the block's gradients.

    state = attend(state, block, key, value, shift=1, shards=shards, causal=True)
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

from shardlib.jax_compat import splash_gradients
from shardlib.ops import fused_attention
from shardlib.ops.context_arguments import Shards
from shardlib.ops.fused_attention import LANES, manual_over_rest, scale, splash_kernel
from shardlib.ops.online_softmax import Cotangent, Gradients, Softmax, merged

T = TypeVar("T")


def refusal(
    platform: str | None,
    *,
    query: tuple[int, ...],
    key: tuple[int, ...],
    value: tuple[int, ...],
    dtype: Any,
    placement: str,
    causal: bool,
    window: int | None,
    has_mask: bool = False,
    has_positions: bool = False,
) -> str | None:
    """Why the platform's kernel cannot compute the blocks of a ring; None when it can.

    Args:
        platform, dtype, causal, window: as for `fused_attention.refusal`.
        query, key, value: shapes of one shard, [batch, length_local, heads, head_dim].
        placement: which tokens a shard holds.
        has_mask: of keys or rows.
        has_positions: tokens stand elsewhere than the placement says.
    """
    if platform == "gpu":
        return "JAX differentiates cuDNN's attention only where the softmax ends with the block"
    problem = fused_attention.refusal(platform, query=query, key=key, value=value, dtype=dtype, causal=causal)
    if problem is not None:
        return problem
    for given, what in ((window is not None, "a window"), (has_mask, "a mask"), (has_positions, "given positions")):
        if given:
            return f"{what} of a block depends on where it comes from, and the kernel's mask does not"
    if causal and placement == "striped":
        return "a striped block is causal by halves of a step, which the kernel's mask is not"
    if causal and placement == "zigzag" and query[1] % (2 * LANES):
        return f"half a zigzag shard of {query[1]} tokens is no multiple of {LANES}"
    return None


class Block(NamedTuple):
    """What a block of the ring is computed from beside its keys and values; a pytree.

    Args:
        query: [batch, kv_heads, group, length_local, head_dim].
        segments: ids of the queries, [batch, length_local], or None.
        key_segments: ids of the block's keys, or None.
    """

    query: jax.Array
    segments: jax.Array | None
    key_segments: jax.Array | None


def attend(
    state: Softmax,
    block: Block,
    key: jax.Array,
    value: jax.Array,
    *,
    shift: int | jax.Array,
    shards: Shards,
    causal: bool,
) -> Softmax:
    """Continues the softmax over the block that came from `shift` shards back.

    Args:
        state: after the earlier blocks.
        block: its queries and labels.
        key, value: [batch, kv_heads, length_local, head_dim].
        shift: 0, the own block, as an int; another one may be traced.
        shards: how the sequence is spread.
        causal: a query attends to positions up to its own.

    Source: a block's result and the log of its denominator are a softmax that can be merged: Dao et al. 2022
        (2205.14135) section 3.1.
    """

    def part(state: Softmax, rows: slice, columns: slice, causal: bool) -> Softmax:
        operands = _operands(block, key, value, rows, columns)
        kernel = _kernel(*operands[:2], causal=causal, with_log_weight=True)
        out, (log_weight,) = manual_over_rest(jax.vmap(kernel), *operands)
        seen = jax.tree.map(lambda x: x[:, :, :, rows], state)
        shape = seen.weight.shape
        new = merged(seen, out.reshape(*shape, out.shape[-1]), log_weight.reshape(shape))
        return jax.tree.map(lambda x, new: x.at[:, :, :, rows].set(new), state, new)

    return _visible(part, state, length=key.shape[2], shift=shift, shards=shards, causal=causal)


def gradients(
    sums: Gradients,
    block: Block,
    key: jax.Array,
    value: jax.Array,
    *,
    result: jax.Array,
    cotangent: Cotangent,
    shift: int | jax.Array,
    shards: Shards,
    causal: bool,
) -> Gradients:
    """Adds the block's gradients to `sums`, each rounded once to the dtype of its array; the queries' not scaled yet.

    Args:
        sums: so far, in float32.
        block, key, value, shift, shards, causal: as for `attend`.
        result: of all blocks, [batch, kv_heads, group, length_local, head_dim].
        cotangent: of the result.

    Source: Dao et al. 2022 (2205.14135) appendix B.2: the weights of a block follow from its scores and the log of the
        denominator over all blocks.
    """

    def part(sums: Gradients, rows: slice, columns: slice, causal: bool) -> Gradients:
        operands = _operands(block, key, value, rows, columns)
        kernel = _kernel(*operands[:2], causal=causal)
        of_rows = [_by_head(x[:, :, :, rows]) for x in (result, cotangent.log_weight, cotangent.out)]
        found = manual_over_rest(jax.vmap(functools.partial(splash_gradients, kernel)), *operands, *of_rows)
        query, *of_columns = (x.astype(wide.dtype) for x, wide in zip(found, sums, strict=True))
        query = query.reshape(sums.query[:, :, :, rows].shape)
        of_columns = (x.at[:, :, columns].add(new) for x, new in zip(sums[1:], of_columns, strict=True))
        return Gradients(sums.query.at[:, :, :, rows].add(query), *of_columns)

    return _visible(part, sums, length=key.shape[2], shift=shift, shards=shards, causal=causal)


def scaled(sums: Gradients) -> Gradients:
    """Gradients of all blocks, the queries' scaled: once, and after the last block.

    The TPU compiler (libtpu 0.0.42) fails where the float32 result of a conditional is only rounded to bfloat16.
    """
    return sums._replace(query=sums.query * scale(sums.query))


def _visible(
    part: Callable[..., T], state: T, *, length: int, shift: int | jax.Array, shards: Shards, causal: bool
) -> T:
    """`part` of the queries and keys of a block that see each other.

    With a zigzag placement shard i of n holds the chunks i and 2n - 1 - i. Against an earlier shard both see its early
    chunk whole and nothing of its late one; against a later shard the late chunk sees both whole. The own block is
    causal as it lies.
    """
    everything, half = slice(0, length), length // 2
    if not causal or (isinstance(shift, int) and shift == 0):
        return part(state, everything, everything, causal)
    came_from_before = shards.index >= shift
    if shards.placement == "contiguous":
        return jax.lax.cond(came_from_before, lambda x: part(x, everything, everything, False), lambda x: x, state)
    return jax.lax.cond(
        came_from_before,
        lambda x: part(x, everything, slice(0, half), False),
        lambda x: part(x, slice(half, length), everything, False),
        state,
    )


def _operands(block: Block, key: jax.Array, value: jax.Array, rows: slice, columns: slice) -> tuple[Any, ...]:
    """Scaled queries, keys, values and segment ids for a kernel mapped over the batch."""
    query = block.query[:, :, :, rows]
    query = _by_head((query * scale(query)).astype(query.dtype))
    segments = None
    if block.segments is not None and block.key_segments is not None:
        segments = SegmentIds(q=block.segments[:, rows], kv=block.key_segments[:, columns])
    return query, key[:, :, columns], value[:, :, columns], segments


def _by_head(x: jax.Array) -> jax.Array:
    """From [batch, kv_heads, group, ...] to [batch, heads, ...]."""
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])


def _kernel(query: jax.Array, key: jax.Array, *, causal: bool, with_log_weight: bool = False) -> Callable[..., Any]:
    heads, length = query.shape[1:3]
    return splash_kernel(
        (length, heads), keys=key.shape[2], causal=causal, window=None, with_log_weight=with_log_weight
    )
