"""Attention over a divided sequence: the result and the gradients of one device, for every kind, mask and size."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshes import make_mesh
from shardlib.ops.context_attention import KINDS, context_attention
from shardlib.ops.context_layout import PLACEMENTS, document_positions
from shardlib.ops.ring_attention import ring_attention
from tests import sequences
from tests.covering import name, pairwise, product
from tests.oracle import assert_trees_equal
from tests.sequences import (
    BATCH,
    KV_HEADS,
    LENGTH,
    QUICK,
    alone,
    arrays,
    divided,
    masks,
    one_device,
    run,
    with_gradients,
)

FACTORS = {
    "kind": list(KINDS),
    "mask": ["causal", "full", "window", "packed", "padded"],
    "heads": list(KV_HEADS),
    "context": [2, 4, 8],
    "placement": list(PLACEMENTS),
    "beside": ["data", "tensor", "fsdp", "stage"],
}


def slow(*values):
    """A case of the exhaustive tier."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def valid(case):
    alone = case["kind"] == "all_to_all" and case["placement"] != "contiguous"
    fits = case["beside"] == "data" or case["context"] < 8  # of 8 devices
    return fits and not alone and not (case["kind"] == "hybrid" and case["context"] == 2)


@functools.cache
def wanted(mask, heads):
    return alone(arrays(KV_HEADS[heads]), **masks(mask))


def check(*, kind, mask, heads, context, placement, beside="data"):
    found = divided(arrays(KV_HEADS[heads]), kind, context, placement=placement, beside=beside, **masks(mask))
    assert_trees_equal(found, wanted(mask, heads), f"{kind} {mask} beside {beside}")


@pytest.mark.parametrize("case", pairwise(FACTORS, valid=valid), ids=name)
def test_equal_to_one_device(case):
    check(**case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", product(FACTORS | {"beside": ["data", "tensor", "stage"]}, valid=valid), ids=name)
def test_equal_to_one_device_in_every_combination(case):
    check(**case)


@pytest.mark.parametrize(
    "kind, mask",
    [
        ("ring", "by head"),
        ("gather", "by row"),
        ("ring", "both ways"),
        slow("ring", "by row"),
        slow("gather", "by head"),
        slow("gather", "both ways"),
    ],
)
def test_masks_with_rows_and_windows_both_ways(kind, mask):
    check(kind=kind, mask=mask, heads="GQA", context=4, placement="striped" if mask == "by row" else "contiguous")


def test_a_wrong_order_is_seen():
    """Negative control: arrays in their original order, taken for zigzag."""
    query, key, value, _ = arrays(2)
    mesh = make_mesh("context=4")
    attend = functools.partial(context_attention, kind="ring", axis="context", causal=True, mesh=mesh)
    found, wrong = (run(functools.partial(attend, placement=p), query, key, value) for p in PLACEMENTS[:2])
    assert_trees_equal(found, wanted("causal", "GQA")["result"], "contiguous")
    assert float(jnp.abs(wrong - found).max()) > 0.1


@pytest.mark.parametrize("kind", ["ring", slow("gather"), slow("all_to_all")])
def test_rows_that_see_nothing_are_zero(kind):
    """Padding on the left: the first rows have no key at all, and give and take no gradient."""
    options = {"causal": True, "mask": np.broadcast_to(np.arange(LENGTH) >= 11, (BATCH, 1, 1, LENGTH))}
    found = divided(arrays(2), kind, 2, **options)
    assert all(np.isfinite(leaf).all() and not leaf[:, :11].any() for leaf in found.values())
    assert_trees_equal(found, alone(arrays(2), **options), "left padding")


@pytest.mark.newest
@pytest.mark.parametrize(
    "kind, placement", [("ring", "striped"), slow("gather", "zigzag"), ("all_to_all", "contiguous")], ids=str
)
def test_positions_in_place_of_the_placements(kind, placement):
    """Documents whose positions restart: a window counts inside a document, wherever its tokens are stored."""
    segments = sequences.documents()
    options = {"causal": True, "window": 5, "segment_ids": segments, "positions": document_positions(segments)}
    found = divided(arrays(2), kind, 2, placement=placement, **options)
    assert_trees_equal(found, alone(arrays(2), **options), kind)


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_heads_over_a_tensor_axis(kv_heads):
    """KV heads fewer than the tensor shards are repeated for them once; the ring moves one each."""
    mesh = make_mesh("context=2,tensor=4")
    attend = functools.partial(
        context_attention, kind="ring", axis="context", causal=True, head_axes=("tensor",), mesh=mesh
    )
    found = run(functools.partial(with_gradients, attend), *arrays(kv_heads))
    assert_trees_equal(found, wanted("causal", "MHA" if kv_heads == 8 else "GQA"), "tensor")


def test_inside_a_manual_region_with_remat_and_scan():
    """Layers scanned with remat in a region manual over stage and data; only context is made manual inside."""
    mesh = make_mesh("stage=2,data=2,context=2")
    query, key, value, _ = arrays(2)

    def layers(attend, x, key, value):
        block = jax.checkpoint(lambda x, scale: (x + attend(x * scale, key, value), None))
        return jax.lax.scan(block, x, jnp.float32([0.5, 1.5]))[0]

    attend = functools.partial(context_attention, kind="ring", axis="context", causal=True, batch_axes=("data",))

    def local(x, key, value):
        return jax.grad(lambda *x: (layers(attend, *x) ** 2).sum(), argnums=(0, 1, 2))(x, key, value)

    region = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P("data"),) * 3,
        out_specs=(P("data"),) * 3,
        axis_names={"stage", "data"},
        check_vma=False,
    )
    plain = functools.partial(layers, functools.partial(one_device, causal=True))
    truth = run(jax.grad(lambda *x: (plain(*x) ** 2).sum(), argnums=(0, 1, 2)), query, key, value)
    assert_trees_equal(run(region, query, key, value), truth, "nested")


