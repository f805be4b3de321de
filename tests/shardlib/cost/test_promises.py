"""Promises in bytes: closed forms by hand, and what the state of a plan really takes on a device."""

import math
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest

import shardlib as sl
from shardlib.strategies import ALL
from tests.moving import bound, compiled, example, program

EMBED, MLP = 16, 24
SPLIT, WHOLE = EMBED + 2 * EMBED * MLP, MLP  # by fsdp: scale, up, down; not the bias


def bytes_of(found, what):
    return {promise.axis: (promise.kind, promise.bytes_per_device) for promise in found if promise.what == what}


def test_every_strategy_promises_something():
    assert all(strategy.promises for strategy in ALL)


def test_data_parallelism_sums_every_gradient_once():
    found = bound("data=4", lowering="explicit", num_microbatches=2).promised()
    assert bytes_of(found, "whole gradients") == {"data": ("all-reduce", 2 * 3 / 4 * 4 * (SPLIT + WHOLE))}
    # Weights first, then everything: total, weight, per_microbatch, parts and a mean of two numbers.
    assert bytes_of(found, "sums") == {"data": ("all-reduce", 2 * 2 * 3 / 4 * 6 * 4)}
    assert not any(promise.loop for promise in found)


@pytest.mark.parametrize("zero", [1, 2])
def test_zero_reduces_and_gathers_a_share(zero):
    found = bound("data=4", lowering="explicit", zero=zero).promised()
    once = 3 / 4 * 4 * (SPLIT + WHOLE)
    assert bytes_of(found, "split gradients") == {"data": ("reduce-scatter", once)}
    assert bytes_of(found, "updated parameters") == {"data": ("all-gather", once)}


@pytest.mark.parametrize(("gather", "times"), [("step", 1), ("microbatch", 4)])
def test_fsdp_gathers_and_scatters_what_it_splits(gather, times):
    found = bound("fsdp=4", lowering="explicit", num_microbatches=4, gather=gather).promised()
    once = 3 / 4 * 4 * SPLIT
    assert bytes_of(found, "split parameters") == {"fsdp": ("all-gather", times * once)}
    assert bytes_of(found, "split gradients") == {"fsdp": ("reduce-scatter", once)}
    assert bytes_of(found, "whole gradients") == {"fsdp": ("all-reduce", 2 * 3 / 4 * 4 * WHOLE)}
    assert [promise.what for promise in found if promise.loop] == (["split parameters"] if times > 1 else [])


def test_only_a_shard_of_each_gradient_crosses_between_replicas():
    found = bound("replica=2,fsdp=4", lowering="explicit").promised()
    assert bytes_of(found, "whole gradients")["replica"] == ("all-reduce", 2 * 1 / 2 * 4 * (SPLIT / 4 + WHOLE))


def test_parameters_travel_as_computed_with_and_gradients_as_asked():
    found = bound("fsdp=4", compute_dtype="bfloat16").promised()
    assert bytes_of(found, "split parameters") == {"fsdp": ("all-gather", 3 / 4 * 2 * SPLIT)}
    assert bytes_of(found, "split gradients") == {"fsdp": ("reduce-scatter", 3 / 4 * 4 * SPLIT)}
    found = bound("fsdp=4", compute_dtype="bfloat16", reduce_dtype="bfloat16").promised()
    assert bytes_of(found, "split gradients") == {"fsdp": ("reduce-scatter", 3 / 4 * 2 * SPLIT)}


def test_a_frozen_parameter_is_gathered_and_not_reduced():
    made = bound("fsdp=4", lowering="explicit")
    trainable = jax.tree.map(lambda leaf: len(leaf.shape) == 1, made.abstract_params)
    found = made.promised(trainable)
    assert bytes_of(found, "split parameters") == {"fsdp": ("all-gather", 3 / 4 * 4 * SPLIT)}
    assert bytes_of(found, "split gradients") == {"fsdp": ("reduce-scatter", 3 / 4 * 4 * EMBED)}


def test_the_automatic_lowering_reduces_in_every_microbatch():
    found = bound("fsdp=4", lowering="automatic", num_microbatches=2).promised()
    assert bytes_of(found, "split parameters") == {"fsdp": ("all-gather", 2 * 2 * 3 / 4 * 4 * SPLIT)}
    assert bytes_of(found, "split gradients") == {"fsdp": ("reduce-scatter", 2 * 3 / 4 * 4 * SPLIT)}
    scattered = next(promise for promise in found if promise.what == "split gradients")
    assert (scattered.form_kind, scattered.form_bytes) == ("all-reduce", 2 * scattered.bytes_per_device)
    assert not scattered.exact and scattered.loop


def test_tensor_parallelism_moves_the_stream_four_times_each_way():
    from models import gpt

    config = gpt.Config(layers=3, embed=32, heads=4, mlp=64, vocab=96, length=16)
    found = bound("data=2,tensor=4", model=gpt.build(config, batch=8)).promised()
    once = 3 / 4 * 4 * (4 * 16) * 32  # (t-1)/t of 4 bytes, 4 rows of 16 tokens, 32 wide
    layers = [promise for promise in found if promise.what in ("column inputs", "row outputs")]
    head = 3 * once
    # Eight per layer, and two to gather inputs again for the gradients of weights: 10 (t-1)/t bTh.
    assert sum(promise.bytes_per_device for promise in layers) == 10 * 3 * once + head
    statistics = next(promise for promise in found if promise.what == "token statistics")
    assert statistics.bytes_per_device == 3 * 2 * 3 / 4 * 4 * (4 * 16)


