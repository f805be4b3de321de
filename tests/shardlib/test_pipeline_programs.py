"""Compiled pipelines hold what they promise: messages, gathers, reductions, products, memory; every breach is seen."""

import functools
import math

import jax
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params

import shardlib as sl
from models import gpt
from shardlib.audit.contract import hold
from shardlib.audit.program import axes_of
from shardlib.jax_compat import opened
from shardlib.pipeline import execute
from shardlib.pipeline.simulate import simulate
from shardlib.programs import equation_flops, product_flops
from shardlib.strategies import DATA_LIKE
from tests.moving import compiled
from tests.shardlib.pipeline_execution.test_executor import unrolled

SIZES = {"layers": 4, "batch": 16, "embed": 16, "heads": 4, "mlp": 32, "vocab": 32, "length": 8}
SGD = optax.sgd(0.1)
V_SHAPED = "# placement=v\nF0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1\nF0 F0.1 F1 F1.1 B0.1 B0 B1.1 B1"


def bound(mesh, *, example=None, sizes=(), **plan):
    module, loss, spec = example or gpt.small(**{**SIZES, **dict(sizes)})
    return sl.bind(module, loss, sl.Plan(mesh=mesh, **plan), spec)


def staging_of(made):
    assert made.staging is not None
    return made.staging


@functools.cache
def program(mesh, **plan):
    """A micro GPT under a plan, and the collectives of its compiled train step."""
    made = bound(mesh, **plan)
    return made, compiled(sl.Trainer(made, SGD, check_separable=False).lowered)


def check(made, moved):
    contract = hold(moved, made.promised(), made.plan.mesh)
    assert contract.problems == contract.unattributed == (), str(contract)
    exact = [row for row in contract.rows if row.exact]
    assert {"stage"} < {axis for row in exact for axis in row.axes} or made.plan.mesh.num_devices <= 4
    assert all(-row.unread_bytes <= (row.excess_bytes or 0) <= row.scalar_bytes for row in exact), str(contract)
    return contract


# Promises --------------------------------------------------------------------------------------------------------

MESHES = [
    ("stage=4,data=2", {"num_microbatches": 8}),
    ("stage=2,fsdp=2,tensor=2", {"num_microbatches": 4}),
    ("stage=4,fsdp=2", {"num_microbatches": 4}),
    ("stage=2,data=2", {"num_microbatches": 4, "chunks": 2}),
]
MORE = [
    ("stage=2,fsdp=2", {"num_microbatches": 4, "gather": "microbatch"}),
    ("stage=2,fsdp=2,tensor=2", {"num_microbatches": 4, "gather": "microbatch", "chunks": 2}),
    ("stage=2,fsdp=2", {"num_microbatches": 4, "gather": "microbatch", "idle": "mask", "chunks": 2}),
    ("stage=2,fsdp=2", {"num_microbatches": 4, "gather": "microbatch", "compute_dtype": "bfloat16"}),
    ("stage=2,data=2", {"num_microbatches": 4, "idle": "mask", "zero": 2}),
    ("stage=2,data=2", {"num_microbatches": 4, "zero": 3, "schedule": "gpipe"}),
    ("stage=2,data=2", {"num_microbatches": 2, "compute_dtype": "bfloat16", "random_slices": 8}),
    ("stage=2,data=2", {"num_microbatches": 2, "reduce_dtype": "bfloat16", "compute_dtype": "bfloat16"}),
    ("stage=2", {"num_microbatches": 2, "schedule": V_SHAPED}),
    ("replica=2,stage=2,fsdp=2", {"num_microbatches": 2, "residuals": "none"}),
    ("stage=2,tensor=2", {"num_microbatches": 4, "chunks": 2, "residuals": "stage"}),
    ("stage=2,data=2,tensor=2", {"num_microbatches": 4, "idle": "mask", "residuals": "none"}),
]
SINGLE = [
    (4, "stage=2,data=2", {}),
    (4, "stage=2,fsdp=2", {"residuals": "none"}),
    (5, "stage=2,data=2", {"zero": 1}),
    (5, "replica=2,stage=2,fsdp=2", {"idle": "mask"}),
]


