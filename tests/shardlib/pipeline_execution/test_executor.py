"""The executor: sizes of rings, tables of all kinds, unequal stages, errors, evaluation, subsets, unrolled layers."""

import functools

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import shardlib as sl
from meshes import ShardingError
from models import gpt, language, lora
from shardlib import annotate
from shardlib.pipeline import execute, rings
from shardlib.pipeline.schedules import ALL
from tests import oracle
from tests.shardlib.pipeline_execution import reference, towers

SGD = optax.sgd(0.1, momentum=0.9)
TOWER = towers.build(layers=4, tied=True, balance=0.1)
GPT = {"batch": 16, "embed": 16, "heads": 4, "mlp": 32, "vocab": 32, "length": 8}


@functools.cache
def wanted():
    return reference.one_device(TOWER, SGD, num_steps=2)


def check(**plan):
    found = reference.pipelined(TOWER, SGD, num_steps=2, **plan)
    reference.assert_equal(found, wanted())


def bound(example=TOWER, **plan):
    module, loss, spec = example
    return sl.bind(module, loss, sl.Plan(**plan), spec)


# What is kept ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("residuals", ["full", "none"])
def test_rings_are_as_large_as_the_simulated_peak(residuals, monkeypatch):
    """1F1B in lockstep holds 2p-1 stage inputs, however many microbatches there are: with 4 stages 7, not 16."""
    made = []
    make_ring = rings.make_ring
    counted = lambda value, *, slots: made.append(slots) or make_ring(value, slots=slots)  # noqa: E731
    monkeypatch.setattr(rings, "make_ring", counted)
    monkeypatch.setattr(execute, "make_ring", counted)
    trainer = reference.trainer_of(TOWER, SGD, mesh="stage=4", num_microbatches=16, residuals=residuals)
    trainer.lowered  # noqa: B018
    lowered = trainer.bound.staging.lowered
    kept = "saved_input" if residuals == "full" else "residual_input"
    in_flight = [0] * 4
    peaks = [0] * 4
    grids = lowered.arrays()
    for tick in range(lowered.num_ticks):
        for rank in range(4):
            in_flight[rank] += grids["F.microbatch"][tick, rank] >= 0
            peaks[rank] = max(peaks[rank], in_flight[rank])
            in_flight[rank] -= grids["B.microbatch"][tick, rank] >= 0
    assert max(peaks) == 7
    assert lowered.buffer(kept).size == 7
    assert 7 in made
    assert max(made) == 7


# Tables ----------------------------------------------------------------------------------------------------------

SERIAL = "F0,F1,B0,B1\nF0,B0,F1,B1"
LOPSIDED = "F0,B0,F1,B1\nF0,B0,F1,B1"
V_SHAPED = "# placement=v\nF0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1\nF0 F0.1 F1 F1.1 B0.1 B0 B1.1 B1"


@pytest.mark.parametrize("table", [LOPSIDED, V_SHAPED], ids=["lopsided", "v"])
def test_tables_as_text(table):
    check(mesh="stage=2", num_microbatches=2, schedule=table, residuals="none" if table == V_SHAPED else None)


def test_a_table_that_deadlocks_is_refused():
    with pytest.raises(ShardingError) as caught:
        bound(mesh="stage=2", num_microbatches=2, schedule="F0,F1,B0,B1\nB0,F0,F1,B1")
    assert "B0" in str(caught.value)


def test_a_table_of_another_size_is_refused():
    with pytest.raises(ShardingError) as caught:
        sl.Plan(mesh="stage=2", num_microbatches=4, schedule=SERIAL)
    assert "is for 2 stages and 2 microbatches; the plan has stage=2 and num_microbatches=4" in str(caught.value)


def test_an_unknown_schedule_has_a_nearest_name():
    with pytest.raises(ShardingError) as caught:
        sl.Plan(mesh="stage=2", num_microbatches=4, schedule="1f1bb")
    assert "schedule '1f1bb' is unknown (did you mean '1f1b'?)" in str(caught.value)
    assert all(schedule.name in str(caught.value) for schedule in ALL)


