"""The loss protocol: `loss(params, batch, rng) -> scalar | Loss`.

In: sums over the examples at hand. Out: values that combine exactly over tokens, microbatches and shards.

    return Loss(total=(nll * weights).sum(), weight=weights.sum(), aux={"accuracy": Mean(hits.sum(), weights.sum())})
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Mean:
    """A metric reported as `total / weight`, both summed over everything first; a pytree of two float scalars."""

    total: Any
    weight: Any

    def value(self) -> jax.Array:
        """The mean, 0 where nothing was counted."""
        return ratio(self.total, self.weight)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Sum:
    """A metric reported as its sum over everything; a pytree of one scalar."""

    total: Any

    def value(self) -> jax.Array:
        """The sum."""
        return jnp.asarray(self.total)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What a loss function returns when a plain scalar does not say enough; a pytree.

    The objective is `total / weight + per_microbatch`, or `total + per_microbatch` for a loss that is a sum.

    Args:
        total: float scalar, summed over examples (tokens).
        weight: float scalar, how much `total` sums over; it must not depend on the parameters. None: the objective
            is the sum itself, over the whole batch, and nothing is divided.
        per_microbatch: float scalar averaged over microbatches, such as a balance loss.
        aux: metrics, a dict of `Mean` and `Sum`.
        state: updated collections the next step starts from (running statistics), or None.
    """

    total: Any
    weight: Any
    per_microbatch: Any = 0.0
    aux: dict[str, Mean | Sum] = field(default_factory=dict)
    state: Any = None

    def value(self) -> jax.Array:
        """The objective, finite also where nothing was weighted."""
        return weighted(self.total, self.weight) + self.per_microbatch


def weighted(total: Any, weight: Any) -> jax.Array:
    """`total / weight` by `ratio`, or the total in float32 where the weight is None."""
    return jnp.asarray(total, jnp.float32) if weight is None else ratio(total, weight)


def ratio(total: Any, weight: Any) -> jax.Array:
    """`total / weight` in float32, 0 where the weight is 0; its gradient stays finite there."""
    total, weight = jnp.asarray(total, jnp.float32), jnp.asarray(weight, jnp.float32)
    return jnp.where(weight == 0, 0.0, total / jnp.where(weight == 0, 1.0, weight))
