"""What the linen and the NNX recurrent layers share: gates of all steps in one product, then the recurrence.

In: x [batch, length, embed] and parameters as they are stored. Out: outputs [batch, length, hidden] and the state after
the last step, from which a further part of the sequence goes on.

    y, state = sru(x, kernel, bias)
    y, state = sru(more, kernel, bias, state=state)
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from shardlib import annotate
from shardlib.ops.linear_recurrence import context_recurrence, context_windows
from shardlib.ops.lstm import LSTMState, lstm

# Fans are those of one gate: the dim of the gates, and of the streams, counts as so many kernels.
SRU_KERNEL = nn.initializers.lecun_normal(in_axis=0, out_axis=2, batch_axis=1)
QRNN_KERNEL = nn.initializers.lecun_normal(in_axis=(0, 1), out_axis=3, batch_axis=2)
STREAM_KERNEL = nn.initializers.lecun_normal(in_axis=1, out_axis=3, batch_axis=(0, 2))
STREAM_HEAD = nn.initializers.lecun_normal(in_axis=(0, 1), out_axis=2)
ZEROS = nn.initializers.zeros

SRU_NAMES = {"kernel": ("embed", None, "mlp"), "bias": (None, "mlp")}
QRNN_NAMES = {"kernel": (None, "embed", None, "mlp"), "bias": (None, "mlp")}
# The hidden units of an LSTM have no name: divided, they would be brought together at every step.
STREAM_NAMES = {
    "kernel": ("stream", "embed", None, None),
    "recurrent_kernel": ("stream", None, None, None),
    "bias": ("stream", None, None),
}
STREAM_HEAD_NAMES = {"kernel": ("stream", None, "classes"), "bias": ("classes",)}


class QRNNState(NamedTuple):
    """What one part of a sequence leaves to the next; a pytree.

    Args:
        cell: [batch, hidden], float32.
        inputs: [batch, width - 1, embed], the last steps of x.
    """

    cell: jax.Array
    inputs: jax.Array


def num_sru_gates(embed: int, features: int) -> int:
    """3, or 4 where the sizes differ and the way around the cell needs a product of its own."""
    return 3 if embed == features else 4


def sru(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array,
    *,
    positions: jax.Array | None = None,
    state: jax.Array | None = None,
    dtype: Any = None,
    recurrence: Callable[..., jax.Array] = context_recurrence,
) -> tuple[jax.Array, jax.Array]:
    """A simple recurrent unit.

        x~, f, r = x W, sigmoid(x W_f + b_f), sigmoid(x W_r + b_r)
        c_t = f c_{t-1} + (1 - f) x~,    h = r tanh(c) + (1 - r) x

    Args:
        x: [batch, length, embed], in contiguous order over the context axis.
        kernel: [embed, 3 or 4, hidden]: x~, f, r, and a product in place of x where hidden is not embed.
        bias: [2, hidden], of f and r.
        positions: [batch, length], integer, 0 where a document begins; None for one document.
        state: [batch, hidden], the cell before x; None for 0.
        dtype: of the product; None follows x and the kernel. Gates and cells are float32.
        recurrence: `context_recurrence`, or a `functools.partial` of it that names a mesh or an axis.

    Returns:
        h [batch, length, hidden], of the product's dtype; the last cell. In a region manual over the context axis that
        is the last of the shard's own part.

    Source: Lei et al. 2017 (1709.02755) section 2; many steps in one product: Sung and Park 2018 (1803.11389).
    """
    dtype = dtype or jnp.promote_types(x.dtype, kernel.dtype)
    x = annotate.in_order(x.astype(dtype))
    gates = annotate.dot_general(x, kernel.astype(dtype), (((2,), (0,)), ((), ())))
    gates = annotate.constrain(gates, "batch", "length", None, "mlp").astype(jnp.float32)
    candidate, forget, reset = gates[:, :, 0], *_sigmoids(gates[:, :, 1:3], bias)
    around = gates[:, :, 3] if kernel.shape[1] == 4 else x.astype(jnp.float32)
    cell = recurrence(_kept(forget, positions), (1 - forget) * candidate, initial=state)
    hidden = reset * jnp.tanh(cell) + (1 - reset) * around
    return annotate.constrain(hidden.astype(dtype), "batch", "length", "mlp"), cell[:, -1]


def qrnn(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array,
    *,
    positions: jax.Array | None = None,
    state: QRNNState | None = None,
    dtype: Any = None,
    recurrence: Callable[..., jax.Array] = context_recurrence,
    windows: Callable[..., jax.Array] = context_windows,
) -> tuple[jax.Array, QRNNState]:
    """A quasi-recurrent layer: a causal convolution makes the gates, fo-pooling the state.

        z, f, o = tanh(x * W_z + b_z), sigmoid(x * W_f + b_f), sigmoid(x * W_o + b_o)
        c_t = f c_{t-1} + (1 - f) z,    h = o c

    Args:
        x, positions, dtype, recurrence: as for `sru`.
        kernel: [width, embed, 3, hidden], the oldest step first: z, f, o.
        bias: [3, hidden].
        state: before x; None for 0.
        windows: `context_windows`, or a `functools.partial` of it.

    Returns:
        h [batch, length, hidden], of the product's dtype, and the state after the last step.

    Source: Bradbury et al. 2016 (1611.01576) section 2.
    """
    dtype = dtype or jnp.promote_types(x.dtype, kernel.dtype)
    # Without its embed name x is not divided along the length between the products of a tensor axis: windows of such
    # parts would send to their neighbours, which in a pipeline waits for devices that never come.
    x, width = annotate.constrain(annotate.in_order(x.astype(dtype)), "batch", "length", None), kernel.shape[0]
    before = jnp.zeros((x.shape[0], width - 1, x.shape[2]), dtype) if state is None else state.inputs.astype(dtype)
    seen = windows(x, width=width, before=None if state is None else before)
    if positions is not None:
        # A step of another document is as many steps back as the position allows, or more.
        distance = jnp.arange(width - 1, -1, -1)
        seen = jnp.where((positions[:, :, None] >= distance[None, None])[..., None], seen, 0)
    gates = annotate.dot_general(seen, kernel.astype(dtype), (((2, 3), (0, 1)), ((), ())))
    gates = annotate.constrain(gates, "batch", "length", None, "mlp").astype(jnp.float32)
    candidate = jnp.tanh(gates[:, :, 0] + bias[None, None, 0].astype(jnp.float32))
    forget, output = _sigmoids(gates[:, :, 1:], bias[1:])
    cell = recurrence(_kept(forget, positions), (1 - forget) * candidate, initial=None if state is None else state.cell)
    hidden = annotate.constrain((output * cell).astype(dtype), "batch", "length", "mlp")
    last = jnp.concatenate([before, x], axis=1)[:, x.shape[1] :]
    return hidden, QRNNState(cell=cell[:, -1], inputs=last)


def stream_lstm(
    x: jax.Array,
    kernel: jax.Array,
    recurrent_kernel: jax.Array,
    bias: jax.Array,
    *,
    positions: jax.Array | None = None,
    state: LSTMState | None = None,
    dtype: Any = None,
) -> tuple[jax.Array, LSTMState]:
    """One LSTM per stream; the inputs' part of all gates is one product, the steps follow one another.

    Args:
        x: [stream, batch, length, embed].
        kernel: [stream, embed, 4, hidden], gates in the order of `ops.lstm.GATES`.
        recurrent_kernel: [stream, hidden, 4, hidden].
        bias: [stream, 4, hidden].
        positions: [batch, length], integer, 0 where a document begins in all streams.
        state: before x; None for 0.
        dtype: of the products; None follows x and the kernel.

    Returns:
        h [stream, batch, length, hidden], of the product's dtype, and the state after the last step.
    """
    dtype = dtype or jnp.promote_types(x.dtype, kernel.dtype)
    x, kernel, recurrent_kernel = (leaf.astype(dtype) for leaf in (x, kernel, recurrent_kernel))
    gates = annotate.dot_general(x, kernel, (((3,), (1,)), ((0,), (0,)))) + bias[:, None, None].astype(dtype)
    gates = annotate.constrain(gates, "stream", "batch", "length", None, None)
    hidden, state = lstm(
        annotate.in_order(gates), recurrent_kernel, starts=None if positions is None else positions == 0, state=state
    )
    return annotate.constrain(hidden, "stream", "batch", "length", None), state


def stream_head(x: jax.Array, kernel: jax.Array, bias: jax.Array, *, dtype: Any = None) -> jax.Array:
    """The streams' one output, sum over streams of h^k W_k + b: their only meeting, one all-reduce where divided.

    Args:
        x: [stream, batch, length, hidden].
        kernel: [stream, hidden, classes].
        bias: [classes].

    Returns:
        [batch, length, classes].
    """
    dtype = dtype or jnp.promote_types(x.dtype, kernel.dtype)
    out = annotate.dot_general(x.astype(dtype), kernel.astype(dtype), (((0, 3), (0, 1)), ((), ())))
    return annotate.constrain(out + bias[None, None].astype(dtype), "batch", "length", "classes")


def _sigmoids(gates: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two gates [batch, length, 2, hidden] with their biases, apart."""
    both = jax.nn.sigmoid(gates + bias[None, None].astype(jnp.float32))
    return both[:, :, 0], both[:, :, 1]


def _kept(forget: jax.Array, positions: jax.Array | None) -> jax.Array:
    """What is kept of the state: nothing where a document begins."""
    return forget if positions is None else jnp.where((positions == 0)[..., None], 0, forget)
