"""Field troubles, group PRC: the dtype in which things are added up."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib.audit.stablehlo import reduction_dtypes
from tests.moving import bound, example
from tests.tiny import stepped


@pytest.mark.newest
@pytest.mark.parametrize(("asked", "expected"), [("float32", "f32"), ("bfloat16", "bf16")])
def test_prc_01_gradients_are_reduced_in_the_dtype_asked_for(asked, expected):
    made = bound("data=8", model=example(dtype=jnp.bfloat16), compute_dtype="bfloat16", reduce_dtype=asked)
    lowered = sl.Trainer(made, optax.sgd(0.1)).lowered
    found = reduction_dtypes(lowered, made.plan.mesh)
    (packed,) = [one for one in found if one.shapes == ((6,),)]
    assert packed.dtype == "f32", "the loss and its metrics are float32 whatever the gradients are"
    gradients = [one for one in found if one is not packed]
    assert len(gradients) == 4 and {one.dtype for one in gradients} == {expected}
    assert {one.axes for one in found} == {("data",)}


@pytest.mark.parametrize(("asked", "expected"), [(jnp.float32, 1 + 2**-10), (jnp.bfloat16, 1.0)])
def test_prc_02_sums_over_either_axis_are_in_the_dtype_asked_for(asked, expected):
    shape = sl.MeshShape.parse("data=2,tensor=2")
    mesh = sl.make_mesh("data=2,tensor=2", devices=jax.devices()[:4])
    for axis in shape.names:

        def summed(x, axis=axis):
            return jax.lax.psum(x.astype(asked), axis)

        step = jax.jit(jax.shard_map(summed, mesh=mesh, in_specs=P(axis), out_specs=P(), check_vma=False))
        partials = np.array([1.0, 2**-10], np.float32)
        (reduction,) = reduction_dtypes(step.lower(partials), shape)
        assert (reduction.axes, jnp.dtype(asked).itemsize * 8) == ((axis,), int(reduction.dtype.strip("bf")))
        assert float(step(partials)[0].astype(jnp.bfloat16 if asked is jnp.bfloat16 else asked)) == expected


@pytest.mark.parametrize("lowering", ["automatic", "explicit"])
def test_prc_03_metrics_of_a_bfloat16_model_grow_past_4096(lowering):
    def loss(params, batch, rng):
        ones = batch["x"].astype(jnp.bfloat16)
        used = jax.tree.leaves(params)[0].astype(jnp.bfloat16) * ones[0]
        return sl.Loss(total=used.astype(jnp.float32), weight=1.0, aux={"count": sl.Sum(ones.sum())})

    # 4097 microbatches of one row each; in bfloat16 the sum would stop at 256, and 4096 + 1 is 4096.
    batch = {"x": np.ones((4097,), np.float32)}
    _, metrics = stepped(loss, batch, mesh="data=1", num_microbatches=4097, lowering=lowering)
    assert float(metrics["count"]) == 4097
