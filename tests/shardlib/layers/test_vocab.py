"""The embedding and the cross-entropy head in linen and NNX: names, padding, the model's own loss, plans."""

import ast
import functools
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from models import language
from shardlib import annotate, layers
from shardlib.layers import vocab, vocab_nnx
from shardlib.layers.vocab_head import cross_entropy
from shardlib.ops.vocab_embedding import embed_tokens
from shardlib.ops.vocab_loss import token_losses
from tests.oracle import assert_losses_equal, assert_trees_equal

VOCAB, EMBED, BATCH, LENGTH = 19, 8, 4, 10
DRAW = np.random.default_rng(0)
IDS = jnp.asarray(DRAW.integers(0, VOCAB, (BATCH, LENGTH)), jnp.int32)
TARGETS = jnp.asarray(DRAW.integers(0, VOCAB, (BATCH, LENGTH)), jnp.int32)
WEIGHTS = jnp.asarray(DRAW.integers(0, 3, (BATCH, LENGTH)), jnp.float32)


class Linen(nn.Module):
    """Embed, a nonlinearity, the head."""

    tied: bool = False
    multiple: int = 8
    mesh: object = None

    @nn.compact
    def __call__(self, batch, *, logits=False):
        lookup, losses = (functools.partial(op, mesh=self.mesh) for op in (embed_tokens, token_losses))
        embed = vocab.VocabEmbed(VOCAB, EMBED, multiple=self.multiple, lookup=lookup, name="embed")
        head = vocab.CrossEntropyHead(
            VOCAB, EMBED, tied=self.tied, multiple=self.multiple, losses=losses, num_chunks=3, name="head"
        )
        x = jnp.tanh(embed(batch["inputs"]))
        table = embed.embedding if self.tied else None
        if logits:
            return head.logits(x, table=table)
        return head(x, batch["targets"], weights=batch.get("weights"), table=table)


class Nnx(nnx.Module):
    """The same."""

    def __init__(self, rngs, *, tied=False, multiple=8, mesh=None):
        lookup, losses = (functools.partial(op, mesh=mesh) for op in (embed_tokens, token_losses))
        self.embed = vocab_nnx.VocabEmbed(VOCAB, EMBED, multiple=multiple, lookup=lookup, rngs=rngs)
        self.head = vocab_nnx.CrossEntropyHead(
            VOCAB, EMBED, tied=tied, multiple=multiple, losses=losses, num_chunks=3, rngs=rngs
        )
        self.tied = tied

    def __call__(self, batch, *, logits=False):
        x = jnp.tanh(self.embed(batch["inputs"]))
        table = self.embed.embedding[...] if self.tied else None
        if logits:
            return self.head.logits(x, table=table)
        return self.head(x, batch["targets"], weights=batch.get("weights"), table=table)


def batch(*, weighted=True):
    return {"inputs": IDS, "targets": TARGETS} | ({"weights": WEIGHTS} if weighted else {})


def linen_params(**options):
    boxed = jax.jit(Linen(**options).init)(jax.random.key(0), batch())["params"]
    return nn.meta.unbox(boxed)


@pytest.mark.newest
@pytest.mark.parametrize(("tied", "weighted"), [(False, True), (True, False)])
def test_the_loss_of_logits_that_exist_whole(tied, weighted):
    params = linen_params(tied=tied)

    def whole(params, batch):
        head = params["embed"]["embedding"].T if tied else params["head"]["kernel"]
        logits = jnp.tanh(params["embed"]["embedding"][batch["inputs"]]) @ head[:, :VOCAB]
        return language.token_loss(logits, batch)

    ours = lambda params, batch: Linen(tied=tied).apply({"params": params}, batch)  # noqa: E731
    found, wanted = (
        jax.jit(
            lambda params, batch, loss=loss: (loss(params, batch), jax.grad(lambda p: loss(p, batch).value())(params))
        )(params, batch(weighted=weighted))
        for loss in (ours, whole)
    )
    assert jax.tree.structure(found[0]) == jax.tree.structure(wanted[0])
    assert_losses_equal(jax.tree.leaves(found[0]), jax.tree.leaves(wanted[0]))
    assert_trees_equal(found[1], wanted[1], "gradient")


