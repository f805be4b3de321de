"""Annotations are inert without a plan, mean something under one, and survive stacking."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from meshes import ShardingError, make_mesh
from shardlib import annotate
from shardlib.place import with_rules
from shardlib.rules import Rules

RULES = Rules.parse(["batch -> data", "embed -> tensor", "length -> none"])
MESH = "data=4,tensor=2"


def doubled(x):
    return annotate.constrain(x * 2, "batch", "embed")


def test_inert_without_a_plan():
    x = jnp.ones((3, 5))
    assert annotate.constrain(x, "anything", "goes") is x
    assert "sharding" not in jax.jit(doubled).lower(x).as_text()
    query, kv = jnp.ones((2, 4, 4, 8)), jnp.ones((2, 4, 2, 8))
    wanted = jax.nn.dot_product_attention(query, kv, kv, is_causal=True)
    np.testing.assert_array_equal(annotate.attention(query, kv, kv, causal=True), wanted)


def test_segment_ids_and_mask_combine():
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (1, 4, 2, 8)) for key in keys)
    segments = jnp.array([[0, 0, 1, 1]])
    found = annotate.attention(q, k, v, causal=True, segment_ids=segments)
    alone = [annotate.attention(q[:, s], k[:, s], v[:, s], causal=True) for s in (slice(0, 2), slice(2, 4))]
    np.testing.assert_allclose(found, jnp.concatenate(alone, axis=1), rtol=1e-6)


@pytest.mark.newest
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_constrain_places_under_rules_on_both_kinds_of_mesh(axis_type):
    mesh = make_mesh(MESH, axis_type=axis_type)
    with jax.set_mesh(mesh):
        found = jax.jit(with_rules(doubled, RULES, mesh))(np.ones((8, 4), np.float32))
    assert found.sharding.spec == P("data", "tensor")
    np.testing.assert_array_equal(found, 2 * np.ones((8, 4)))


@pytest.mark.newest
def test_other_rules_make_another_program():
    mesh, x = make_mesh(MESH), jnp.ones((8, 4))
    other = Rules.parse(["batch -> tensor", "embed -> none"])
    texts = [jax.jit(with_rules(doubled, rules, mesh)).lower(x).as_text() for rules in (RULES, other)]
    assert texts[0] != texts[1]
    shards = [jax.jit(with_rules(doubled, r, mesh))(x).addressable_shards[0].data.shape for r in (RULES, other)]
    assert shards == [(2, 2), (4, 4)]


def test_rules_do_not_leak_out_of_their_function():
    mesh = make_mesh(MESH)

    def fails(x):
        doubled(x)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        with_rules(fails, RULES, mesh)(jnp.ones((8, 4)))
    x = jnp.ones((3, 5))
    assert annotate.constrain(x, "batch", "embed") is x


@pytest.mark.parametrize(
    ("shape", "names", "says"),
    [
        ((8, 4), ("batch",), "constrain(x, batch): 1 names for an array of rank 2 [8, 4]"),
        ((8, 4), ("batch", "embd"), "no rule names the logical axis 'embd' (did you mean 'embed'?)"),
        ((6, 4), ("batch", "embed"), "dim 0 'batch': size 6 not divisible by data=4"),
    ],
)
def test_a_wrong_constraint_is_an_error_that_names_it(shape, names, says):
    traced = with_rules(lambda x: annotate.constrain(x, *names), RULES, make_mesh(MESH).abstract_mesh)
    with pytest.raises(ShardingError) as caught:
        jax.eval_shape(traced, jax.ShapeDtypeStruct(shape, jnp.float32))
    assert says in str(caught.value)
    assert "fix: " in str(caught.value)


def test_the_attention_slot_works_under_rules_that_do_not_name_its_axes():
    query, kv = jnp.ones((4, 4, 4, 8)), jnp.ones((4, 4, 2, 8))
    rules = Rules.parse(["batch -> data"])
    found = with_rules(lambda q, k, v: annotate.attention(q, k, v), rules, make_mesh(MESH))(query, kv, kv)
    np.testing.assert_allclose(found, annotate.attention(query, kv, kv), rtol=1e-6)


def test_one_device_needs_no_constraint():
    mesh = make_mesh("data=1")
    x = jnp.ones((3, 5))
    assert with_rules(lambda x: annotate.constrain(x, "batch", "embed"), RULES, mesh)(x) is x


def test_boxes_survive_flax_bridges_and_stacks():
    box = annotate.LogicalAxes(jnp.ones((4, 8)), ("embed", "mlp"))
    stacked = box.add_axis(0, {})
    assert stacked.names == ("layers", "embed", "mlp")
    assert stacked.add_axis(0, {}).names == (None, "layers", "embed", "mlp")
    assert stacked.add_axis(1, {nn.PARTITION_NAME: "stage"}).names == ("layers", "stage", "embed", "mlp")
    assert stacked.remove_axis(0, {}) == box
    back = annotate.LogicalAxes.from_nnx_metadata(box.to_nnx_metadata())
    assert back.names == box.names


@pytest.mark.parametrize(("axis", "names"), [(0, ("layers", "embed", "mlp")), (-1, ("embed", "mlp", "layers"))])
def test_name_stack_puts_the_stack_axis_where_vmap_put_it(axis, names):
    init = annotate.nnx_logical(nnx.initializers.lecun_normal(), "embed", "mlp")

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=axis)
    def layers(rngs):
        return nnx.Linear(4, 8, use_bias=False, kernel_init=init, rngs=rngs)

    stack = annotate.name_stack(layers(nnx.Rngs(0)), axis=axis)
    assert stack.kernel.get_metadata()[annotate.METADATA_KEY] == names
    again = annotate.name_stack(stack, axis=axis)
    assert again.kernel.get_metadata()[annotate.METADATA_KEY] == names