@pytest.mark.parametrize(("mesh", "plan"), MESHES, ids=str)
def test_a_pipeline_keeps_its_promises_to_the_byte(mesh, plan):
    made, moved = program(mesh, **plan)
    contract = check(made, moved)
    exact = [row for row in contract.rows if row.exact]
    assert all(row.found_arrays == row.promised_arrays for row in exact), str(contract)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "plan"), MORE, ids=str)
def test_all_kinds_of_pipelines_keep_their_promises(mesh, plan):
    check(*program(mesh, **plan))


@pytest.mark.exhaustive
def test_masked_ticks_gather_again():
    check(*program("stage=2,fsdp=2", num_microbatches=4, gather="microbatch", idle="mask"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "plan"), [*MESHES, MORE[0]], ids=str)
def test_optimized_programs_keep_their_promises(mesh, plan, optimized):
    made = bound(mesh, **plan)
    check(made, compiled(sl.Trainer(made, SGD, check_separable=False).lowered))


@pytest.mark.exhaustive
def test_padded_rows_count_as_moved():
    made = bound("stage=2,data=2", sizes={"layers": 5}, num_microbatches=4)
    check(made, compiled(sl.Trainer(made, SGD, check_separable=False).lowered))
    sizes = {entry.path: math.prod(entry.shape) for entry in made.params.entries}
    whole = next(one for one in made.promised() if one.what == "whole gradients")
    # 2 (d-1)/d, 4 bytes; a stage's half of the 6 rows, and the half of the others that scattering has left.
    assert whole.axis == "data" and whole.bytes_per_device == 2 * 1 / 2 * 4 * sum(sizes.values()) / 2
    assert {entry.shape[0] for entry in made.params.entries if "layers" in entry.names} == {6}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("layers", "mesh", "plan"), SINGLE, ids=str)
def test_layers_held_one_by_one_pass_through_all_to_alls(layers, mesh, plan):
    made = bound(mesh, example=unrolled(layers), num_microbatches=2, **plan)
    contract = check(made, compiled(sl.Trainer(made, SGD, check_separable=False).lowered))
    assert {row.what for row in contract.of("stage") if row.kind == "all-to-all"} == {
        ("single layers", "gradients of single layers")
    }


def test_promises_by_hand():
    """stage=4, data=2, 8 microbatches of one row of 8 tokens, 16 wide, in float32: 512 bytes a message."""
    found = {(one.what, one.axis): one for one in bound("stage=4,data=2", num_microbatches=8).promised()}
    for what in ("activations", "cotangents"):
        sent = found[what, "stage"]
        assert (sent.kind, sent.count, sent.bytes_per_device) == ("collective-permute", 10, 10 * 512)  # 8 + 4 - 2 ticks
        assert sent.taken == 10 / 14  # of 8 + 2 (4 - 1)
        assert sent.exact and sent.loop
    table, positions, norm = 32 * 16, 8 * 16, 2 * 16
    outer = 4 * 3 / 4 * (2 * table + positions + norm)
    for what, kind in (("split parameters", "all-gather"), ("split gradients", "reduce-scatter")):
        assert (found[what, "stage"].kind, found[what, "stage"].bytes_per_device) == (kind, outer)
    layer = 4 * (4 * 16 * 16 + 2 * 16 * 32 + 3 * 16 + 32 + 16 + 4 * 16)
    # The other parameters are summed over data once a quarter of each is left.
    assert found["whole gradients", "data"].bytes_per_device == layer + 4 * (2 * table + positions + norm) / 4
    assert found["sums", "data"].count == found["sums", "stage+data"].count == 1