# Layers ----------------------------------------------------------------------------------------------------------


def test_more_stages_than_layers():
    with pytest.raises(ShardingError, match="4 layers cannot fill 8 stages") as caught:
        bound(mesh="stage=8", num_microbatches=8)
    assert "use stage=4, or a model with more layers" in str(caught.value)
    with pytest.raises(ShardingError, match="4 layers cannot fill 4 stages x 2 chunks"):
        bound(mesh="stage=4", num_microbatches=4, chunks=2)


def test_microbatches_that_do_not_divide_the_batch():
    with pytest.raises(ShardingError) as caught:
        trainer = sl.Trainer(bound(mesh="stage=2,data=2", num_microbatches=3), SGD)
        trainer.lowered  # noqa: B018
    assert "inputs has 16 rows, not a multiple of 6" in str(caught.value)


def test_stages_store_whole_rows_of_zeros_for_missing_layers():
    trainer = reference.trainer_of(towers.build(layers=7), SGD, mesh="stage=4", num_microbatches=4)
    staging = trainer.bound.staging
    assert sum(staging.partition.counts) == 7
    state = trainer.init(jax.random.key(0))
    up = np.asarray(state.params["layers"]["up"]["kernel"])
    assert up.shape[0] == 8
    missing = [row for row, layer in enumerate(staging.partition.rows) if layer == -1]
    assert len(missing) == 1
    assert not up[missing].any()
    restored = oracle.host(trainer.bound.restore(state.params))
    start, _ = reference.start(towers.build(layers=7))
    assert jax.tree.all(jax.tree.map(np.array_equal, restored, start))
    again = oracle.host(trainer.bound.store(restored))
    assert jax.tree.all(jax.tree.map(np.array_equal, again, oracle.host(state.params)))


# Losses ----------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_the_sum_of_its_rows():
    module, _, spec = TOWER

    def loss(params, batch, rng):
        logits, _ = module.apply({"params": params}, batch["inputs"])
        return language.token_loss(logits, batch).value() ** 2

    trainer = sl.Trainer(sl.bind(module, loss, sl.Plan(mesh="stage=2", num_microbatches=4), spec), SGD)
    with pytest.raises(ShardingError, match="the loss is not the sum of its rows") as caught:
        trainer.step(trainer.init(jax.random.key(0)), reference.batch_of(spec, 0))
    assert "the plan cuts the batch (4 microbatches): loss of 4 rows is" in str(caught.value)


def test_evaluation_with_batches_of_any_size():
    one = sl.Trainer(bound(mesh="data=1"), SGD)
    many = sl.Trainer(bound(mesh="stage=2,data=2", num_microbatches=4, chunks=2, idle="mask"), SGD)
    batches = [oracle.token_batch(k, batch=rows, length=8, vocab=32) for k, rows in enumerate((16, 7))]
    found, expected = (run.evaluate_all(run.init(jax.random.key(0)), batches) for run in (many, one))
    for name in ("weight", "accuracy"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6)
    # The auxiliary loss is a mean over parts, and a short batch is a part: compared for whole batches alone.
    found, expected = (run.evaluate(run.init(jax.random.key(0)), batches[0]) for run in (many, one))
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-6)


# Other ways to train ---------------------------------------------------------------------------------------------


