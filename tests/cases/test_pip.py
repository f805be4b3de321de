"""Field troubles PIP, and those of RNG, BN, CLP and SMG that are about pipelines."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib as sl
from meshes import ShardingError
from models import gpt
from shardlib import annotate
from shardlib.pipeline.placement import Placement
from shardlib.rules import Rules
from shardlib.strategies import default_rules
from tests.oracle import assert_trees_equal, host
from tests.shardlib.pipeline_execution.chains import bound, gradient, through, trained
from tests.tiny import rows

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
MATRICES = np.random.default_rng(1).normal(size=(4, 4, 4)).astype(np.float32) * 0.5


def dense(x, w):
    return x + jnp.tanh(x @ w)


def dense_loss(params, batch, rng):
    return (through(params, batch["x"], dense)[0] ** 2).mean()


# A table of whole backward passes in which the first and the last virtual stage share rank 0.
V_TABLE = "# placement=v\nF0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1\nF0 F0.1 F1 F1.1 B0.1 B0 B1.1 B1"


class Tied(nn.Module):
    """A table of 12 x 8 that is looked up and is the head, and two or four layers between."""

    layers: int

    @nn.compact
    def __call__(self, tokens):
        table = self.param("table", annotate.logical(nn.initializers.normal(0.5), "vocab", "embed"), (12, 8))
        w = self.param("w", annotate.logical(nn.initializers.normal(0.3), "layers", "embed", None), (self.layers, 8, 8))
        x = jax.lax.scan(lambda x, w: (dense(x, w), None), table[tokens], w)[0]
        return x @ table.T


def tied(mesh, *, layers=4, **plan):
    module = Tied(layers)

    def loss(params, batch, rng):
        logits = module.apply({"params": params}, batch["tokens"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"]).mean()

    # No axis may divide the vocabulary: one bare mesh axis is enough here.
    return sl.bind(module, loss, sl.Plan(mesh=mesh, **plan), {"tokens": rows(8, dtype="int32")})


def steps_of(found, optimizer, count):
    trainer = sl.Trainer(found, optimizer)
    state = trainer.init(jax.random.key(0))
    for step in range(count):
        tokens = np.random.default_rng(step).integers(0, 12, 8).astype(np.int32)
        state, _ = trainer.step(state, {"tokens": tokens})
    return host(found.restore(state.params)), state


def test_pip_01_and_04_tied_parameters_are_one():
    optimizer = optax.sgd(0.5, momentum=0.9)
    wanted, _ = steps_of(tied("data=1"), optimizer, 5)
    plans = [{"mesh": "stage=2"}, {"mesh": "stage=4"}, {"mesh": "stage=2", "schedule": V_TABLE, "num_microbatches": 2}]
    for plan in plans:
        found = tied(**{"num_microbatches": 4, **plan})
        params, state = steps_of(found, optimizer, 5)
        assert_trees_equal(params, wanted, "parameter")
        # One logical array, counted once, in parts over the stages: there is no second copy that could differ.
        assert sum(leaf.size for leaf in jax.tree.leaves(found.abstract_params)) == 12 * 8 + 4 * 8 * 8
        assert "stage" in str(state.params["table"].sharding.spec)


@pytest.mark.parametrize("zero", [1, 2])
def test_pip_02_tied_gradients_are_summed_before_they_are_split(zero):
    wanted, _ = steps_of(tied("data=1", layers=2), optax.sgd(0.5, momentum=0.9), 2)
    found = tied("stage=2,data=2", layers=2, zero=zero, num_microbatches=2)
    assert_trees_equal(steps_of(found, optax.sgd(0.5, momentum=0.9), 2)[0], wanted, "parameter")


def test_pip_05_embedding_and_head_are_counted():
    sizes = {"layers": 8, "embed": 32, "heads": 4, "mlp": 128, "vocab": 512, "length": 8, "batch": 4}
    example = gpt.small(**sizes)
    plans = {balance: sl.Plan(mesh="stage=4", num_microbatches=4, balance=balance) for balance in ("even", "cost")}
    bound = {balance: sl.bind(example[0], example[1], plan, example[2]) for balance, plan in plans.items()}
    staged = {balance: each.staging for balance, each in bound.items()}
    assert staged["even"].partition.counts == (2, 2, 2, 2)
    assert sum(staged["cost"].partition.counts) == 8
    assert staged["cost"].partition.counts[-1] < 2, "the last stage has the head, more than a layer's work"
    uneven = {balance: max(s.loads) / np.mean(s.loads) for balance, s in staged.items()}
    assert uneven["cost"] < uneven["even"]
    facts = bound["cost"].explain().pipeline
    assert facts.chosen.max_over_mean == pytest.approx(uneven["cost"])
    assert sum(stage.load for stage in facts.stages) == pytest.approx(8 + facts.embedding + facts.head)
    whole = sum(leaf.size for leaf in jax.tree.leaves(bound["cost"].abstract_params))
    assert sum(stage.layer_parameters for stage in facts.stages) + facts.other_parameters == whole


def affine(params, batch, rng):
    """Layer i maps x to w_i x + i, and reports what it saw: the order matters."""
    count = params["w"].get_value().shape[0]
    ids = jnp.arange(count, dtype=jnp.float32)
    x, seen = through(params, batch["x"], lambda x, own: (x * own[0] + own[1], own[1]), ids)
    order = (seen * 10.0 ** -jnp.arange(count)).sum()
    return sl.Loss(total=x.sum(), weight=jnp.float32(x.size), aux={"order": sl.Mean(order, 1.0)})


@pytest.mark.parametrize(("layers", "stages"), [(30, 4), (10, 3), (7, 2)])
def test_pip_07_every_layer_once_and_in_order(layers, stages):
    value, batch = 1 + 0.1 * np.cos(np.arange(layers)), {"x": np.arange(4, dtype=np.float32)}
    wanted, one = gradient(affine, batch, value=value, mesh="data=1")
    found, metrics = gradient(affine, batch, value=value, mesh=f"stage={stages}", num_microbatches=2)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    np.testing.assert_allclose([metrics["loss"], metrics["order"]], [one["loss"], one["order"]], rtol=1e-6)


def test_pip_07_fewer_layers_than_stages():
    with pytest.raises(ShardingError) as caught:
        bound(affine, {"x": X[:, 0]}, value=np.ones(3), mesh="stage=4", num_microbatches=2)
    assert "3 layers cannot fill 4 stages: every stage needs a layer" in str(caught.value)
    assert "stage=3" in str(caught.value)


def test_pip_08_microbatches_that_do_not_divide_the_batch():
    with pytest.raises(ShardingError) as caught:
        trained(dense_loss, {"x": X}, value=MATRICES[:3], mesh="stage=3", num_microbatches=3)
    assert "8 rows, not a multiple of 3" in str(caught.value)


@pytest.mark.parametrize("idle", ["skip", "mask"])
@pytest.mark.parametrize("residuals", ["full", "none"])
def test_pip_10_a_layer_that_is_undefined_at_zero(idle, residuals):
    def loss(params, batch, rng):
        unit = lambda x, w: dense(x / jnp.sqrt((x**2).sum(-1, keepdims=True)), w)  # noqa: E731
        return (through(params, batch["x"], unit)[0] ** 2).sum(-1).mean()

    # Three layers on two stages: with idle="mask" the missing one is computed, too.
    value = MATRICES[:3]
    wanted, one = gradient(loss, {"x": X}, value=value, mesh="data=1")
    plan = {"mesh": "stage=2", "num_microbatches": 4, "idle": idle, "residuals": residuals}
    found, metrics = gradient(loss, {"x": X}, value=value, **plan)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["loss"], one["loss"], rtol=1e-6)


@pytest.mark.parametrize("microbatches", [3, 5])
def test_pip_11_and_13_every_microbatch_once(microbatches):
    """Identity layers that count their calls; every microbatch has a loss of its own."""

    def loss(params, batch, rng):
        x, calls = through(params, batch["x"], lambda x, w: (x * w, jnp.ones(())))
        aux = {f"calls {k}": sl.Sum(calls[k]) for k in range(3)}
        aux |= {f"loss {k}": sl.Sum((x * (batch["id"] == k)).sum()) for k in range(microbatches)}
        return sl.Loss(total=x.sum(), weight=jnp.float32(x.size), aux=aux)

    batch = {"x": np.arange(1, microbatches + 1, dtype=np.float32), "id": np.arange(microbatches, dtype=np.int32)}
    for schedule in ("gpipe", "1f1b"):
        plan = {"mesh": "stage=3", "num_microbatches": microbatches, "schedule": schedule}
        found, metrics = gradient(loss, batch, value=np.ones(3), **plan)
        np.testing.assert_allclose(found, np.full(3, batch["x"].mean()), rtol=1e-6)
        assert [metrics[f"calls {k}"] for k in range(3)] == [microbatches] * 3
        assert [metrics[f"loss {k}"] for k in range(microbatches)] == list(batch["x"])


def test_pip_12_a_last_short_batch():
    """Ten rows in batches of four: evaluated exactly, in two microbatches or in one."""
    found = bound(dense_loss, {"x": X[:4]}, value=MATRICES[:2], mesh="stage=2", num_microbatches=2)

    trainer = sl.Trainer(found, optax.sgd(1.0))
    state = trainer.init(jax.random.key(0))
    ten = np.random.default_rng(5).normal(size=(10, 4)).astype(np.float32)
    losses = [float(trainer.evaluate(state, {"x": ten[k : k + 4]})["loss"]) for k in (0, 4, 8)]
    x = ten
    for w in MATRICES[:2]:
        x = np.asarray(dense(x, w))
    np.testing.assert_allclose(losses, [(x[k : k + 4] ** 2).mean() for k in (0, 4, 8)], rtol=1e-5)
    with pytest.raises(ShardingError, match="has shape"):
        trainer.step(state, {"x": ten[8:]})


def test_pip_15_rules_inside_leave_the_stages_and_the_batch_alone():
    """Constraints within the ticks name tensor alone; batch and stages are divided by hand there."""

    def loss(params, batch, rng):
        layer = lambda x, w: sl.constrain(dense(x, w), "batch", "embed")  # noqa: E731
        return (through(params, batch["x"], layer)[0] ** 2).mean()

    rules = default_rules().with_first(Rules.parse(["embed -> tensor"]))
    plan = {"mesh": "stage=2,data=2,tensor=2", "num_microbatches": 2, "rules": rules}
    found = bound(loss, {"x": X}, value=MATRICES[:2], names=(None, None), **plan)
    text = sl.Trainer(found, optax.sgd(1.0)).lowered.as_text()
    lines = [line.split("<@mesh, ")[1] for line in text.splitlines() if "sdy.sharding_constraint" in line]
    inside = {line for line in lines if '"' in line and "tensor<2x4xf32>" in line}
    assert inside == {'[{}, {"tensor"}]> : tensor<2x4xf32>'}


def test_rng_07_dropout_does_not_depend_on_the_number_of_stages():
    def loss(params, batch, rng):
        keys = jax.random.split(rng, 4) if rng is not None else None

        def layer(x, own):
            w, key = own
            kept = jax.random.bernoulli(key, 0.7, x.shape) / 0.7
            return x + w * kept * batch["x"], (kept * batch["bits"]).sum()

        if keys is None:
            return sl.Loss(total=batch["x"].sum(), weight=1.0)
        x, masks = through(params, 0 * batch["x"], layer, keys)
        aux = {f"mask {k} {m}": sl.Sum(masks[k] * batch["id"][0, m]) for k in range(4) for m in range(4)}
        return sl.Loss(total=(x**2).sum(), weight=jnp.float32(x.size), aux=aux)

    batch = {
        "x": np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32),
        # Every subset of a microbatch's 2 x 6 units has a sum of its own; a row's id says which microbatch it is in.
        "bits": np.tile(2.0 ** np.arange(12).reshape(2, 6), (4, 1)).astype(np.float32),
        "id": np.repeat(np.eye(4, dtype=np.float32), 2, 0),
    }
    value = np.linspace(0.5, 1.0, 4)
    plan = {"num_microbatches": 4}
    runs = [gradient(loss, batch, value=value, mesh=mesh, **plan) for mesh in ("data=1", "stage=2", "stage=4")]
    for found, metrics in runs[1:]:
        np.testing.assert_allclose(metrics["loss"], runs[0][1]["loss"], rtol=1e-6)
        np.testing.assert_allclose(found, runs[0][0], rtol=1e-5)
    masks = [value for name, value in runs[2][1].items() if name.startswith("mask")]
    assert len(set(masks)) == 16, "by layer and by microbatch"


def test_rng_08_the_same_masks_when_the_layers_run_again():
    def loss(params, batch, rng):
        def layer(x, own):
            w, key = own
            return dense(x, w) * jax.random.bernoulli(key, 0.9, x.shape), None

        if rng is None:
            return (batch["x"] ** 2).mean()
        return (through(params, batch["x"], layer, jax.random.split(rng, 2))[0] ** 2).mean()

    plan = {"mesh": "stage=2", "num_microbatches": 2, "value": MATRICES[:2]}
    found = [gradient(loss, {"x": X}, residuals=residuals, **plan)[0] for residuals in ("full", "none", "dots")]
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-6, atol=1e-7)


def test_bn_03_statistics_of_microbatches_are_refused():
    class Normalised(nn.Module):
        @nn.compact
        def __call__(self, x):
            one, zero = nn.initializers.ones, nn.initializers.zeros
            norm = nn.BatchNorm(scale_init=annotate.logical(one, None), bias_init=annotate.logical(zero, None))
            return norm(x, use_running_average=False)

    module = Normalised()

    def loss(params, batch, rng, collections):
        y, updated = module.apply({"params": params, **collections}, batch["x"], mutable=["batch_stats"])
        return sl.Loss(total=(y**2).sum(), weight=float(y.size), state=updated)

    plan = sl.Plan(mesh="stage=2", num_microbatches=4)
    with pytest.raises(ShardingError) as caught:
        sl.bind(module, loss, plan, {"x": rows(8, 2)})
    text = str(caught.value)
    assert "the loss updates state over the whole batch" in text
    assert "the plan cuts the batch (4 microbatches): statistics of a part are not those of the batch" in text
    assert "normalise per example (LayerNorm)" in text


@pytest.mark.parametrize("stages", [2, 4])
def test_clp_04_clipping_by_the_norm_of_all_stages(stages):
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-3))
    run = {"value": MATRICES, "optimizer": optimizer, "steps": 3}
    wanted, _ = trained(dense_loss, {"x": X}, mesh="data=1", **run)
    found, _ = trained(dense_loss, {"x": X}, mesh=f"stage={stages}", num_microbatches=4, **run)
    assert_trees_equal({"w": found}, {"w": wanted}, "parameter")


def test_smg_06_layers_are_split_over_stages_and_nothing_else_is():
    plan = {"mesh": "stage=4,data=2", "num_microbatches": 2}

    def loss(params, batch, rng):
        layer = lambda x, w: sl.constrain(dense(x, w), "batch", None)  # noqa: E731
        return (through(params, batch["x"], layer)[0] ** 2).mean()

    found = bound(loss, {"x": X}, value=MATRICES, **plan)
    state = sl.Trainer(found, optax.sgd(1.0)).init(jax.random.key(0))
    (w,) = jax.tree.leaves(state.params)
    assert {shard.data.shape for shard in w.addressable_shards} == {(1, 4, 4)}
    rules = default_rules().with_first(Rules.parse(["batch -> stage"]))
    with pytest.raises(ShardingError) as caught:
        bound(loss, {"x": X}, value=MATRICES, rules=rules, **plan)
    assert "rule 'batch -> stage' splits 'batch' over stage, and only layers are staged" in str(caught.value)
    # A rule that says where layers go is what the plan does anyway.
    rules = default_rules().with_first(Rules.parse(["layers -> stage"]))
    assert bound(loss, {"x": X}, value=MATRICES, rules=rules, **plan).staging is not None


def test_the_table_of_these_tests_is_a_v():
    from shardlib.pipeline.table import Table

    assert Table.parse(V_TABLE, name="v").placement == Placement.v_shape(2)
