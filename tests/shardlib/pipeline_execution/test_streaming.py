"""Inputs held in parts over the stages: which, the numbers of one device, bytes, permutes, and what goes wrong."""

import functools
import json
import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib import staging
from shardlib.audit.contract import hold
from shardlib.audit.hlo import parse
from shardlib.pipeline import value_and_grad
from shardlib.pipeline.feeds import Feeds
from tests import oracle
from tests.shardlib import test_constant_collections
from tests.shardlib.pipeline_execution import frames, reference, test_spread, towers

EXAMPLE = frames.build()
# Virtual stages 0 and 3 share rank 0; microbatches go in pairs, the second first.
ORDER = [m ^ 1 for m in range(16)]
V_SHAPED = "# placement=v\n" + "\n".join(
    " ".join(f"{kind}{m}{chunk}" for kind, chunk in (("F", ""), ("F", ".1"), ("B", ".1"), ("B", "")) for m in ORDER)
    for _ in range(2)
)
BACKWARDS = "\n".join([" ".join([*(f"F{m}" for m in range(7, -1, -1)), *(f"B{m}" for m in range(7, -1, -1))])] * 2)


@functools.cache
def wanted():
    return frames.on_one_device(EXAMPLE)


def bound(example=EXAMPLE, **plan):
    module, loss, spec = example
    return sl.bind(module, loss, sl.Plan(**plan), spec)


def streamed(made):
    return {one.path for one in made.staging.inputs if one.streamed}


def keeps_its_promises(trainer):
    """A trainer's program has what was promised, to the byte and to the number of permutes."""
    plan = trainer.bound.plan
    contract = hold(parse(trainer.compiled.as_text()), trainer.bound.promised(), plan.mesh)
    assert contract.problems == (), str(contract)
    permutes = [row for row in contract.rows if row.kind == "collective-permute" and row.axes == ("stage",)]
    assert [row.found_arrays for row in permutes] == [row.promised_arrays for row in permutes], str(contract)


# Numbers ---------------------------------------------------------------------------------------------------------

PLANS = {
    "gpipe": {"mesh": "stage=4,data=2", "num_microbatches": 16, "schedule": "gpipe", "residuals": "none"},
    "1f1b, tensor": {"mesh": "stage=4,tensor=2", "num_microbatches": 32, "residuals": "dots"},
    "interleaved, mask": {"mesh": "stage=2,data=2", "num_microbatches": 16, "chunks": 2, "idle": "mask"},
    "v, in pairs": {"mesh": "stage=2,fsdp=2", "num_microbatches": 16, "schedule": V_SHAPED, "gather": "microbatch"},
}
MORE = [
    {"mesh": "stage=4", "num_microbatches": 32},
    {"mesh": "stage=2,data=2,tensor=2", "num_microbatches": 16, "idle": "mask", "zero": 2},
    {"mesh": "stage=2,replica=2,fsdp=2", "num_microbatches": 8, "chunks": 2, "residuals": "stage"},
    {"mesh": "data=2,stage=4", "num_microbatches": 16, "gather": "microbatch"},
]


@functools.cache
def trainer(name):
    return reference.trainer_of(EXAMPLE, frames.SGD, random_slices=frames.ROWS, **PLANS[name])


def check(trainer):
    assert "targets" in streamed(trainer.bound)
    reference.assert_equal(frames.one_step(trainer), wanted())
    keeps_its_promises(trainer)


@pytest.mark.parametrize("name", PLANS)
def test_streamed_inputs_have_the_numbers_of_one_device(name):
    check(trainer(name))


@pytest.mark.exhaustive
@pytest.mark.parametrize("plan", MORE, ids=lambda plan: plan["mesh"])
def test_more_plans(plan):
    check(reference.trainer_of(EXAMPLE, frames.SGD, random_slices=frames.ROWS, **plan))


def test_a_batch_placed_for_training_is_evaluated_too():
    many, one = trainer("gpipe"), sl.Trainer(bound(mesh="data=1"), frames.SGD)
    batch = frames.batch_of(EXAMPLE[2])
    placed = jax.device_put(batch, many.batch_shardings)
    assert placed["frames"].sharding.spec == P(("data", "stage"), None, None)
    assert {shard.data.shape[0] for shard in placed["frames"].addressable_shards} == {4}
    found, expected = (run.evaluate(run.init(jax.random.key(0)), placed)["loss"] for run in (many, one))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.exhaustive
def test_collections_beside_a_streamed_batch():
    """What the loss reads beside the batch is whole, and does not count among its inputs."""
    plan = {"mesh": "stage=2", "num_microbatches": 8}
    assert streamed(test_constant_collections.bound(**plan)) == {"x"}
    losses, params, _ = test_constant_collections.trained(**plan)
    expected, same, _ = test_constant_collections.trained(mesh="data=1")
    oracle.assert_losses_equal(losses, expected)
    oracle.assert_trees_equal(params, same, "parameter")


