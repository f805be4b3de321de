"""Recurrent layers whose sequence may be divided over a context axis (SRU, QRNN), and LSTMs over streams, in NNX.

In: x [batch, length, embed]. Out: (outputs [batch, length, features], the state from which the sequence goes on).

    sru = SRU(128, 128, rngs=rngs)
    y, state = sru(x, positions=batch["positions"])
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shardlib import annotate
from shardlib.layers import recurrent_cells as cells
from shardlib.ops.linear_recurrence import context_recurrence, context_windows
from shardlib.ops.lstm import LSTMState


class SRU(nnx.Module):
    """A simple recurrent unit; `recurrent_cells.sru` has the formulas.

    Args:
        embed: size of x.
        features: hidden units; as many as x has save a product.
        dtype: of the product; None follows x and the parameters.
        param_dtype: of the parameters.
        kernel_init, bias_init: draw [embed, 3 or 4, features] and [2, features].
        recurrence: `context_recurrence`, or a `functools.partial` of it that names a mesh or an axis.
        rngs: draws from its stream "params".
    """

    def __init__(
        self,
        embed: int,
        features: int,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Any] = cells.SRU_KERNEL,
        bias_init: Callable[..., Any] = cells.ZEROS,
        recurrence: Callable[..., jax.Array] = context_recurrence,
        rngs: nnx.Rngs,
    ):
        draw = _drawn(cells.SRU_NAMES, param_dtype, rngs)
        self.kernel = draw("kernel", kernel_init, (embed, cells.num_sru_gates(embed, features), features))
        self.bias = draw("bias", bias_init, (2, features))
        self.dtype, self.recurrence = dtype, recurrence

    def __call__(
        self, x: jax.Array, *, positions: jax.Array | None = None, state: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """x [batch, length, embed], positions [batch, length], 0 where a document begins, state [batch, features]."""
        options: Any = {"dtype": self.dtype, "recurrence": self.recurrence}
        return cells.sru(x, self.kernel[...], self.bias[...], positions=positions, state=state, **options)


class QRNN(nnx.Module):
    """A quasi-recurrent layer; `recurrent_cells.qrnn` has the formulas.

    Args:
        embed: size of x.
        features: hidden units.
        width: steps that the convolution sees, the own one included.
        dtype, param_dtype, bias_init, recurrence, rngs: as for `SRU`.
        kernel_init: draws [width, embed, 3, features].
        windows: `context_windows`, or a `functools.partial` of it.
    """

    def __init__(
        self,
        embed: int,
        features: int,
        *,
        width: int = 2,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Any] = cells.QRNN_KERNEL,
        bias_init: Callable[..., Any] = cells.ZEROS,
        recurrence: Callable[..., jax.Array] = context_recurrence,
        windows: Callable[..., jax.Array] = context_windows,
        rngs: nnx.Rngs,
    ):
        draw = _drawn(cells.QRNN_NAMES, param_dtype, rngs)
        self.kernel = draw("kernel", kernel_init, (width, embed, 3, features))
        self.bias = draw("bias", bias_init, (3, features))
        self.dtype, self.recurrence, self.windows = dtype, recurrence, windows

    def __call__(
        self, x: jax.Array, *, positions: jax.Array | None = None, state: cells.QRNNState | None = None
    ) -> tuple[jax.Array, cells.QRNNState]:
        """x [batch, length, embed], positions [batch, length], 0 where a document begins."""
        options: Any = {"dtype": self.dtype, "recurrence": self.recurrence, "windows": self.windows}
        return cells.qrnn(x, self.kernel[...], self.bias[...], positions=positions, state=state, **options)


class StreamLSTM(nnx.Module):
    """One LSTM for each of several synchronous streams, their weights stacked along "stream".

    Args:
        streams: how many.
        embed: size of x.
        features: hidden units of each.
        dtype, param_dtype, bias_init, rngs: as for `SRU`.
        kernel_init: draws [stream, inputs, 4, features].
    """

    def __init__(
        self,
        streams: int,
        embed: int,
        features: int,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Any] = cells.STREAM_KERNEL,
        bias_init: Callable[..., Any] = cells.ZEROS,
        rngs: nnx.Rngs,
    ):
        draw = _drawn(cells.STREAM_NAMES, param_dtype, rngs)
        self.kernel = draw("kernel", kernel_init, (streams, embed, 4, features))
        self.recurrent_kernel = draw("recurrent_kernel", kernel_init, (streams, features, 4, features))
        self.bias = draw("bias", bias_init, (streams, 4, features))
        self.dtype = dtype

    def __call__(
        self, x: jax.Array, *, positions: jax.Array | None = None, state: LSTMState | None = None
    ) -> tuple[jax.Array, LSTMState]:
        """x [stream, batch, length, embed], positions [batch, length], to [stream, batch, length, features]."""
        parameters = self.kernel[...], self.recurrent_kernel[...], self.bias[...]
        return cells.stream_lstm(x, *parameters, positions=positions, state=state, dtype=self.dtype)


class StreamHead(nnx.Module):
    """One output of all streams.

    Args:
        streams, features: of the LSTMs.
        classes: size of the output.
        dtype, param_dtype, bias_init, rngs: as for `SRU`.
        kernel_init: draws [stream, features, classes].
    """

    def __init__(
        self,
        streams: int,
        features: int,
        *,
        classes: int,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Any] = cells.STREAM_HEAD,
        bias_init: Callable[..., Any] = cells.ZEROS,
        rngs: nnx.Rngs,
    ):
        draw = _drawn(cells.STREAM_HEAD_NAMES, param_dtype, rngs)
        self.kernel = draw("kernel", kernel_init, (streams, features, classes))
        self.bias = draw("bias", bias_init, (classes,))
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """[stream, batch, length, features] to [batch, length, classes]."""
        return cells.stream_head(x, self.kernel[...], self.bias[...], dtype=self.dtype)


def _drawn(names: Any, dtype: Any, rngs: nnx.Rngs) -> Callable[..., nnx.Param]:
    """Makes parameters by name, with their logical axes."""

    def draw(name: str, initializer: Callable[..., Any], shape: tuple[int, ...]) -> nnx.Param:
        return nnx.Param(annotate.nnx_logical(initializer, *names[name])(rngs.params(), shape, dtype))

    return draw
