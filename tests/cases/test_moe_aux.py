"""Field troubles MOE-1 to MOE-4: auxiliary losses of layers, standing in for those of routers, through a pipeline.

Every layer reports the mean square of what it adds; the objective has their sum times a coefficient.
"""

import jax.numpy as jnp
import numpy as np

import shardlib as sl
from tests.shardlib.pipeline_execution.chains import gradient, through

VALUE = np.linspace(0.3, 0.9, 4).astype(np.float32)
X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)


def layer(x, w):
    update = jnp.sin(x) * w
    return x + update, (update**2).mean()


def loss_of(coefficient, *, main=1.0):
    def loss(params, batch, rng):
        x, balance = through(params, batch["x"], layer)
        return sl.Loss(
            total=main * (x**2).sum(),
            weight=jnp.float32(x.size),
            per_microbatch=coefficient * balance.sum(),
            aux={"balance": sl.Mean(balance.sum(), 1.0)},
        )

    return loss


def test_moe_01_the_same_for_all_numbers_of_stages():
    plans = [{"mesh": "data=1"}, {"mesh": "stage=2"}, {"mesh": "stage=4"}]
    runs = [gradient(loss_of(0.1), {"x": X}, value=VALUE, num_microbatches=4, **plan) for plan in plans]
    for found, metrics in runs[1:]:
        np.testing.assert_allclose(metrics["balance"], runs[0][1]["balance"], rtol=1e-6)
        np.testing.assert_allclose(metrics["loss"], runs[0][1]["loss"], rtol=1e-6)
        np.testing.assert_allclose(found, runs[0][0], rtol=1e-5)


def test_moe_02_and_04_the_same_for_all_numbers_of_microbatches_and_shards():
    """The same rows in every microbatch: gradient and log do not know how many there are."""
    batch = {"x": np.tile(X[:1], (8, 1))}
    plans = [{"num_microbatches": count} for count in (1, 2, 4)] + [{"num_microbatches": 2, "mesh": "stage=2,data=2"}]
    runs = [gradient(loss_of(0.1, main=0.0), batch, value=VALUE, **{"mesh": "stage=2", **plan}) for plan in plans]
    for found, metrics in runs[1:]:
        np.testing.assert_allclose(found, runs[0][0], rtol=1e-5)
        np.testing.assert_allclose(metrics["balance"], runs[0][1]["balance"], rtol=1e-6)
    assert np.abs(runs[0][0]).min() > 1e-3


def test_moe_03_it_trains_every_layer_in_proportion_to_its_coefficient():
    none, one, two = (
        gradient(loss_of(c, main=0.0), {"x": X}, value=VALUE, mesh="stage=2", num_microbatches=4)[0]
        for c in (0.0, 0.01, 0.02)
    )
    assert not none.any()
    assert np.abs(one).min() > 1e-5
    np.testing.assert_allclose(two, 2 * one, rtol=1e-5)
