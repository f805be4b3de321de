"""The convolutional network: equal to one device, running statistics included; training and evaluation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardlib as sl
from models import convnet
from shardlib import annotate
from tests.oracle import assert_losses_equal, assert_trees_equal, host

BATCH = 8
REAL = np.float32([1, 1, 0, 1, 1, 0, 1, 1])
SMALL = functools.partial(convnet.small, batch=BATCH, widths=(8, 16), size=8, weights=True)
SMALLEST = functools.partial(convnet.small, batch=BATCH, widths=(8,), size=4, weights=True)


@pytest.fixture(autouse=True)
def quick_compiles():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def image_batch(step, *, size=8):
    draw = np.random.default_rng(step)
    images = draw.normal(size=(BATCH, size, size, 3)).astype(np.float32)
    return {"images": images, "labels": draw.integers(0, 10, BATCH).astype(np.int32), "weights": REAL}


@functools.cache
def trained(mesh):
    """Three steps, then an evaluation of a short batch."""
    module, loss, spec = SMALLEST()
    trainer = sl.Trainer(sl.bind(module, loss, sl.Plan(mesh=mesh), spec), optax.sgd(0.1))
    state, losses = trainer.init(jax.random.key(0)), []
    for step in range(3):
        state, metrics = trainer.step(state, image_batch(step, size=4))
        losses.append(float(metrics["loss"]))
    evaluated = trainer.evaluate(state, {name: leaf[:6] for name, leaf in image_batch(3, size=4).items()})
    return losses, host(state.params), host(state.collections), float(evaluated["loss"])


@pytest.mark.parametrize("mesh", ["data=8", "fsdp=8", "data=4,tensor=2"])
def test_equal_to_one_device(mesh):
    losses, params, collections, evaluated = trained("data=1")
    found = trained(mesh)
    assert losses[0] != losses[1]
    assert_losses_equal(found[0], losses)
    assert_trees_equal(found[1], params, "parameter")
    assert_trees_equal(found[2], collections, "running statistics")
    np.testing.assert_allclose(found[3], evaluated, rtol=1e-5)


def test_convolutions_are_split_in_pairs():
    module, loss, spec = convnet.small()
    bound = sl.bind(module, loss, sl.Plan(mesh="fsdp=4,tensor=2"), spec)
    specs = bound.params.specs
    block = specs["stage1_block0"]
    assert block["up"]["kernel"] == P(None, None, "fsdp", "tensor")
    assert block["down"]["kernel"] == P(None, None, "tensor", "fsdp")
    assert (block["up_norm"]["scale"], block["down_norm"]["scale"]) == (P("tensor"), P("fsdp"))
    assert (specs["stem"]["kernel"], specs["head"]["kernel"]) == (P(None, None, None, "fsdp"), P("fsdp", None))
    assert not [entry for entry in bound.params.entries if not entry.names]
    assert sum(np.prod(entry.shape) for entry in bound.params.entries) == 75_290
    assert not bound.notices


def variables(module, spec):
    images = jnp.zeros(spec["images"].shape, jnp.float32)
    made = module.init(jax.random.key(0), images)
    is_box = lambda leaf: isinstance(leaf, annotate.LogicalAxes)  # noqa: E731
    params = jax.tree.map(lambda leaf: leaf.value, made["params"], is_leaf=is_box)
    return params, {"batch_stats": made["batch_stats"]}


def test_masked_rows_count_nowhere():
    module, loss, spec = SMALL()
    params, collections = variables(module, spec)
    batch, other = image_batch(0), image_batch(0)
    other["images"] = np.where(REAL[:, None, None, None] > 0, batch["images"], 7.0)
    key = jax.random.key(0)
    evaluate = jax.jit(lambda batch, rng: loss(params, batch, rng, collections))
    first, second = evaluate(batch, key), evaluate(other, key)
    np.testing.assert_allclose(first.value(), second.value(), rtol=1e-6)
    assert_trees_equal(host(second.state), host(first.state), "running statistics")
    assert float(first.weight) == REAL.sum()
    nothing = evaluate({**batch, "weights": 0 * REAL}, key)
    assert float(nothing.value()) == 0.0
    assert jax.tree.all(jax.tree.map(np.array_equal, host(nothing.state), host(collections)))


def test_an_evaluation_uses_the_running_statistics_and_keeps_them():
    module, loss, spec = SMALL()
    params, collections = variables(module, spec)
    found = loss(params, image_batch(0), None, collections)
    assert jax.tree.all(jax.tree.map(np.array_equal, host(found.state), host(collections)))
    logits = module.apply({"params": params, **collections}, image_batch(0)["images"])
    wanted = convnet.class_loss(logits, image_batch(0), state=None)
    np.testing.assert_allclose(found.value(), wanted.value(), rtol=1e-6)


def test_follows_the_parameters_dtype():
    module, loss, spec = SMALL()
    shapes, collections = variables(module, spec)
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), shapes)
    batch = {name: leaf.abstract() for name, leaf in spec.items()}
    program = jax.make_jaxpr(lambda *arguments: loss(*arguments, jax.random.key(0), collections))(params, batch)
    products = [eqn for eqn in program.eqns if eqn.primitive.name in ("conv_general_dilated", "dot_general")]
    assert len(products) == 6
    assert {var.aval.dtype for eqn in products for var in eqn.invars} == {jnp.dtype(jnp.bfloat16)}
    result = jax.eval_shape(lambda *arguments: loss(*arguments, jax.random.key(0), collections), params, batch)
    assert {leaf.dtype for leaf in jax.tree.leaves(result)} == {jnp.dtype(jnp.float32)}
