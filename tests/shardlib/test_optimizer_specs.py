"""Optimizer state follows its parameter by structure; what does not is replicated."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from shardlib.optimizer_specs import abstract_state, optimizer_specs

PARAMS = {"w": jax.ShapeDtypeStruct((8, 16), jnp.float32), "b": jax.ShapeDtypeStruct((16,), jnp.float32)}
SPECS = {"w": P("fsdp", "tensor"), "b": P("tensor")}


@pytest.mark.newest
@pytest.mark.parametrize(
    ("optimizer", "copies"),
    [
        (optax.sgd(0.1), 0),
        (optax.sgd(0.1, momentum=0.9), 1),
        (optax.adam(1e-3), 2),
        (optax.adamw(1e-3), 2),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), 2),
        (optax.MultiSteps(optax.adam(1e-3), 4), 3),
    ],
    ids=["sgd", "momentum", "adam", "adamw", "clip", "multisteps"],
)
def test_moments_follow_their_parameter_and_scalars_are_replicated(optimizer, copies):
    specs = optimizer_specs(optimizer, PARAMS, SPECS)
    state = abstract_state(optimizer, PARAMS)
    is_spec = lambda node: isinstance(node, P)  # noqa: E731
    assert jax.tree.structure(specs, is_leaf=is_spec) == jax.tree.structure(state)
    found = jax.tree.leaves(specs, is_leaf=is_spec)
    assert sum(spec == SPECS["w"] for spec in found) == copies
    assert sum(spec == SPECS["b"] for spec in found) == copies
    for spec, leaf in zip(found, jax.tree.leaves(state), strict=True):
        assert leaf.shape or spec == P()


def test_nothing_is_allocated():
    huge = {"w": jax.ShapeDtypeStruct((1 << 20, 1 << 20), jnp.float32)}
    specs = optimizer_specs(optax.adam(1e-3), huge, {"w": P("fsdp", None)})
    assert specs[0].mu == {"w": P("fsdp", None)}
