"""A function over chunks of the length dim, one after another, so that what a chunk needs exists for one at a time.

In: arrays [batch, length, ...]. Out: a carry, and outputs [batch, length, ...].

    total, out = over_chunks(lambda carry, x: (carry + x.sum(), 2 * x), 0.0, (x,), num_chunks=8)
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def over_chunks(
    function: Callable[..., tuple[Any, Any]], carry: Any, arrays: tuple[jax.Array, ...], *, num_chunks: int
) -> tuple[Any, Any]:
    """`carry, out = function(carry, *chunks)` in turn; the last chunk may be filled up with zeros.

    Args:
        function: arrays [batch, chunk, ...] to outputs with the same two dims first.
        carry: what the first call gets.
        arrays: [batch, length, ...].
        num_chunks: at most this many.

    Returns:
        The last carry, and outputs [batch, length, ...].
    """
    length = arrays[0].shape[1]
    size = -(-length // num_chunks)
    count = -(-length // size)

    def cut(array: jax.Array) -> jax.Array:
        widths = [(0, 0), (0, count * size - length)] + [(0, 0)] * (array.ndim - 2)
        return jnp.pad(array, widths).reshape(array.shape[0], count, size, *array.shape[2:])

    pieces = [cut(array) for array in arrays]

    def body(carry: Any, index: jax.Array) -> tuple[Any, Any]:
        return function(
            carry, *(jax.lax.dynamic_index_in_dim(piece, index, axis=1, keepdims=False) for piece in pieces)
        )

    carry, outputs = jax.lax.scan(body, carry, jnp.arange(count))
    join = lambda out: jnp.moveaxis(out, 0, 1).reshape(out.shape[1], count * size, *out.shape[3:])[:, :length]  # noqa: E731
    return carry, jax.tree.map(join, outputs)