def test_messages_are_as_small_as_the_model_splits_the_stream():
    made = bound("stage=2,fsdp=2,tensor=2", num_microbatches=4)
    whole = bound("stage=2,fsdp=2", num_microbatches=4)
    sent = [next(one for one in each.promised() if one.what == "activations") for each in (made, whole)]
    assert 2 * sent[0].bytes_per_device == sent[1].bytes_per_device


def test_explain_says_what_moves():
    text = str(bound("stage=4,data=2", num_microbatches=8).explain()).splitlines()
    assert "  stage: 10 x collective-permute of activations, 5.0 KiB per device, in the loop over microbatches" in text
    assert "  stage: 5 x all-gather of split parameters, 3.5 KiB per device" in text


# Loops -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mesh", "plan"), MESHES, ids=str)
def test_ticks_permute_and_neither_reduce_over_data_nor_gather(mesh, plan):
    made, moved = program(mesh, **plan)
    inside = [(one, axes_of(one, made.plan.mesh).axes) for one in moved.collectives if one.loop_depth]
    permutes = [one for one, axes in inside if one.kind == "collective-permute"]
    channels = [channel for channel in staging_of(made).lowered.channels if channel.shift]
    assert len(permutes) == len(channels) == 2
    assert all(one.in_branch and one.times_executed == staging_of(made).lowered.num_ticks for one in permutes)
    others = [(one, axes) for one, axes in inside if one.kind != "collective-permute"]
    assert not [one for one, axes in others if {*DATA_LIKE, "stage"} & {*(axes or ())}]
    # The compiler gathers a vocabulary to look rows up in it; nothing else becomes whole.
    sharded = {entry.shape for entry in made.params.entries if entry.num_shards > 1 and "vocab" not in entry.names}
    wholes = sharded | {shape[1:] for shape in sharded}
    gathered = [shape.dims for one, _ in others if one.kind == "all-gather" for shape in one.results]
    assert not {dims for dims in gathered if len(dims) > 1} & wholes


@pytest.mark.exhaustive
def test_permutes_run_in_the_ticks_in_which_somebody_sends(monkeypatch):
    calls, permute = [], jax.lax.ppermute

    def counted(x, axis, pairs):
        jax.debug.callback(lambda: calls.append(pairs))
        return permute(x, axis, pairs)

    monkeypatch.setattr(jax.lax, "ppermute", counted)
    made = bound("stage=2,data=2", num_microbatches=4)
    trainer = sl.Trainer(made, SGD, check_separable=False)
    rows = np.zeros((16, 8), np.int32)
    jax.block_until_ready(trainer.step(trainer.init(jax.random.key(0)), {"inputs": rows, "targets": rows}))
    jax.effects_barrier()
    promised = sum(one.count for one in made.promised() if one.kind == "collective-permute")
    assert promised == sum(map(sum, staging_of(made).lowered.ticks.sends)) < 2 * staging_of(made).lowered.num_ticks
    assert len(calls) == 4 * promised  # on each of four devices


# Negative controls -----------------------------------------------------------------------------------------------


def broken(monkeypatch, deliver):
    monkeypatch.setattr(execute, "deliver", deliver)
    made = bound("stage=2,data=2", sizes={"layers": 2}, num_microbatches=4)
    moved = compiled(sl.Trainer(made, SGD, check_separable=False).lowered)
    return hold(moved, made.promised(), made.plan.mesh).problems


def test_a_sum_in_every_tick_is_seen(monkeypatch):
    deliver = execute.deliver

    def summing(channel, packing, value, rings, now, *, ring):
        value = [jax.lax.psum(leaf, "data") / 2 for leaf in value]
        return deliver(channel, packing, value, rings, now, ring=ring)

    # 6 ticks, two directions, 2 (d-1)/d of a message of 2 rows of 8 tokens, 16 wide.
    assert broken(monkeypatch, summing) == (
        "all-reduce over data, in a loop: 12,288 bytes beyond the nothing promised",
    )