def test_linen_and_nnx_compute_the_same():
    model = Nnx(nnx.Rngs(0))
    params = {"embed": {"embedding": model.embed.embedding[...]}, "head": {"kernel": model.head.kernel[...]}}
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, linen_params())
    found = jax.jit(lambda batch: (model(batch), model(batch, logits=True)))(batch())
    apply = functools.partial(Linen().apply, {"params": params})
    wanted = jax.jit(lambda batch: (apply(batch), apply(batch, logits=True)))(batch())
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_names_and_padding_of_the_parameters():
    boxed = jax.eval_shape(Linen().init, jax.random.key(0), batch())["params"]
    assert boxed["embed"]["embedding"].names == ("vocab", "embed")
    assert boxed["head"]["kernel"].names == ("embed", "vocab")
    model = Nnx(nnx.Rngs(0))
    assert model.embed.embedding.get_metadata()[annotate.METADATA_KEY] == ("vocab", "embed")
    assert model.head.kernel.get_metadata()[annotate.METADATA_KEY] == ("embed", "vocab")
    stored, plain = linen_params(), linen_params(multiple=1)
    assert stored["embed"]["embedding"].shape == (24, EMBED) and stored["head"]["kernel"].shape == (EMBED, 24)
    assert (stored["embed"]["embedding"][VOCAB:] == 0).all() and (stored["head"]["kernel"][:, VOCAB:] == 0).all()
    # The same weights however they are padded.
    np.testing.assert_array_equal(stored["embed"]["embedding"][:VOCAB], plain["embed"]["embedding"])
    np.testing.assert_array_equal(stored["head"]["kernel"][:, :VOCAB], plain["head"]["kernel"])


@pytest.mark.parametrize("tied", [False, True])
def test_logits_show_no_padding_to_softmax_and_maximum(tied):
    model = Nnx(nnx.Rngs(0), tied=tied)
    logits = model(batch(), logits=True)
    assert logits.shape == (BATCH, LENGTH, 24)
    assert (jax.nn.softmax(logits)[..., VOCAB:] == 0).all() and (logits.argmax(axis=-1) < VOCAB).all()
    attended = model.embed.attend(jnp.tanh(model.embed(IDS)))
    assert attended.shape == logits.shape and (attended[..., VOCAB:] == jnp.finfo(jnp.float32).min).all()
    if tied:
        np.testing.assert_array_equal(logits, attended)


def test_a_masked_token_counts_nowhere_whatever_its_target():
    x = jnp.asarray(DRAW.normal(size=(BATCH, LENGTH, EMBED)), jnp.float32)
    table = jnp.asarray(DRAW.normal(size=(24, EMBED)), jnp.float32)
    loss = functools.partial(cross_entropy, vocab=VOCAB, vocab_dim=0, z_loss=0.01)
    weights = WEIGHTS.at[0, 0].set(0).at[1, 1].set(2)
    spoilt = TARGETS.at[0, 0].set(1000)
    found, wanted = (jax.jit(loss)(x, table, targets, weights=weights) for targets in (spoilt, TARGETS))
    assert set(found.aux) == {"accuracy", "nll"}
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)
    # A wrong target that counts is seen; an ignored one takes its weight along.
    assert np.isnan(loss(x, table, TARGETS.at[1, 1].set(1000), weights=weights).total)
    ignored = loss(x, table, TARGETS.at[1, 1].set(-1), weights=weights)
    assert ignored.weight == weights.sum() - 2


