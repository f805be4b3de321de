"""Field troubles, group DIV: short last batches, in evaluation and in training, under both lowerings."""

import jax
import numpy as np
import optax
import pytest

import shardlib as sl
from tests.cases.test_nrm import token_loss
from tests.tiny import LOWERINGS, gradient, rows, weight

HITS = np.float32([1, 1, 1, 0, 1, 0, 1, 1, 1, 0])  # 6 of the first 8 right, 1 of the last 2


def accuracy_loss(params, batch, rng):
    total, count = ((params["w"] - batch["hit"]) ** 2).sum(), float(batch["hit"].shape[0])
    return sl.Loss(total=total, weight=count, aux={"accuracy": sl.Mean(batch["hit"].sum(), count)})


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_div_08_a_short_last_batch_is_counted_by_its_rows(lowering):
    found = {}
    for mesh in ("data=1", "data=8"):
        plan = sl.Plan(mesh=mesh, lowering=lowering)
        trainer = sl.Trainer(sl.bind(weight(0.25), accuracy_loss, plan, {"hit": rows(8)}), optax.sgd(1.0))
        state = trainer.init(jax.random.key(0))
        found[mesh] = trainer.evaluate_all(state, [{"hit": HITS[:8]}, {"hit": HITS[8:]}])
        assert float(found[mesh]["accuracy"]) == np.float32(0.7)  # 0.625 as a mean of means, 0.4375 padded
        assert float(found[mesh]["weight"]) == 10
    np.testing.assert_allclose(found["data=8"]["loss"], found["data=1"]["loss"], rtol=1e-6)
    np.testing.assert_allclose(found["data=8"]["loss"], ((0.25 - HITS) ** 2).mean(), rtol=1e-6)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_div_10_a_short_batch_in_training(lowering, num_microbatches):
    """Three real rows of gradient 1, 2 and 6 in a batch of eight over four devices: two devices have none."""
    batch = {"g": np.float32([1, 2, 6, 99, 99, 99, 99, 99]), "real": np.float32([1, 1, 1, 0, 0, 0, 0, 0])}
    found, metrics = gradient(token_loss, batch, mesh="data=4", lowering=lowering, num_microbatches=num_microbatches)
    assert (float(found), float(metrics["weight"])) == (3.0, 3.0)
