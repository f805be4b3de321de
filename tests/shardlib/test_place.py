"""Arrays where they belong: shardings, buffers of their own, states of another structure."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from meshes import ShardingError, abstract_mesh, make_mesh
from shardlib.place import decide_activation, place, shardings
from shardlib.rules import Rules


@pytest.mark.newest
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_place_puts_every_leaf_on_its_sharding(axis_type):
    mesh = make_mesh("data=4,tensor=2", axis_type=axis_type)
    wanted = shardings({"w": P("data", "tensor"), "s": P()}, mesh)
    placed = place({"w": np.arange(32.0, dtype=np.float32).reshape(8, 4), "s": np.float32(3)}, wanted)
    assert placed["w"].sharding == wanted["w"]
    assert placed["w"].addressable_shards[0].data.shape == (2, 2)
    assert len(placed["s"].addressable_shards) == 8
    np.testing.assert_array_equal(placed["w"], np.arange(32.0).reshape(8, 4))


def pointers(array):
    return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


@pytest.mark.parametrize("spec", [P(), P("data")])
def test_one_array_under_two_leaves_gets_two_buffers(spec):
    mesh = make_mesh("data=8")
    array = jax.device_put(jnp.arange(64.0), jax.NamedSharding(mesh, spec))
    placed = place({"emb": array, "head": array}, shardings({"emb": spec, "head": spec}, mesh))
    assert not pointers(placed["emb"]) & pointers(placed["head"])
    np.testing.assert_array_equal(placed["emb"], placed["head"])
    assert placed["head"].sharding == placed["emb"].sharding


def test_typed_keys_are_placed_and_copied_too():
    mesh = make_mesh("data=2")
    key = jax.device_put(jax.random.key(3), jax.NamedSharding(mesh, P()))
    placed = place([key, key], shardings([P(), P()], mesh))
    raw = [jax.random.key_data(leaf) for leaf in placed]
    assert not pointers(raw[0]) & pointers(raw[1])
    np.testing.assert_array_equal(*raw)


def test_another_structure_names_missing_and_unknown_paths():
    wanted = shardings({"layers": {"up": P(), "down": P()}}, make_mesh("data=2"))
    with pytest.raises(ShardingError) as caught:
        place({"layers": {"up": jnp.ones(2), "dwn": jnp.ones(2)}}, wanted)
    text = str(caught.value)
    assert "- missing: layers/down" in text
    assert "- unknown: layers/dwn" in text


def test_shardings_need_no_devices():
    mesh = abstract_mesh("data=1024,tensor=8")
    sharding = shardings({"w": P("data", "tensor")}, mesh)["w"]
    assert sharding.shard_shape((2048, 64)) == (2, 8)


def test_an_activation_is_decided_with_every_problem_listed():
    rules = Rules.parse(["batch -> data", "embed -> tensor"])
    with pytest.raises(ShardingError) as caught:
        decide_activation(("batch", "embed"), (6, 3), rules=rules, mesh=abstract_mesh("data=4,tensor=2"))
    text = str(caught.value)
    assert "activation [6, 3] named (batch, embed) on mesh data=4,tensor=2:" in text
    assert "size 6 not divisible by data=4" in text
    assert "size 3 not divisible by tensor=2" in text
