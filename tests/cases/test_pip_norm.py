"""Field troubles NRM through a pipeline: what a loss is divided by, over stages, devices and microbatches.

Every layer adds w x g to zero, so that its gradient is the weighted mean of g.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib as sl
from meshes import ShardingError
from tests.shardlib.pipeline_execution.chains import bound, gradient, through, trained

ZEROS = np.zeros(2, np.float32)


def added(params, batch):
    return through(params, 0 * batch["g"], lambda x, w: x + w * batch["g"])[0]


def token_loss(params, batch, rng):
    return sl.Loss(total=(added(params, batch) * batch["real"]).sum(), weight=batch["real"].sum())


# One real token of gradient 4 on the first device, or in the first microbatch; three of gradient 0 on the second.
UNEVEN = {"g": np.float32([4, 9, 9, 0, 0, 0]), "real": np.float32([1, 0, 0, 1, 1, 1])}


@pytest.mark.newest
@pytest.mark.parametrize(
    "plan", [{"mesh": "stage=2,data=2"}, {"mesh": "stage=2", "num_microbatches": 2}], ids=["nrm_01", "nrm_02"]
)
def test_nrm_01_and_02_one_count_for_all_devices_and_microbatches(plan):
    found, metrics = gradient(token_loss, UNEVEN, value=ZEROS, **plan)
    np.testing.assert_allclose(found, [1.0, 1.0], rtol=1e-6)
    assert metrics["weight"] == 4


def test_nrm_03_accumulation_over_steps_and_microbatches():
    """Three steps of four microbatches, a gradient of 1 in the first alone: a third of it after averaging."""
    loss = lambda params, batch, rng: added(params, batch).mean()  # noqa: E731
    optimizer = optax.MultiSteps(optax.sgd(1.0), every_k_schedule=3)
    plan = {"mesh": "stage=2", "num_microbatches": 4}
    found = bound(loss, {"g": np.zeros(4, np.float32)}, value=ZEROS, **plan)
    trainer = sl.Trainer(found, optimizer)
    state = trainer.init(jax.random.key(0))
    for g in (1.0, 0.0, 0.0):
        state, _ = trainer.step(state, {"g": np.full(4, g, np.float32)})
    np.testing.assert_allclose(jax.tree.leaves(state.params)[0], [-1 / 3, -1 / 3], rtol=1e-6)


def test_nrm_04_and_05_gradients_are_those_without_a_pipeline_for_any_number_of_microbatches():
    draw = np.random.default_rng(0)
    real = np.ones(48, np.float32)
    real[draw.choice(48, 10, replace=False)] = 0
    batch = {"g": draw.normal(size=(8, 6)).astype(np.float32), "real": real.reshape(8, 6)}
    wanted = (batch["g"] * batch["real"]).sum() / 38
    for count in (1, 2, 4, 8):
        found, metrics = gradient(token_loss, batch, value=ZEROS, mesh="stage=2", num_microbatches=count)
        np.testing.assert_allclose(found, [wanted, wanted], rtol=1e-6)
        assert metrics["weight"] == 38


def test_nrm_08_masked_mean():
    batch = {"g": np.float32([3, 3, 3, 9]), "real": np.float32([1, 1, 1, 0])}
    found, metrics = gradient(token_loss, batch, value=[1.0, 0.0], mesh="stage=2,data=4")
    np.testing.assert_allclose(found, [3.0, 3.0], rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], 3.0, rtol=1e-6)


def test_nrm_09_sums_and_means():
    draw = np.random.default_rng(0)
    batch = {"x": draw.normal(size=(8, 4)).astype(np.float32), "y": draw.normal(size=8).astype(np.float32)}
    value = draw.normal(size=(2, 4, 4)).astype(np.float32)

    def errors(params, batch):
        x, _ = through(params, batch["x"], lambda x, w: jnp.tanh(x @ w))
        return (x.sum(-1) - batch["y"]) ** 2

    losses = {
        "mean": lambda params, batch, rng: errors(params, batch).mean(),
        "sum": lambda params, batch, rng: sl.Loss(total=errors(params, batch).sum(), weight=None),
    }
    for reduction, loss in losses.items():
        wanted, one = gradient(loss, batch, value=value, mesh="data=1")
        found, metrics = gradient(loss, batch, value=value, mesh="stage=2", num_microbatches=4)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(metrics["loss"], one["loss"], rtol=1e-6)
        assert ("weight" in metrics) == (reduction == "mean")


def test_nrm_10_a_microbatch_without_real_tokens():
    plan = {"mesh": "stage=2", "num_microbatches": 4, "value": ZEROS}
    g = np.arange(1, 9, dtype=np.float32)
    real = np.float32([1, 1, 0, 0, 1, 0, 1, 1])  # nothing in the second microbatch
    found, metrics = gradient(token_loss, {"g": g, "real": real}, **plan)
    np.testing.assert_allclose(found, (g * real).sum() / real.sum(), rtol=1e-6)
    assert np.isfinite(metrics["loss"])
    nothing, metrics = gradient(token_loss, {"g": g, "real": 0 * real}, **plan)
    assert (list(nothing), metrics["loss"], metrics["weight"]) == ([0.0, 0.0], 0.0, 0.0)


def test_nrm_11_two_heads_divided_by_the_same_count():
    draw = np.random.default_rng(0)
    real = np.zeros((4, 6), np.float32)
    for shard, count in enumerate((1, 2, 3, 6)):
        real[shard, :count] = 1
    batch = {"x": draw.normal(size=(24, 2)).astype(np.float32), "real": real.ravel()}

    def loss(params, batch, rng):
        x, _ = through(params, batch["x"], lambda x, w: x + jnp.tanh(x * w[None]))
        main, extra = ((x[:, head] ** 2 * batch["real"]).sum() for head in (0, 1))
        weight = batch["real"].sum()
        return sl.Loss(total=main + 0.3 * extra, weight=weight, aux={"main": sl.Mean(main, weight)})

    value = draw.normal(size=(2, 2)).astype(np.float32)
    wanted, one = gradient(loss, batch, value=value, mesh="data=1")
    found, many = gradient(loss, batch, value=value, mesh="stage=2,data=4")
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    np.testing.assert_allclose(many["main"], one["main"], rtol=1e-6)


def test_a_scalar_that_is_no_mean_over_rows_is_refused():
    """Negative control of NRM-1, NRM-2 and NRM-9: means of unequal parts, and sums given as a plain scalar."""
    batch = {"g": np.float32([1, 9, 2, 3]), "real": np.float32([1, 0, 1, 1])}
    local_mean = lambda params, batch, rng: (added(params, batch) * batch["real"]).sum() / batch["real"].sum()  # noqa: E731
    plain_sum = lambda params, batch, rng: (added(params, batch)).sum()  # noqa: E731
    for loss in (local_mean, plain_sum):
        with pytest.raises(ShardingError, match="the loss is not the sum of its rows") as caught:
            trained(loss, batch, value=[1.0, 1.0], mesh="stage=2", num_microbatches=2, check=True)
        assert "loss of 4 rows is" in str(caught.value)
