"""Field troubles, group SMG: gradients through manual regions. There is no lint of a user's own redundant psum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardlib as sl
from meshes import ShardingError
from shardlib.rules import Rules
from shardlib.strategies import default_rules
from tests.tiny import LOWERINGS, gradient


def square_loss(params, batch, rng):
    return sl.Loss(total=(params["w"] ** 2 * batch["x"]).sum(), weight=None)


def check_one_sum(**plan):
    """SMG-1: d/dw of sum w^2 x at w=3 with x=0..7 is 168, counted once whatever the mesh."""
    found, metrics = gradient(square_loss, {"x": np.arange(8, dtype=np.float32)}, value=3.0, **plan)
    assert (float(found), float(metrics["loss"])) == (168.0, 252.0)


@pytest.mark.newest
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("mesh", ["data=8", "data=2,fsdp=2,tensor=2", "replica=2,data=4"])
def test_smg_01_gradients_are_summed_once(lowering, mesh):
    check_one_sum(mesh=mesh, lowering=lowering)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_smg_02_a_sum_is_a_sum(lowering):
    loss = lambda params, batch, rng: sl.Loss(  # noqa: E731
        total=params["w"] * batch["x"].sum(), weight=None, aux={"ones": sl.Sum(batch["x"].sum())}
    )
    found, metrics = gradient(loss, {"x": np.ones(8, np.float32)}, value=1.0, mesh="data=8", lowering=lowering)
    assert (float(found), float(metrics["loss"]), float(metrics["ones"])) == (8.0, 8.0, 8.0)


@pytest.mark.newest
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_smg_04_gradient_of_a_reshard(lowering):
    """A weighted sum of columns of an array split by rows: the gradient is the weights, 0..63."""
    rules = default_rules().with_first(Rules.parse(["rows -> tensor", "columns -> tensor"]))
    weights = np.arange(64, dtype=np.float32).reshape(8, 8)

    def by_constraint(params, batch, rng):
        w = sl.constrain(params["w"].get_value(), None, "columns")
        return sl.Loss(total=(w * weights).sum() * batch["x"].mean(), weight=None)

    plan = {"rules": rules, "lowering": lowering, "mesh": "tensor=8"}
    found, _ = gradient(by_constraint, {"x": np.ones(8, np.float32)}, value=weights, names=("rows", None), **plan)
    assert np.array_equal(found, weights)


def test_smg_04_gradient_of_an_all_to_all_of_the_users():
    weights = np.arange(64, dtype=np.float32).reshape(8, 8)

    def by_hand(params, batch, rng):
        swap = lambda w: jax.lax.all_to_all(w, "tensor", split_axis=1, concat_axis=0, tiled=True)  # noqa: E731
        swap = jax.shard_map(swap, in_specs=P("tensor", None), out_specs=P(None, "tensor"))
        w = swap(params["w"].get_value())
        return sl.Loss(total=(w * weights).sum() * batch["x"].mean(), weight=None)

    rules = default_rules().with_first(Rules.parse(["rows -> tensor"]))
    with jax.set_mesh(sl.make_mesh("tensor=8")):
        found, _ = gradient(
            by_hand, {"x": np.ones(8, np.float32)}, value=weights, names=("rows", None), rules=rules, mesh="tensor=8"
        )
    assert np.array_equal(found, weights)


@pytest.mark.newest
def test_smg_05_a_captured_value_under_slices():
    """A manual region of the user's that captures a value of its slice: right without slices, refused with them."""
    mesh = sl.make_mesh("data=8")

    def loss(params, batch, rng):
        captured = batch["x"] * params["w"]
        identity = jax.shard_map(lambda one: captured * one, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        return sl.Loss(total=identity(jnp.ones((1,))).sum(), weight=None)

    batch = {"x": np.arange(1, 9, dtype=np.float32)}
    found, metrics = gradient(loss, batch, value=2.0, mesh="data=8", lowering="automatic")
    assert (float(found), float(metrics["loss"])) == (36.0, 72.0)
    with pytest.raises(ShardingError, match="the loss has a shard_map over data of its own"):
        gradient(loss, batch, value=2.0, mesh="data=8", lowering="automatic", random_slices=8)