def test_adapters_alone_are_trained():
    example = lora.small(rank=2, layers=4, **GPT)
    module, loss, spec = example

    def run(**plan):
        found = sl.bind(module, loss, sl.Plan(random_slices=16, **plan), spec)
        trainer = sl.Trainer(found, optax.sgd(0.5), trainable=lora.is_adapter, check_separable=False)
        state, losses = trainer.init(jax.random.key(0)), []
        start = oracle.host(found.restore(state.params))
        for step in range(2):
            state, metrics = trainer.step(state, reference.batch_of(spec, step))
            losses.append(float(metrics["loss"]))
        return losses, oracle.host(found.restore(state.params)), start

    losses, params, start = run(mesh="stage=2,data=2", num_microbatches=2, residuals="none")
    one = run(mesh="data=1")
    oracle.assert_losses_equal(losses, one[0])
    oracle.assert_trees_equal(params, one[1], "parameter")
    same = jax.tree.map(np.array_equal, params, start)
    changed = {path: not value for path, value in oracle.leaves_with_paths(same)}
    assert {path for path, moved in changed.items() if moved} == {path for path in changed if "lora_" in path}


@pytest.mark.exhaustive
def test_bfloat16_by_its_own_rounding():
    example = gpt.small(layers=4, **GPT)
    losses = reference.one_device(example, SGD, num_steps=2).losses
    found = reference.pipelined(
        example, SGD, num_steps=2, mesh="stage=2,tensor=2", num_microbatches=4, compute_dtype="bfloat16"
    )
    np.testing.assert_allclose(found.losses, losses, rtol=2e-2)
    assert {leaf.dtype for leaf in jax.tree.leaves(found.params)} == {np.dtype("float32")}


class Unrolled(nn.Module):
    """Layers in a Python loop between markers."""

    layers: int

    @nn.compact
    def __call__(self, inputs):
        real = (inputs > 2)[..., None].astype(np.float32)
        table = annotate.logical(nn.initializers.normal(0.5), "vocab", "embed")
        embed = nn.Embed(towers.VOCAB, towers.EMBED, embedding_init=table)
        x, balance = annotate.layer_boundary(embed(inputs)), []
        for _ in range(self.layers):
            x, extra = nn.remat(towers.Layer)(0.1)(x, real)
            x = annotate.layer_boundary(x)
            balance.append(extra)
        return language.attend(x, embed.embedding), sum(balance)


@functools.cache
def unrolled(layers):
    module = Unrolled(layers)

    def loss(params, batch, rng):
        rngs = None if rng is None else {"dropout": rng}
        logits, balance = module.apply({"params": params}, batch["inputs"], rngs=rngs)
        main = language.token_loss(logits, batch)
        return sl.Loss(total=main.total, weight=main.weight, per_microbatch=0.1 * balance, aux=main.aux)

    return module, loss, language.batch_spec(batch=16, length=towers.LENGTH)


@functools.cache
def unrolled_on_one_device(layers):
    return reference.one_device(unrolled(layers), SGD, num_steps=2)


@pytest.mark.parametrize(
    "plan",
    [
        {"mesh": "stage=4"},
        {"mesh": "stage=2,fsdp=2", "residuals": "none"},
        {"mesh": "stage=2,data=2", "zero": 1, "schedule": "gpipe"},
    ],
    ids=lambda plan: plan["mesh"],
)
def test_unrolled_layers(plan):
    found = reference.pipelined(unrolled(4), SGD, num_steps=2, num_microbatches=4, **plan)
    reference.assert_equal(found, unrolled_on_one_device(4))


@pytest.mark.exhaustive
@pytest.mark.parametrize("plan", [{"mesh": "stage=4"}, {"mesh": "stage=2,tensor=2", "chunks": 2}])
def test_unrolled_layers_that_stages_do_not_divide(plan):
    found = reference.pipelined(unrolled(5), SGD, num_steps=2, num_microbatches=4, **plan)
    reference.assert_equal(found, reference.one_device(unrolled(5), SGD, num_steps=2))


@pytest.mark.exhaustive
def test_adafactor_on_equal_stages():
    """Its statistics are those of stacked layers, as on one device; unequal stages add a row of zeros to them."""
    adafactor = optax.adafactor(1e-2, min_dim_size_to_factor=8)
    found = reference.pipelined(TOWER, adafactor, mesh="stage=2,data=2", num_microbatches=4)
    reference.assert_equal(found, reference.one_device(TOWER, adafactor))
