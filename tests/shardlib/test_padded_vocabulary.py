"""`indivisible=pad`: a vocabulary that does not divide is padded in storage alone, by the layers that can."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from meshes import ShardingError
from shardlib import annotate
from shardlib.batch_spec import ArraySpec
from shardlib.layers import vocab, vocab_nnx
from shardlib.rules import Rules
from shardlib.strategies import default_rules
from tests import oracle

VOCAB, EMBED, BATCH, LENGTH = 50, 16, 8, 8
SPEC = {
    name: ArraySpec(shape=(BATCH, LENGTH), dtype="int32", axes=("batch", "length")) for name in ("inputs", "targets")
}
PADS = default_rules().with_first(Rules.parse(["vocab -> tensor; indivisible=pad"]))


class Linen(nn.Module):
    """A tied model of four layers."""

    @nn.compact
    def __call__(self, inputs, targets):
        embed = vocab.VocabEmbed(VOCAB, EMBED)
        draw = annotate.logical(nn.initializers.normal(0.2), "layers", "embed", None)
        w = self.param("w", draw, (4, EMBED, EMBED))
        x = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), embed(inputs), w)[0]
        return vocab.CrossEntropyHead(VOCAB, EMBED, tied=True)(x, targets, table=embed.embedding)


class Nnx(nnx.Module):
    """Embedding and an untied head."""

    def __init__(self, rngs):
        self.embed = vocab_nnx.VocabEmbed(VOCAB, EMBED, rngs=rngs)
        self.head = vocab_nnx.CrossEntropyHead(VOCAB, EMBED, rngs=rngs)

    def __call__(self, inputs, targets):
        return self.head(jnp.tanh(self.embed(inputs)), targets)


def bound(model, *, rules=PADS, **plan):
    if model is Nnx:
        graph, _, rest = nnx.split(nnx.eval_shape(lambda: Nnx(nnx.Rngs(0))), nnx.Param, ...)
        loss = lambda params, batch, rng: nnx.merge(graph, params, rest)(**batch)  # noqa: E731
        return sl.bind(Nnx, loss, sl.Plan(rules=rules, **plan), SPEC)
    module = model()
    loss = lambda params, batch, rng: module.apply({"params": params}, **batch)  # noqa: E731
    return sl.bind(module, loss, sl.Plan(rules=rules, **plan), SPEC)


def run(found):
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-3))
    trainer = sl.Trainer(found, optimizer, check_separable=False)
    state, losses = trainer.init(jax.random.key(0)), []
    for step in range(3):
        batch = oracle.token_batch(step, batch=BATCH, length=LENGTH, vocab=VOCAB)
        batch = {name: batch[name] for name in SPEC}
        state, metrics = trainer.step(state, batch)
        losses.append(float(metrics["loss"]))
    losses.append(float(trainer.evaluate(state, batch)["loss"]))
    return losses, state.params


CASES = {
    "tensor": (Linen, {"mesh": "data=2,tensor=4"}, 52),
    "nnx, accumulated": (Nnx, {"mesh": "data=2,tensor=4", "num_microbatches": 2}, 52),
    "spread over stages": (
        Linen,
        {"mesh": "stage=4,tensor=2", "num_microbatches": 2, "vocabulary": "spread", "idle": "mask"},
        56,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_padded_in_storage_only(name):
    model, plan, stored_rows = CASES[name]
    found, one = bound(model, **plan), bound(model, rules=default_rules(), mesh="data=1")
    losses, stored = run(found)
    wanted_losses, wanted = run(one)
    oracle.assert_losses_equal(losses, wanted_losses)
    oracle.assert_trees_equal(oracle.host(found.restore(stored)), oracle.host(wanted), "parameter")
    tables = [leaf for leaf in jax.tree.leaves(oracle.host(stored)) if stored_rows in leaf.shape]
    assert tables
    for table in tables:  # padding stays zero
        rows = np.moveaxis(table, table.shape.index(stored_rows), 0)
        assert (rows[VOCAB:] == 0).all() and (rows[:VOCAB] != 0).any()
    again = oracle.host(found.store(found.restore(stored)))
    assert jax.tree.all(jax.tree.map(np.array_equal, again, oracle.host(stored)))


def test_padding_that_is_trained_is_caught(monkeypatch):
    from shardlib.ops import vocab_loss

    monkeypatch.setattr(vocab_loss._HeadLoss, "is_word", lambda self, num_local: jnp.ones((1, 1, num_local), bool))
    losses, _ = run(bound(Linen, mesh="tensor=4"))
    with pytest.raises(AssertionError):
        oracle.assert_losses_equal(losses, run(bound(Linen, rules=default_rules(), mesh="data=1"))[0])


class Bare(nn.Module):
    """A table that nothing pads."""

    @nn.compact
    def __call__(self, inputs, targets):
        init = annotate.logical(nn.initializers.normal(0.1), "vocab", "embed")
        return nn.Embed(VOCAB, EMBED, embedding_init=init)(inputs).mean()


def test_what_cannot_pad_is_refused():
    with pytest.raises(ShardingError) as caught:
        bound(Bare, mesh="tensor=4")
    assert "size 50 not divisible by tensor=4, and nothing pads it" in str(caught.value)
    assert "VocabEmbed" in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Rules.parse(["mlp -> tensor; indivisible=pad"]),
            "padding stays out of the results of a vocabulary only",
        ),
        (lambda: Rules(rules=(), indivisible="pad"), "indivisible = 'pad' is unknown"),
    ],
)
def test_rules_that_cannot_pad(make, message):
    with pytest.raises(ShardingError, match=message):
        make()


def test_the_rule_is_kept_as_text():
    assert Rules.from_toml(PADS.to_toml(), base=default_rules(), source="test") == PADS
