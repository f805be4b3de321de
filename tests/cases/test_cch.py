"""Field troubles, group CCH: one compilation, whatever the state comes from."""

import dataclasses

import flax.serialization
import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardlib as sl
from tests.cases.test_rul import small_model
from tests.oracle import host

BATCH = {"x": np.ones((8, 64), np.float32)}


@pytest.fixture
def compilations():
    """Grows by one for every program XLA compiles."""
    seen = []

    def listen(name, duration, **_):
        if name == "/jax/core/compile/backend_compile_duration":
            seen.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope="module")
def trainer():
    model, loss, spec = small_model()

    def noisy(params, batch, rng):
        noise = 0.0 if rng is None else jax.random.normal(rng, ())
        return loss(params, batch, rng) + noise

    return sl.Trainer(sl.bind(model, noisy, sl.Plan(mesh="data=8"), spec), optax.adam(1e-3))


def rebuilt(state, change):
    """The state with `change` done to every array but the key, and a fresh key on one device."""
    arrays = jax.tree.map(change, dataclasses.replace(state, rng=None))
    return dataclasses.replace(arrays, rng=jax.random.key(1))


@pytest.mark.newest
def test_cch_01_one_compile_for_state_from_anywhere(trainer, compilations):
    state = trainer.init(jax.random.key(0))
    saved = rebuilt(state, np.asarray)
    executable = trainer.compiled
    trainer.step(state, BATCH)
    # What placing needs for the first time (copies of single leaves) compiles too; the step never does.
    trainer.step(rebuilt(saved, np.array), BATCH)
    trainer.step(rebuilt(saved, jax.numpy.asarray), BATCH)
    compilations.clear()
    for change in (np.array, jax.numpy.asarray, lambda x: jax.device_put(x, jax.devices()[3])):
        after, _ = trainer.step(rebuilt(saved, change), BATCH)
        trainer.step(after, BATCH)
    assert trainer.compiled is executable
    assert compilations == []
    # Negative control: the counter sees a compilation.
    jax.jit(lambda x: x * 3.25)(np.float32(1))
    assert len(compilations) == 1


@pytest.mark.newest
def test_cch_02_the_key_fed_back(trainer, compilations):
    state, first = trainer.step(trainer.init(jax.random.key(0)), BATCH)
    compilations.clear()
    losses = [float(first["loss"])]
    for _ in range(4):
        state, metrics = trainer.step(state, BATCH)
        assert state.rng.sharding.is_equivalent_to(jax.NamedSharding(trainer.mesh, P()), 0)
        losses.append(float(metrics["loss"]))
    assert compilations == []
    assert len(set(losses)) == 5  # a key of its own in every step


def test_cch_03_reloading_places_again(trainer):
    state = trainer.init(jax.random.key(0))
    text = flax.serialization.to_bytes(host(state.params))
    params = flax.serialization.from_bytes(host(state.params), text)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(params))
    after, _ = trainer.step(dataclasses.replace(state, params=params), BATCH)
    assert jax.tree.map(lambda leaf: leaf.sharding, after) == trainer.state_shardings
