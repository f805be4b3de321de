"""Compiled train steps keep their promises, and every way to break one is seen."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardlib as sl
from meshes.errors import ShardingError
from shardlib.audit.contract import hold
from shardlib.audit.stablehlo import reduction_dtypes
from tests.moving import bound, compiled, gpt_program, program

EXPLICIT = [
    ("data=8", {}),
    ("fsdp=8", {"num_microbatches": 2}),
    ("fsdp=4", {"num_microbatches": 2, "gather": "microbatch"}),
    ("replica=2,fsdp=4", {}),
    ("replica=2,data=2,fsdp=2", {"zero": 2}),
    ("data=4,fsdp=2", {"zero": 1}),
    ("data=2,fsdp=2", {"zero": 3, "num_microbatches": 2}),
    ("data=2,fsdp=2,tensor=2", {}),
    ("fsdp=4,tensor=2", {"num_microbatches": 2, "gather": "microbatch"}),
    ("data=2,tensor=4", {"zero": 1}),
]


@pytest.mark.parametrize(("mesh", "plan"), EXPLICIT, ids=lambda value: str(value))
def test_the_explicit_lowering_keeps_its_promises_to_the_byte(mesh, plan):
    found, compiled_program = program(mesh, **plan)
    contract = hold(compiled_program, found.promised(), found.plan.mesh)
    assert contract.problems == contract.unattributed == (), str(contract)
    exact = [row for row in contract.rows if row.exact]
    assert exact and all(row.excess_bytes == 0 for row in exact), str(contract)
    assert all(row.found_arrays == row.promised_arrays for row in exact), str(contract)


@pytest.mark.newest
@pytest.mark.parametrize("mesh", ["fsdp=8", "data=2,tensor=4"])
def test_the_automatic_lowering_stays_below_the_known_form_and_reports_its_excess(mesh):
    found, compiled_program = gpt_program(mesh)
    contract = hold(compiled_program, found.promised(), found.plan.mesh)
    assert contract.problems == (), str(contract)
    assert contract.excess_bytes > 0
    assert not any(row.exact for row in contract.rows)
    assert "every promise is kept" in str(contract)


def test_the_optimizers_own_sums_are_shown_and_not_held():
    adafactor = optax.adafactor(1e-3, min_dim_size_to_factor=8)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), adafactor)
    found = bound("fsdp=4", lowering="explicit")
    contract = hold(compiled(sl.Trainer(found, clipped).lowered), found.promised(), found.plan.mesh)
    assert contract.problems == (), str(contract)
    assert contract.optimizer and "optimizer" in str(contract)


# By hand: a step over data=8 that reduces the gradient of w as promised, and variants that do not.
MESH = sl.MeshShape.parse("data=8")
SIZE = 64


def hand_made(body, *, gathered=False):
    mesh = sl.make_mesh("data=8")
    spec = P("data") if gathered else P()
    step = jax.shard_map(body, mesh=mesh, in_specs=(spec, P("data")), out_specs=P("data"), check_vma=False)
    shapes = jax.ShapeDtypeStruct((SIZE,), jnp.float32), jax.ShapeDtypeStruct((32, SIZE), jnp.float32)
    return compiled(jax.jit(step).lower(*shapes))


def promises(tensors="whole gradients"):
    """One all-reduce of 64 floats over data=8, as a plan states it."""
    all_of_them = bound("data=8", lowering="explicit").promised()
    one = next(promise for promise in all_of_them if promise.what == "whole gradients")
    sent = 2 * 7 / 8 * SIZE * 4
    return (replace(one, count=1, bytes_per_device=sent, form_bytes=sent, widened_bytes=sent),)


def gradients_by_row(w, x):
    return jnp.sin(w[None] * x) * x


def test_a_kept_promise():
    kept = hold(hand_made(lambda w, x: jax.lax.psum(gradients_by_row(w, x).sum(0), "data")), promises(), MESH)
    assert kept.problems == () and [row.excess_bytes for row in kept.rows] == [0]


def test_a_dropped_sum_fails():
    broken = hold(hand_made(lambda w, x: gradients_by_row(w, x).sum(0)), promises(), MESH)
    assert broken.problems == ("all-reduce over data: 448 of 448 bytes are missing",)


def test_a_doubled_sum_fails():
    def body(w, x):
        once = jax.lax.psum(gradients_by_row(w, x).sum(0), "data")
        return jax.lax.psum(jnp.tanh(once), "data")

    broken = hold(hand_made(body), promises(), MESH)
    assert broken.problems == ("all-reduce over data: 448 bytes beyond the 448 bytes promised",)


def test_a_sum_moved_into_the_loop_fails():
    def body(w, x):
        def turn(total, row):
            return total + jax.lax.psum(gradients_by_row(w, row[None])[0], "data"), None

        return jax.lax.scan(turn, jnp.zeros(SIZE), x)[0]

    broken = hold(hand_made(body), promises(), MESH)
    assert broken.problems == (
        "all-reduce over data: 448 of 448 bytes are missing",
        "all-reduce over data, in a loop: 1,792 bytes beyond the nothing promised",
    )


def test_a_gather_of_the_whole_fails():
    def body(w, x):
        whole = jax.lax.all_gather(w, "data", tiled=True)
        return jax.lax.psum(gradients_by_row(whole, x).sum(0), "data")

    broken = hold(hand_made(body, gathered=True), promises(), MESH)
    assert broken.problems == ("all-gather over data: 224 bytes beyond the nothing promised",)


def test_a_collective_along_no_axis_is_listed():
    def body(w, x):
        halves = [[0, 1, 2, 3], [4, 5, 6, 7]]
        return jax.lax.psum(gradients_by_row(w, x).sum(0), "data", axis_index_groups=halves)

    broken = hold(hand_made(body), promises(), MESH)
    assert len(broken.unattributed) == 1 and "all-reduce to f32[64]" in broken.unattributed[0]
    assert broken.problems[-1].startswith("unattributed: all-reduce")


def test_the_report_reads_as_a_table():
    text = str(hold(hand_made(lambda w, x: gradients_by_row(w, x).sum(0)), promises(), MESH))
    assert text.splitlines() == [
        "mesh data=8: bytes each device sends in one step",
        "axis  kind        of               promised  known form  found  excess",
        "data  all-reduce  whole gradients       448       exact      0    -448",
        "problem: all-reduce over data: 448 of 448 bytes are missing",
    ]


@pytest.mark.newest
def test_reduction_dtypes_and_axes_before_the_backend():
    mesh, shape = sl.make_mesh("data=2,tensor=4"), sl.MeshShape.parse("data=2,tensor=4")

    def body(x):
        small = jax.lax.psum(x.astype(jnp.bfloat16), "data")
        return small, jax.lax.psum_scatter(x, "tensor", scatter_dimension=0, tiled=True)

    step = jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=(P(), P("tensor")), check_vma=False)
    found = reduction_dtypes(jax.jit(step).lower(jnp.ones((16, 4))), shape)
    assert [(one.kind, one.dtype, one.shapes, one.axes) for one in found] == [
        ("all-reduce", "bf16", ((8, 4),), ("data",)),
        ("reduce-scatter", "f32", ((8, 4),), ("tensor",)),
    ]
    with pytest.raises(ShardingError, match="not StableHLO text"):
        reduction_dtypes("HloModule m", shape)
