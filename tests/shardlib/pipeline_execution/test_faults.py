"""Negative controls: faults put into the executor on purpose, each seen by the comparison with one device; and idle
slots full of NaN, which change nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardlib import pipelined
from shardlib.pipeline import execute, rings, stage
from tests.shardlib.pipeline_execution import reference, towers

# Three layers on two stages: one stage is smaller. Tied, with auxiliary losses and token weights.
EXAMPLE = reference.weighted(towers.build(layers=3, tied=True, balance=0.1))
SGD = optax.sgd(0.1)


@functools.cache
def wanted():
    return reference.one_device(EXAMPLE, SGD, num_steps=1)


def check(**plan):
    found = reference.pipelined(EXAMPLE, SGD, num_steps=1, mesh="stage=2", num_microbatches=4, **plan)
    reference.assert_equal(found, wanted())


def auxiliary_losses_in_bubbles(patch):
    """Idle slots add to the sums, too."""
    work = execute._Tick._when

    def leaking(self, kind, action, rings, sums, now):
        _, leaked, _ = action(rings, sums, now, True)
        rings, sums, sent = work(self, kind, action, rings, sums, now)
        return rings, {**sums, "results": leaked["results"]}, sent

    patch.setattr(execute._Tick, "_when", leaking)


def another_scale(patch):
    """Everything is divided by the number of microbatches once more."""
    scales = pipelined.scales_of
    patch.setattr(pipelined, "scales_of", lambda total: jax.tree.map(lambda scale: scale / 4, scales(total)))


def a_dropped_layer(patch):
    """On stages of unequal size no layer exists."""
    perhaps = stage.StageWork._perhaps
    patch.setattr(stage.StageWork, "_perhaps", lambda self, exists, *rest: perhaps(self, exists & False, *rest))


def a_slot_off_by_one(patch):
    """What is read is what lies beside it."""
    read = execute.read
    patch.setattr(execute, "read", lambda ring, slot: read(ring, jnp.where(slot > 0, slot - 1, slot)))


def tied_gradients_not_summed(patch):
    """What the first stage knows of the tied embedding is lost."""
    gradients = execute.Executor.gradients

    def last_alone(self, *arguments):
        rows, outer, results = gradients(self, *arguments)
        is_last = jax.lax.axis_index("stage") == 1
        return rows, [jnp.where(is_last, grad, 0) for grad in outer], results

    patch.setattr(execute.Executor, "gradients", last_alone)


FAULTS = [
    auxiliary_losses_in_bubbles,
    another_scale,
    a_dropped_layer,
    a_slot_off_by_one,
    tied_gradients_not_summed,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_faults_are_seen(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=r"differs|Not equal"):
        check(idle="mask")


@pytest.fixture
def rings_of_nan(monkeypatch):
    """What no microbatch has written is NaN instead of zero."""
    make_ring = rings.make_ring

    def poisoned(value, *, slots):
        poison = lambda leaf: jnp.full_like(leaf, np.nan) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf  # noqa: E731
        made.append(slots)
        return [poison(leaf) for leaf in make_ring(value, slots=slots)]

    made = []
    monkeypatch.setattr(rings, "make_ring", poisoned)
    monkeypatch.setattr(execute, "make_ring", poisoned)
    return made


@pytest.mark.newest
@pytest.mark.parametrize("plan", [{"idle": "skip"}, {"idle": "mask", "residuals": "none"}], ids=lambda p: p["idle"])
def test_rings_of_nan_change_nothing(plan, rings_of_nan):
    """What idle slots read is never part of a sum. Without the poison this is the control of the faults above."""
    check(**plan)
    assert rings_of_nan


def test_an_evaluation_on_rings_of_nan(rings_of_nan):
    trainer = reference.trainer_of(EXAMPLE, SGD, mesh="stage=2", num_microbatches=4, idle="mask")
    state = trainer.init(jax.random.key(0))
    batch = reference.batch_of(EXAMPLE[2], 0)
    params, _ = reference.start(EXAMPLE)
    value = jax.jit(reference.objective_of(EXAMPLE[1]))(params, batch, jax.random.key(0))
    np.testing.assert_allclose(trainer.evaluate(state, batch)["loss"], value, rtol=1e-6)
    assert rings_of_nan
