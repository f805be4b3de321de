"""One device is the oracle: loss, gradients and parameters over three steps, for every model on every kind of mesh.

The default tier runs each model on the mesh of most axes and one of them on every mesh, with the options spread over
the models (the GPTs are on every mesh in the covering array of plans, test_covering.py); the full product of models,
meshes, optimizers and options is in the exhaustive tier. Compilation takes nearly all the time, so the default tier
compiles without XLA's costly optimisations, the exhaustive one with them.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardlib as sl
from tests.cases.test_rul import small_model
from tests.oracle import (
    MODELS,
    OPTIMIZERS,
    assert_equal_to_one_device,
    assert_losses_equal,
    assert_trees_equal,
    host,
    record_gradients,
    run,
)

MESHES = ("data=8", "fsdp=8", "tensor=4,data=2", "fsdp=2,tensor=2,data=2")
DEFAULT = {
    "gpt": ("sgd", {"dropout": 0.1, "tied": True}),
    "gpt_nnx": ("adam", {"dropout": 0.1}),
    "llama": ("adam", {"tied": True}),
}
OPTIONS = {
    "gpt": ({}, {"dropout": 0.1, "tied": True, "remat": True}),
    "gpt_nnx": ({}, {"dropout": 0.1, "tied": True, "remat": True}),
    "llama": ({}, {"tied": True, "remat": True}),
}
PRODUCT = [
    (model, mesh, optimizer, tuple(options.items()))
    for model in MODELS
    for mesh, optimizer, options in itertools.product(MESHES, OPTIMIZERS, OPTIONS[model])
]


@pytest.fixture(autouse=True)
def quick_compiles(request):
    quick = request.node.get_closest_marker("exhaustive") is None
    jax.config.update("jax_disable_most_optimizations", quick)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def trainer_of(model, mesh, optimizer, options):
    module, loss, spec = MODELS[model](**dict(options))
    return sl.Trainer(sl.bind(module, loss, sl.Plan(mesh=mesh), spec), OPTIMIZERS[optimizer])


@functools.cache
def one_device(model, optimizer, options):
    """The state to start from, on the host, and what three steps on one device make of it."""
    trainer = trainer_of(model, "data=1", optimizer, options)
    state = trainer.init(jax.random.key(0))
    start = dataclasses.replace(host(dataclasses.replace(state, rng=0)), rng=None)
    return start, run(trainer, with_key(start))


def with_key(start):
    return dataclasses.replace(start, rng=jax.random.key(7))


def check(model, mesh, optimizer, options):
    start, wanted = one_device(model, optimizer, options)
    assert wanted.losses[0] != wanted.losses[1]
    found = run(trainer_of(model, mesh, optimizer, options), with_key(start))
    assert_equal_to_one_device(found, wanted)


@pytest.mark.newest
@pytest.mark.parametrize("mesh", ["fsdp=2,tensor=2,data=2"])
def test_linen_gpt_equals_one_device_on_a_product_mesh(mesh):
    optimizer, options = DEFAULT["gpt"]
    check("gpt", mesh, optimizer, tuple(options.items()))


@pytest.mark.parametrize(("model", "mesh"), [("gpt_nnx", MESHES[-1]), *(("llama", mesh) for mesh in MESHES)])
def test_every_model_and_every_mesh_equal_one_device(model, mesh):
    optimizer, options = DEFAULT[model]
    check(model, mesh, optimizer, tuple(options.items()))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("model", "mesh", "optimizer", "options"), PRODUCT)
def test_the_full_product_equals_one_device(model, mesh, optimizer, options):
    check(model, mesh, optimizer, options)


def test_the_trainer_on_one_device_equals_a_loop_by_hand():
    model, _, spec = small_model()

    def loss(params, batch, rng):
        noise = jax.random.normal(rng, (8, 16))
        return ((model.apply({"params": params}, batch["x"]) - noise) ** 2).mean()

    optimizer = optax.adam(1e-2, eps=1e-3)
    trainer = sl.Trainer(sl.bind(model, loss, sl.Plan(mesh="data=1"), spec), optimizer)
    state = trainer.init(jax.random.key(0))
    params, key = host(state.params), jax.random.wrap_key_data(np.asarray(jax.random.key_data(state.rng)))
    opt_state, losses, wanted = optimizer.init(params), [], []
    for step in range(3):
        batch = {"x": np.random.default_rng(step).normal(size=(8, 64)).astype(np.float32)}
        rng = jax.random.fold_in(jax.random.fold_in(key, step), 0)  # part 0 of the step, its only one
        value, grads = jax.value_and_grad(loss)(params, batch, rng)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        wanted.append(float(value))
        state, metrics = trainer.step(state, batch)
        losses.append(float(metrics["loss"]))
    assert_losses_equal(losses, wanted)
    assert_trees_equal(host(state.params), host(params), "parameter")


def linear_run(mesh, rows):
    """One step of a linear model whose mean over rows is `rows(x, w)`; gradients and loss."""
    model, _, spec = small_model()
    loss = lambda params, batch, rng: rows(batch["x"], params["up"]["kernel"])  # noqa: E731
    bound = sl.bind(model, loss, sl.Plan(mesh=mesh), spec)
    trainer = sl.Trainer(bound, optax.chain(record_gradients(), optax.sgd(0.1)))
    batch = {"x": np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)}
    state, metrics = trainer.step(trainer.init(jax.random.key(0)), batch)
    return host(state.opt_state[0].grads), float(metrics["loss"])


def test_a_dropped_reduction_is_caught():
    whole = lambda x, w: ((x @ w) ** 2).mean()  # noqa: E731
    mesh = sl.make_mesh("data=8")
    local = lambda reduce: jax.shard_map(  # noqa: E731
        lambda x, w: reduce(whole(x, w)), mesh=mesh, in_specs=(P("data"), P()), out_specs=P(), check_vma=False
    )
    wanted, wanted_loss = linear_run("data=1", whole)
    right, loss = linear_run("data=8", local(lambda value: jax.lax.pmean(value, "data")))
    assert_losses_equal([loss], [wanted_loss])
    assert_trees_equal(right, wanted, "gradient")
    _, wrong_loss = linear_run("data=8", local(lambda value: value))  # each shard keeps its own mean
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_losses_equal([wrong_loss], [wanted_loss])
    wrong, _ = linear_run("data=8", local(lambda value: jax.lax.psum(value, "data")))
    with pytest.raises(AssertionError, match="gradient up/kernel: differs by"):
        assert_trees_equal(wrong, wanted, "gradient")


def test_a_small_fault_in_one_leaf_is_caught_and_named():
    tree = {"a": np.ones((4, 4), np.float32), "b": np.full(4, 1e-6, np.float32), "c": np.ones(2, np.float32)}
    assert_trees_equal({**tree, "a": tree["a"] * np.float32(1 + 5e-6)}, tree, "gradient")
    for name, factor in (("a", 1 + 2e-5), ("b", 1.5), ("c", -1)):
        with pytest.raises(AssertionError, match=f"gradient {name}: differs by"):
            assert_trees_equal({**tree, name: tree[name] * np.float32(factor)}, tree, "gradient")
    with pytest.raises(AssertionError):
        assert_losses_equal([1.0 + 2e-6], [1.0])
    with pytest.raises(AssertionError, match="bfloat16"):
        assert_trees_equal({**tree, "c": jnp.ones(2, jnp.bfloat16)}, tree, "gradient")
