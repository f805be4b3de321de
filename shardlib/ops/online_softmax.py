"""Attention over keys that arrive in blocks: running softmax, its gradient, tile by tile, empty tiles skipped.

In: queries and one block of keys and values in the layout [batch, kv_heads, group, length, head_dim]. Out: a state
that the next block continues, or the block's gradients. Holds no array of [length, length], sends nothing.

    state = attend(start(query), query, key, value, view=view, rule=rule, tiles=(512, 512))
    out, log_weight = finish(state)
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from shardlib.ops.attention_mask import Rule, View, allowed, any_allowed, cut, tile_of

T = TypeVar("T")


class Softmax(NamedTuple):
    """A softmax-weighted sum over the keys seen so far, in float32; a pytree.

    Args:
        total: [batch, kv_heads, group, length, head_dim], sum of exp(score - largest) x value.
        largest: [batch, kv_heads, group, length], the largest score.
        weight: [batch, kv_heads, group, length], sum of exp(score - largest).

    Source: Milakov and Gimelshein 2018 (1805.02867) section 3; as blocks, Dao et al. 2022 (2205.14135) section 3.1.
    """

    total: jax.Array
    largest: jax.Array
    weight: jax.Array


class Gradients(NamedTuple):
    """Cotangents of one block, in float32; a pytree: the query's, and what belongs to the block's keys and values."""

    query: jax.Array
    key: jax.Array
    value: jax.Array


class Cotangent(NamedTuple):
    """What the backward pass knows of the queries' results; a pytree.

    Args:
        out: [batch, kv_heads, group, length, head_dim], cotangent of the result.
        delta: [batch, kv_heads, group, length], float32, its product with the result, summed over head_dim.
        log_weight: [batch, kv_heads, group, length], float32, log of the softmax's denominator.
    """

    out: jax.Array
    delta: jax.Array
    log_weight: jax.Array


def start(query: jax.Array, *, value_dim: int) -> Softmax:
    """The state before the first block."""
    dtype = _wide(query)
    return Softmax(
        total=jnp.zeros((*query.shape[:-1], value_dim), dtype),
        # Finite, so that the difference of two of them is 0 and not NaN.
        largest=jnp.full(query.shape[:-1], 0.5 * jnp.finfo(dtype).min, dtype),
        weight=jnp.zeros(query.shape[:-1], dtype),
    )


def finish(state: Softmax) -> tuple[jax.Array, jax.Array]:
    """The attention result in float32, and the log of its denominator; rows that saw no key are 0 in both."""
    seen = state.weight > 0
    weight = jnp.where(seen, state.weight, 1)
    return state.total / weight[..., None], jnp.where(seen, state.largest + jnp.log(weight), 0)


def attend(
    state: Softmax,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    view: View,
    rule: Rule,
    tiles: tuple[int, int],
) -> Softmax:
    """Continues the softmax over one more block of keys.

    Args:
        state: after the earlier blocks.
        query: [batch, kv_heads, group, length, head_dim].
        key, value: [batch, kv_heads, keys, head_dim].
        view: labels of the queries and of these keys.
        rule: the mask that positions imply.
        tiles: rows and columns computed at a time; they divide length and keys.
    """
    rows, columns = tiles
    across = key.shape[2] // columns

    def step(number: jax.Array | int, state: Softmax) -> Softmax:
        row, column = number // across * rows, number % across * columns
        seen = tile_of(view, row=row, column=column, rows=rows, columns=columns)
        part = jax.tree.map(lambda x: _tile(x, row, rows, axis=3), state)
        operands = (_tile(query, row, rows, axis=3), *(_tile(x, column, columns, axis=2) for x in (key, value)))
        part = _unless_empty(rule, seen, lambda part: update(part, *operands, view=seen, rule=rule), part)
        return jax.tree.map(lambda x, new: _written(x, new, row, axis=3), state, part)

    return repeated(query.shape[3] // rows * across, step, state)


def merged(state: Softmax, out: jax.Array, log_weight: jax.Array) -> Softmax:
    """Continues the softmax over keys of which the result is known.

    Args:
        state: after the earlier blocks.
        out: [batch, kv_heads, group, length, head_dim], the attention over those keys alone.
        log_weight: [batch, kv_heads, group, length], float32, log of its denominator.
    """
    largest = jnp.maximum(state.largest, log_weight)
    shrink, weight = jnp.exp(state.largest - largest), jnp.exp(log_weight - largest)
    return Softmax(
        total=state.total * shrink[..., None] + out.astype(state.total.dtype) * weight[..., None],
        largest=largest,
        weight=state.weight * shrink + weight,
    )


def gradients(
    sums: Gradients,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    cotangent: Cotangent,
    view: View,
    rule: Rule,
    tiles: tuple[int, int],
) -> Gradients:
    """Adds one block's gradients to `sums`, with its scores computed again.

    Args:
        sums: so far, in float32; of the shapes of `query`, `key` and `value`.
        query, key, value, view, rule, tiles: as for `attend`.
        cotangent: of the result over all blocks.

    Source: Dao et al. 2022 (2205.14135) appendix B.2.
    """
    rows, columns = tiles
    across = key.shape[2] // columns

    def step(number: jax.Array | int, sums: Gradients) -> Gradients:
        row, column = number // across * rows, number % across * columns
        seen = tile_of(view, row=row, column=column, rows=rows, columns=columns)
        operands = (_tile(query, row, rows, axis=3), *(_tile(x, column, columns, axis=2) for x in (key, value)))
        known = jax.tree.map(lambda x: _tile(x, row, rows, axis=3), cotangent)
        places = ((row, rows, 3), (column, columns, 2), (column, columns, 2))
        part = Gradients(*(_tile(x, at, size, axis=axis) for x, (at, size, axis) in zip(sums, places)))
        part = _unless_empty(
            rule, seen, lambda part: tile_gradients(part, *operands, cotangent=known, view=seen, rule=rule), part
        )
        return Gradients(*(_written(x, new, at, axis=axis) for x, new, (at, _, axis) in zip(sums, part, places)))

    return repeated(query.shape[3] // rows * across, step, sums)


def update(state: Softmax, query: jax.Array, key: jax.Array, value: jax.Array, *, view: View, rule: Rule) -> Softmax:
    """One tile of `attend`, all of it computed."""
    scores, visible = _scores(query, key, view=view, rule=rule)
    if visible is not None:
        scores = jnp.where(visible, scores, 0.5 * jnp.finfo(scores.dtype).min)
    largest = jnp.maximum(state.largest, scores.max(axis=-1))
    weights = _hidden(jnp.exp(scores - largest[..., None]), visible)
    shrink = jnp.exp(state.largest - largest)
    added = _product("bkgqs,bksd->bkgqd", weights.astype(value.dtype), value)
    return Softmax(
        total=state.total * shrink[..., None] + added,
        largest=largest,
        weight=state.weight * shrink + weights.sum(axis=-1),
    )


def tile_gradients(
    sums: Gradients,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    cotangent: Cotangent,
    view: View,
    rule: Rule,
) -> Gradients:
    """One tile of `gradients`, all of it computed."""
    scores, visible = _scores(query, key, view=view, rule=rule)
    weights = _hidden(jnp.exp(scores - cotangent.log_weight[..., None]), visible)
    inner = _product("bkgqd,bksd->bkgqs", cotangent.out, value) - cotangent.delta[..., None]
    inner = (weights * inner * query.shape[-1] ** -0.5).astype(query.dtype)
    return Gradients(
        query=sums.query + _product("bkgqs,bksd->bkgqd", inner, key),
        key=sums.key + _product("bkgqs,bkgqd->bksd", inner, query),
        value=sums.value + _product("bkgqs,bkgqd->bksd", weights.astype(value.dtype), cotangent.out),
    )


def cotangent_of(out: jax.Array, result: jax.Array, log_weight: jax.Array) -> Cotangent:
    """What the backward pass needs of the result and its cotangent."""
    wide = _wide(out)
    delta = (out.astype(wide) * result.astype(wide)).sum(axis=-1)
    return Cotangent(out=out, delta=delta, log_weight=log_weight)


def no_gradients(query: jax.Array, key: jax.Array, value: jax.Array) -> Gradients:
    """Zeros in float32."""
    return Gradients(*(jnp.zeros(x.shape, _wide(x)) for x in (query, key, value)))


def repeated(count: int, step: Callable[[Any, T], T], state: T) -> T:
    """`step(number, state)` for every number below `count`; without a loop when there is one.

    A `while_loop`, not a `fori_loop`: that one is a scan, of which partial evaluation takes the masks of all tiles out
    when a scan over layers is differentiated, and keeps them, [length, length] in all.
    """
    if count == 1:
        return step(0, state)
    body = lambda carry: (carry[0] + 1, step(*carry))  # noqa: E731
    return jax.lax.while_loop(lambda carry: carry[0] < count, body, (jnp.int32(0), state))[1]


def _scores(query: jax.Array, key: jax.Array, *, view: View, rule: Rule) -> tuple[jax.Array, jax.Array | None]:
    """Scaled scores in float32, [batch, kv_heads, group, rows, columns], and where they count; None is everywhere."""
    scores = _product("bkgqd,bksd->bkgqs", query, key) * query.shape[-1] ** -0.5
    visible = allowed(rule, view)
    visible = None if visible is None else visible[:, None, None]
    if view.mask is not None:
        batch, heads, rows, columns = view.mask.shape
        by_head = query.shape[1:3] if heads > 1 else (1, 1)
        mask = view.mask.reshape(batch, *by_head, rows, columns)
        visible = mask if visible is None else visible & mask
    return scores, visible


def _unless_empty(rule, seen, compute, part):
    """`compute(part)`, skipped where labels say that nothing is allowed: no collective sits under the condition."""
    needed = any_allowed(rule, seen)
    return compute(part) if needed is None else jax.lax.cond(needed, compute, lambda part: part, part)


def _hidden(weights: jax.Array, visible: jax.Array | None) -> jax.Array:
    return weights if visible is None else jnp.where(visible, weights, 0)


def _product(subscripts: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, left, right, preferred_element_type=_wide(left))


def _written(x: jax.Array, part: jax.Array, start: jax.Array | int, *, axis: int) -> jax.Array:
    whole = part.shape[axis] == x.shape[axis]
    return part if whole else jax.lax.dynamic_update_slice_in_dim(x, part, start, axis)


def _tile(x: jax.Array, start: jax.Array | int, size: int, *, axis: int) -> jax.Array:
    found = cut(x, start, size, axis=axis)
    assert found is not None
    return found


def _wide(x: jax.Array):
    return jnp.promote_types(x.dtype, jnp.float32)
