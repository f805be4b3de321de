"""Whole models over a divided sequence: group SEQ where a model, its loss and its batch are concerned."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshes.errors import ShardingError
from models import gpt, language, llama
from shardlib import annotate
from shardlib.batch_spec import ArraySpec
from shardlib.binding import bind
from shardlib.plan import Plan
from shardlib.trainer import Trainer
from tests import oracle

SIZES = {"layers": 1, "embed": 16, "heads": 4, "mlp": 32, "vocab": 32, "length": 16}
BATCH, VOCAB, LENGTH = 4, 32, 16


def trainer(plan, model=gpt.small, loss=None, **options):
    module, own, spec = model(batch=BATCH, **SIZES)
    return Trainer(bind(module, loss(module) if loss else own, plan, spec), optax.sgd(0.1), **options)


def step(trainer):
    batch = oracle.token_batch(0, batch=BATCH, length=LENGTH, vocab=VOCAB)
    return trainer.step(trainer.init(jax.random.key(0)), batch)


def shifting(module):
    """A loss that predicts the next input, shifting it itself."""

    def loss(params, batch, rng):
        logits = module.apply({"params": params}, batch["inputs"])
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch["inputs"][:, 1:]).mean()

    return loss


def numbering(module):
    """A loss that weighs tokens by positions of its own, beside a model that follows the plan's."""

    def loss(params, batch, rng):
        logits = module.apply({"params": params}, batch["inputs"])
        late = jnp.broadcast_to(jnp.arange(logits.shape[1]) >= 4, logits.shape[:2])
        return language.token_loss(logits, {**batch, "weights": late.astype(jnp.float32)})

    return loss


ZIGZAG = Plan(mesh="context=2", attention="gather", placement="zigzag")


def test_seq_02_a_loss_that_shifts_inside_is_refused_where_tokens_move():
    with pytest.raises(ShardingError) as error:
        step(trainer(ZIGZAG, loss=shifting))
    text = str(error.value)
    assert "the loss depends on the order in which tokens are held (placement=zigzag): loss of row 0 is" in text
    assert "It shifts targets itself" in text
    for fix in ("put targets in the batch", "annotate.by_position", 'placement="contiguous"'):
        assert fix in text


@pytest.mark.exhaustive
def test_seq_02_in_bfloat16_too():
    plan = Plan(mesh="context=2", attention="gather", placement="zigzag", compute_dtype="bfloat16")
    with pytest.raises(ShardingError, match="the loss depends on the order in which tokens are held"):
        step(trainer(plan, loss=shifting))


@pytest.mark.exhaustive
def test_seq_05_positions_of_its_own_are_refused_where_tokens_move():
    with pytest.raises(ShardingError, match=r"makes positions or masks of its own"):
        step(trainer(ZIGZAG, loss=numbering))


@pytest.mark.exhaustive
def test_the_check_knows_pipelines():
    plan = Plan(mesh="stage=2,context=2", attention="gather", placement="zigzag", num_microbatches=2)
    module, _, spec = gpt.small(batch=BATCH, **{**SIZES, "layers": 2})
    staged = Trainer(bind(module, shifting(module), plan, spec), optax.sgd(0.1), check_separable=False)
    with pytest.raises(ShardingError, match="the loss depends on the order in which tokens are held"):
        step(staged)


@pytest.mark.exhaustive
@pytest.mark.parametrize("placement", ["contiguous", "zigzag"])
def test_a_loss_that_shifts_inside_trains_in_order(placement):
    """In order, it is one device's; checked out of order without the check, it is not: what the check is for."""
    wanted = float(step(trainer(Plan(mesh="data=1"), loss=shifting))[1]["loss"])
    plan = Plan(mesh="context=2", attention="gather", placement=placement)
    found = float(step(trainer(plan, loss=shifting, check_order=False))[1]["loss"])
    assert (abs(found - wanted) <= 1e-6 * wanted) == (placement == "contiguous")


@pytest.mark.exhaustive
def test_a_model_made_for_one_length_is_checked_at_it():
    def fixed(module):
        def loss(params, batch, rng):
            assert batch["inputs"].shape[1] == LENGTH
            return language.token_loss(module.apply({"params": params}, batch["inputs"]), batch)

        return loss

    step(trainer(ZIGZAG, loss=fixed))
    with pytest.raises(ShardingError, match="the loss depends on the order"):
        step(trainer(ZIGZAG, loss=lambda module: lambda *given: fixed(module)(*given).total + shifting(module)(*given)))