@pytest.mark.parametrize("kind", ["all_to_all", slow("gather")])
def test_under_a_condition_that_differs_between_stages(kind):
    """Only the first of two stages computes; the collectives of these kinds need the devices of their own group."""
    mesh = make_mesh("stage=2,data=2,context=2")
    attend = functools.partial(context_attention, kind=kind, axis="context", causal=True, batch_axes=("data",))

    def local(*operands):
        def loss(*operands):
            first = jax.lax.axis_index("stage") == 0
            return jax.lax.cond(first, lambda: (attend(*operands) ** 2).sum(), lambda: jnp.float32(0))

        return jax.tree.map(lambda x: x[None], jax.grad(loss, argnums=(0, 1, 2))(*operands))

    region = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P("stage"), axis_names={"stage"}, check_vma=False)
    operands = arrays(2)[:3]
    truth = run(jax.grad(lambda *x: (one_device(*x, causal=True) ** 2).sum(), argnums=(0, 1, 2)), *operands)
    found = run(region, *operands)
    assert_trees_equal(jax.tree.map(lambda x: np.asarray(x[0]), found), truth, kind)
    assert not any(np.asarray(x[1]).any() for x in found)


def test_a_body_beside_an_automatic_tensor_axis():
    mesh = make_mesh("context=2,tensor=4")
    heads = NamedSharding(mesh, P(None, "context", "tensor"))
    body = functools.partial(ring_attention, axis="context", placement="zigzag", causal=True)
    spec = P(None, "context")
    region = jax.shard_map(
        body, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, axis_names={"context"}, check_vma=False
    )
    stored = sequences.order(LENGTH, shards=2, placement="zigzag")
    operands = [jax.device_put(x[:, stored], heads) for x in arrays(8)]
    compiled = jax.jit(functools.partial(with_gradients, region)).lower(*operands).compile(compiler_options=QUICK)
    restored = {name: x[:, sequences.inverse(stored)] for name, x in compiled(*operands).items()}
    assert_trees_equal(restored, wanted("causal", "MHA"), "automatic tensor")
    assert "all-gather(" not in str(compiled.as_text())


def test_a_mesh_with_explicit_axes():
    mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        query, key, value, _ = (jax.device_put(x, P("data", "context")) for x in arrays(2))
        attend = functools.partial(context_attention, kind="ring", axis="context", causal=True, batch_axes=("data",))
        found = jax.jit(attend)(query, key, value)
    assert_trees_equal(np.asarray(found), np.asarray(wanted("causal", "GQA")["result"]), "explicit")


@pytest.mark.parametrize("kind", ["ring", slow("all_to_all"), slow("gather")])
def test_bfloat16_by_its_own_rounding(kind):
    """Half-width operands: scores, sums and travelling gradients are wide, so errors stay those of the operands."""
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in arrays(2)]
    found = divided([np.asarray(x) for x in narrow], kind, 2, causal=True)
    truth = alone([x.astype(jnp.float32) for x in narrow], causal=True)
    for leaf, a in found.items():
        assert a.dtype == jnp.bfloat16
        scale = float(jnp.abs(truth[leaf]).max())
        assert float(np.abs(a.astype(np.float32) - truth[leaf]).max()) < 2**-7 * scale
