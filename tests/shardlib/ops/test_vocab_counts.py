"""What a split vocabulary sends, from compiled programs: statistics of tokens and reductions, never a logit.

The formulas are the row "vocabulary parallel" of the table of collectives: forward of the embedding one all-reduce of
T h; the loss a maximum and sums over T in float32, and backward one reduction of T h.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshes import MeshShape, make_mesh
from shardlib.audit.hlo import parse
from shardlib.audit.program import axes_of, totals
from shardlib.ops.vocab_embedding import embed_tokens
from shardlib.ops.vocab_loss import token_losses
from tests.moving import QUICK
from tests.partitioned import partitioned
from tests.vocabularies import with_gradients

BATCH, LENGTH, EMBED, VOCAB = 8, 32, 16, 48
MESHES = ["tensor=4", "tensor=8", "data=2,tensor=4", "data=2,context=2,tensor=2", "fsdp=2,tensor=4"]


def shape_of(mesh):
    return {axis: dict(make_mesh(mesh).shape).get(axis, 1) for axis in ("data", "fsdp", "context", "tensor")}


def lowered(mesh, function, *, parameter, num_arrays):
    """The function of (x, parameter, targets, weights), each where a plan would put it."""
    mesh = make_mesh(mesh)
    present = lambda *axes: tuple(axis for axis in axes if axis in mesh.shape) or None  # noqa: E731
    tokens = P(present("data", "fsdp"), present("context"))
    split = {"embed": present("fsdp"), "vocab": present("tensor")}
    specs = [tokens, P(*(split[name] for name in parameter)), tokens, tokens][-num_arrays:]
    sizes = {"embed": EMBED, "vocab": VOCAB}
    shapes = [
        jax.ShapeDtypeStruct((BATCH, LENGTH, EMBED), jnp.float32),
        jax.ShapeDtypeStruct(tuple(sizes[name] for name in parameter), jnp.float32),
        jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32),
        jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.float32),
    ][-num_arrays:]
    places = [NamedSharding(mesh, spec) for spec in specs]
    return jax.jit(function, in_shardings=places).lower(*shapes)


def program(*args, **kwargs):
    return parse(lowered(*args, **kwargs).compile(compiler_options=QUICK).as_text())


def loss_program(mesh, **options):
    losses = functools.partial(token_losses, mesh=make_mesh(mesh), **options)
    return program(mesh, functools.partial(with_gradients, losses), parameter=("embed", "vocab"), num_arrays=4)


def over(found, mesh, axes):
    """The collectives that run over exactly these axes."""
    return tuple(each for each in found.collectives if axes_of(each, MeshShape.parse(mesh)).axes == axes)


@pytest.mark.newest
@pytest.mark.parametrize(("mesh", "smoothing"), [*((mesh, 0.0) for mesh in MESHES), ("data=2,tensor=4", 0.1)])
def test_the_loss_moves_three_floats_per_token_and_one_gradient(mesh, smoothing):
    found = loss_program(mesh, smoothing=smoothing)
    sizes = shape_of(mesh)
    shards = sizes["tensor"]
    tokens = BATCH * LENGTH // (sizes["data"] * sizes["fsdp"] * sizes["context"])
    sums = 3 if smoothing else 2
    moved = over(found, mesh, ("tensor",))
    assert {each.kind for each in moved} == {"all-reduce"} and all(each.loop_depth == 0 for each in moved)
    assert sorted(each.operand_bytes for each in moved) == [4 * tokens, 4 * sums * tokens, 4 * EMBED * tokens]
    ring = 2 * (shards - 1) / shards * 4 * tokens
    assert totals(moved).bytes_per_device == ring * (1 + sums) + ring * EMBED
    # The head's gradient, once and not per chunk; its embed dim is gathered once where fsdp splits it.
    others = [each for each in found.collectives if each not in moved]
    assert all(each.times_executed == 1 for each in others)
    largest = max((each.operand_bytes for each in others), default=0)
    assert largest <= 4 * EMBED * VOCAB // shards + 8


@pytest.mark.newest
@pytest.mark.parametrize("mesh", MESHES)
def test_the_lookup_moves_its_output_once(mesh):
    lookup = functools.partial(embed_tokens, mesh=make_mesh(mesh))
    value = jax.value_and_grad(lambda table, ids: jnp.sin(lookup(table, ids)).sum())
    found = program(mesh, lambda table, ids, _: value(table, ids), parameter=("vocab", "embed"), num_arrays=3)
    sizes = shape_of(mesh)
    shards = sizes["tensor"]
    tokens = BATCH * LENGTH // (sizes["data"] * sizes["fsdp"] * sizes["context"])
    (moved,) = over(found, mesh, ("tensor",))
    assert (moved.kind, moved.operand_bytes) == ("all-reduce", 4 * EMBED * tokens)
    assert moved.bytes_per_device == 2 * (shards - 1) / shards * 4 * EMBED * tokens


def test_negative_control_automatic_data_reduces_the_head_once_per_chunk():
    found = loss_program("data=2,tensor=4", batch_axes=(), num_chunks=4)
    repeated = [each for each in found.collectives if each.times_executed == 4]
    assert max(each.operand_bytes for each in repeated) == 4 * EMBED * VOCAB // 4


def test_negative_control_whole_logits_are_gathered():
    def losses(x, head, targets):
        split, whole = (NamedSharding(mesh, P("data", None, axis)) for axis in ("tensor", None))
        # First where the product leaves them; otherwise the compiler gathers the head, which is smaller here.
        logits = jax.lax.with_sharding_constraint(x @ head, split)
        logits = jax.lax.with_sharding_constraint(jax.lax.optimization_barrier(logits), whole)
        target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits, axis=-1) - target, target, target

    mesh = make_mesh("data=2,tensor=4")
    found = program(
        "data=2,tensor=4", functools.partial(with_gradients, losses), parameter=("embed", "vocab"), num_arrays=4
    )
    assert max(each.result_bytes for each in found.of_kind("all-gather")) == 4 * BATCH * LENGTH * VOCAB // 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_dtype_of_reductions_is_what_was_asked_for(dtype):
    # Read before the backend widens them (JAX on CPU adds up in float32 either way).
    losses = functools.partial(token_losses, mesh=make_mesh("tensor=4"), reduce_dtype=dtype)

    def narrow(x, head, targets, weights):
        return with_gradients(losses, x.astype(jnp.bfloat16), head.astype(jnp.bfloat16), targets, weights)

    text = partitioned(lowered("tensor=4", narrow, parameter=("embed", "vocab"), num_arrays=4))
    # By pattern: the reader of programs does not know how JAX 0.12.0 prints loops before they are compiled.
    sent = {dims: dtype for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]\S* all-reduce\(", text)}
    assert sent[f"{BATCH},{LENGTH},{EMBED}"] == {"float32": "f32", "bfloat16": "bf16"}[dtype]
    assert sent[f"{BATCH},{LENGTH}"] == sent[f"2,{BATCH},{LENGTH}"] == "f32"  # statistics always
