"""Specs for optimizer state: what follows a parameter takes its spec, everything else is replicated.

In: an optax optimizer, abstract parameters, their specs. Out: a tree of specs with the state's structure.

    specs = optimizer_specs(optax.adamw(1e-3), abstract_params, param_specs)
"""

from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec as P

from meshes.errors import raise_collected
from shardlib.tree_paths import leaves_with_paths


def abstract_state(optimizer: optax.GradientTransformation, params: Any) -> Any:
    """The optimizer's state for these parameters as `jax.ShapeDtypeStruct`s; nothing is allocated."""
    return jax.eval_shape(optimizer.init, params)


def optimizer_specs(optimizer: optax.GradientTransformation, params: Any, specs: Any) -> Any:
    """Derives the specs of the optimizer's state by optax's own map over parameter-like leaves.

    Args:
        optimizer: adam, adamw, sgd, or any optimizer whose parameter-like state has its parameter's shape.
        params: parameters or their abstract values.
        specs: partition specs of the parameters' structure.

    Raises:
        ShardingError: state that follows a parameter but has another shape (factored moments).
    """
    state = abstract_state(optimizer, params)

    def follow(leaf: Any, spec: P, param: Any) -> Any:
        return spec if leaf.shape == param.shape else _Reshaped(leaf.shape, param.shape)

    # optax runs the optimizer's init to tell parameters from the rest: traced, so that it touches no device.
    traced: list[Any] = []
    mapped = lambda: optax.tree.map_params(optimizer, follow, state, specs, params, transform_non_params=lambda _: P())  # noqa: E731
    jax.eval_shape(lambda: traced.append(mapped()))
    found = traced[0]
    reshaped = [(path, leaf) for path, leaf in leaves_with_paths(found) if isinstance(leaf, _Reshaped)]
    raise_collected(
        [f"{path}: shape {leaf.state_shape} for a parameter of shape {leaf.param_shape}" for path, leaf in reshaped],
        heading="this optimizer keeps state that does not have its parameter's shape, which no rule covers yet; "
        "fix: use adam, adamw or sgd",
    )
    return found


class _Reshaped:
    """Marks state that follows a parameter with another shape."""

    def __init__(self, state_shape: tuple[int, ...], param_shape: tuple[int, ...]):
        self.state_shape, self.param_shape = state_shape, param_shape
