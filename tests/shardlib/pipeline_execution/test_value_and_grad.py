"""`shardlib.pipeline.value_and_grad` on losses that know nothing of the toolkit, and on parts written by hand."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardlib as sl
from meshes import ShardingError
from shardlib.annotate import layer_boundary
from shardlib.pipeline.parts import Parts
from shardlib.pipeline.stack import Stacked
from tests.oracle import assert_trees_equal, host

LAYERS, WIDTH, ROWS = 4, 8, 8
KEYS = jax.random.split(jax.random.key(0), 3)
PARAMS = {
    "embed": jax.random.normal(KEYS[0], (4, WIDTH)),
    "head": jax.random.normal(KEYS[1], (WIDTH, 3)),
    "w": 0.3 * jax.random.normal(KEYS[2], (LAYERS, WIDTH, WIDTH)),
}
BATCH = {
    "x": np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32),
    "y": np.arange(ROWS, dtype=np.int32) % 3,
}
SPECS = jax.tree.map(lambda _: P(), PARAMS)
ONE = jax.tree.map(lambda leaf: leaf[:2], BATCH)  # one microbatch of one data shard


def loss(params, batch, rng):
    x = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), batch["x"] @ params["embed"], params["w"])[0]
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], batch["y"])
    return sl.Loss(total=losses.sum(), weight=losses.size, aux={"norm": sl.Mean((x**2).sum(), x.size)})


def objective(params):
    made = loss(params, BATCH, None)
    return made.total / made.weight


def by_hand():
    """Parameters flat: embed, head, w. The microbatch flat: x, y."""

    def post(outer, piece, carry, outputs):
        losses = optax.softmax_cross_entropy_with_integer_labels(carry[0] @ outer[1], piece[1])
        return jax.tree.leaves(sl.Loss(total=losses.sum(), weight=jnp.float32(losses.size)))

    return Parts(
        num_layers=LAYERS,
        stacked=(Stacked(leaves=(2,), dim=0),),
        outer=(0, 1),
        pre=lambda outer, piece: [piece[0] @ outer[0]],
        side=lambda outer, piece: ([], []),
        block=lambda layer, side, carry, slices: ([carry[0] + jnp.tanh(carry[0] @ layer[0])], []),
        post=post,
        carry=(jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),),
        outputs=(),
        results=jax.tree.structure(sl.Loss(total=0.0, weight=0.0)),
    )


@pytest.mark.parametrize("form", ["a loss", "parts by hand", "parts of a cut"])
def test_equals_one_device(form):
    forms = {
        "a loss": lambda: loss,
        "parts by hand": by_hand,
        "parts of a cut": lambda: sl.pipeline.cut(lambda params, piece: loss(params, *piece), PARAMS, (ONE, KEYS[0])),
    }
    mesh = sl.make_mesh("stage=4,data=2")
    step = sl.pipeline.value_and_grad(forms[form](), mesh=mesh, num_microbatches=2, specs=SPECS, has_aux=True)
    (value, metrics), grads = step(PARAMS, BATCH, KEYS[0])
    wanted, wanted_grads = jax.value_and_grad(objective)(PARAMS)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    assert_trees_equal(host(grads), host(wanted_grads), "gradient")
    assert ("norm" in metrics) == (form != "parts by hand")


def test_in_a_jitted_step_of_ones_own_and_on_a_mesh_with_explicit_axes():
    explicit = sl.make_mesh("stage=4,data=2", axis_type=jax.sharding.AxisType.Explicit)
    grad_of = sl.pipeline.value_and_grad(loss, mesh=explicit, num_microbatches=2, specs=SPECS)

    @jax.jit
    def step(params, batch):
        value, grads = grad_of(params, batch)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    value, params = step(PARAMS, BATCH)
    wanted, grads = jax.value_and_grad(objective)(PARAMS)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    assert_trees_equal(host(params), host(jax.tree.map(lambda p, g: p - 0.1 * g, PARAMS, grads)), "parameter")


def test_a_loss_that_is_not_the_sum_of_its_rows_is_refused():
    squared = lambda params, batch, rng: loss(params, batch, rng).total ** 2  # noqa: E731
    step = sl.pipeline.value_and_grad(squared, mesh=sl.make_mesh("stage=2"), num_microbatches=2, specs=SPECS)
    with pytest.raises(ShardingError, match="the loss is not the sum of its rows, and the plan cuts the batch"):
        step(PARAMS, BATCH)


def test_parts_of_layers_one_by_one():
    def marked(params, piece):
        batch, _ = piece
        x = layer_boundary(batch["x"] @ params["embed"])
        for w in params["layers"]:
            x = layer_boundary(x + jnp.tanh(x @ w))
        return ((x @ params["head"]) ** 2).mean()

    params = {"embed": PARAMS["embed"], "head": PARAMS["head"], "layers": list(PARAMS["w"])}
    parts = sl.pipeline.cut(marked, params, (ONE, KEYS[0]))
    specs = jax.tree.map(lambda _: P(), params)
    step = sl.pipeline.value_and_grad(parts, mesh=sl.make_mesh("stage=2"), num_microbatches=4, specs=specs)
    value, grads = step(params, BATCH, KEYS[0])
    wanted, wanted_grads = jax.value_and_grad(marked)(params, (BATCH, None))
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    assert_trees_equal(host(grads), host(wanted_grads), "gradient")


def test_a_wrong_block_by_hand_is_caught():
    wrong = lambda layer, side, carry, slices: ([carry[0] + 0.9 * jnp.tanh(carry[0] @ layer[0])], [])  # noqa: E731
    assert abs(float(by_hand().loss(PARAMS, BATCH).total / ROWS) - float(objective(PARAMS))) < 1e-6
    other = replace(by_hand(), block=wrong).loss(PARAMS, BATCH)
    assert abs(float(other.total / ROWS) - float(objective(PARAMS))) > 1e-3


def test_a_mesh_without_stages():
    with pytest.raises(ShardingError, match="mesh data=8 has no stage axis of more than one stage"):
        sl.pipeline.value_and_grad(loss, mesh=sl.make_mesh("data=8"), num_microbatches=2)
