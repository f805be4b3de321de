"""Gradients of the whole objective from its parts: slices side by side, microbatches one after another.

In: a loss, parameters, a batch cut into [microbatches, slices, rows, ...], a key per slice. Out: gradients in float32
and `Sums`. The weight is known before the first backward pass, so every part is differentiated at its final scale.

    grads, sums = gradients(loss, params, pieces, keys, state=None, reduce=lambda sums: sums)
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from meshes.errors import ShardingError
from shardlib.jax_compat import manual_axes, pruned
from shardlib.loss import weighted
from shardlib.objective import LossFunction, Sums, folded, sums_of
from shardlib.trainable import merge, split


def gradients(
    loss: LossFunction,
    params: Any,
    pieces: Any,
    keys: Any,
    *,
    state: Any,
    reduce: Callable[[Sums], Sums],
    fetch: Callable[[Any, Any], tuple[Any, Any]] = lambda params, piece: (params, piece),
    slice_axes: tuple[str, ...] = (),
    mask: Any = None,
) -> tuple[Any, Sums]:
    """Differentiates `sum(total) / sum(weight) + mean(per_microbatch)` over all parts.

    Args:
        loss: `(params, batch, rng) -> scalar | Loss`.
        params: what to differentiate by, or what `fetch` makes it from.
        pieces: leaves [microbatches, slices, rows, ...].
        keys: PRNG keys [microbatches, slices], or None.
        state: collections the loss reads and updates, or None.
        reduce: adds `Sums` over devices that hold other rows of the batch.
        fetch: (parameters as held, this microbatch) -> (as used, the microbatch); a gather.
        slice_axes: mesh axes that the slice dim is sharded over.
        mask: a tree of bools, True for the parameters to differentiate by; None for all of them.

    Returns:
        Gradients by the masked part of `fetch`'s parameters in float32, not summed over devices, and reduced `Sums`.
    """
    num_microbatches, num_slices = jax.tree.leaves(pieces)[0].shape[:2]
    part = over_slices(loss, num_slices, slice_axes)
    if num_microbatches == 1:
        # Forward, then the weight over all devices, then backward at the final scale.
        used, (piece, key) = fetch(params, _take(pieces, keys, 0))
        pull, sums = _forward(part, used, piece, key, state=state, mask=mask)
        reduced = reduce(sums)
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), pull(scales_of(reduced))), reduced
    shapes, _ = jax.eval_shape(fetch, params, _take(pieces, keys, 0))
    weights = summed_weights(part, shapes, pieces, keys)
    total = reduce(weights)

    def body(carry: tuple[Any, Sums], piece: Any) -> tuple[tuple[Any, Sums], None]:
        grads, sums = carry
        used, piece = fetch(params, piece)
        pull, more = _forward(part, used, *piece, state=None, mask=mask)
        return (jax.tree.map(lambda a, b: a + b.astype(a.dtype), grads, pull(scales_of(total))), sums + more), None

    chosen, _ = _parts(shapes, mask)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), chosen)
    nothing = jax.tree.map(jnp.zeros_like, weights)
    (grads, sums), _ = jax.lax.scan(body, (zeros, nothing), (pieces, keys))
    return grads, reduce(sums)


def _forward(part: Any, params: Any, piece: Any, key: Any, *, state: Any, mask: Any) -> tuple[Callable[..., Any], Sums]:
    """Runs one microbatch: what takes the cotangents of (total, per_microbatch) to gradients, and its sums."""
    chosen, rest = _parts(params, mask)

    def objective(chosen: Any) -> tuple[tuple[Any, Any], Sums]:
        sums = part(chosen if mask is None else merge(chosen, rest), piece, key, state)
        return (sums.total, sums.per_microbatch), sums

    _, pull, sums = jax.vjp(objective, chosen, has_aux=True)
    return lambda scales: pull(scales)[0], sums


def _parts(params: Any, mask: Any) -> tuple[Any, Any]:
    return (params, None) if mask is None else split(params, mask)


def scales_of(total: Sums) -> tuple[jax.Array, jax.Array]:
    """Cotangents of (total, per_microbatch): 1 / weight, or 1 for a sum, zero where nothing is weighted; 1 / parts."""
    return weighted(1.0, total.weight), 1.0 / total.parts


def summed_weights(part: Any, used: Any, pieces: Any, keys: Any) -> Sums:
    """The weights and parts of all microbatches, by the equations they need alone; the rest of Sums is zero."""
    run = lambda params, piece, key: part(params, piece, key, None)  # noqa: E731
    closed, shape = jax.make_jaxpr(run, return_shape=True)(used, *_take(pieces, keys, 0))
    return weights_of(closed, shape, jax.tree.leaves((pieces, keys)))


def weights_of(closed: Any, shape: Sums, pieces: list[Any]) -> Sums:
    """`summed_weights` of a traced part.

    Args:
        closed: jaxpr of the parameters' leaves, then those of a microbatch, to `Sums`.
        shape: the abstract result.
        pieces: leaves [num_microbatches, ...].
    """
    nothing = jax.tree.map(lambda _: False, shape)
    wanted = replace(nothing, weight=jax.tree.map(lambda _: True, shape.weight), parts=True)
    num_params = len(closed.jaxpr.invars) - len(pieces)
    counted = pruned(closed, jax.tree.leaves(wanted), num_unused=num_params)
    zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shape)

    def body(sums: Sums, piece: list[Any]) -> tuple[Sums, None]:
        *weight, parts = counted(*piece)
        weight = sums.weight + weight[0] if weight else None
        return replace(sums, weight=weight, parts=sums.parts + parts), None

    return jax.lax.scan(body, zero, pieces)[0]


def over_slices(loss: LossFunction, num_slices: int, slice_axes: tuple[str, ...]) -> Any:
    """`(params, piece, key, state) -> Sums` over the slice dim; a single slice is not vmapped."""

    def one(params: Any, piece: Any, key: Any, state: Any) -> Sums:
        return sums_of(loss, params, piece, key, state=state)

    if num_slices == 1:
        first = lambda tree: jax.tree.map(lambda leaf: leaf[0], tree)  # noqa: E731
        return lambda params, piece, key, state: one(params, first(piece), first(key), state)
    many = jax.vmap(one, in_axes=(None, 0, 0, None), spmd_axis_name=slice_axes or None)

    def summed(params: Any, piece: Any, key: Any, state: Any) -> Sums:
        if slice_axes:
            own = manual_axes(jax.make_jaxpr(one)(params, *jax.tree.map(lambda leaf: leaf[0], (piece, key)), state))
            _refuse(own & set(slice_axes))
        return folded(many(params, piece, key, state))

    return summed


def _refuse(axes: set[str]) -> None:
    """Raises for a loss that is manual over axes that slices are split over: what it captures would be wrong."""
    if axes:
        named = ", ".join(sorted(axes))
        raise ShardingError(
            f"the loss has a shard_map over {named} of its own, and the plan splits slices of the batch over {named}",
            fix="leave random_slices out, or take the axis out of the shard_map (constrain places arrays without one)",
        )


def _take(pieces: Any, keys: Any, index: int) -> tuple[Any, Any]:
    return jax.tree.map(lambda leaf: leaf[index], (pieces, keys))
