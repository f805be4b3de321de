"""Lookups in a table split over its rows: the rows and the gradients of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshes import ShardingError, make_mesh
from shardlib.ops import vocab_embedding
from shardlib.ops.vocab_embedding import embed_tokens
from shardlib.ops.vocab_shards import Shards
from tests.oracle import assert_trees_equal
from tests.vocabularies import under_a_stage

STORED, EMBED = 24, 8
TABLE = jnp.asarray(np.random.default_rng(0).normal(size=(STORED, EMBED)), jnp.float32)
IDS = jnp.asarray(np.random.default_rng(1).integers(0, 19, (4, 10)), jnp.int32)


def with_gradient(lookup, table, ids):
    """Rows and the gradient of the table, float32; every occurrence of an id has another cotangent."""

    def total(table):
        rows = lookup(table, ids).astype(jnp.float32)
        return (rows * jnp.sin(jnp.arange(rows.size, dtype=jnp.float32)).reshape(rows.shape)).sum(), rows

    (_, rows), gradient = jax.value_and_grad(total, has_aux=True)(table)
    return rows, gradient.astype(jnp.float32)


WANTED = with_gradient(lambda table, ids: table[ids], TABLE, IDS)


@pytest.mark.newest
@pytest.mark.parametrize(
    ("mesh", "vocab"),
    [
        ("tensor=1", 19),
        ("tensor=2", None),
        ("data=2,tensor=4", 19),
        ("tensor=8", 19),
        ("data=2,tensor=2,context=2", None),
    ],
)
def test_rows_and_gradients_of_one_device(mesh, vocab):
    lookup = functools.partial(embed_tokens, vocab=vocab, mesh=make_mesh(mesh))
    with jax.numpy_dtype_promotion("strict"):
        rows, gradient = jax.jit(functools.partial(with_gradient, lookup))(TABLE, IDS)
    np.testing.assert_array_equal(rows, WANTED[0])
    assert_trees_equal(gradient, WANTED[1], "table")
    assert (np.asarray(gradient)[19:] == 0).all()


@pytest.mark.parametrize("checked", [False, True])
def test_on_the_slices_of_a_manual_region(checked):
    region = jax.shard_map(
        functools.partial(with_gradient, embed_tokens),
        mesh=make_mesh("tensor=4"),
        in_specs=(P("tensor"), P()),
        out_specs=(P(), P("tensor")),
        check_vma=checked,
    )
    assert_trees_equal(jax.jit(region)(TABLE, IDS), WANTED, "manual")
    across = jax.shard_map(
        embed_tokens, mesh=make_mesh("data=2,tensor=4"), in_specs=(P("tensor"), P("data")), out_specs=P("data")
    )
    assert_trees_equal(jax.jit(functools.partial(with_gradient, across))(TABLE, IDS), WANTED, "across a boundary")


@pytest.mark.newest
def test_nestedunder_a_stage_with_data_beside():
    mesh = make_mesh("stage=2,data=2,tensor=2")
    nested = under_a_stage(functools.partial(with_gradient, embed_tokens), mesh)
    assert_trees_equal(jax.jit(nested)(TABLE, IDS), WANTED, "nested")


@pytest.mark.newest
def test_rows_split_over_an_axis_that_stays_automatic_too():
    # XLA's partitioner aborts on this gather unless the rows are put together first (JAX 0.12.0).
    mesh = make_mesh("data=2,expert=2,tensor=2")
    place = lambda *spec: NamedSharding(mesh, P(*spec))  # noqa: E731
    lookup = functools.partial(embed_tokens, mesh=mesh, batch_axes=())
    jitted = jax.jit(
        functools.partial(with_gradient, lookup), in_shardings=(place(("tensor", "expert")), place("data"))
    )
    assert_trees_equal(jitted(TABLE, IDS), WANTED, "expert beside")


def test_a_table_spread_over_stages_too():
    mesh = make_mesh("stage=2,data=2,tensor=2")
    region = jax.shard_map(
        functools.partial(with_gradient, functools.partial(embed_tokens, axes=("stage", "tensor"))),
        mesh=mesh,
        axis_names={"stage"},
        in_specs=(P("stage"), P()),
        out_specs=(P(), P("stage")),
        check_vma=False,
    )
    assert_trees_equal(jax.jit(region)(TABLE, IDS), WANTED, "spread")


def test_bfloat16_rows_are_exact_whatever_the_sum_is_made_in():
    table = TABLE.astype(jnp.bfloat16)
    for dtype in (jnp.float32, jnp.bfloat16):
        lookup = functools.partial(embed_tokens, mesh=make_mesh("tensor=4"), reduce_dtype=dtype)
        rows = jax.jit(lookup)(table, IDS)
        assert rows.dtype == jnp.bfloat16
        np.testing.assert_array_equal(rows.astype(jnp.float32), table[IDS].astype(jnp.float32))


@pytest.mark.parametrize("mesh", [None, "tensor=4"])
def test_ids_outside_the_vocabulary_are_seen(mesh):
    ids = IDS.at[0, 0].set(19).at[0, 1].set(-1).at[0, 2].set(1000)
    lookup = functools.partial(embed_tokens, vocab=19, mesh=mesh and make_mesh(mesh))
    rows, gradient = jax.jit(functools.partial(with_gradient, lookup))(TABLE, ids)
    assert np.isnan(np.asarray(rows)[0, :3]).all() and np.isfinite(np.asarray(rows)[0, 3:]).all()
    assert np.isfinite(np.asarray(gradient)).all() and (np.asarray(gradient)[19:] == 0).all()


def test_negative_controls(monkeypatch):
    lookup = functools.partial(embed_tokens, mesh=make_mesh("tensor=4"))
    found = lambda: jax.jit(functools.partial(with_gradient, lookup))(TABLE, IDS)  # noqa: E731
    assert_trees_equal(found(), WANTED, "right")
    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="no sum"):
        patch.setattr(Shards, "total", lambda self, x: x)
        assert_trees_equal(found(), WANTED, "no sum")
    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="no mask"):
        everywhere = lambda shards, ids, num_rows: (ids % num_rows, jnp.ones(ids.shape, bool))  # noqa: E731
        patch.setattr(vocab_embedding, "_local", everywhere)
        assert_trees_equal(found(), WANTED, "no mask")


def test_what_does_not_fit_is_named():
    with pytest.raises(ShardingError, match=r"takes a table .* not float32\[24, 8\] and float32\[24, 8\]"):
        embed_tokens(TABLE, TABLE)
    with pytest.raises(ShardingError, match=r"table: vocab dim of size 24 not divisible by tensor=5; fix: store"):
        embed_tokens(TABLE, IDS, mesh=make_mesh("tensor=5", devices=jax.devices()[:5]))
