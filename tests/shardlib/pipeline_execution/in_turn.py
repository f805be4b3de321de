"""Runs the parts of a cut loss one after another, on one device: what a pipeline must compute.

check(loss, params, piece, num_layers=4)
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.pipeline.cutting import cut
from shardlib.pipeline.parts import Parts


def in_turn(parts: Parts, params: Any, piece: Any) -> list[Any]:
    """The results of the loss: before the layers, every layer, after the layers."""
    leaves, flat = jax.tree.leaves(params), jax.tree.leaves(piece)
    outer = [leaves[leaf] for leaf in parts.outer]
    rows = [kind.rows(leaves) for kind in parts.stacked]
    carry, outputs = parts.pre(outer, flat), []
    shared, own = parts.side(outer, flat)
    for layer in range(parts.num_layers):
        carry, made = parts.block([row[layer] for row in rows], shared, carry, [array[layer] for array in own])
        outputs.append(made)
    return parts.post(outer, flat, carry, [jnp.stack(values) for values in zip(*outputs)])


def check(loss: Any, params: Any, piece: Any, *, num_layers: int, gradients: bool = True) -> Parts:
    """The results, and the gradients of the first, equal the loss's own; returns the parts."""
    parts = cut(loss, params, piece)
    assert parts.num_layers == num_layers
    results = _with_gradients if gradients else lambda run, params, piece: run(params, piece)
    wanted, found = jax.jit(
        lambda params, piece: [
            results(run, params, piece)
            for run in (lambda params, piece: jax.tree.leaves(loss(params, piece)), functools.partial(in_turn, parts))
        ]
    )(params, piece)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    return parts


def _with_gradients(run: Any, params: Any, piece: Any) -> Any:
    def first(params: Any) -> Any:
        results = run(params, piece)
        return results[0], results

    grads, results = jax.grad(first, has_aux=True)(params)
    return grads, results
