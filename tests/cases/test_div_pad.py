"""Field troubles, group DIV: padding of vocabularies; and COL-3 for the vocabulary-parallel lookup."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshes import ShardingError, make_mesh
from shardlib.audit.hlo import parse
from shardlib.ops import vocab_loss
from shardlib.ops.vocab_embedding import embed_tokens
from shardlib.ops.vocab_loss import token_losses
from shardlib.ops.vocab_shards import padded_vocab
from tests.oracle import assert_trees_equal

BATCH, LENGTH, EMBED, VOCAB, TENSOR = 2, 6, 8, 10, 4
STORED = padded_vocab(VOCAB, shards=TENSOR)
X = jnp.asarray(np.random.default_rng(0).normal(size=(BATCH, LENGTH, EMBED)), jnp.float32)
TARGETS = jnp.asarray(np.random.default_rng(1).integers(0, VOCAB, (BATCH, LENGTH)), jnp.int32)


def uniform_loss():
    losses = functools.partial(token_losses, vocab=VOCAB, mesh=make_mesh("tensor=4"))
    return jax.jit(losses)(jnp.zeros_like(X), jnp.zeros((EMBED, STORED)), TARGETS).nll


def trained(head, mesh):
    """Three steps of gradient descent, and the last gradient."""

    def loss(head):
        return token_losses(X, head, TARGETS, vocab=VOCAB, mesh=mesh).loss.mean()

    gradient_of = jax.jit(jax.grad(loss))
    for _ in range(3):
        gradient = gradient_of(head)
        head = head - 0.5 * gradient
    return head, gradient


@pytest.mark.newest
def test_div_04_padding_is_not_in_the_normaliser(monkeypatch):
    assert STORED == 12
    np.testing.assert_allclose(uniform_loss(), np.log(10), rtol=1e-6)
    head = jnp.asarray(np.random.default_rng(2).normal(size=(EMBED, VOCAB)), jnp.float32)
    # Padding that is not zero would be seen if anything read it.
    stored = jnp.concatenate([head, jnp.full((EMBED, STORED - VOCAB), 5.0)], axis=1)
    found, gradient = trained(stored, make_mesh("tensor=4"))
    assert_trees_equal(found[:, :VOCAB], trained(head, None)[0], "three steps")
    assert (np.asarray(gradient)[:, VOCAB:] == 0).all() and (np.asarray(found)[:, VOCAB:] == 5.0).all()
    # Negative control: counted padding gives the loss of the report.
    monkeypatch.setattr(vocab_loss._HeadLoss, "is_word", lambda self, num_local: jnp.ones((1, 1, num_local), bool))
    np.testing.assert_allclose(uniform_loss(), np.log(12), rtol=1e-6)


def test_div_06_the_padded_size_knows_the_shards():
    assert padded_vocab(100, shards=6, multiple=8) == 120
    assert padded_vocab(100, shards=6, multiple=8) // 6 == 20
    assert padded_vocab(50257, shards=4) == 50260
    assert padded_vocab(120, shards=6, multiple=8) == 120
    # Negative control: a fixed multiple that ignores the shards is refused, with the size that would do.
    mesh = make_mesh("tensor=6", devices=jax.devices()[:6])
    with pytest.raises(ShardingError, match=r"size 128 not divisible by tensor=6; fix: store padded_vocab\(100, sha"):
        token_losses(X, jnp.zeros((EMBED, padded_vocab(100, multiple=64))), TARGETS, vocab=100, mesh=mesh)
    head = jnp.asarray(np.random.default_rng(2).normal(size=(EMBED, 100)), jnp.float32)
    stored = jnp.pad(head, ((0, 0), (0, 20)))
    found = jax.jit(functools.partial(token_losses, vocab=100, mesh=mesh))(X, stored, TARGETS)
    np.testing.assert_allclose(found.nll, jax.jit(token_losses)(X, head, TARGETS).nll, rtol=1e-6)


def kinds_of_lookup(mesh, *, output):
    """Collectives of a split lookup whose result is asked for at a given place, by kind."""
    place = lambda *spec: NamedSharding(mesh, P(*spec))  # noqa: E731
    lookup = functools.partial(embed_tokens, axes=("model",), mesh=mesh)
    jitted = jax.jit(lookup, in_shardings=(place("model"), place("data")), out_shardings=place(*output))
    shapes = jax.ShapeDtypeStruct((64, 32), jnp.float32), jax.ShapeDtypeStruct((8, 16), jnp.int32)
    return [collective.kind for collective in parse(jitted.lower(*shapes).compile().as_text()).collectives]


def test_col_03_the_split_lookup_keeps_the_data_axis():
    mesh = make_mesh("data=4,model=2")
    assert kinds_of_lookup(mesh, output=("data",)) == ["all-reduce"]
    # Negative control: a result that leaves the data axis out is gathered.
    assert "all-gather" in kinds_of_lookup(mesh, output=())
