"""LSTMs over several streams at once: each stream has its own weights, all take their steps together.

In: what the inputs add to the gates of every step, and the recurrent weights. Out: hidden states of every step.

    hidden, state = lstm(gates, kernel)    # gates [stream, batch, length, 4, hidden]
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

GATES = ("input", "forget", "candidate", "output")
"""The order of the gates."""


class LSTMState(NamedTuple):
    """What one step leaves to the next; a pytree, each [stream, batch, hidden], float32."""

    hidden: jax.Array
    cell: jax.Array


def lstm(
    gates: jax.Array, kernel: jax.Array, *, starts: jax.Array | None = None, state: LSTMState | None = None
) -> tuple[jax.Array, LSTMState]:
    """Runs all streams over time, in float32 but for the recurrent product.

        i, f, o = sigmoid, g = tanh of gates_t + h_{t-1} kernel
        c_t = f c_{t-1} + i g,    h_t = o tanh(c_t)

    The streams do not meet: divided over a mesh axis, they send nothing. The steps follow one another; a divided
    length would be brought together.

    Args:
        gates: [stream, batch, length, 4, hidden], from the inputs, biases included, in the order of `GATES`.
        kernel: [stream, hidden, 4, hidden].
        starts: [batch, length], boolean, True where a document begins; no state crosses into it.
        state: before the first step; None for 0.

    Returns:
        Hidden states [stream, batch, length, hidden], of the gates' dtype, and the state after the last step.

    Source: Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000; streams: Bouaziz et al. 2016
    (1702.03402).
    """
    streams, batch, length, _, features = gates.shape
    zeros = jnp.zeros((streams, batch, features), jnp.float32)
    state = LSTMState(zeros, zeros) if state is None else state
    keeps = jnp.ones((batch, length), bool) if starts is None else ~starts

    def step(state: LSTMState, now: tuple[jax.Array, jax.Array]) -> tuple[LSTMState, jax.Array]:
        given, keep = now
        hidden, cell = (jnp.where(keep[None, :, None], leaf, 0) for leaf in state)
        dims = (((2,), (1,)), ((0,), (0,)))
        own = jax.lax.dot_general(hidden.astype(kernel.dtype), kernel, dims, preferred_element_type=jnp.float32)
        add, forget, candidate, output = jnp.moveaxis(given.astype(jnp.float32) + own, 2, 0)
        cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(add) * jnp.tanh(candidate)
        hidden = jax.nn.sigmoid(output) * jnp.tanh(cell)
        return LSTMState(hidden, cell), hidden.astype(gates.dtype)

    state, hidden = jax.lax.scan(step, state, (jnp.moveaxis(gates, 2, 0), keeps.T))
    return jnp.moveaxis(hidden, 0, 2), state
