"""One device against a pipeline: three optimizer steps of any example, losses, gradients and parameters.

The steps on one device are independent of those under test: `jax.value_and_grad` of the loss summed over rows, each
with its own key, divided once.

    wanted = one_device(example, optimizer)
    found = pipelined(example, optimizer, mesh="stage=4", num_microbatches=4)
    assert_equal(found, wanted)
"""

from typing import Any

import jax
import numpy as np
import optax

import shardlib as sl
from tests import oracle

SLICES, NUM_STEPS = 16, 3


def weighted(example: Any) -> Any:
    """The example with a weight for every token in its batch."""
    module, loss, spec = example
    tokens = spec["inputs"]
    return module, loss, {**spec, "weights": sl.ArraySpec(shape=tokens.shape, dtype="float32", axes=tokens.axes)}


def batch_of(spec: Any, step: int, *, vocab: int = 32) -> Any:
    """A deterministic batch; weights are 0, 1 or 2, and the first row has none at all."""
    batch, length = spec["inputs"].shape
    made = oracle.token_batch(step, batch=batch, length=length, vocab=vocab)
    if "weights" in spec:
        weights = np.random.default_rng(100 + step).integers(0, 3, (batch, length)).astype(np.float32)
        weights[0] = 0
        made["weights"] = weights
    return made


def recording(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer, with the gradients of the last step in its state."""
    return optax.chain(oracle.record_gradients(), optimizer)


def start(example: Any, seed: int = 0) -> tuple[Any, Any]:
    """Parameters and the run's key, as a trainer makes them."""
    module, loss, spec = example
    bound = sl.bind(module, loss, sl.Plan(mesh=sl.MeshShape.parse("data=1")), spec)
    init_key, run_key = jax.random.split(jax.random.key(seed))
    return oracle.host(jax.jit(bound.init)(init_key)[0]), run_key


def objective_of(loss: Any, *, slices: int = SLICES) -> Any:
    """`(params, batch, key) -> scalar`: rows one by one, each with its own key, summed and divided once."""

    def objective(params: Any, batch: Any, rng: Any) -> jax.Array:
        keys = jax.vmap(lambda part: jax.random.fold_in(rng, part))(np.arange(slices))
        parts = jax.tree.map(lambda x: x.reshape(slices, -1, *x.shape[1:]), batch)
        sums = jax.vmap(lambda part, key: loss(params, part, key))(parts, keys)
        if not isinstance(sums, sl.Loss):
            return sums.mean()
        return sums.total.sum() / sums.weight.sum() + np.float32(1) * sums.per_microbatch.mean()

    return objective


def one_device(example: Any, optimizer: Any, *, num_steps: int = NUM_STEPS) -> oracle.Run:
    """Losses, gradients and parameters of every step."""
    _, loss, spec = example
    params, run_key = start(example)
    gradients = jax.jit(jax.value_and_grad(objective_of(loss)))  # host arrays in: it runs on the first device
    state, found = optimizer.init(params), oracle.Run([], [], [])
    apply = jax.jit(lambda g, s, p: (lambda u, s: (optax.apply_updates(p, u), s))(*optimizer.update(g, s, p)))
    for step in range(num_steps):
        value, grads = gradients(params, batch_of(spec, step), jax.random.fold_in(run_key, step))
        params, state = apply(grads, state, params)
        found.losses.append(float(value))
        found.grads.append(oracle.host(grads))
        found.params.append(oracle.host(params))
    return found


def trainer_of(example: Any, optimizer: Any, **plan: Any) -> Any:
    """A trainer of the example whose rows have keys of their own, whatever the layout."""
    module, loss, spec = example
    plan = {"random_slices": SLICES, **plan}
    return sl.Trainer(sl.bind(module, loss, sl.Plan(**plan), spec), recording(optimizer), check_separable=False)


def pipelined(example: Any, optimizer: Any, *, num_steps: int = NUM_STEPS, **plan: Any) -> oracle.Run:
    """The same under a plan, in the model's own form."""
    trainer = trainer_of(example, optimizer, **plan)
    state, found = trainer.init(jax.random.key(0)), oracle.Run([], [], [])
    for step in range(num_steps):
        state, metrics = trainer.step(state, batch_of(example[2], step))
        found.losses.append(float(metrics["loss"]))
        found.grads.append(oracle.host(trainer.bound.restore(state.opt_state[0].grads)))
        found.params.append(oracle.host(trainer.bound.restore(state.params)))
    return found


def assert_equal(found: oracle.Run, wanted: oracle.Run) -> None:
    """Losses and parameters of every step, and the gradients of the first.

    Later gradients are taken at parameters that differ in rounding, which curvature may amplify beyond the tolerance
    of one evaluation.
    """
    oracle.assert_losses_equal(found.losses, wanted.losses)
    oracle.assert_trees_equal(found.grads[0], wanted.grads[0], "step 0 gradient")
    for step, (a, b) in enumerate(zip(found.params, wanted.params, strict=True)):
        oracle.assert_trees_equal(a, b, f"step {step} parameter")