def refused(match, *, model=gpt.small, loss=None, spec=None, sizes=None, **options):
    module, own, its = model(batch=BATCH, **(SIZES | (sizes or {})))
    with pytest.raises(ShardingError, match=match):
        bind(module, loss or own, Plan(**options), spec or its)


def test_seq_07_a_length_that_does_not_divide():
    refused(
        r"sequences of length 18 do not divide over context=4\n  fix: pad or cut them to length 24, two chunks for "
        r"each device, which is what placement=zigzag needs, or 20 with another placement",
        mesh="context=4",
        sizes={"length": 18},
    )
    refused(
        r"length 20 over a context axis of 4, placement 'zigzag': not divisible by 8 \(two chunks on each of 4 shards\)"
        r"\n  fix: pad the sequence to length 24",
        mesh="context=4",
        placement="zigzag",
        sizes={"length": 20},
    )


def test_heads_that_do_not_fit():
    refused(
        r"attention='all_to_all' cannot run here: 4 query heads on a device do not divide over 8 shards\n"
        r"  fix: attention='ring'",
        mesh="context=8",
        attention="all_to_all",
    )


def test_a_ring_under_branches_of_a_pipeline():
    refused(
        r"attention='ring' cannot run here: a permute under a condition .* deadlocks\n"
        r"  fix: attention='all_to_all'; or idle='mask'",
        mesh="stage=2,context=4",
        attention="ring",
        num_microbatches=2,
        sizes={"layers": 2},
    )


def windowed(monkeypatch, module, *, window):
    attend = functools.partial(annotate.attention, window=window)
    monkeypatch.setattr(module.annotate, "attention", attend)


def test_a_window_larger_than_the_sequence(monkeypatch):
    windowed(monkeypatch, llama, window=17)
    refused(
        r"window 17 is larger than the length 16: it limits nothing\n  fix: leave window out",
        model=llama.tiny,
        mesh="context=4",
    )


def bypassing(query, key, value, **options):
    """Attention that a model calls by itself."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


@pytest.mark.parametrize(
    "model, where", [(gpt, r"GPT/layers/attention \(.*test_seq_models.py:\d+\)"), (llama, r".*test_seq_models.py:\d+")]
)
def test_attention_outside_the_slot_is_named(monkeypatch, model, where):
    monkeypatch.setattr(model.annotate, "attention", bypassing)
    make = model.small if model is gpt else model.tiny
    refused(
        rf"attention outside the slot makes \[16, 16\] scores of whole sequences, which context=4 does not divide: "
        rf"{where}.*\n  fix: call shardlib.attention",
        model=make,
        mesh="context=4",
    )


def test_dims_as_long_as_the_sequence_are_no_attention():
    module, loss, spec = gpt.small(batch=BATCH, **(SIZES | {"embed": 16, "mlp": 16, "heads": 1, "vocab": 16}))
    assert bind(module, loss, Plan(mesh="context=2"), spec).context.kind in ("ring", "gather")


def test_segment_ids_out_of_order():
    module, _, spec = gpt.small(batch=BATCH, **SIZES)
    tokens = ArraySpec(shape=(BATCH, LENGTH), dtype="int32", axes=("batch", "length"))
    loss = lambda params, batch, rng: language.token_loss(  # noqa: E731
        module.apply({"params": params}, batch["inputs"]), batch
    )
    bound = bind(module, loss, Plan(mesh="context=2"), {**spec, "segment_ids": tokens})
    batch = oracle.token_batch(0, batch=BATCH, length=LENGTH, vocab=VOCAB)
    ids = np.repeat([[1, 2, 1, 3]], BATCH, axis=0).repeat(4, axis=1).astype(np.int32)
    held = Trainer(bound, optax.sgd(0.1))
    state = held.init(jax.random.key(0))
    with pytest.raises(ShardingError, match=r"row 0: id 1 starts at token 0 and again at token 8.*\n  fix: number the"):
        held.step(state, {**batch, "segment_ids": ids})