def test_bfloat16_computation_of_float32_parameters():
    params = linen_params(tied=True)
    embed = vocab.VocabEmbed(VOCAB, EMBED, multiple=8, dtype=jnp.bfloat16)
    head = vocab.CrossEntropyHead(VOCAB, EMBED, tied=True, dtype=jnp.bfloat16)
    x = jax.jit(embed.apply)({"params": params["embed"]}, IDS)
    assert x.dtype == jnp.bfloat16
    loss = jax.jit(lambda x, table: head.apply({}, x, TARGETS, table=table))(x, params["embed"]["embedding"])
    exact = jax.jit(lambda x, table: head.clone(dtype=jnp.float32).apply({}, x, TARGETS, table=table))(
        x, params["embed"]["embedding"]
    )
    np.testing.assert_allclose(loss.total, exact.total, rtol=1e-3)


def test_a_tied_head_wants_the_table_and_another_does_not():
    x = jnp.zeros((BATCH, LENGTH, EMBED))
    for make in (
        lambda tied: functools.partial(vocab.CrossEntropyHead(VOCAB, EMBED, tied=tied).init, jax.random.key(0)),
        lambda tied: vocab_nnx.CrossEntropyHead(VOCAB, EMBED, tied=tied, rngs=nnx.Rngs(0)),
    ):
        with pytest.raises(ValueError, match=r"CrossEntropyHead\(tied=True\) was called without a table"):
            make(True)(x, TARGETS)
        with pytest.raises(ValueError, match=r"CrossEntropyHead\(tied=False\) was called with a table"):
            make(False)(x, TARGETS, table=jnp.zeros((VOCAB, EMBED)))


def trained(mesh, *, framework, lowering, tied=True):
    """Losses of three steps under a plan; the mesh reaches the ops as arguments."""
    real = sl.make_mesh(mesh)
    spec = {
        name: sl.ArraySpec(shape=(BATCH * 2, LENGTH), dtype="int32", axes=("batch", "length"))
        for name in ("inputs", "targets")
    }
    if framework == "linen":
        model = Linen(tied=tied, mesh=real)
        loss = lambda params, batch, rng: model.apply({"params": params}, batch)  # noqa: E731
        init = lambda key, batch: model.init(key, batch)  # noqa: E731
    else:
        model = functools.partial(Nnx, tied=tied, mesh=real)
        graphdef = nnx.graphdef(nnx.eval_shape(lambda: model(nnx.Rngs(0))))
        loss = lambda params, batch, rng: nnx.merge(graphdef, params)(batch)  # noqa: E731
        init = None
    plan = sl.Plan(mesh=mesh, lowering=lowering)
    bound = sl.bind(model, loss, plan, spec, **({"init": init} if init else {}))
    trainer = sl.Trainer(bound, optax.sgd(0.1))
    state = trainer.init(jax.random.key(0))
    losses = []
    for step in range(3):
        tokens = np.random.default_rng(step).integers(0, VOCAB, (BATCH * 2, LENGTH + 1)).astype(np.int32)
        state, metrics = trainer.step(state, {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]})
        losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.parametrize(
    ("framework", "lowering", "mesh"),
    [
        pytest.param("linen", "automatic", "data=2,tensor=4", marks=pytest.mark.exhaustive),
        ("linen", "explicit", "data=2,tensor=4"),
        pytest.param("nnx", "explicit", "fsdp=2,tensor=2", marks=pytest.mark.exhaustive),
        pytest.param("nnx", "automatic", "fsdp=2,tensor=2", marks=pytest.mark.exhaustive),
    ],
)
def test_plans_train_the_padded_vocabulary(framework, lowering, mesh):
    found = trained(mesh, framework=framework, lowering=lowering)
    assert_losses_equal(found, trained("data=1", framework=framework, lowering="automatic"))


def test_layers_see_flax_annotations_ops_and_the_loss_protocol_alone():
    allowed = ("flax", "jax", "collections", "typing", "functools", "dataclasses", "shardlib.layers", "shardlib.ops")
    for path in Path(layers.__file__).parent.glob("vocab*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                assert name.startswith((*allowed, "shardlib.annotate", "shardlib.loss")), f"{path.name}: {name}"
