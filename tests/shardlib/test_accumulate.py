"""Accumulated microbatches give the gradients of the whole batch, wherever parameters are gathered and rows taken."""

import functools

import jax
import numpy as np
import optax
import pytest

import shardlib as sl
from tests.moving import bound
from tests.oracle import host


@functools.cache
def stepped(mesh, **plan):
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(32, 16)).astype("float32"), "weights": rng.uniform(size=32).astype("float32")}
    trainer = sl.Trainer(bound(mesh, **plan), optax.sgd(0.5))
    state, metrics = trainer.step(trainer.init(jax.random.key(0)), batch)
    return jax.tree.leaves(host(state.params)), float(metrics["loss"])


@pytest.mark.parametrize(
    ("mesh", "plan"),
    [
        ("data=8", {"num_microbatches": 4, "lowering": "automatic"}),
        ("fsdp=4,tensor=2", {"num_microbatches": 2, "gather": "microbatch"}),
        ("data=2,fsdp=2", {"num_microbatches": 4, "gather": "microbatch", "zero": 3}),
    ],
    ids=str,
)
def test_microbatches_equal_one_device_and_one_batch(mesh, plan):
    (wanted, wanted_loss), (found, loss) = stepped("data=1"), stepped(mesh, **plan)
    assert loss == pytest.approx(wanted_loss, rel=1e-6)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
