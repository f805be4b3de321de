"""A vocabulary spread over the stages: equal to one device, in parts, moving what it promises; refused where needed."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import shardlib as sl
from meshes import ShardingError
from shardlib import annotate
from shardlib.audit.contract import hold
from shardlib.audit.hlo import parse
from shardlib.batch_spec import ArraySpec
from shardlib.layers import vocab, vocab_nnx
from shardlib.pipeline.joint import Joint
from tests import oracle

VOCAB, EMBED, LAYERS, BATCH, LENGTH = 30, 16, 4, 16, 8
KERNEL = nn.initializers.lecun_normal()
SPEC = {
    name: ArraySpec(shape=(BATCH, LENGTH), dtype="int32", axes=("batch", "length")) for name in ("inputs", "targets")
}


class Layer(nn.Module):
    """Two products, split over tensor as in a transformer's second half."""

    @nn.compact
    def __call__(self, x, _):
        up, down = (annotate.logical(KERNEL, *names) for names in (("embed", "mlp"), ("mlp", "embed")))
        x = x + nn.Dense(EMBED, use_bias=False, kernel_init=down)(
            jnp.tanh(annotate.constrain(nn.Dense(32, use_bias=False, kernel_init=up)(x), "batch", "length", "mlp"))
        )
        return annotate.constrain(x, "batch", "length", "embed"), None


class Model(nn.Module):
    """Tied or not; with a norm between the layers and the head, whose gradient only one stage may count."""

    tied: bool
    multiple: int = 8
    penalty: bool = False

    @nn.compact
    def __call__(self, inputs, targets):
        embed = vocab.VocabEmbed(VOCAB, EMBED, multiple=self.multiple)
        head = vocab.CrossEntropyHead(VOCAB, EMBED, tied=self.tied, multiple=self.multiple, smoothing=0.1)
        stack = nn.scan(
            Layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x = stack()(embed(inputs), None)[0]
        x = nn.LayerNorm(scale_init=annotate.logical(nn.initializers.ones, "embed"), use_bias=False)(x)
        loss = head(x, targets, table=embed.embedding if self.tied else None)
        return loss if not self.penalty else sl.Loss(total=loss.total + (embed.embedding**2).sum(), weight=loss.weight)


class NnxModel(nnx.Module):
    """The same in NNX."""

    def __init__(self, rngs):
        self.embed = vocab_nnx.VocabEmbed(VOCAB, EMBED, multiple=8, rngs=rngs)
        self.head = vocab_nnx.CrossEntropyHead(VOCAB, EMBED, tied=True, multiple=8, rngs=rngs)
        draw = annotate.nnx_logical(nn.initializers.normal(0.2), "layers", "embed", None)
        self.w = nnx.Param(draw(rngs.params(), (LAYERS, EMBED, EMBED), jnp.float32))

    def __call__(self, inputs, targets):
        x = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), self.embed(inputs), self.w[...])[0]
        return self.head(x, targets, table=self.embed.embedding[...])


def bound(model="tied", **plan):
    if model == "nnx":
        graph, _, rest = nnx.split(nnx.eval_shape(lambda: NnxModel(nnx.Rngs(0))), nnx.Param, ...)
        loss = lambda params, batch, rng: nnx.merge(graph, params, rest)(**batch)  # noqa: E731
        return sl.bind(NnxModel, loss, sl.Plan(**plan), SPEC)
    module = model if isinstance(model, Model) else Model(tied=model == "tied")
    loss = lambda params, batch, rng: module.apply({"params": params}, **batch)  # noqa: E731
    return sl.bind(module, loss, sl.Plan(**plan), SPEC)


def trainer_of(model, **plan):
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-3))
    return sl.Trainer(bound(model, **plan), optimizer, check_separable=False)


def run(trainer):
    """Losses of two steps and of an evaluation, and parameters in the model's form."""
    state, losses = trainer.init(jax.random.key(0)), []
    for step in range(2):
        batch = oracle.token_batch(step, batch=BATCH, length=LENGTH, vocab=VOCAB)
        batch = {name: batch[name] for name in SPEC}
        state, metrics = trainer.step(state, batch)
        losses.append(float(metrics["loss"]))
    losses.append(float(trainer.evaluate(state, batch)["loss"]))
    return losses, oracle.host(trainer.bound.restore(state.params))


@functools.cache
def wanted(model):
    return run(trainer_of(model, mesh="data=1"))


PLANS = {
    "1f1b, tied": ("tied", {"mesh": "stage=4,data=2", "num_microbatches": 4}),
    "gpipe, untied, nothing recomputed": (
        "untied",
        {"mesh": "stage=4", "num_microbatches": 2, "schedule": "gpipe", "residuals": "none"},
    ),
    "interleaved, masked, with fsdp and tensor": (
        "untied",
        {"mesh": "stage=2,fsdp=2,tensor=2", "num_microbatches": 4, "chunks": 2, "idle": "mask"},
    ),
    "nnx": ("nnx", {"mesh": "stage=2", "num_microbatches": 4, "zero": 0}),
}


@functools.cache
def spread(name):
    model, plan = PLANS[name]
    return trainer_of(model, vocabulary="spread", **plan)