def test_a_permute_in_every_tick_is_seen(monkeypatch):
    def always(channel, packing, value, rings, now, *, ring):
        packed = [jax.lax.ppermute(leaf, "stage", channel.pairs) for leaf in packing.pack(value)]
        slot = now[f"{ring}.write.{channel.name}"]
        return {**rings, ring: execute.write(rings[ring], packing.unpack(packed), slot)}

    problems = broken(monkeypatch, always)
    assert problems[1:] == ("collective-permute over stage, in a loop: 8,192 of 8,192 bytes are missing",)
    assert problems[0] == "collective-permute over stage, in a loop: 12,288 bytes beyond the nothing promised"


def test_a_message_sent_twice_is_seen(monkeypatch):
    deliver = execute.deliver

    def twice(channel, packing, value, rings, now, *, ring):
        rings = deliver(channel, packing, [leaf + 1 for leaf in value], rings, now, ring=ring)
        return deliver(
            channel, packing, [leaf + jax.numpy.sin(rings[ring][0][0]) for leaf in value], rings, now, ring=ring
        )

    (problem,) = broken(monkeypatch, twice)
    assert problem == "collective-permute over stage, in a loop: 8,192 bytes beyond the 8,192 bytes promised"


# Products --------------------------------------------------------------------------------------------------------


class Traced(sl.Trainer):
    """A trainer whose `lowered` stops at the traced program."""

    def _lower(self, jitted, *arguments):
        with jax.set_mesh(self.mesh):
            return jitted.trace(*arguments)


def branches(equation):
    return max(jaxprs_in_params(equation.params), key=lambda jaxpr: len(opened(jaxpr).eqns))


def equations_of(jaxpr):
    for equation in opened(jaxpr).eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations_of(inner)


def bare_flops(jaxpr):
    """FLOPs of a jaxpr's own equations and loops, conditionals left out."""
    total = 0
    for equation in opened(jaxpr).eqns:
        if equation.primitive.name == "cond":
            continue
        inner = [bare_flops(each) for each in jaxprs_in_params(equation.params)]
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += times * sum(inner) if inner else equation_flops(equation)
    return total


def tick_body(made):
    """What one tick does, as a jaxpr, and F and B in it."""
    ticks = staging_of(made).lowered.num_ticks
    scans = [
        equation
        for equation in equations_of(Traced(made, SGD, check_separable=False).lowered.jaxpr)
        if equation.primitive.name == "scan" and equation.params["length"] == ticks
    ]
    (body,) = [
        each.params["jaxpr"]
        for each in scans
        if sum(inner.primitive.name == "cond" for inner in opened(each.params["jaxpr"]).eqns) >= 2
    ]
    return body, [
        branches(each) for each in opened(body).eqns if each.primitive.name == "cond" and equation_flops(each)
    ]


@functools.cache
def tick_flops(residuals, chunks=None):
    """FLOPs of F and of B in one tick: (always, under conditionals of their own); and how the model was cut."""
    made = bound("stage=2,data=2", num_microbatches=4, chunks=chunks, residuals=residuals)
    body, work = tick_body(made)
    assert len(work) == 2 and bare_flops(body) == 0  # all work is under a conditional
    return [(bare_flops(each), product_flops(each) - bare_flops(each)) for each in work], staging_of(made)


@pytest.mark.parametrize(
    ("residuals", "chunks"), [("none", None), ("none", 2), ("dots", None), ("full", None), ("stage", None)]
)
def test_products_are_made_three_times_or_four(residuals, chunks):
    ((forward, head), (backward, embedding)), staging = tick_flops(residuals, chunks=chunks)
    before, block, after, _ = staging.parts.flops
    virtual = len(staging.partition.placement.ranks)
    layers = staging.parts.num_layers
    whole = virtual * (forward + backward) + head + embedding  # each stage once, head and embedding once
    assert forward * virtual == layers * block
    assert after > 0 and head == 3 * after and embedding == 2 * before
    if residuals in ("none", "dots"):
        assert abs(whole / (3 * (before + layers * block + after)) - 1) < 0.01
    else:
        assert 3 * (before + layers * block + after) < whole <= 3 * (before + after) + 4 * layers * block


