"""The training loop: losses in order, the step of a loss that is no number, bytes counted from the shards."""

import jax
import numpy as np
import optax
import pytest

import shardlib as sl
from shardlib.batch_spec import resized
from shardlib.examples.tiny import tiny
from shardlib.loop import NonFiniteLoss, state_bytes_per_device, train
from shardlib.trainer import Trainer

BATCH, LENGTH = 8, 8


@pytest.fixture(scope="module")
def trainer():
    model, loss, spec = tiny()
    spec = resized(spec, batch=BATCH, length=LENGTH)
    return Trainer(sl.bind(model, loss, sl.Plan(mesh="fsdp=2"), spec), optax.sgd(0.5))


def batch_at(step: int) -> dict[str, np.ndarray]:
    tokens = np.random.RandomState(step).randint(0, 256, (BATCH, LENGTH)).astype(np.int32)
    return {"inputs": tokens, "targets": tokens}


@pytest.fixture(scope="module")
def heard_run(trainer):
    heard: list[tuple[int, float]] = []
    run = train(trainer, batch_at, num_steps=3, seed=5, on_step=lambda *args: heard.append(args))
    return heard, run


def test_every_loss_once_and_in_order(heard_run):
    heard, run = heard_run
    assert heard == [(step + 1, loss) for step, loss in enumerate(run.losses)]
    assert len(run.losses) == 3
    assert run.platform == "cpu"
    assert run.steps_per_second > 0


def test_losses_are_those_of_the_steps_one_by_one(trainer, heard_run):
    state, expected = trainer.init(jax.random.key(5)), []
    for step in range(3):
        state, metrics = trainer.step(state, batch_at(step))
        expected.append(float(metrics["loss"]))
    assert list(heard_run[1].losses) == expected


def test_a_loss_that_is_no_number_stops_the_run_and_names_its_step(trainer, monkeypatch):
    real, seen = trainer.step, []

    def step(state, batch):
        state, metrics = real(state, batch)
        seen.append(len(seen) + 1)
        return state, {**metrics, "loss": np.float32("nan")} if len(seen) == 3 else metrics

    monkeypatch.setattr(trainer, "step", step)
    with pytest.raises(NonFiniteLoss, match=r"the loss of step 3 is nan \(steps count from 1\)"):
        train(trainer, batch_at, num_steps=50)
    assert len(seen) <= 4  # one step may be under way while the loss before it is read


def test_bytes_are_those_of_the_fullest_device(trainer, heard_run):
    run = heard_run[1]
    explained = trainer.bound.explain(trainer.optimizer).totals
    expected = explained["parameters"].per_device + explained["optimizer_state"].per_device
    assert expected <= run.state_bytes_per_device <= expected + 64  # the step count and the key
    mesh = sl.make_mesh("data=2")
    split = jax.device_put(
        np.zeros((4, 2), np.float32), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    )
    assert state_bytes_per_device({"x": split}) == 16
