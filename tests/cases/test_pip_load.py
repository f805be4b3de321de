"""Field troubles PIP-3 and PIP-14: a tied head after loading, and a step that only asks for gradients."""

import dataclasses
import functools

import jax
import numpy as np
import optax

import shardlib as sl
from models import gpt
from shardlib.pipeline import value_and_grad
from tests import oracle

SIZES = {"layers": 2, "embed": 16, "heads": 4, "mlp": 32, "vocab": 32, "length": 8}


@functools.cache
def tied():
    """A tied GPT, its parameters on one device, and a batch."""
    module, loss, spec = gpt.small(batch=8, tied=True, **SIZES)
    bound = sl.bind(module, loss, sl.Plan(mesh="data=1"), spec)
    params = oracle.host(jax.jit(bound.init)(jax.random.key(3))[0])
    return module, loss, spec, params, oracle.token_batch(0, batch=8, length=8, vocab=32)


def mean(loss, params, batch):
    found = loss(params, batch, None)
    return found.total / found.weight


def test_pip_3_a_tied_head_is_the_embedding_after_loading(tmp_path):
    module, loss, spec, params, batch = tied()
    assert "head" not in params  # the file holds the embedding alone
    leaves, treedef = jax.tree.flatten(params)
    np.savez(tmp_path / "saved.npz", *leaves)
    with np.load(tmp_path / "saved.npz") as saved:
        loaded = jax.tree.unflatten(treedef, [saved[f"arr_{i}"] for i in range(len(leaves))])
    bound = sl.bind(module, loss, sl.Plan(mesh="stage=2,data=2", num_microbatches=2), spec)
    trainer = sl.Trainer(bound, optax.sgd(0.1), check_separable=False)
    state = trainer.init(jax.random.key(0))
    stored = jax.device_put(bound.store(loaded), trainer.state_shardings.params)
    metrics = trainer.evaluate(dataclasses.replace(state, params=stored), batch)
    oracle.assert_losses_equal([float(metrics["loss"])], [float(mean(loss, params, batch))])


def test_pip_14_gradients_without_an_update():
    _, loss, _, params, batch = tied()
    wanted, wanted_grads = jax.value_and_grad(lambda params: mean(loss, params, batch))(params)
    mesh = sl.make_mesh("stage=2,data=2")
    whole = jax.tree.map(lambda _: jax.sharding.PartitionSpec(), params)
    value, grads = value_and_grad(loss, mesh=mesh, num_microbatches=2, specs=whole)(params, batch)
    oracle.assert_losses_equal([float(value)], [float(wanted)])
    oracle.assert_trees_equal(oracle.host(grads), oracle.host(wanted_grads), "gradient")