def test_the_cut_counts_the_products_of_the_whole_loss():
    _, staging = tick_flops("none")
    _, loss, spec = gpt.small(**{**SIZES, "batch": 2})
    key = jax.eval_shape(lambda: jax.random.key(0))
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), spec)
    params = bound("data=1").abstract_params
    before, block, after, side = staging.parts.flops
    assert product_flops(jax.make_jaxpr(loss)(params, batch, key)) == before + side + 4 * block + after


# Memory ----------------------------------------------------------------------------------------------------------

COUNTS = (8, 16, 32)
ROWS, LENGTH = 4, 16


def slopes(counts, **plan):
    """Temporaries on a device for every added microbatch, without its tokens, as a share of its activations.

    Activations are the least that a stage may keep of a microbatch: the inputs of its layers.
    """
    taken = []
    for count in counts:
        sizes = {"batch": ROWS * count, "embed": 32, "mlp": 128, "length": LENGTH}
        made = bound("stage=2", sizes=sizes, num_microbatches=count, **plan)
        step = sl.Trainer(made, SGD, check_separable=False).lowered.compile()
        taken.append(step.memory_analysis().temp_size_in_bytes)
    partition = staging_of(made).partition
    activations = staging_of(made).parts.message_bytes * partition.most * partition.placement.num_chunks
    tokens = 2 * ROWS * LENGTH * 4  # inputs and targets, int32
    pairs = zip(taken, taken[1:], counts, counts[1:])
    return [((after - before) / (more - fewer) - tokens) / activations for before, after, fewer, more in pairs]


def test_memory_does_not_grow_with_microbatches(optimized):
    (slope,) = slopes(COUNTS[::2])
    assert slope < 0.01


@pytest.mark.exhaustive
@pytest.mark.parametrize("plan", [{}, {"residuals": "none"}, {"residuals": "stage"}, {"chunks": 2}], ids=str)
def test_memory_does_not_grow_with_microbatches_at_any_step(plan, optimized):
    assert max(slopes(COUNTS, **plan)) < 0.01


@pytest.mark.exhaustive
def test_memory_of_gpipe_grows_with_microbatches(optimized):
    first, second = slopes(COUNTS, schedule="gpipe")
    assert first == pytest.approx(second, rel=0.01) and first > 1


@pytest.mark.parametrize(
    ("schedule", "chunks", "peaks"),
    [("1f1b", None, (7, 5, 3, 1)), ("interleaved_1f1b", 2, (11, 9, 7, 5)), ("gpipe", None, (16, 16, 16, 16))],
)
def test_rings_hold_what_the_simulator_says_is_in_flight(schedule, chunks, peaks):
    sizes = {"layers": 8, "batch": 16}
    made = bound("stage=4", sizes=sizes, num_microbatches=16, schedule=schedule, chunks=chunks, residuals="stage")
    lowered, virtual = staging_of(made).lowered, chunks or 1
    found = simulate(lowered.table, lockstep=True, form=lowered.ticks.form)
    in_flight = tuple(round(virtual * peak) for peak in found.peak_in_flight)
    assert in_flight == lowered.buffer("residual_input").sizes == peaks
    message = staging_of(made).parts.message[0].shape
    body, _ = tick_body(made)
    carried = [var.aval.shape for var in opened(body).invars]
    slots = (lowered.buffer("saved_input").size, lowered.buffer("cotangent").size)
    assert slots[0] >= max(peaks)
    # Each ring has one slot more, for what nobody reads.
    assert sorted(shape[0] - 1 for shape in carried if shape[1:] == message) == sorted(slots)
