"""Field troubles, group COL: collectives nobody asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib import annotate
from shardlib.audit.contract import hold
from shardlib.audit.hlo import parse
from shardlib.audit.joined_layouts import check_joined_layouts
from shardlib.audit.relayout import middle_layouts
from shardlib.rules import Rules
from shardlib.slices import cut
from tests.moving import bound, compiled, program

RULES = Rules.parse(["batch -> data", "vocab -> model", "length -> none", "embed -> none"])


def kinds_of_embedding(rules):
    """Collectives of a lookup in a table split over its rows, by kind."""
    mesh = sl.make_mesh("data=4,model=2")

    def lookup(table, ids):
        return annotate.constrain(jnp.take(table, ids, axis=0), "batch", "length", "embed")

    place = lambda *spec: jax.NamedSharding(mesh, P(*spec))  # noqa: E731
    jitted = jax.jit(sl.with_rules(lookup, rules, mesh), in_shardings=(place("model"), place("data")))
    shapes = jax.ShapeDtypeStruct((64, 32), jnp.float32), jax.ShapeDtypeStruct((8, 16), jnp.int32)
    return [collective.kind for collective in parse(jitted.lower(*shapes).compile().as_text()).collectives]


def relaid(*specs):
    """The program that takes a cube from the first layout through the others."""
    mesh = sl.make_mesh("x=4,y=2")
    places = [jax.NamedSharding(mesh, spec) for spec in specs]

    def change(cube):
        for place in places[1:]:
            cube = jax.lax.with_sharding_constraint(cube, place)
        return cube

    jitted = jax.jit(change, in_shardings=places[0], out_shardings=places[-1])
    return compiled(jitted.lower(jax.ShapeDtypeStruct((16, 16, 16), jnp.float32)))


def test_col_01_a_layout_change_that_gathers_everything_is_named_and_has_a_way_round():
    source, target = P("y", None, "x"), P(None, ("x", "y"), None)
    found = hold(relaid(source, target), (), sl.MeshShape.parse("x=4,y=2"))
    assert found.problems
    assert "all-gather to f32[16,16,16] at jit(change)" in str(found) and "test_col.py:" in str(found)
    between = middle_layouts(source, target)
    assert between == (P("y", "x", None),)
    kinds = {collective.kind for collective in relaid(source, *between, target).collectives}
    assert kinds == {"all-to-all"}
    assert middle_layouts(P(("x", "y")), P(("y", "x"))) is None


def test_col_02_a_state_on_one_device_is_placed_before_the_step():
    made, moved = program("fsdp=4")
    trainer = sl.Trainer(made, optax.adam(1e-3))
    alone = jax.device_put(trainer.init(jax.random.key(0)), jax.devices()[0])
    batch = {"x": np.ones((32, 16), np.float32), "weights": np.ones((32,), np.float32)}
    state, _ = trainer.step(alone, batch)
    for leaf, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(trainer.state_shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim)
    assert hold(moved, made.promised(), made.plan.mesh).problems == ()


@pytest.mark.newest
def test_col_03_embedding_keeps_the_data_axis():
    assert kinds_of_embedding(RULES) == ["all-reduce"]
    # Negative control: a spec that leaves the data axis out gathers the batch.
    dropped = Rules.parse(["batch -> none", *map(str, RULES.rules[1:])])
    assert "all-gather" in kinds_of_embedding(dropped)


@pytest.mark.parametrize("lowering", ["automatic", "explicit"])
def test_col_04_cutting_a_batch_moves_no_row(lowering):
    _, moved = program("data=8", num_microbatches=4, lowering=lowering)
    assert {collective.kind for collective in moved.collectives} == {"all-reduce"}


def test_col_04_every_row_is_used_once():
    for num_slices, num_shards in ((1, 1), (1, 8), (8, 1), (1, 3)):
        pieces = cut(np.arange(32), 0, num_microbatches=4, num_slices=num_slices, num_shards=num_shards)
        assert pieces.shape == (4, num_slices, 8 // num_slices)
        assert sorted(pieces.ravel().tolist()) == list(range(32))
    # Each microbatch has a row of each of the eight shards of four.
    taken = cut(np.arange(32), 0, num_microbatches=4, num_slices=1, num_shards=8)
    assert (np.sort(taken[:, 0] // 4) == np.arange(8)).all()
    # Negative control: rows in a row belong to two shards, and must move.
    _, moved = program("data=8", num_microbatches=4, lowering="automatic", random_slices=4)
    assert {collective.kind for collective in moved.collectives} != {"all-reduce"}


class Stack(nnx.Module):
    """Four equal layers under one scan."""

    def __init__(self, rngs: nnx.Rngs):
        value = jax.random.normal(rngs.params(), (4, 64, 64))
        self.layers = nnx.Param(value, logical_axes=("layers", "embed", "mlp"))


@pytest.mark.parametrize("remat", [False, True])
def test_col_05_layers_are_gathered_one_at_a_time(remat):
    def loss(params, batch, rng):
        layer = lambda x, kernel: (jnp.tanh(x @ kernel), None)  # noqa: E731
        layer = jax.checkpoint(layer, prevent_cse=False) if remat else layer
        return jnp.square(jax.lax.scan(layer, batch, jax.tree.leaves(params)[0])[0]).mean()

    spec = sl.ArraySpec(shape=(512, 64), dtype="float32", axes=("batch", None))
    made = bound("fsdp=8", model=(Stack, loss, spec))
    gathers = compiled(sl.Trainer(made, optax.sgd(0.1)).lowered).of_kind("all-gather")
    assert gathers and max(one.result_bytes for one in gathers) == 64 * 64 * 4
    assert all(one.times_executed == 4 for one in gathers)
    # The explicit lowering gathers whole stacks, says so, and what that costs.
    explicit = bound("fsdp=8", model=(Stack, loss, spec), lowering="explicit").explain()
    assert "sharded parameters are gathered once per step" in str(explicit)
    assert "fsdp: all-gather of split parameters, 56.0 KiB per device" in str(explicit)


def test_col_07_gradients_are_reduced_once_a_step():
    _, moved = program("data=8", num_microbatches=4)
    assert all(collective.loop_depth == 0 for collective in moved.collectives)
    reduced = [shape.dims for one in moved.collectives for shape in one.operands if shape.dims != (6,)]
    assert sorted(reduced) == [(16,), (16, 24), (24,), (24, 16)]
    # Negative control: the compiler's own place is inside the loop.
    _, moved = program("data=8", num_microbatches=4, lowering="automatic")
    assert any(collective.times_executed == 4 for collective in moved.collectives)


def test_col_08_joining_arrays_of_different_layouts_keeps_their_values():
    mesh = sl.make_mesh("data=4,model=2")
    place = lambda size, *spec: jax.device_put(np.ones(size, np.float32), jax.NamedSharding(mesh, P(*spec)))  # noqa: E731
    for parts in ((place(2), place(10, "model")), (place(4, "data"), place(12, "data"))):
        joined = jax.jit(lambda *parts: jnp.concatenate(parts))(*parts)
        np.testing.assert_array_equal(joined, np.ones(joined.shape))


@pytest.mark.newest
def test_col_08_a_self_test_at_start():
    mesh = sl.make_mesh("data=4,model=2")
    check_joined_layouts(mesh)
    # Negative control: a join that sums the two copies of what comes first.
    with pytest.raises(sl.ShardingError) as caught:
        check_joined_layouts(mesh, join=lambda parts: jnp.concatenate([2 * parts[0], parts[1]]))
    heading, *problems = str(caught.value).splitlines()
    assert heading.endswith("wrongly on mesh data=4,model=2; fix: install another version of JAX:")
    assert len(problems) == 9
    assert (
        problems[2]
        == f"- {P()} beside {P('model')}: [2.0, 4.0, 1.0, 2.0, 3.0, 4.0], not [1.0, 2.0, 1.0, 2.0, 3.0, 4.0]"
    )
