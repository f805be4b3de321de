"""A model of one weight, for tests of what a step sums and divides: compiled in a blink."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import shardlib as sl
from tests.oracle import host

LOWERINGS = ("automatic", "explicit")


def rows(*counts: int, dtype: str = "float32") -> sl.ArraySpec:
    """The spec of an input with a batch dim and whole further dims."""
    return sl.ArraySpec(shape=counts, dtype=dtype, axes=("batch", *[None] * (len(counts) - 1)))


def weight(value: Any = 0.0, *names: str | None) -> Any:
    """A factory of a module whose only parameter is "w"."""
    array = jnp.asarray(value, jnp.float32)

    class Weight(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.w = nnx.Param(array, logical_axes=names or (None,) * array.ndim)

    return Weight


def stepped(loss: Any, batch: Any, *, model: Any = None, optimizer: Any = None, **plan: Any) -> Any:
    """A state after one step from `model`, and its metrics; the batch spec is read off the batch."""
    batch = jax.tree.map(np.asarray, batch)
    spec = jax.tree.map(lambda leaf: rows(*leaf.shape, dtype=str(leaf.dtype)), batch)
    bound = sl.bind(model or weight(), loss, sl.Plan(**plan), spec)
    trainer = sl.Trainer(bound, optimizer or optax.sgd(1.0))
    return trainer.step(trainer.init(jax.random.key(0)), batch)


def gradient(loss: Any, batch: Any, *, value: Any = 0.0, names: tuple[str | None, ...] = (), **plan: Any) -> Any:
    """The gradient by w at `value` under a plan, and the metrics."""
    state, metrics = stepped(loss, batch, model=weight(value, *names), **plan)
    after = np.asarray(jax.tree.leaves(host(state.params))[0])
    return np.asarray(value, np.float32) - after, metrics
