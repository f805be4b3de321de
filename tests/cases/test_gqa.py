"""Field troubles, group GQA: fewer key and value heads than query heads or shards."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardlib as sl
from meshes import make_mesh
from shardlib import annotate
from shardlib.audit.hlo import parse
from shardlib.ops.attention import sharded_heads_attention
from shardlib.rules import Rules
from shardlib.specs import resolve
from shardlib.strategies import default_rules
from tests.cases.test_rul import array
from tests.oracle import assert_trees_equal


def weights(heads: int, kv_heads: int, *, head_dim: int = 8, embed: int = 16):
    """Projections of one attention layer, with biases on keys and values."""
    keys = iter(jax.random.split(jax.random.key(0), 6))
    draw = lambda *shape: np.asarray(jax.random.normal(next(keys), shape)) / embed**0.5  # noqa: E731
    return {
        "query": draw(embed, heads, head_dim),
        "key": draw(embed, kv_heads, head_dim),
        "key_bias": draw(kv_heads, head_dim),
        "value": draw(embed, kv_heads, head_dim),
        "value_bias": draw(kv_heads, head_dim),
        "out": draw(heads, head_dim, embed),
    }


AXES = {
    "query": ("embed", "heads", "head_dim"),
    "key": ("embed", "kv_heads", "head_dim"),
    "key_bias": ("kv_heads", "head_dim"),
    "value": ("embed", "kv_heads", "head_dim"),
    "value_bias": ("kv_heads", "head_dim"),
    "out": ("heads", "head_dim", "embed"),
}


def attend(params, x):
    """[batch, length, embed] to the same."""
    query = jnp.einsum("ble,ehd->blhd", x, params["query"])
    query = annotate.constrain(query, "batch", "length", "heads", "head_dim")
    key = jnp.einsum("ble,ehd->blhd", x, params["key"]) + params["key_bias"][None, None]
    key = key * (1 + jnp.arange(x.shape[1]) / 8)[None, :, None, None]  # or softmax would ignore the keys' bias
    value = jnp.einsum("ble,ehd->blhd", x, params["value"]) + params["value_bias"][None, None]
    key, value = (annotate.constrain(a, "batch", "length", "kv_heads", "head_dim") for a in (key, value))
    x = annotate.attention(query, key, value, causal=True)
    x = annotate.constrain(x, "batch", "length", "heads", "head_dim")
    return jnp.einsum("blhd,hde->ble", x, params["out"])


@functools.cache
def compiled(heads, kv_heads, text, *, length=6, grad=False):
    """The attention of the sizes on the mesh: abstract arguments' shardings, notices, executable."""
    mesh, params = make_mesh(text), weights(heads, kv_heads)
    tree = {name: array(*value.shape, axes=AXES[name]) for name, value in params.items()}
    found = resolve(tree, default_rules(), mesh)
    function = jax.grad(lambda params, x: (attend(params, x) ** 2).sum()) if grad else attend
    wanted = sl.shardings(found.specs, mesh)
    jitted = jax.jit(
        sl.with_rules(function, default_rules(), mesh),
        in_shardings=(wanted, jax.NamedSharding(mesh, P())),
        out_shardings=wanted if grad else jax.NamedSharding(mesh, P()),
    )
    x = jax.ShapeDtypeStruct((2, length, 16), jnp.float32)
    return found, jitted.lower(params, x).compile()


def inputs(length=6):
    return np.random.default_rng(1).normal(size=(2, length, 16)).astype(np.float32)


@pytest.mark.newest
def test_gqa_01_fewer_kv_heads_than_shards():
    found, executable = compiled(4, 2, "tensor=4")
    assert any("key [16, 2, 8] dim 1 'kv_heads': size 2 not divisible by tensor=4" in n for n in found.notices)
    assert found.specs["key"] == P(None, None, None)
    assert found.specs["query"] == P(None, "tensor", None)
    params, x = weights(4, 2), inputs()
    assert_trees_equal(executable(params, x), attend(params, x), "attention")


def test_gqa_02_no_split_inside_a_head():
    rules = Rules.parse(["embed -> none", "kv_heads -> tensor; indivisible=replicate", "batch -> none"])
    mesh = make_mesh("tensor=4")

    def project(kernel, x, axes):
        spec = resolve({"k": array(16, 8, axes=axes)}, rules, mesh).specs["k"]

        def body(kernel, x):
            heads = (x @ kernel).reshape(4, 2, 4)
            return annotate.constrain(jnp.sin(heads), "batch", "kv_heads", None)

        shardings = (jax.NamedSharding(mesh, spec), jax.NamedSharding(mesh, P()))
        text = jax.jit(sl.with_rules(body, rules, mesh), in_shardings=shardings).lower(kernel, x).compile().as_text()
        return spec, [collective.kind for collective in parse(text).collectives]

    kernel, x = jnp.ones((16, 8)), jnp.ones((4, 16))
    spec, kinds = project(kernel, x, ("embed", annotate.blocks("kv_heads", 2)))
    assert (spec, kinds) == (P(None, None), [])
    # Negative control: judged by columns alone, 8 divide by 4, a head is cut in half and the compiler must gather it.
    spec, kinds = project(kernel, x, ("embed", "kv_heads"))
    assert spec == P(None, "tensor")
    assert kinds


def test_gqa_03_each_shard_holds_the_head_of_its_queries():
    mesh = make_mesh("tensor=4")
    placed = []

    def constrain(x, names):
        assert names == ("batch", None, "heads", "head_dim")
        placed.append(jax.device_put(x, jax.NamedSharding(mesh, P(None, None, "tensor", None))))
        return placed[-1]

    kv = jnp.broadcast_to(jnp.arange(1.0, 3.0)[None, None, :, None], (1, 6, 2, 8))
    query = jax.random.normal(jax.random.key(0), (1, 6, 8, 8))
    axes_of = lambda shape: ((), ("tensor",))  # noqa: E731
    attend_in = sharded_heads_attention(axes_of, constrain, mesh=make_mesh("tensor=4"), platform=None, manual=False)
    found = attend_in(query, kv, kv, causal=True, mask=None, segment_ids=None)
    for copy in placed:
        held = [np.unique(shard.data).tolist() for shard in copy.addressable_shards]
        assert held == [[1.0], [1.0], [2.0], [2.0]]
    np.testing.assert_allclose(found, annotate.attention(query, kv, kv, causal=True), rtol=1e-6)


def test_gqa_05_gradients_of_a_shared_head():
    _, executable = compiled(4, 1, "tensor=4", grad=True)
    params, x = weights(4, 1), inputs()
    wanted = jax.grad(lambda params: (attend(params, x) ** 2).sum())(params)
    grads = executable(params, x)
    for name in ("key", "key_bias", "value", "value_bias"):
        shards = [np.asarray(shard.data) for shard in grads[name].addressable_shards]
        assert all(np.array_equal(shard, shards[0]) for shard in shards)
    assert_trees_equal(grads, wanted, "gradient")


@pytest.mark.parametrize("text", ["tensor=2", "tensor=8"])
def test_gqa_07_no_needless_all_to_all(text):
    found, executable = compiled(8, 4, text, length=8)
    kinds = {collective.kind for collective in parse(executable.as_text()).collectives}
    assert "all-to-all" not in kinds
    noticed = any("kv_heads" in notice and "not divisible by tensor=8" in notice for notice in found.notices)
    assert noticed == (text == "tensor=8")
    params, x = weights(8, 4), inputs(8)
    assert_trees_equal(executable(params, x), attend(params, x), "attention")
