"""The trainer: sharded from birth, one executable, clear words for batches, states and meshes that do not fit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import shardlib as sl
from meshes import ShardingError, make_mesh
from tests.cases.test_rul import StatefulMLP, array, small_model
from tests.oracle import assert_trees_equal, host

MESH = "fsdp=2,tensor=4"
BATCH = {"x": np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)}


@pytest.fixture(scope="module")
def trainer():
    model, loss, spec = small_model()
    return sl.Trainer(sl.bind(model, loss, sl.Plan(mesh=MESH), spec), optax.adam(1e-3))


@pytest.mark.newest
def test_the_state_is_born_where_the_plan_says(trainer):
    state = trainer.init(jax.random.key(0))
    for tree in (state.params, state.opt_state[0].mu):
        assert {shard.data.shape for shard in tree["up"]["kernel"].addressable_shards} == {(32, 32)}
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == trainer.state_shardings
    again, _ = trainer.step(state, BATCH)
    assert jax.tree.map(lambda leaf: leaf.sharding, again) == trainer.state_shardings
    assert int(again.step) == 1


def test_metrics_and_evaluation_agree(trainer):
    state = trainer.init(jax.random.key(0))
    evaluated = trainer.evaluate(state, BATCH)
    evaluated_twice = trainer.evaluate(state, BATCH)  # nothing was donated
    _, metrics = trainer.step(state, BATCH)
    assert float(evaluated["loss"]) == pytest.approx(float(metrics["loss"]), rel=1e-6)
    assert float(evaluated_twice["loss"]) == float(evaluated["loss"])


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"x": np.ones((8, 63), np.float32)}, "'x' has shape [8, 63], and the plan was bound for [8, 64]"),
        ({"x": np.ones((4, 64), np.float32)}, "'x' has shape [4, 64], and the plan was bound for [8, 64]"),
        ({"x": np.ones((8, 64), np.int32)}, "'x' has dtype int32, and the batch spec says float32"),
        ({}, "entry 'x' is missing"),
        ({"x": np.ones((8, 64), np.float32), "y": 1}, "unknown entry 'y'"),
    ],
)
def test_a_batch_that_does_not_fit(trainer, batch, says):
    with pytest.raises(ShardingError) as caught:
        trainer.step(trainer.init(jax.random.key(0)), batch)
    assert says in str(caught.value)
    assert "fix: " in str(caught.value)


def test_a_batch_of_float64_is_taken_as_jax_takes_it(trainer):
    trainer.step(trainer.init(jax.random.key(0)), {"x": np.ones((8, 64))})


def test_a_state_that_does_not_fit(trainer):
    state = trainer.init(jax.random.key(0))
    narrow = dataclasses.replace(state, params=jax.tree.map(lambda x: x[:8], state.params))
    whole = dataclasses.replace(state, params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.params))
    other = dataclasses.replace(state, params={"up": state.params["up"]})
    for run in (trainer.step, trainer.evaluate):
        with pytest.raises(ShardingError, match=r"up/kernel: float32\[8, 128\], and the plan was bound for float32"):
            run(narrow, BATCH)
        with pytest.raises(ShardingError, match=r"up/kernel: bfloat16\[64, 128\], and the plan was bound for float32"):
            run(whole, BATCH)
        with pytest.raises(ShardingError, match=r"- missing: .*down/kernel"):
            run(other, BATCH)


@pytest.mark.parametrize("key", [0, np.zeros(2, np.uint32), "rbg"])
def test_a_key_that_is_none(trainer, key):
    key = jax.random.key(0, impl="rbg") if isinstance(key, str) else key
    with pytest.raises(ShardingError, match=r"not one typed key key<fry>\n  fix: use jax\.random\.key\(0\)"):
        trainer.init(key)


def test_a_mesh_of_another_shape_is_refused(trainer):
    with pytest.raises(ShardingError, match="the mesh is data=8 and the plan was bound for fsdp=2,tensor=4"):
        sl.Trainer(trainer.bound, optax.sgd(0.1), mesh=make_mesh("data=8"))


@pytest.mark.newest
def test_an_explicit_mesh_is_rebuilt_and_one_that_is_set_does_not_matter(trainer):
    state, metrics = trainer.step(trainer.init(jax.random.key(0)), BATCH)
    mesh = make_mesh(MESH, axis_type=AxisType.Explicit)
    with jax.set_mesh(mesh):
        other = sl.Trainer(trainer.bound, optax.adam(1e-3), mesh=mesh)
        assert set(other.mesh.axis_types) == {AxisType.Auto}
        other_state, other_metrics = other.step(other.init(jax.random.key(0)), BATCH)
        other.evaluate(other_state, BATCH)
    assert float(metrics["loss"]) == float(other_metrics["loss"])
    assert_trees_equal(host(other_state.params), host(state.params), "parameter")


def test_a_module_given_built_keeps_its_parameters():
    module = StatefulMLP(nnx.Rngs(0))
    graphdef, before = nnx.graphdef(module), host(nnx.state(module, nnx.Param))
    loss = lambda params, batch, rng: (nnx.merge(graphdef, params)(batch["x"]) ** 2).mean()  # noqa: E731
    bound = sl.bind(module, loss, sl.Plan(mesh="data=1"), {"x": array(8, 64, axes=("batch", "embed"))})
    trainer = sl.Trainer(bound, optax.sgd(0.1))
    losses = []
    for _ in range(2):
        _, metrics = trainer.step(trainer.init(jax.random.key(0)), BATCH)
        losses.append(float(metrics["loss"]))
    assert losses[0] == losses[1]
    assert_trees_equal(host(nnx.state(module, nnx.Param)), before, "parameter")


def test_a_state_on_the_host_is_not_written_to(trainer):
    state = trainer.init(jax.random.key(0))
    params = host(state.params)
    before = jax.tree.map(np.copy, params)
    for _ in range(2):
        fresh = dataclasses.replace(trainer.init(jax.random.key(0)), params=params)
        trainer.step(fresh, BATCH)
    assert_trees_equal(params, before, "parameter")