def plain_loss(params, batch, rng):
    x, _ = jax.lax.scan(lambda x, w: (x + jax.numpy.tanh(x @ w), None), batch["x"] @ params["in"], params["layers"])
    return jax.numpy.mean((x @ params["out"] - batch["y"]) ** 2)


def test_value_and_grad_alone(monkeypatch):
    feeds, rng = [], np.random.default_rng(0)
    fetched = Feeds.fetched
    monkeypatch.setattr(
        Feeds, "fetched", lambda self, *given, **axis: feeds.append(self) or fetched(self, *given, **axis)
    )
    shapes = {"in": (8, 4), "layers": (4, 4, 4), "out": (4, 8)}
    params = {name: rng.normal(size=shape, scale=0.3).astype(np.float32) for name, shape in shapes.items()}
    batch = {name: rng.normal(size=(16, 8)).astype(np.float32) for name in ("x", "y")}
    specs = jax.tree.map(lambda _: P(), params)
    mesh = sl.make_mesh("stage=4", devices="cpu")
    value, grads = value_and_grad(plain_loss, mesh=mesh, num_microbatches=8, specs=specs)(params, batch)
    assert [len(each.leaves) for each in feeds] == [2]
    same, expected = jax.value_and_grad(plain_loss)(params, batch, None)
    np.testing.assert_allclose(value, same, rtol=1e-6)
    oracle.assert_trees_equal(jax.device_get(grads), jax.device_get(expected), "gradient")


# Memory ----------------------------------------------------------------------------------------------------------


def memory(example, **plan):
    made = bound(example, **plan)
    return made, sl.Trainer(made, frames.SGD, check_separable=False).lowered.compile().memory_analysis()


def whole(monkeypatch):
    """From here on every stage holds all inputs."""
    decide = staging.inputs_of
    every = lambda *given, **more: tuple(replace(one, streamed=False) for one in decide(*given, **more))  # noqa: E731
    monkeypatch.setattr(staging, "inputs_of", every)


def test_streamed_inputs_take_less_memory(optimized, monkeypatch):
    example = frames.build(batch=64, length=128)
    plan = {"mesh": "stage=4", "num_microbatches": 32}
    made, parts = memory(example, **plan)
    found = [one for one in made.staging.inputs if one.streamed]
    whole(monkeypatch)
    _, all_of_them = memory(example, **plan)
    size = sum(one.whole_bytes for one in found)
    assert size == 64 * 128 * (frames.FRAME + frames.OUT + 1) * 4
    # A quarter of the batch as an argument, and nothing else that was not counted; some loops copy what they read.
    assert all_of_them.argument_size_in_bytes - parts.argument_size_in_bytes == size * 3 / 4
    taken = [found.argument_size_in_bytes + found.temp_size_in_bytes for found in (all_of_them, parts)]
    assert taken[0] - taken[1] > 0.99 * (size - sum(one.held_bytes for one in found))


def test_explain_counts_the_bytes():
    made = bound(mesh="stage=4,data=2", num_microbatches=16)
    entries = {entry.path: entry for entry in made.batch.entries}
    assert entries["frames"].bytes_per_device * 8 == math.prod(entries["frames"].shape) * 4
    assert "(data+stage, -, -)" in str(made.explain())
    held = {one.path: (one.held_bytes, one.whole_bytes) for one in made.staging.inputs}
    each = frames.LENGTH * frames.FRAME * 4
    assert held["frames"] == (
        (4 + 2 * 3) * each,
        16 * each,
    )  # four, and for F, the loss and B what is read and what comes
    facts = json.loads(json.dumps(made.explain().to_json()))["pipeline"]["inputs"]
    assert [one["streamed"] for one in facts] == [True, False, True, True]


# Which -----------------------------------------------------------------------------------------------------------


def test_token_ids_are_whole_on_every_stage():
    made = bound(towers.build(layers=4), mesh="stage=4", num_microbatches=16)
    assert not streamed(made)
    assert made.batch.specs["inputs"] == P(None, None)
    found = {one.path: one.reason for one in made.staging.inputs}
    assert found["inputs"] == "the layers of every stage read it"
    # Eight ids of four bytes a row; of 16 microbatches 10 would not be held. A message is 16 wide, and has four sums.
    assert found["targets"] == "streaming it would save 320 bytes, less than a message has (528)"
    text = "targets whole on every stage, 512 B: streaming it would save 320 bytes, less than a message has (528)"
    assert text in str(made.explain())


