"""Field troubles, group DIV: divisibility, the last batch. Padding of vocabularies is not there yet."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from meshes import ShardingError
from shardlib.rules import Rules
from shardlib.specs import resolve
from shardlib.strategies import default_rules
from tests.cases.test_rul import array, small_model
from tests.oracle import assert_trees_equal, host, record_gradients


def test_div_01_the_leaf_is_named():
    rules = Rules.parse(["w -> x"])
    tree = {"decoder": {"layers": [{"kernel": array(5, axes=("w",))}, {"kernel": array(8, axes=("w",))}]}}
    with pytest.raises(ShardingError) as caught:
        resolve(tree, rules, "x=4,y=2")
    text = str(caught.value)
    assert "decoder/layers/0/kernel [5] dim 0 'w': size 5 not divisible by x=4" in text
    assert "layers/1" not in text


def test_div_02_batch_smaller_than_the_mesh():
    rules = Rules.parse(["batch -> data+fsdp", "length -> context", "heads -> tensor", "head_dim -> none"])
    spec = {"query": array(1, 64, 4, 8, axes=("batch", "length", "heads", "head_dim"))}

    def never(params, batch, rng):
        raise AssertionError("traced before the batch was checked")

    model, _, _ = small_model()
    plan = sl.Plan(mesh="data=1,fsdp=8,tensor=1,context=1", rules=default_rules().with_first(rules))
    init = lambda keys, batch: model.init(keys, jnp.ones((8, 64)))  # noqa: E731
    with pytest.raises(ShardingError) as caught:
        sl.bind(model, never, plan, spec, init=init)
    text = str(caught.value)
    assert "query [1, 64, 4, 8] dim 0 'batch': size 1 not divisible by fsdp=8" in text


@pytest.mark.newest
def test_div_03_odd_device_count():
    model, loss, _ = small_model()
    spec = {"x": array(6, 64, axes=("batch", "embed"))}
    with pytest.raises(ShardingError, match=r"up/kernel .* dim 0 'embed': size 64 not divisible by fsdp=6"):
        sl.bind(model, loss, sl.Plan(mesh="fsdp=6"), spec)
    rules = default_rules().with_first(Rules.parse(["embed -> fsdp; indivisible=replicate"]))
    batch = {"x": np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)}
    grads = {}
    for mesh in ("data=1", "fsdp=6"):
        bound = sl.bind(model, loss, sl.Plan(mesh=mesh, rules=rules), spec)
        trainer = sl.Trainer(bound, optax.chain(record_gradients(), optax.sgd(0.1)))
        state, _ = trainer.step(trainer.init(jax.random.key(0)), batch)
        grads[mesh] = host(state.opt_state[0].grads)
    assert_trees_equal(grads["fsdp=6"], grads["data=1"], "gradient")
    uneven = {notice.split(" [")[0]: notice for notice in bound.notices if "kernel" in notice}
    assert list(uneven) == ["down/kernel", "up/kernel"]
    assert "64 not divisible by fsdp=6" in uneven["up/kernel"]
    assert "(32,768 bytes on each device)" in uneven["up/kernel"]


def classifier():
    """A model whose accuracy is decided by its inputs: class 1 where x is positive."""

    def loss(params, batch, rng):
        logits = batch["x"] * params["up"]["kernel"].sum() ** 0
        hits = ((logits > 0) == batch["y"]) * batch["real"]
        nll = (batch["x"] - params["down"]["kernel"].mean()) ** 2 * batch["real"]
        weight = batch["real"].sum()
        return sl.Loss(total=nll.sum(), weight=weight, aux={"accuracy": sl.Mean(hits.sum(), weight)})

    entry = {"shape": (8,), "axes": ("batch",)}
    spec = {
        "x": sl.ArraySpec(dtype="float32", **entry),
        "y": sl.ArraySpec(dtype="bool", **entry),
        "real": sl.ArraySpec(dtype="float32", **entry),
    }
    model, _, _ = small_model()
    return model, loss, spec, lambda keys, batch: model.init(keys, jnp.ones((8, 64)))


def test_div_08_last_batch_of_an_evaluation():
    model, loss, spec, init = classifier()
    x = np.where(np.arange(10) % 2 == 0, 1.0, -1.0).astype(np.float32)
    y = x > 0
    y[[0, 1, 8]] ^= True  # 6 of the first 8 right, 1 of the last 2
    found = {}
    for mesh in ("data=1", "data=8"):
        trainer = sl.Trainer(sl.bind(model, loss, sl.Plan(mesh=mesh), spec, init=init), optax.sgd(0.1))
        state = trainer.init(jax.random.key(0))
        metrics = []
        for rows in (slice(0, 8), slice(8, 10)):
            num_pad = 8 - (min(rows.stop, 10) - rows.start)
            pad = lambda values: np.concatenate([values[rows], np.zeros(num_pad, values.dtype)])  # noqa: B023, E731
            metrics.append(trainer.evaluate(state, {"x": pad(x), "y": pad(y), "real": pad(np.ones(10, np.float32))}))
        weights = np.array([metric["weight"] for metric in metrics])
        assert weights.tolist() == [8, 2]
        found[mesh] = [float((weights * [m[name] for m in metrics]).sum() / 10) for name in ("accuracy", "loss")]
        assert found[mesh][0] == pytest.approx(0.7, abs=1e-7)
    assert found["data=8"][1] == pytest.approx(found["data=1"][1], rel=1e-6)


@pytest.mark.parametrize("rows", [1, 3, 4, 5])
def test_div_09_batches_of_any_size(rows):
    model, loss, _ = small_model()
    bind = lambda: sl.bind(model, loss, sl.Plan(mesh="data=4"), {"x": array(rows, 64, axes=("batch", "embed"))})  # noqa: E731
    if rows == 4:
        trainer = sl.Trainer(bind(), optax.sgd(0.1))
        trainer.step(trainer.init(jax.random.key(0)), {"x": np.ones((4, 64), np.float32)})
        with pytest.raises(ShardingError) as caught:
            trainer.step(trainer.init(jax.random.key(0)), {"x": np.ones((3, 64), np.float32)})
        assert "'x' has shape [3, 64], and the plan was bound for [4, 64]" in str(caught.value)
    else:
        with pytest.raises(
            ShardingError, match=rf"x \[{rows}, 64\] dim 0 'batch': size {rows} not divisible by data=4"
        ):
            bind()


def test_div_10_short_batch_weights():
    def loss(params, batch, rng):
        # The gradient of row i is g_i.
        total = (batch["g"] * batch["real"]).sum() * params["w"]
        return sl.Loss(total=total, weight=batch["real"].sum())

    class Scalar(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(jnp.float32(0))

    spec = {name: sl.ArraySpec(shape=(8,), dtype="float32", axes=("batch",)) for name in ("g", "real")}
    bound = sl.bind(Scalar, loss, sl.Plan(mesh="data=4"), spec)
    trainer = sl.Trainer(bound, optax.sgd(1.0))
    rows = np.array([1, 2, 6, 99, 99, 99, 99, 99], np.float32)  # 3 real rows: two shards have none
    state, metrics = trainer.step(trainer.init(jax.random.key(0)), {"g": rows, "real": (rows < 99).astype(np.float32)})
    assert float(state.params["w"].get_value()) == -3.0
    assert float(metrics["weight"]) == 3
