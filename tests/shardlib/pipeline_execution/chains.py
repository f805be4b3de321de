"""A model that is one stacked parameter, for tests of what a pipeline sums and divides: compiled in a blink.

loss = lambda params, batch, rng: through(params, batch["x"], lambda x, w: x + w)[0].mean()
w, metrics = trained(loss, batch, value=np.zeros(4), mesh="stage=2", num_microbatches=2)
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

import shardlib as sl
from tests.oracle import host
from tests.tiny import rows, weight


def through(params: Any, x: Any, layer: Callable[[Any, Any], Any], own: Any = None) -> tuple[Any, Any]:
    """Runs `layer(x, w)`, or `layer(x, (w, own))`, over the rows of w; `(x, outputs)`. A layer may return `x` alone."""

    def step(x: Any, slices: Any) -> Any:
        made = layer(x, slices if own is not None else slices[0])
        return made if isinstance(made, tuple) else (made, None)

    return jax.lax.scan(step, x, (params["w"].get_value(), own))


def bound(loss: Any, batch: Any, *, value: Any, names: tuple[str | None, ...] = (), **plan: Any) -> Any:
    """The parameter w under a plan; its first dim is that of the layers."""
    value, batch = np.asarray(value, np.float32), jax.tree.map(np.asarray, batch)
    spec = jax.tree.map(lambda leaf: rows(*leaf.shape, dtype=str(leaf.dtype)), batch)
    names = ("layers", *(names or (None,) * (value.ndim - 1)))
    return sl.bind(weight(value, *names), loss, sl.Plan(**plan), spec)


def trained(
    loss: Any, batch: Any, *, value: Any, optimizer: Any = None, steps: int = 1, check: bool = False, **plan: Any
) -> tuple[np.ndarray, dict[str, float]]:
    """w after some steps in the order of the layers, and the metrics of the last step."""
    found = bound(loss, batch, value=value, **plan)
    trainer = sl.Trainer(found, optimizer or optax.sgd(1.0), check_separable=check)
    state, metrics = trainer.init(jax.random.key(0)), {}
    for _ in range(steps):
        state, metrics = trainer.step(state, jax.tree.map(np.asarray, batch))
    (w,) = jax.tree.leaves(host(found.restore(state.params)))
    return w, {name: float(value) for name, value in metrics.items()}


def gradient(loss: Any, batch: Any, *, value: Any, **options: Any) -> tuple[np.ndarray, dict[str, float]]:
    """The gradient by w, and the metrics."""
    w, metrics = trained(loss, batch, value=value, **options)
    return np.asarray(value, np.float32) - w, metrics