def test_what_is_streamed_says_who_reads_it():
    text = str(bound(mesh="stage=4,data=2", num_microbatches=16).explain())
    assert "frames streamed, 2.8 KiB of 4.5 KiB on every device: a stage holds 4 of 16 microbatches, and " in text
    assert "the first stage and the last stage alone read it, the first for F and again for B; " in text
    assert "kinds whole on every stage, 64 B: the layers of every stage read it; " in text


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ({"mesh": "stage=4", "num_microbatches": 2}, "2 microbatches do not divide over 4 stages"),
        (
            {"mesh": "stage=2", "num_microbatches": 4, "random_slices": 32},
            "random_slices=32 makes every microbatch of several slices, which lie apart",
        ),
        (
            {"mesh": "stage=2", "num_microbatches": 8, "schedule": BACKWARDS},
            "the schedule begins with a microbatch that another stage would hold",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_why_an_input_is_whole(plan, reason):
    made = bound(**plan)
    assert {one.path: one.reason for one in made.staging.inputs}["frames"] == reason


def test_an_input_that_all_rows_share():
    module, loss, spec = EXAMPLE
    scale = sl.ArraySpec(shape=(4096,), dtype="float32", axes=(None,))
    shared = lambda params, batch, rng: loss(params, {**batch, "weights": batch["weights"] * batch["scale"][0]}, rng)  # noqa: E731
    made = bound((module, shared, {**spec, "scale": scale}), mesh="stage=4,data=2", num_microbatches=16)
    assert {one.path: one.reason for one in made.staging.inputs}["scale"] == "all rows share it"


def test_what_all_stages_compute_together_reads_whole_inputs():
    made = test_spread.bound(mesh="stage=2", num_microbatches=8, vocabulary="spread")
    found = {one.path: one.reason for one in made.staging.inputs}
    assert set(found.values()) == {"all stages compute embedding and head together, and read it"}


# Permutes --------------------------------------------------------------------------------------------------------


def test_permutes_by_hand():
    """stage=4, data=2, 16 microbatches: twelve of them lie on other stages than the one that reads them."""
    made = bound(mesh="stage=4,data=2", num_microbatches=16)
    (inputs,) = [one for one in made.promised() if one.what == "inputs"]
    row = frames.LENGTH * 4
    # Frames for F and for B of the first stage; frames, targets and weights, packed, for the last one.
    assert (inputs.kind, inputs.axis, inputs.count, inputs.loop) == ("collective-permute", "stage", 36, True)
    assert inputs.bytes_per_device == 12 * row * (3 * frames.FRAME + frames.OUT + 1)
    frozen = jax.tree_util.tree_map_with_path(lambda path, _: "project" not in str(path), made.abstract_params)
    (fewer,) = [one for one in made.promised(frozen) if one.what == "inputs"]
    assert fewer.count == 24, "no gradient before the layers reads frames again"


@pytest.mark.exhaustive
def test_frozen_projections_read_nothing_again():
    made = bound(mesh="stage=4,data=2", num_microbatches=16)
    is_trained = lambda path, names: "project" not in path  # noqa: E731
    frozen = sl.Trainer(made, frames.SGD, trainable=is_trained, check_separable=False)
    mask = jax.tree_util.tree_map_with_path(lambda path, _: "project" not in str(path), made.abstract_params)
    contract = hold(parse(frozen.compiled.as_text()), made.promised(mask), made.plan.mesh)
    assert contract.problems == (), str(contract)


@pytest.mark.exhaustive
def test_permutes_that_run_are_those_promised(monkeypatch):
    calls, permute = [], jax.lax.ppermute

    def counted(x, axis, pairs):
        jax.debug.callback(lambda: calls.append(pairs))
        return permute(x, axis, pairs)

    monkeypatch.setattr(jax.lax, "ppermute", counted)
    run = reference.trainer_of(
        EXAMPLE, frames.SGD, random_slices=frames.ROWS, mesh="stage=2,data=2", num_microbatches=16
    )
    frames.one_step(run)
    jax.effects_barrier()
    promised = sum(one.count for one in run.bound.promised() if one.kind == "collective-permute")
    assert len(calls) == 4 * promised  # on each of four devices


# Negative controls -----------------------------------------------------------------------------------------------


def test_inputs_from_the_wrong_stage_are_seen(monkeypatch):
    away = Feeds.away
    monkeypatch.setattr(Feeds, "away", lambda self, feed: tuple(-n % self.num_ranks for n in away(self, feed)))
    run = reference.trainer_of(
        EXAMPLE, frames.SGD, random_slices=frames.ROWS, mesh="stage=4,data=2", num_microbatches=16
    )
    with pytest.raises(AssertionError, match=r"Mismatched elements|differs by"):
        reference.assert_equal(frames.one_step(run), wanted())


def test_inputs_that_stay_where_they_are_are_seen(monkeypatch):
    def still(self, pieces, now, *, axis):
        return {feed.reader: self._own(feed, pieces, now[f"{feed.reader}.slot"]) for feed in self.feeds}

    monkeypatch.setattr(Feeds, "fetched", still)
    run = reference.trainer_of(
        EXAMPLE, frames.SGD, random_slices=frames.ROWS, mesh="stage=2,data=2", num_microbatches=16
    )
    with pytest.raises(AssertionError, match=r"collective-permute over stage, in a loop: .* bytes are missing"):
        keeps_its_promises(run)
    with pytest.raises(AssertionError, match=r"Mismatched elements|differs by"):
        reference.assert_equal(frames.one_step(run), wanted())
