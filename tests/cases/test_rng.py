"""Field troubles, group RNG: the same values on every layout."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardlib as sl
from tests.cases.test_rul import small_model


@pytest.mark.newest
def test_rng_03_initial_values_do_not_depend_on_the_layout():
    draws = []
    for count in (1, 2, 4, 8):
        sharding = jax.NamedSharding(sl.make_mesh(f"data={count}"), P("data"))
        draw = jax.jit(lambda key: jax.random.normal(key, (496, 3)), out_shardings=sharding)
        draws.append(np.asarray(draw(jax.random.key(0))))
    assert all(np.array_equal(draw, draws[0]) for draw in draws)
    model, loss, spec = small_model()
    states = []
    for mesh in ("data=1", "data=8", "tensor=8", "data=2,tensor=4"):
        trainer = sl.Trainer(sl.bind(model, loss, sl.Plan(mesh=mesh), spec), optax.sgd(0.1))
        states.append(jax.tree.map(np.asarray, trainer.init(jax.random.key(0)).params))
    for state in states:
        assert jax.tree.all(jax.tree.map(np.array_equal, state, states[0]))