@pytest.mark.parametrize("name", PLANS)
def test_equals_one_device(name):
    losses, params = run(spread(name))
    wanted_losses, wanted_params = wanted(PLANS[name][0])
    oracle.assert_losses_equal(losses, wanted_losses)
    oracle.assert_trees_equal(params, wanted_params, "parameter")


@pytest.mark.parametrize("name", ["1f1b, tied", "gpipe, untied, nothing recomputed", "nnx"])
def test_moves_what_it_promises_and_gathers_no_vocabulary(name):
    trainer = spread(name)
    program = parse(trainer.compiled.as_text())
    contract = hold(program, trainer.bound.promised(), trainer.bound.plan.mesh)
    assert contract.problems == (), str(contract)
    moved = [row for row in contract.rows if "spread vocabulary" in row.what]
    assert len(moved) == 1
    assert moved[0].found_bytes == moved[0].promised_bytes
    # Neither the table nor a logit of all words, nor of this device's words for all rows, goes over the wire.
    stored = 32 * EMBED * 4
    assert all(c.bytes_per_device * 1.0 < stored for c in program.collectives if c.kind == "all-gather")


def test_a_message_that_carries_a_key():
    """The sum that shows a message to all ranks takes keys apart."""
    module = Model(tied=True)

    def loss(params, batch, rng):
        table = params["VocabEmbed_0"]["embedding"]

        def layer(carry, w):
            x, key = carry
            key, own = jax.random.split(key)
            return (
                x + jnp.tanh(x @ w["Dense_1"]["kernel"]) @ w["Dense_0"]["kernel"] + jax.random.normal(own, (1, 1, 1)),
                key,
            ), None

        lookup = annotate.slot(annotate.EMBED_TOKENS, vocab.embed_tokens)
        start = (lookup(table, batch["inputs"], vocab=VOCAB), jax.random.key(7))
        (x, _), _ = jax.lax.scan(layer, start, params["ScanLayer_0"])
        losses = annotate.slot(annotate.TOKEN_LOSSES, vocab.token_losses)
        found = losses(
            x * params["LayerNorm_0"]["scale"][None, None], table, batch["targets"], vocab=VOCAB, vocab_dim=0
        )
        return sl.Loss(total=found.loss.sum(), weight=found.counted.sum())

    def first_loss(**plan):
        trainer = sl.Trainer(sl.bind(module, loss, sl.Plan(**plan), SPEC), optax.sgd(0.1), check_separable=False)
        batch = oracle.token_batch(0, batch=BATCH, length=LENGTH, vocab=VOCAB)
        state, metrics = trainer.step(trainer.init(jax.random.key(0)), {name: batch[name] for name in SPEC})
        return float(metrics["loss"]), oracle.host(trainer.bound.restore(state.params))

    found, wanted = first_loss(mesh="stage=2", num_microbatches=2, vocabulary="spread"), first_loss(mesh="data=1")
    oracle.assert_losses_equal([found[0]], [wanted[0]])
    oracle.assert_trees_equal(found[1], wanted[1], "parameter")


def test_each_stage_holds_its_own_words():
    found = bound("tied", mesh="stage=4,data=2", num_microbatches=2, vocabulary="spread")
    (entry,) = [entry for entry in found.params.entries if "embedding" in entry.path]
    assert entry.spec[0] == "stage"
    text = str(found.explain())
    assert "512 of them stay there, and all stages compute embedding and head together" in text
    assert len(set(found.staging.loads)) == 1, "no stage carries the head alone"


BREACHES = {
    "the rest counted by every stage": lambda self, sums, grads, spread, rank: [a + b for a, b in zip(sums, grads)],
    "the parts counted by one stage": lambda self, sums, grads, spread, rank: Joint_added(
        self, sums, grads, tuple(False for _ in spread), rank
    ),
}
Joint_added = Joint.added


@pytest.mark.parametrize("breach", BREACHES)
def test_a_wrong_sum_is_caught(breach, monkeypatch):
    monkeypatch.setattr(Joint, "added", BREACHES[breach])
    _, params = run(trainer_of("tied", mesh="stage=2", num_microbatches=2, vocabulary="spread"))
    with pytest.raises(AssertionError):
        oracle.assert_trees_equal(params, wanted("tied")[1], "parameter")


REFUSED = {
    "is also used whole": (Model(tied=True, penalty=True), {}),
    "vocab dim of size 30 not divisible by stage=4; fix: multiple=4": (Model(tied=True, multiple=1), {}),
    "vocabulary='spread' is for a pipeline, and mesh data=2 has no stage axis": ("tied", {"mesh": "data=2"}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    model, plan = REFUSED[message]
    with pytest.raises(ShardingError) as caught:
        bound(model, **{"mesh": "stage=4", "num_microbatches": 2, "vocabulary": "spread", **plan})
    assert message in str(caught.value)


def test_a_model_without_such_layers_is_refused():
    from models import gpt

    module, loss, spec = gpt.small(layers=4, embed=16, heads=4, mlp=32, vocab=32, length=8, batch=16)
    with pytest.raises(ShardingError) as caught:
        sl.bind(module, loss, sl.Plan(mesh="stage=4", num_microbatches=2, vocabulary="spread"), spec)
    assert "no embedding or head of shardlib.layers found" in str(caught.value)
    assert "shardlib.layers.VocabEmbed" in str(caught.value)
