"""Collections that a loss does not change pass through whatever cuts the batch; those it changes are refused."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib as sl
from meshes import ShardingError
from shardlib import annotate
from tests.oracle import assert_losses_equal, assert_trees_equal, host
from tests.tiny import rows

LAYERS, WIDTH, ROWS = 4, 8, 16


class Layer(nn.Module):
    """A layer with a fixed scale of its own, which is no parameter."""

    @nn.compact
    def __call__(self, x, _):
        scale = self.variable("constants", "scale", lambda: jnp.linspace(0.5, 1.5, WIDTH)[None])
        kernel = annotate.logical(nn.initializers.normal(0.3), "embed", None)
        return x + jnp.tanh(nn.Dense(WIDTH, kernel_init=kernel, use_bias=False)(x) * scale.value), None


class Tower(nn.Module):
    """Layers of which each has its own constants, and a table that all rows share."""

    @nn.compact
    def __call__(self, x):
        table = self.variable("tables", "offset", lambda: jnp.arange(float(WIDTH))[None])
        stack = nn.scan(
            Layer,
            variable_axes={"params": 0, "constants": 0},
            split_rngs={"params": True},
            length=LAYERS,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return stack()(x + table.value, None)[0]


def bound(*, changes=False, **plan):
    module = Tower()

    def loss(params, batch, rng, collections):
        y = module.apply({"params": params, **collections}, batch["x"])
        state = jax.tree.map(lambda leaf: leaf + 1, collections) if changes else collections
        return sl.Loss(total=(y**2).sum(), weight=float(y.size), state=state)

    return sl.bind(module, loss, sl.Plan(**plan), {"x": rows(ROWS, WIDTH, dtype="float32")})


def trained(**plan):
    trainer = sl.Trainer(bound(**plan), optax.sgd(0.1))
    state, losses = trainer.init(jax.random.key(0)), []
    # Constants that differ per layer: the wrong layer's would show.
    scale = lambda leaf: leaf * jnp.arange(1, LAYERS + 1)[:, None, None] / LAYERS if leaf.shape[0] == LAYERS else leaf  # noqa: E731
    state = type(state)(
        **{name: getattr(state, name) for name in ("step", "params", "opt_state", "rng")},
        collections=jax.tree.map(scale, host(state.collections)),
    )
    for step in range(2):
        batch = {"x": np.random.default_rng(step).normal(size=(ROWS, WIDTH)).astype(np.float32)}
        state, metrics = trainer.step(state, batch)
        losses.append(float(metrics["loss"]))
    evaluated = trainer.evaluate(state, batch)
    return [*losses, float(evaluated["loss"])], host(trainer.bound.restore(state.params)), host(state.collections)


PLANS = {
    "accumulation": {"mesh": "data=2", "num_microbatches": 4},
    "pipeline": {"mesh": "stage=2,data=2", "num_microbatches": 4},
    "interleaved": {"mesh": "stage=2", "num_microbatches": 4, "schedule": "interleaved_1f1b", "chunks": 2},
}


@pytest.mark.parametrize("plan", PLANS)
def test_equals_one_device(plan):
    losses, params, collections = trained(**PLANS[plan])
    wanted_losses, wanted, wanted_collections = trained(mesh="data=1")
    assert_losses_equal(losses, wanted_losses)
    assert_trees_equal(params, wanted, "parameter")
    assert jax.tree.all(jax.tree.map(np.array_equal, collections, wanted_collections))


@pytest.mark.parametrize("plan", ["accumulation", "pipeline"])
def test_collections_that_change_are_refused(plan):
    with pytest.raises(ShardingError, match=r"updates state over the whole batch .*offset.*, and the plan cuts"):
        bound(changes=True, **PLANS[plan])
