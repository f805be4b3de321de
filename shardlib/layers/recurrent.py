"""Recurrent layers whose sequence may be divided over a context axis (SRU, QRNN), and LSTMs over streams, in linen.

In: x [batch, length, embed]. Out: (outputs [batch, length, features], the state from which the sequence goes on).

    y, state = SRU(128)(x, positions=batch["positions"])
    y, state = QRNN(128, width=2)(x)
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from shardlib import annotate
from shardlib.layers import recurrent_cells as cells
from shardlib.ops.linear_recurrence import context_recurrence, context_windows
from shardlib.ops.lstm import LSTMState


class SRU(nn.Module):
    """A simple recurrent unit; `recurrent_cells.sru` has the formulas.

    Args:
        features: hidden units; as many as x has save a product.
        dtype: of the product; None follows x and the parameters.
        param_dtype: of the parameters.
        kernel_init, bias_init: draw [embed, 3 or 4, features] and [2, features].
        recurrence: `context_recurrence`, or a `functools.partial` of it that names a mesh or an axis.
    """

    features: int
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = cells.SRU_KERNEL
    bias_init: Callable[..., Any] = cells.ZEROS
    recurrence: Callable[..., jax.Array] = context_recurrence

    @nn.compact
    def __call__(
        self, x: jax.Array, *, positions: jax.Array | None = None, state: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """x [batch, length, embed], positions [batch, length], 0 where a document begins, state [batch, features]."""
        shape = x.shape[-1], cells.num_sru_gates(x.shape[-1], self.features), self.features
        kernel, bias = _parameters(self, cells.SRU_NAMES, {"kernel": shape, "bias": (2, self.features)})
        return cells.sru(
            x, kernel, bias, positions=positions, state=state, dtype=self.dtype, recurrence=self.recurrence
        )


class QRNN(nn.Module):
    """A quasi-recurrent layer; `recurrent_cells.qrnn` has the formulas.

    Args:
        features: hidden units.
        width: steps that the convolution sees, the own one included.
        dtype, param_dtype, bias_init, recurrence: as for `SRU`.
        kernel_init: draws [width, embed, 3, features].
        windows: `context_windows`, or a `functools.partial` of it.
    """

    features: int
    width: int = 2
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = cells.QRNN_KERNEL
    bias_init: Callable[..., Any] = cells.ZEROS
    recurrence: Callable[..., jax.Array] = context_recurrence
    windows: Callable[..., jax.Array] = context_windows

    @nn.compact
    def __call__(
        self, x: jax.Array, *, positions: jax.Array | None = None, state: cells.QRNNState | None = None
    ) -> tuple[jax.Array, cells.QRNNState]:
        """x [batch, length, embed], positions [batch, length], 0 where a document begins."""
        shapes = {"kernel": (self.width, x.shape[-1], 3, self.features), "bias": (3, self.features)}
        kernel, bias = _parameters(self, cells.QRNN_NAMES, shapes)
        options: Any = {"dtype": self.dtype, "recurrence": self.recurrence, "windows": self.windows}
        return cells.qrnn(x, kernel, bias, positions=positions, state=state, **options)


class StreamLSTM(nn.Module):
    """One LSTM for each of several synchronous streams, their weights stacked along "stream".

    Args:
        features: hidden units of each.
        dtype, param_dtype, bias_init: as for `SRU`.
        kernel_init: draws [stream, inputs, 4, features].
    """

    features: int
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = cells.STREAM_KERNEL
    bias_init: Callable[..., Any] = cells.ZEROS

    @nn.compact
    def __call__(
        self, x: jax.Array, *, positions: jax.Array | None = None, state: LSTMState | None = None
    ) -> tuple[jax.Array, LSTMState]:
        """x [stream, batch, length, embed], positions [batch, length], to [stream, batch, length, features]."""
        streams, embed = x.shape[0], x.shape[-1]
        shapes = {
            "kernel": (streams, embed, 4, self.features),
            "recurrent_kernel": (streams, self.features, 4, self.features),
            "bias": (streams, 4, self.features),
        }
        parameters = _parameters(self, cells.STREAM_NAMES, shapes)
        return cells.stream_lstm(x, *parameters, positions=positions, state=state, dtype=self.dtype)


class StreamHead(nn.Module):
    """One output of all streams.

    Args:
        classes: its size.
        dtype, param_dtype, bias_init: as for `SRU`.
        kernel_init: draws [stream, hidden, classes].
    """

    classes: int
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = cells.STREAM_HEAD
    bias_init: Callable[..., Any] = cells.ZEROS

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[stream, batch, length, hidden] to [batch, length, classes]."""
        shapes = {"kernel": (x.shape[0], x.shape[-1], self.classes), "bias": (self.classes,)}
        kernel, bias = _parameters(self, cells.STREAM_HEAD_NAMES, shapes)
        return cells.stream_head(x, kernel, bias, dtype=self.dtype)


def _parameters(module: Any, names: Any, shapes: dict[str, tuple[int, ...]]) -> list[jax.Array]:
    """The parameters of a module, named and drawn."""
    made = []
    for name, shape in shapes.items():
        initializer = module.bias_init if name == "bias" else module.kernel_init
        made.append(module.param(name, annotate.logical(initializer, *names[name]), shape, module.param_dtype))
    return made
