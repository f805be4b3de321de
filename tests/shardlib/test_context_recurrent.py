"""Recurrent models on divided sequences: tokens stay in order, states are handed on, all equals one device."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import shardlib as sl
from meshes import ShardingError
from models import rnn
from shardlib import annotate
from shardlib.layers.recurrent import SRU
from tests import oracle

SIZES = {"layers": 2, "batch": 8, "embed": 16, "mlp": 16, "vocab": 32, "length": 16}


@functools.cache
def run(cell, mesh, **plan):
    module, loss, spec = rnn.small(cell=cell, **SIZES)
    trainer = sl.Trainer(sl.bind(module, loss, sl.Plan(mesh=mesh, **plan), spec), optax.adam(1e-2, eps=1e-3))
    state, losses = trainer.init(jax.random.key(0)), []
    for step in range(3):
        batch = oracle.token_batch(step, batch=8, length=16, vocab=32)
        state, metrics = trainer.step(state, {name: batch[name] for name in spec})
        losses.append(float(metrics["loss"]))
    return trainer.bound, losses, oracle.host(trainer.bound.restore(state.params))


CASES = [
    ("sru", "context=4,data=2", {}),
    ("qrnn", "context=2,fsdp=2,tensor=2", {"num_microbatches": 2}),
    ("sru", "stage=2,context=2,data=2", {"num_microbatches": 2}),
]


@pytest.mark.parametrize(("cell", "mesh", "plan"), CASES, ids=[f"{cell} {mesh}" for cell, mesh, _ in CASES])
def test_equals_one_device(cell, mesh, plan):
    found, losses, params = run(cell, mesh, **plan)
    _, wanted_losses, wanted = run(cell, "data=1")
    assert found.context.placement == "contiguous"
    assert "states handed on, tokens held contiguous, because recurrent layers" in str(found.explain())
    oracle.assert_losses_equal(losses, wanted_losses)
    oracle.assert_trees_equal(params, wanted, "parameter")


def test_a_state_that_is_not_handed_on_is_caught(monkeypatch):
    from shardlib.ops import linear_recurrence as ops

    monkeypatch.setattr(ops._Shards, "entering", lambda self, decay, state, *, reverse: jnp.zeros_like(state))
    run.cache_clear()
    _, losses, _ = run("sru", "context=4,data=2")
    run.cache_clear()
    with pytest.raises(AssertionError):
        oracle.assert_losses_equal(losses, run("sru", "data=1")[1])


class Mixed(nn.Module):
    """Attention after a recurrent layer: tokens must stay in order for both."""

    @nn.compact
    def __call__(self, x):
        x, _ = SRU(16)(x)
        x = annotate.by_position(jnp.ones((x.shape[1], 16)))[None] * x
        heads = x.reshape(*x.shape[:2], 2, 8)
        return annotate.attention(heads, heads, heads, causal=True)


def bound(module, **plan):
    def loss(params, batch, rng):
        return (module.apply({"params": params}, batch["x"]) ** 2).mean()

    spec = {"x": sl.ArraySpec(shape=(4, 16, 16), dtype="float32", axes=("batch", "length", None))}
    return sl.bind(module, loss, sl.Plan(**plan), spec)


def test_attention_beside_recurrence_keeps_tokens_in_order():
    found = bound(Mixed(), mesh="context=2", attention="ring")
    assert (found.context.kind, found.context.placement) == ("ring", "contiguous")
    assert "the model has recurrent layers" in found.context.reason


REFUSED = {
    "the model goes through tokens one after another": (Mixed, {"placement": "zigzag"}),
    "the model has recurrent layers and no attention": ("rnn", {"attention": "ring"}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    model, plan = REFUSED[message]
    with pytest.raises(ShardingError, match=message):
        if model == "rnn":
            module, loss, spec = rnn.small(**SIZES)
            sl.bind(module, loss, sl.Plan(mesh="context=2", **plan), spec)
        else:
            bound(model(), mesh="context=2", **plan)
