"""Every option of a plan beside every other: three optimizer steps equal one device.

The default tier runs a pairwise covering array, the exhaustive tier the whole product. The oracle is independent of
the step under test: `jax.value_and_grad` of the loss summed over logical slices, on one device.
"""

import functools
import itertools

import jax
import numpy as np
import optax
import pytest

from models import gpt, gpt_nnx
from shardlib.binding import bind
from shardlib.plan import Plan
from shardlib.trainer import Trainer
from tests import covering, oracle

SLICES, NUM_STEPS, LEARNING_RATE = 32, 3, 0.1
SIZES = {"layers": 2, "embed": 16, "heads": 4, "mlp": 32, "vocab": 32, "length": 8}
FRAMEWORKS = {"linen": gpt.small, "nnx": gpt_nnx.small}
OPTIMIZERS = {
    "sgd": functools.partial(optax.sgd, LEARNING_RATE, momentum=0.9),
    "adam": functools.partial(optax.adam, 1e-2, eps=1e-3),
    "adafactor": functools.partial(optax.adafactor, 1e-2, min_dim_size_to_factor=8),
}
FACTORS = {
    "mesh": ["data=8", "fsdp=8", "data=2,tensor=4", "data=2,fsdp=2,tensor=2", "replica=2,data=2,fsdp=2"],
    "lowering": ["automatic", "explicit"],
    "zero": [0, 1, 2, 3],
    "optimizer": ["sgd", "adam", "adafactor"],
    "microbatches": [1, 2, 4],
    "clip": [None, 0.5],
    "dtype": ["float32", "bfloat16"],
    "remat": [None, "full", "dots"],
    "dropout": [0.0, 0.2],
    "framework": ["linen", "nnx"],
}
FACTORS_FIRST = {factor: values[0] for factor, values in FACTORS.items()}


def valid(case):
    return case["zero"] == 0 or "data=" in case["mesh"]


@functools.cache
def model(framework, dropout):
    return FRAMEWORKS[framework](batch=SLICES, dropout=dropout, dtype=None, **SIZES)


def optimizer(case):
    base = OPTIMIZERS[case["optimizer"]]()
    return base if case["clip"] is None else optax.chain(optax.clip_by_global_norm(case["clip"]), base)


def batch(step):
    return oracle.token_batch(step, batch=SLICES, length=SIZES["length"], vocab=SIZES["vocab"])


@functools.cache
def one_device_gradients(framework, dropout, dtype):
    """`(params, batch, key) -> (loss, gradients)`: rows one by one, each with its own key, summed and divided once."""
    _, loss, _ = model(framework, dropout)

    def objective(params, rows, rng):
        cast = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        keys = jax.vmap(lambda part: jax.random.fold_in(rng, part))(np.arange(SLICES))
        one = lambda row, key: loss(cast, jax.tree.map(lambda x: x[None], row), key)  # noqa: E731
        parts = jax.vmap(one)(rows, keys)
        return parts.total.sum() / parts.weight.sum()

    return jax.jit(jax.value_and_grad(objective))  # host arrays in: it runs on the first device


@functools.cache
def start(framework):
    """Parameters and the run's key, as the trainer makes them from seed 0, on one device."""
    module, loss, spec = model(framework, 0.0)
    bound = bind(module, loss, Plan(mesh="data=1"), spec)
    init_key, run_key = jax.random.split(jax.random.key(0))
    return oracle.host(jax.jit(bound.init)(init_key)[0]), run_key


@functools.cache
def expected(framework, dropout, dtype, name, clip):
    case = {"optimizer": name, "clip": clip}
    params, run_key = start(framework)
    chosen = optimizer(case)
    state, losses = chosen.init(params), []
    gradients = one_device_gradients(framework, dropout, dtype)
    apply = jax.jit(lambda g, s, p: (lambda u, s: (optax.apply_updates(p, u), s))(*chosen.update(g, s, p)))
    for step in range(NUM_STEPS):
        value, grads = gradients(params, batch(step), jax.random.fold_in(run_key, step))
        params, state = apply(grads, state, params)
        losses.append(float(value))
    return losses, oracle.host(params)


def run(case):
    module, loss, spec = model(case["framework"], case["dropout"])
    plan = Plan(
        mesh=case["mesh"],
        lowering=case["lowering"],
        zero=case["zero"],
        num_microbatches=case["microbatches"],
        compute_dtype=case["dtype"],
        reduce_dtype="float32" if case["lowering"] == "explicit" else case["dtype"],
        remat=case["remat"],
        random_slices=SLICES,
    )
    trainer = Trainer(bind(module, loss, plan, spec), optimizer(case), check_separable=False)
    state, losses = trainer.init(jax.random.key(0)), []
    for step in range(NUM_STEPS):
        state, metrics = trainer.step(state, batch(step))
        losses.append(float(metrics["loss"]))
    return losses, oracle.host(state.params)


def check(case):
    losses, params = run(case)
    wanted_losses, wanted = expected(*(case[k] for k in ("framework", "dropout", "dtype", "optimizer", "clip")))
    if case["dtype"] == "bfloat16":  # by its own rounding: 8 bits of mantissa
        np.testing.assert_allclose(losses, wanted_losses, rtol=2e-2)
        return
    oracle.assert_losses_equal(losses, wanted_losses)
    oracle.assert_trees_equal(params, wanted, "parameter")


@pytest.mark.parametrize("case", covering.pairwise(FACTORS, valid=valid), ids=covering.name)
def test_pairwise(case):
    check(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", covering.product(FACTORS, valid=valid), ids=covering.name)
def test_product(case):
    check(case)


def test_the_cover_has_every_pair():
    small = {"a": [0, 1, 2], "b": [0, 1], "c": [0, 1, 2]}
    allowed = lambda case: case["a"] != case["c"]  # noqa: E731
    cases = covering.pairwise(small, valid=allowed)
    pairs = {pair for case in cases for pair in itertools.combinations(case.items(), 2)}
    all_cases = covering.product(small, valid=allowed)
    every = {pair for case in all_cases for pair in itertools.combinations(case.items(), 2)}
    assert pairs == every
    assert len(cases) < len(all_cases)


def test_another_key_or_a_dropped_part_is_caught():
    case = {**FACTORS_FIRST, "dropout": 0.2}
    _, params = run(case)
    other = expected(case["framework"], 0.0, case["dtype"], case["optimizer"], case["clip"])
    with pytest.raises(AssertionError):
        oracle.assert_trees_equal(params, other[1], "parameter")
