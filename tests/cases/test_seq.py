"""Field troubles over a divided sequence: groups SEQ, GQA-6, GQA-7 and NRM-7, by op; whole models: test_seq_models."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshes import MeshShape, make_mesh
from meshes.errors import ShardingError
from models import gpt
from shardlib import annotate
from shardlib.audit.hlo import parse
from shardlib.audit.running_sums import check_running_sums
from shardlib.binding import bind
from shardlib.decide import decide, spec_of
from shardlib.ops.context_attention import context_attention
from shardlib.ops.context_layout import document_positions, inverse, next_tokens, order, reorder
from shardlib.ops.sequence_parallel import sequence_parallel, summed_gradients
from shardlib.plan import Plan
from shardlib.strategies import default_rules
from shardlib.trainer import Trainer
from shardlib.tree_paths import leaves_with_paths
from tests.oracle import OPTIMIZERS, SIZES, assert_trees_equal, token_batch
from tests.sequences import HEAD_DIM, QUICK, alone, arrays, divided, one_device, run


def rotated(x, positions):
    """Rotary position embedding of [batch, length, heads, head_dim] at [batch, length]."""
    half = x.shape[-1] // 2
    angles = positions[:, :, None, None] / 10.0 ** jnp.arange(half)[None, None, None]
    even, odd = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [even * jnp.cos(angles) - odd * jnp.sin(angles), even * jnp.sin(angles) + odd * jnp.cos(angles)], axis=-1
    )


def with_rotation(attend, positions):
    """An attention whose queries and keys are rotated at their positions first."""
    return lambda query, key, value: attend(rotated(query, positions), rotated(key, positions), value)


def ring(mesh, **options):
    """Causal ring attention on a mesh with a context axis."""
    return functools.partial(
        context_attention, kind="ring", axis="context", causal=True, mesh=make_mesh(mesh), **options
    )


@pytest.mark.parametrize("placement", ["contiguous", "zigzag"])
def test_seq_01_causal_work_is_balanced_on_request(placement):
    """Cells per shard by position; that the program computes just those is held in test_context_programs."""
    work = (order(32, shards=4, placement=placement).reshape(4, 8) + 1).sum(axis=1)
    assert work.tolist() == ([36, 100, 164, 228] if placement == "contiguous" else [132] * 4)
    if placement == "zigzag":
        found = divided(arrays(2), "ring", 4, causal=True, placement=placement)
        assert_trees_equal(found, alone(arrays(2), causal=True), placement)


def test_seq_02_no_target_is_lost_at_a_border():
    targets, weights = next_tokens(np.arange(1, 9)[None])
    assert targets.reshape(2, 4).tolist() == [[2, 3, 4, 5], [6, 7, 8, 0]]
    assert weights.sum() == 7
    batch = {"targets": targets, "weights": weights}
    moved = reorder(batch, axes=dict.fromkeys(batch, ("batch", "length")), shards=2, placement="zigzag")
    assert (moved["targets"] * moved["weights"]).sum() == 35  # 2 + 3 + ... + 8


@pytest.mark.parametrize("placement", ["contiguous", "zigzag"])
def test_seq_04_rotary_angles_are_global(placement):
    stored = order(16, shards=4, placement=placement)
    if placement == "contiguous":
        assert stored.reshape(4, 4)[3].tolist() == [12, 13, 14, 15]
    operands = arrays(2, length=16)[:3]
    attend = with_rotation(ring("context=4", placement=placement), jnp.asarray(stored)[None])
    found = run(attend, *(x[:, stored] for x in operands))[:, inverse(stored)]
    truth = with_rotation(functools.partial(one_device, causal=True), jnp.arange(16)[None])
    assert_trees_equal(np.asarray(found), np.asarray(run(truth, *operands)), placement)


def test_seq_05_positions_of_packed_documents_follow_the_placement():
    table = np.arange(8)
    stored = order(8, shards=2, placement="zigzag", document_lengths=(4, 4))
    assert table[stored].reshape(2, 4).tolist() == [[0, 3, 4, 7], [1, 2, 5, 6]]
    # Attention told those positions is the attention of the documents.
    ids = np.array([[1, 1, 1, 1, 2, 2, 2, 2]], np.int32)
    operands = [x[:1] for x in arrays(2, length=8)[:3]]
    attend = ring("context=2", positions=stored[None], segment_ids=ids[:, stored])
    found = run(attend, *(x[:, stored] for x in operands))[:, inverse(stored)]
    truth = run(functools.partial(one_device, causal=True, segment_ids=ids), *operands)
    assert_trees_equal(np.asarray(found), np.asarray(truth), "packed")


def test_seq_06_position_ids_of_documents_count():
    ids = np.array([[1, 1, 1, 1, 2, 2, 2, 2]], np.int32)
    positions = document_positions(ids)
    assert positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]
    operands = [x[:1] for x in arrays(2, length=8)[:3]]
    found = run(with_rotation(ring("context=4", segment_ids=ids, positions=positions), positions), *operands)
    plain = with_rotation(functools.partial(one_device, causal=True), jnp.arange(4)[None])
    truth = [run(plain, *(x[:, part] for x in operands)) for part in (slice(0, 4), slice(4, 8))]
    assert_trees_equal(np.asarray(found), np.concatenate(truth, axis=1), "documents alone")


@pytest.mark.parametrize("causal", [True, False])
def test_seq_07_seven_tokens_on_two_shards(causal):
    with pytest.raises(ShardingError, match="pad the sequence to length 8 and mask the padding"):
        order(7, shards=2, placement="contiguous")
    real = [x[:, :7] for x in arrays(2, length=8)]
    padded = [np.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0)), constant_values=5) for x in real[:3]]
    cotangent = np.pad(real[3], ((0, 0), (0, 1), (0, 0), (0, 0)))  # the padded row's loss has weight 0
    mask = (np.arange(8) < 7)[None, None, None]
    found = divided([*padded, cotangent], "ring", 2, causal=causal, mask=mask)
    assert not any(found[name][:, 7].any() for name in ("query", "key", "value"))
    found = {name: leaf[:, :7] for name, leaf in found.items()}
    assert_trees_equal(found, alone(real, causal=causal), "seven tokens")


def rms_norm(scale, x):
    return x * jax.lax.rsqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * scale[None, None]


def attention(weights, x):
    """Causal, of the heads at hand; a part of a sum over heads."""
    query, key, value = (jnp.einsum("ble,ehd->blhd", x, kernel) for kernel in weights["qkv"])
    return jnp.einsum("blhd,hde->ble", annotate.attention(query, key, value, causal=True), weights["out"])


def mlp(weights, x):
    """Of the hidden units at hand; a part of a sum over them."""
    return jax.nn.gelu(x @ weights["up"]) @ weights["down"]


HALVES = {
    "attention": (attention, {"qkv": P(None, None, "tensor"), "out": P("tensor")}),
    "mlp": (mlp, {"up": P(None, "tensor"), "down": P("tensor")}),
}


def block_and_norm():
    """Parameters of one block and a last norm, x and the cotangent of the result."""
    draw = np.random.default_rng(8)
    make = lambda *shape: draw.normal(size=shape).astype(np.float32) / 2  # noqa: E731
    weights = {
        "attention": {"qkv": make(3, 16, 4, 4), "out": make(4, 4, 16)},
        "mlp": {"up": make(16, 32), "down": make(32, 16)},
    }
    norms = {name: 1 + make(16) for name in (*HALVES, "last")}
    return {"weights": weights, "norms": norms}, make(2, 16, 16), make(2, 16, 16)


def test_seq_08_norm_gradients_in_a_manual_region():
    """Each device's gradient of each norm, of a block and a last norm on the device's own quarter of the tokens."""
    parameters, x, cotangent = block_and_norm()

    def divided(parameters, x, *, last_norm=summed_gradients):
        for name, (work, specs) in HALVES.items():
            given = {"weights": parameters["weights"][name], "whole": parameters["norms"][name]}
            x = x + sequence_parallel(x, before=rms_norm, work=work, weight_specs=specs, **given)
        return rms_norm(last_norm(parameters["norms"]["last"]), x)

    def whole(parameters, x):
        for name, (work, _) in HALVES.items():
            x = x + work(parameters["weights"][name], rms_norm(parameters["norms"][name], x))
        return rms_norm(parameters["norms"]["last"], x)

    def by_device(parameters, x, cotangent, **options):
        gradient = jax.vjp(functools.partial(divided, **options), parameters, x)[1](cotangent)[0]
        return jax.tree.map(lambda leaf: leaf[None], gradient["norms"]), gradient["weights"]

    def found(**options):
        specs = {name: half[1] for name, half in HALVES.items()}
        region = jax.shard_map(
            functools.partial(by_device, **options),
            mesh=make_mesh("tensor=4"),
            in_specs=({"weights": specs, "norms": P()}, P(None, "tensor"), P(None, "tensor")),
            out_specs=(P("tensor"), specs),
            check_vma=False,
        )
        return jax.tree.map(np.asarray, run(region, parameters, x, cotangent))

    truth = run(lambda *given: jax.vjp(whole, *given[:2])[1](given[2])[0], parameters, x, cotangent)
    norms, weights = found()
    for name, leaf in norms.items():
        assert (leaf == leaf[:1]).all(), name
    norms = {name: leaf[0] for name, leaf in norms.items()}
    assert_trees_equal({"weights": weights, "norms": norms}, jax.tree.map(np.asarray, truth), "norms")
    # The trouble itself: without the sum, each device has the gradient of its own tokens.
    unsummed = found(last_norm=lambda scale: scale)[0]["last"]
    assert not (unsummed == unsummed[:1]).all()
    np.testing.assert_allclose(unsummed.sum(axis=0), truth["norms"]["last"], rtol=1e-4, atol=1e-4)


def test_seq_08_norm_gradients_under_a_plan():
    """The same for a GPT, whose stream the rules of the tensor axis divide along its length."""

    def gradient(mesh):
        module, loss, spec = gpt.small(batch=4, **{**SIZES, "layers": 1})
        trainer = Trainer(bind(module, loss, Plan(mesh=mesh), spec), OPTIMIZERS["sgd"])
        state, _ = trainer.step(trainer.init(jax.random.key(0)), token_batch(0, batch=4))
        return state.opt_state[0].grads

    stream = decide(("batch", "length", "embed"), (4, 16, 32), rules=default_rules(), mesh=MeshShape.parse("tensor=4"))
    assert spec_of(stream) == P(None, "tensor", None)
    found, wanted = gradient("tensor=4"), gradient("data=1")
    norms = [(path, leaf) for path, leaf in leaves_with_paths(found) if "norm" in path]
    assert len(norms) == 6
    for path, leaf in norms:
        first, *others = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert len(others) == 3 and all((first == other).all() for other in others), path
    assert_trees_equal(jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, wanted), "gradient")


def test_seq_09_dims_are_divided_by_name():
    mesh = make_mesh("context=2")
    axes = {
        "tokens": ("batch", "length"),
        "positions": (None, "batch", "length"),
        "mask": ("batch", None, "length", "keys"),
    }
    shapes = {"tokens": (2, 8), "positions": (3, 2, 8), "mask": (2, 1, 8, 8)}
    batch = {name: np.arange(np.prod(shape)).reshape(shape) for name, shape in shapes.items()}
    moved = reorder(batch, axes=axes, shards=2, placement="zigzag")
    local = {
        name: NamedSharding(mesh, P(*("context" if axis == "length" else None for axis in names))).shard_shape(
            moved[name].shape
        )
        for name, names in axes.items()
    }
    assert local == {"tokens": (2, 4), "positions": (3, 2, 4), "mask": (2, 1, 4, 8)}
    assert (moved["positions"][2] - batch["positions"][2] == moved["tokens"] - batch["tokens"]).all()


@pytest.mark.parametrize("placement", ["contiguous", "zigzag"])
def test_seq_10_both_exchanges_see_the_order_of_tokens(placement):
    operands = arrays(2, length=16)
    found = divided(operands, "hybrid", 4, causal=True, placement=placement)
    assert_trees_equal(found, alone(operands, causal=True), placement)


def test_seq_11_positions_from_a_mask():
    mesh = make_mesh("data=4,context=2")
    placed = NamedSharding(mesh, P("data", "context"))
    found = jax.jit(lambda mask: jnp.cumsum(mask, axis=1), in_shardings=placed)(np.ones((8, 1024), np.int32))
    assert (np.asarray(found) == np.arange(1, 1025)).all()
    check_running_sums(mesh)

    def each_part_alone(mask, axis):
        count = functools.partial(jnp.cumsum, axis=axis)
        return jax.shard_map(count, mesh=mesh, in_specs=P("data", "context"), out_specs=P("data", "context"))(mask)

    with pytest.raises(ShardingError, match="wrong running sums along a dim split over context") as caught:
        check_running_sums(mesh, count=each_part_alone)
    assert "of ones" in str(caught.value) and "padding on the left" in str(caught.value)


def test_seq_12_padding_is_not_attended():
    real = [x[:, :10] for x in arrays(2, length=16)]
    padded = [np.pad(x, ((0, 0), (0, 6), (0, 0), (0, 0)), constant_values=3) for x in real[:3]]
    cotangent = np.pad(real[3], ((0, 0), (0, 6), (0, 0), (0, 0)))
    mask = np.stack([np.arange(16) < 10, np.zeros(16, bool)])[:, None, None]  # the second row is all padding
    found = divided([*padded, cotangent], "ring", 4, mask=mask)
    assert all(np.isfinite(leaf).all() and not leaf[1].any() for leaf in found.values())
    found = {name: leaf[:1, :10] for name, leaf in found.items()}
    assert_trees_equal(found, alone([x[:1] for x in real]), "unpadded")


def test_gqa_06_the_ring_moves_kv_heads():
    """8 query and 2 KV heads over four shards of 32 tokens."""
    placed = NamedSharding(make_mesh("context=4"), P(None, "context"))
    given = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed) for x in arrays(2)[:3]]
    text = jax.jit(ring("context=4")).lower(*given).compile(compiler_options=QUICK).as_text()
    collectives = parse(str(text)).collectives
    assert {each.kind for each in collectives} == {"collective-permute"}
    assert {each.operand_bytes for each in collectives} == {2 * 32 // 4 * 2 * HEAD_DIM * 4}


@pytest.mark.parametrize("mesh, moved", [("context=4,tensor=2", 2), ("tensor=8", 1)])
def test_gqa_07_no_needless_all_to_all(mesh, moved):
    """4 KV heads divide over tensor=2; over tensor=8 each shard holds one, and no all-to-all is needed either."""
    size = {"context=4,tensor=2": 2, "tensor=8": 8}[mesh]
    whole = make_mesh(mesh if "context" in mesh else f"context=1,{mesh}")
    heads, alike = (NamedSharding(whole, P(None, "context", axis)) for axis in ("tensor", None))
    query, key, value, _ = arrays(4)
    given = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=heads if x.shape[2] % size == 0 else alike)
        for x in (query, key, value)
    ]
    attend = functools.partial(
        context_attention, kind="ring", axis="context", causal=True, head_axes=("tensor",), mesh=whole
    )
    text = jax.jit(attend).lower(*given).compile(compiler_options=QUICK).as_text()
    collectives = parse(str(text)).collectives
    assert {each.kind for each in collectives if each.group_size > 1} <= {"collective-permute"}
    moves = {each.operand_bytes for each in collectives if each.group_size > 1}
    assert moves == ({2 * 32 // 4 * moved * HEAD_DIM * 4} if "context" in mesh else set())


def test_nrm_07_gradients_do_not_depend_on_the_context_size():
    """Real tokens are unevenly spread over the chunks; the loss is divided by their number over all chunks."""
    query, key, value, _ = arrays(2, length=16)
    draw = np.random.default_rng(0)
    scale = draw.normal(size=(8, HEAD_DIM)).astype(np.float32)
    real = (np.arange(16)[None] < np.array([[3], [13]])).astype(np.float32)

    def gradient(attend):
        def loss(scale):
            out = attend(query * scale[None, None], key, value)
            return ((out**2).sum(axis=(2, 3)) * real).sum() / real.sum()

        return jax.grad(loss)

    truth = run(gradient(functools.partial(one_device, causal=True)), scale)
    for context in (1, 2, 4):
        attend = ring(f"data=2,context={context}", batch_axes=("data",))
        assert_trees_equal(np.asarray(run(gradient(attend), scale)), np.asarray(truth), f"context={context}")
