"""Collections that a loss reads and hands back as they were, as inputs that all rows share: whatever cuts the batch
leaves them whole.

In: `(params, batch, rng, collections) -> Loss`. Out: `(params, (batch, collections), rng) -> Loss` without state.

    if not changed(loss, params, batch, collections):
        loss, spec = as_inputs(loss), with_constants(spec, collections)
"""

from dataclasses import replace
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from shardlib.batch_spec import ArraySpec
from shardlib.loss import Loss
from shardlib.objective import LossFunction
from shardlib.tree_paths import leaves_with_paths


def changed(loss: LossFunction, params: Any, batch: Any, collections: Any) -> list[str]:
    """Paths of the collections that the loss does not return as it got them; arguments are abstract."""

    def state(params: Any, batch: Any, rng: Any, collections: Any) -> Any:
        made = loss(params, batch, rng, collections)
        return made.state if isinstance(made, Loss) else None

    key = jax.eval_shape(lambda: jax.random.key(0))
    closed, shape = jax.make_jaxpr(state, return_shape=True)(params, batch, key, collections)
    paths = [path for path, _ in leaves_with_paths(collections)]
    if jax.tree.structure(shape) != jax.tree.structure(collections):
        return paths
    given = closed.jaxpr.invars[len(closed.jaxpr.invars) - len(paths) :]
    return [path for path, var, made in zip(paths, given, closed.jaxpr.outvars, strict=True) if made is not var]


def as_inputs(loss: LossFunction) -> LossFunction:
    """The loss with its collections beside the batch, and without a state."""

    def run(params: Any, batch: Any, rng: Any) -> Loss:
        rows, collections = batch
        return replace(loss(params, rows, rng, collections), state=None)

    return run


def with_constants(batch_spec: Any, collections: Any) -> tuple[Any, Any]:
    """The spec of `(batch, collections)`."""
    shared = lambda leaf: ArraySpec(shape=leaf.shape, dtype=str(leaf.dtype), axes=(None,) * len(leaf.shape))  # noqa: E731
    return batch_spec, jax.tree.map(shared, collections)


def specs_with_constants(batch: Any, collections: Any) -> tuple[Any, Any]:
    """The partition specs of `(batch, collections)`: the latter are whole on every device that uses them."""
    return batch, jax.tree.map(lambda _: P(), collections)
