"""Field troubles, group NRM: what a loss is divided by, over devices, microbatches and rows. No pipelines here."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib as sl
from meshes import ShardingError
from tests.tiny import LOWERINGS, gradient, rows, stepped, weight


def token_loss(params, batch, rng):
    """The gradient by w of a row is its g; rows that are not real do not count."""
    return sl.Loss(total=(params["w"] * batch["g"] * batch["real"]).sum(), weight=batch["real"].sum())


# One real token of gradient 4 on the first device, or in the first microbatch; three of gradient 0 on the second.
UNEVEN = {"g": np.float32([4, 9, 9, 0, 0, 0]), "real": np.float32([1, 0, 0, 1, 1, 1])}


def check_uneven(**plan):
    """NRM-1 and NRM-2: each real token counts the same, wherever it is."""
    found, metrics = gradient(token_loss, UNEVEN, **plan)
    np.testing.assert_allclose(found, 1.0, rtol=1e-6)
    assert float(metrics["weight"]) == 4


@pytest.mark.newest
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_nrm_01_one_count_for_all_devices(lowering):
    check_uneven(mesh="data=2", lowering=lowering)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_nrm_02_one_count_for_all_microbatches(lowering):
    check_uneven(mesh="data=1", lowering=lowering, num_microbatches=2)
    # Rows of a shard are cut in turn: here each microbatch has tokens of both kinds on both devices.
    batch = {name: np.tile(values, 2) for name, values in UNEVEN.items()}
    found, _ = gradient(token_loss, batch, mesh="data=2", lowering=lowering, num_microbatches=2)
    np.testing.assert_allclose(found, 1.0, rtol=1e-6)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_nrm_05_no_further_division_by_microbatches(lowering):
    batch = {"x": np.random.default_rng(0).normal(size=16).astype(np.float32)}
    mean = lambda params, batch, rng: ((params["w"] - batch["x"]) ** 2).mean()  # noqa: E731
    found = [
        gradient(mean, batch, value=1.0, mesh="data=2", lowering=lowering, num_microbatches=count)[0]
        for count in (1, 2, 4, 8)
    ]
    np.testing.assert_allclose(found, 2 * (1 - batch["x"].mean()), rtol=1e-6)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_nrm_08_masked_mean(lowering):
    batch = {"g": np.float32([3, 3, 3, 9]), "real": np.float32([1, 1, 1, 0])}
    found, metrics = gradient(token_loss, batch, value=1.0, mesh="data=4", lowering=lowering)
    assert (float(metrics["loss"]), float(found)) == (3.0, 3.0)  # 9 counts neither in the loss nor in its gradient


@pytest.mark.newest
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_nrm_09_sums_and_means(lowering):
    draw = np.random.default_rng(0)
    batch = {"x": draw.normal(size=(8, 3)).astype(np.float32), "y": draw.normal(size=8).astype(np.float32)}

    def errors(params, batch):
        hidden = jnp.tanh(batch["x"] @ params["w"])
        return (hidden.sum(-1) - batch["y"]) ** 2

    losses = {
        "mean": lambda params, batch, rng: errors(params, batch).mean(),
        "sum": lambda params, batch, rng: sl.Loss(total=errors(params, batch).sum(), weight=None),
    }
    value = draw.normal(size=(3, 4)).astype(np.float32)
    for reduction, loss in losses.items():
        wanted = jax.grad(lambda w: getattr(errors({"w": w}, batch), reduction)())(value)  # noqa: B023
        for sizes in ({"mesh": "data=1"}, {"mesh": "data=2", "num_microbatches": 4}):
            found, metrics = gradient(loss, batch, value=value, lowering=lowering, **sizes)
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(metrics["loss"], getattr(errors({"w": value}, batch), reduction)(), rtol=1e-6)
            assert ("weight" in metrics) == (reduction == "mean")


def test_nrm_09_a_sum_evaluates_to_the_sum_of_its_batches():
    loss = lambda params, batch, rng: sl.Loss(total=(params["w"] * batch["x"]).sum(), weight=None)  # noqa: E731
    trainer = sl.Trainer(sl.bind(weight(2.0), loss, sl.Plan(mesh="data=4"), {"x": rows(4)}), optax.sgd(1.0))
    state = trainer.init(jax.random.key(0))
    batches = [{"x": np.float32([1, 2, 3, 4])}, {"x": np.float32([5, 6])}]
    assert {name: float(value) for name, value in trainer.evaluate_all(state, batches).items()} == {"loss": 42.0}


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_nrm_10_a_microbatch_without_real_tokens(lowering):
    size = {"mesh": "data=2", "num_microbatches": 4, "lowering": lowering}
    g = np.arange(1, 17, dtype=np.float32)
    real = np.float32([1, 1, 0, 0, 1, 0, 1, 1, 1, 1, 0, 0, 1, 1, 0, 1])  # the second microbatch of both devices
    found, metrics = gradient(token_loss, {"g": g, "real": real}, **size)
    np.testing.assert_allclose(found, (g * real).sum() / real.sum(), rtol=1e-6)
    assert np.isfinite(float(metrics["loss"]))
    nothing, metrics = gradient(token_loss, {"g": g, "real": 0 * real}, **size)
    assert (float(nothing), float(metrics["loss"]), float(metrics["weight"])) == (0.0, 0.0, 0.0)


def test_nrm_10_a_last_short_window():
    """Six microbatches of two rows in steps of four: the second step is filled up with rows that are not real."""
    g = np.arange(1, 13, dtype=np.float32)
    padded = {"g": np.pad(g, (0, 4)), "real": np.pad(np.ones(12, np.float32), (0, 4))}
    plan = sl.Plan(mesh="data=2", num_microbatches=4)
    spec = {"g": rows(8), "real": rows(8)}
    trainer = sl.Trainer(sl.bind(weight(), token_loss, plan, spec), optax.sgd(1.0))
    state = trainer.init(jax.random.key(0))
    for start in (0, 8):
        state, _ = trainer.step(state, {name: values[start : start + 8] for name, values in padded.items()})
    assert int(state.step) == 2
    (after,) = jax.tree.leaves(state.params)
    np.testing.assert_allclose(after, -(g[:8].mean() + g[8:].mean()), rtol=1e-6)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_nrm_11_a_second_head_is_divided_by_the_same_count(lowering):
    draw = np.random.default_rng(0)
    real = np.zeros((4, 6), np.float32)
    for shard, count in enumerate((1, 2, 3, 6)):
        real[shard, :count] = 1
    batch = {"x": draw.normal(size=(24, 2)).astype(np.float32), "real": real.ravel()}

    def loss(params, batch, rng):
        main, extra = ((params["w"][head][None] * batch["x"]).sum(-1) ** 2 * batch["real"] for head in (0, 1))
        aux = {"main": sl.Mean(main.sum(), batch["real"].sum())}
        return sl.Loss(total=main.sum() + 0.3 * extra.sum(), weight=batch["real"].sum(), aux=aux)

    value = draw.normal(size=(2, 2)).astype(np.float32)
    sizes = ({"mesh": "data=1", "lowering": "automatic"}, {"mesh": "data=4", "lowering": lowering})
    (wanted, one), (found, many) = (gradient(loss, batch, value=value, **size) for size in sizes)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    np.testing.assert_allclose(float(many["main"]), float(one["main"]), rtol=1e-6)


def test_a_scalar_that_is_no_mean_over_rows_is_refused_where_the_batch_is_cut():
    """Negative control of NRM-1, NRM-2 and NRM-9: means of unequal parts, and sums given as a plain scalar."""

    def local_mean(params, batch, rng):
        return (params["w"] * batch["g"] * batch["real"]).sum() / batch["real"].sum()

    # The comparison takes the first four rows, in halves.
    batch = {"g": np.float32([1, 9, 2, 3]), "real": np.float32([1, 0, 1, 1])}
    plain_sum = lambda params, batch, rng: (params["w"] * batch["g"]).sum()  # noqa: E731
    for loss in (local_mean, plain_sum):
        with pytest.raises(ShardingError, match="the loss is not the sum of its rows"):
            stepped(loss, batch, model=weight(1.0), mesh="data=2", lowering="explicit")
