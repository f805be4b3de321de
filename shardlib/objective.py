"""From a user's loss to sums that combine exactly: over slices, microbatches, shards and evaluation batches.

In: `loss(params, batch, rng[, state])`. Out: `Sums`, which add up and are divided once, at the end.

    sums = sums_of(loss, params, batch, rng, state=None)
    metrics = sums.metrics()
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from meshes.errors import ShardingError, raise_collected
from shardlib.loss import Loss, Mean, Sum, weighted

LossFunction = Callable[..., Any]
Metrics = dict[str, jax.Array]
RESERVED = ("loss", "weight")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """A loss before its division; a pytree of float32 scalars.

    The objective is `total / weight + per_microbatch / parts`.

    Args:
        total, weight: summed over everything counted so far; without a weight the objective's first term is `total`.
        per_microbatch: summed over parts.
        parts: how many parts (slices, microbatches, shards) were added.
        aux: metrics, summed.
        state: updated collections, or None.
    """

    total: Any
    weight: Any
    per_microbatch: Any
    parts: Any
    aux: dict[str, Mean | Sum]
    state: Any = None

    def value(self) -> jax.Array:
        """The objective."""
        return weighted(self.total, self.weight) + self.per_microbatch / self.parts

    def metrics(self) -> Metrics:
        """The objective, its weight if it has one, and the values of the metrics."""
        weight = {} if self.weight is None else {"weight": self.weight}
        return {"loss": self.value(), **weight, **{k: metric.value() for k, metric in self.aux.items()}}

    def __add__(self, other: "Sums") -> "Sums":
        added = jax.tree.map(jnp.add, replace(self, state=None), replace(other, state=None))
        return replace(added, state=other.state)

    def summed(self, axes: Any) -> "Sums":
        """Summed over mesh axes, inside a `shard_map`; all scalars in one collective."""
        if not axes:
            return self
        leaves, treedef = jax.tree.flatten(replace(self, state=None))
        packed = jax.lax.psum(jnp.stack(leaves), axes)
        return replace(jax.tree.unflatten(treedef, list(packed)), state=self.state)


def sums_of(loss: LossFunction, params: Any, batch: Any, rng: Any, *, state: Any) -> Sums:
    """Runs the loss on one part and returns it as `Sums`; a scalar counts as one part of equal weight.

    Raises:
        ShardingError: the loss returned something that is no scalar and no well-formed `Loss`.
    """
    result = loss(params, batch, rng) if state is None else loss(params, batch, rng, state)
    one = jnp.ones((), jnp.float32)
    if not isinstance(result, Loss):
        _check_scalar(result, "the loss", of=jnp.floating)
        return Sums(total=_f32(result), weight=one, per_microbatch=0 * one, parts=one, aux={})
    # An integer total would have a gradient of zero without a word; a weight may be a count.
    for part, kind in (("total", jnp.floating), ("weight", jnp.number), ("per_microbatch", jnp.floating)):
        if part != "weight" or result.weight is not None:
            _check_scalar(getattr(result, part), f"the {part} of the loss", of=kind)
    _check_aux(result.aux)
    return Sums(
        total=_f32(result.total),
        weight=None if result.weight is None else _f32(result.weight),
        per_microbatch=_f32(result.per_microbatch),
        parts=one,
        aux=jax.tree.map(_f32, result.aux),
        state=result.state,
    )


def folded(stacked: Sums) -> Sums:
    """Sums with a leading dim of parts (from `jax.vmap`) added up."""
    return jax.tree.map(lambda leaf: leaf.sum(0), stacked)


def _f32(value: Any) -> jax.Array:
    return jnp.asarray(value, jnp.float32)


def _check_scalar(value: Any, what: str, *, of: Any) -> None:
    if not jax.tree_util.all_leaves([value]):
        raise ShardingError(
            f"{what} is a {type(value).__name__}, not a scalar",
            fix="return a scalar or Loss(total, weight, aux=...); metrics go into aux as Mean or Sum",
        )
    shape, dtype = jnp.shape(value), jnp.result_type(value)
    if shape != ():
        raise ShardingError(
            f"{what} has shape {list(shape)}, not a scalar",
            fix="return Loss(total=values.sum(), weight=values.size), or the mean",
        )
    if not jnp.issubdtype(dtype, of):
        wanted = "a floating-point number" if of is jnp.floating else "a number"
        raise ShardingError(f"{what} has dtype {dtype}, not {wanted}", fix="return a floating-point scalar")


def _check_aux(aux: Any) -> None:
    problems: list[str] = []
    for name, metric in aux.items():
        if not isinstance(metric, Mean | Sum):
            problems.append(
                f"metric {name!r} is a {type(metric).__name__}, and only Mean and Sum say how it combines over shards; "
                "fix: write Mean(total, weight) or Sum(total)"
            )
        if name in RESERVED:
            problems.append(f"metric {name!r} has the name of a metric of the step; fix: call it otherwise")
    raise_collected(problems, heading="the aux of the loss cannot be used:")