def test_explain_shows_the_promises_as_text_and_json():
    explained = bound("fsdp=4", lowering="explicit").explain()
    assert explained.promises == bound("fsdp=4", lowering="explicit").promised()
    assert "  fsdp: 3 x all-gather of split parameters, 2.3 KiB per device" in str(explained).splitlines()
    shown = explained.to_json()["promises"]
    assert next(promise for promise in shown if promise["kind"] == "all-gather") == {
        "kind": "all-gather",
        "mesh_axes": ["fsdp"],
        "what": "split parameters",
        "count": 3,
        "bytes_per_device": 2352,
        "per_microbatch": False,
        "exact": True,
    }


def test_one_reduction_per_parameter_and_step_and_none_in_the_loop():
    found, compiled_program = program("fsdp=8", num_microbatches=2)
    assert any(loop.trip_count == 2 for loop in compiled_program.loops)
    assert all(one.loop_depth == 0 for one in compiled_program.collectives)
    scattered = compiled_program.of_kind("reduce-scatter")
    summed = [shape for one in compiled_program.of_kind("all-reduce") for shape in one.operands if shape.dims != (6,)]
    assert len(scattered) + len(summed) == len(found.params.entries) == 4


def test_32_mib_of_parameters_move_as_32_and_32_mib():
    mib = 2**20
    model = example(embed=1024, mlp=4096, batch=8)  # two matrices of 16 MiB
    made = bound("fsdp=8", model=model, lowering="explicit")
    moved = compiled(sl.Trainer(made, optax.sgd(0.1)).lowered)
    matrices = lambda shapes: sum(shape.num_bytes for shape in shapes if len(shape.dims) == 2) / mib  # noqa: E731
    assert sum(matrices(one.results) for one in moved.of_kind("all-gather")) == 32
    assert sum(matrices(one.operands) for one in moved.of_kind("reduce-scatter")) == 32
    assert matrices([shape for one in moved.of_kind("all-reduce") for shape in one.operands]) == 0


def test_hsdp_crosses_the_slow_axis_with_a_shard():
    _, inside = program("fsdp=4")
    found, both = program("replica=2,fsdp=4")
    crossing = [one for one in both.collectives if one.kind == "all-reduce" and one.groups[0] == (0, 4)]
    assert sum(one.operand_bytes for one in crossing) == 4 * (SPLIT / 4 + WHOLE)
    fast = [one for one in both.collectives if one.kind in ("all-gather", "reduce-scatter")]
    assert sum(one.bytes_per_device for one in fast) == sum(
        one.bytes_per_device for one in inside.collectives if one.kind in ("all-gather", "reduce-scatter")
    )
    assert found.plan.mesh.num_devices == 8


COPIES = {  # of the parameters, in the optimizer's state
    "sgd": (optax.sgd(0.1), 0),
    "momentum": (optax.sgd(0.1, momentum=0.9), 1),
    "adam": (optax.adam(1e-3), 2),
    "adamw": (optax.adamw(1e-3), 2),
}
PLANS = [("data=4,fsdp=2", zero) for zero in (0, 1, 2, 3)] + [("data=2,fsdp=2,tensor=2", zero) for zero in (0, 1)]


def on_first_device(tree):
    """Bytes of the shards that device 0 holds."""
    first = jax.devices()[0]
    shards = [shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards if shard.device == first]
    return sum(math.prod(shard.data.shape) * shard.data.dtype.itemsize for shard in shards)


def placed(made, optimizer):
    """A real state of zeros where the plan puts it."""
    trainer = sl.Trainer(made, optimizer)
    state = replace(trainer.abstract_state, rng=None)
    shardings = replace(trainer.state_shardings, rng=None)
    return jax.device_put(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state), shardings)


def elements(mesh, zero, *, of_state):
    """Scalars of the parameters on one device, or of what ZeRO shards."""
    shape = sl.MeshShape.parse(mesh)
    fsdp, tensor = shape.size("fsdp"), shape.size("tensor")
    data = shape.size("data") if zero == 3 or (zero and of_state) else 1
    matrices = 2 * EMBED * MLP // (fsdp * tensor * data)
    bias = MLP // (tensor * (data if zero in (1, 2) else 1))
    return matrices + EMBED // (fsdp * data) + bias


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize(("mesh", "zero"), PLANS)
def test_bytes_on_a_device_equal_the_closed_form(mesh, zero, name):
    optimizer, copies = COPIES[name]
    made = bound(mesh, zero=zero)
    state = placed(made, optimizer)
    parameters = 4 * elements(mesh, zero, of_state=False)
    shares = 4 * elements(mesh, zero, of_state=True)
    count = sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == ())
    assert on_first_device(state.params) == parameters
    assert on_first_device(state.opt_state) == copies * shares + count
    explained = made.explain(optimizer).totals
    assert explained["parameters"].per_device == parameters
    assert explained["gradients"].per_device == shares
    assert explained["optimizer_state"].per_device == copies * shares + count


@pytest.mark.parametrize(("zero", "shards"), [(0, 2), (3, 8)])
def test_bytes_of_adafactors_factors(zero, shards):
    optimizer = optax.adafactor(1e-3, min_dim_size_to_factor=8)
    made = bound("data=4,fsdp=2", zero=zero)
    state = placed(made, optimizer)
    # Each matrix keeps one mean per row and one per column: that along embed is split, that along mlp is not.
    vectors = 4 * (EMBED // shards + MLP)  # the second moments of scale and bias
    factors = 2 * 4 * (EMBED // shards + MLP)
    small = sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state) if leaf.shape in ((), (1,)))
    assert on_first_device(state.opt_state) == vectors + factors + small
    assert made.explain(optimizer).totals["optimizer_state"].per_device == vectors + factors + small
