"""Field troubles, group BN: batch statistics are those of the whole batch, or the plan is refused."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib as sl
from meshes import ShardingError
from shardlib import annotate
from tests.oracle import host
from tests.tiny import rows


class Normalised(nn.Module):
    """One BatchNorm of features."""

    momentum: float

    @nn.compact
    def __call__(self, x, mask=None, *, train=False):
        scale, bias = annotate.logical(nn.initializers.ones, None), annotate.logical(nn.initializers.zeros, None)
        norm = nn.BatchNorm(not train, momentum=self.momentum, scale_init=scale, bias_init=bias, name="norm")
        return norm(x, mask=mask)


def bound(plan, spec, *, momentum):
    module = Normalised(momentum)

    def loss(params, batch, rng, collections):
        variables = {"params": params, **collections}
        if rng is None:
            y = module.apply(variables, batch["x"])
            return sl.Loss(total=(y**2).sum(), weight=float(y.size), state=collections)
        mask = batch["mask"][:, None] if "mask" in batch else None
        y, updated = module.apply(variables, batch["x"], mask, train=True, mutable=["batch_stats"])
        weights = jnp.arange(y.size, dtype=jnp.float32).reshape(y.shape)  # so that a loss sees each output
        if mask is not None:
            weights *= mask
        return sl.Loss(total=(y * weights).sum(), weight=float(y.size), state=updated)

    return sl.bind(module, loss, plan, spec, init=lambda keys, batch: module.init(keys, batch["x"]))


def stepped(mesh, batch, *, momentum):
    spec = {name: rows(*leaf.shape, dtype=str(leaf.dtype)) for name, leaf in batch.items()}
    trainer = sl.Trainer(bound(sl.Plan(mesh=mesh), spec, momentum=momentum), optax.sgd(0.1))
    state, metrics = trainer.step(trainer.init(jax.random.key(0)), batch)
    return trainer, state, metrics


@pytest.mark.newest
def test_bn_01_statistics_of_real_rows():
    """Rows 1, 2, 3 on one device and 10 on the other, each with 4 slots: not the mean of 2 and 10."""
    x = np.float32([1, 2, 3, 99, 10, 99, 99, 99])[:, None]
    for mesh in ("data=1", "data=2"):
        _, state, _ = stepped(mesh, {"x": x, "mask": x[:, 0] < 99}, momentum=0.0)
        statistics = host(state.collections)["batch_stats"]["norm"]
        np.testing.assert_allclose(statistics["mean"], [4.0], rtol=1e-6)
        np.testing.assert_allclose(statistics["var"], [12.5], rtol=1e-6)


@pytest.mark.newest
def test_bn_02_statistics_of_all_devices():
    x = np.arange(16, dtype=np.float32).reshape(8, 2)
    (_, one, alone), (trainer, many, metrics) = (stepped(mesh, {"x": x}, momentum=0.9) for mesh in ("data=1", "data=8"))
    statistics = host(many.collections)["batch_stats"]["norm"]
    np.testing.assert_allclose(statistics["mean"], 0.1 * x.mean(0), rtol=1e-6)
    np.testing.assert_allclose(statistics["var"], 0.9 + 0.1 * x.var(0), rtol=1e-6)
    pairs = zip(jax.tree.leaves(host((many.params, many.collections))), jax.tree.leaves((one.params, one.collections)))
    for found, wanted in pairs:
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], alone["loss"], rtol=1e-6)
    # An evaluation uses the running statistics, on every device the same, and changes nothing.
    before = host(many.collections)
    np.testing.assert_allclose(
        trainer.evaluate(many, {"x": x})["loss"],
        np.mean(
            (
                (x - statistics["mean"]) / np.sqrt(statistics["var"] + 1e-5) * host(many.params)["norm"]["scale"]
                + host(many.params)["norm"]["bias"]
            )
            ** 2
        ),
        rtol=1e-5,
    )
    assert jax.tree.all(jax.tree.map(np.array_equal, before, host(many.collections)))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"lowering": "explicit"}, "explicit lowering over 2 shards"),
        ({"num_microbatches": 2, "lowering": "automatic"}, "2 microbatches"),
        ({"random_slices": 8}, "random_slices=8"),
    ],
)
def test_bn_02_local_statistics_are_refused(options, why):
    with pytest.raises(ShardingError) as caught:
        bound(sl.Plan(mesh="data=2", **options), {"x": rows(16, 2)}, momentum=0.9)
    text = str(caught.value)
    assert "batch_stats/norm/mean" in text
    assert "statistics of a part are not those of the batch" in text
    assert why in text
