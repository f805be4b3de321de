"""Attention over a divided sequence and on one device, on the same small arrays."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from meshes import make_mesh
from shardlib.ops.context_attention import context_attention
from shardlib.ops.context_layout import inverse, order

# Compiles the many small kernels of these programs in half the time; what they compute and send is the same.
QUICK: dict[str, Any] = {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}

BATCH, LENGTH, HEADS, HEAD_DIM = 2, 32, 8, 4
KV_HEADS = {"MHA": 8, "GQA": 2, "MQA": 1}
WINDOW = 7


def arrays(kv_heads: int, *, length: int = LENGTH, batch: int = BATCH) -> tuple[Any, ...]:
    """Query, key, value and the cotangent of the result."""
    draw = np.random.default_rng(kv_heads)
    return tuple(
        draw.normal(size=(batch, length, heads, HEAD_DIM)).astype(np.float32)
        for heads in (HEADS, kv_heads, kv_heads, HEADS)
    )


def documents(*, length: int = LENGTH, batch: int = BATCH) -> Any:
    """Segment ids: documents of other lengths in every row, one of them a single token."""
    starts = [[5 + row, 6 + row, length // 2 + 3 - row] for row in range(batch)]
    return np.stack([np.searchsorted(row, np.arange(length), side="right") for row in starts]).astype(np.int32)


def padding(*, length: int = LENGTH, batch: int = BATCH) -> Any:
    """A key mask [batch, 1, 1, keys] with another number of real tokens in every row."""
    return (np.arange(length)[None] < np.array([length - 5 - 4 * row for row in range(batch)])[:, None])[:, None, None]


def masks(name: str) -> dict[str, Any]:
    """Options of attention by the name of a kind of mask."""
    return {
        "causal": {"causal": True},
        "full": {},
        "window": {"causal": True, "window": WINDOW},
        "packed": {"causal": True, "segment_ids": documents()},
        "padded": {"mask": padding()},
        "both ways": {"window": WINDOW},
        "by head": {"mask": np.random.default_rng(3).random((BATCH, HEADS, LENGTH, LENGTH)) < 0.7},
        "by row": {"causal": True, "mask": np.random.default_rng(4).random((1, 1, LENGTH, LENGTH)) < 0.7},
    }[name]


def seen(*, causal=False, window=None, mask=None, segment_ids=None, positions=None, length=LENGTH) -> Any:
    """The boolean mask [batch or 1, heads or 1, length, keys] that the options mean, written out in NumPy."""
    at = np.arange(length)[None] if positions is None else positions
    distance = at[:, :, None] - at[:, None, :]
    found = np.ones_like(distance, bool)
    if causal:
        found &= distance >= 0
    if window is not None:
        found &= np.abs(distance) < window
    found = found[:, None]
    if segment_ids is not None:
        found = found & (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
    return found if mask is None else found & mask


def one_device(query, key, value, **options) -> jax.Array:
    """The attention of all of it with a mask written out; rows that see nothing are 0."""
    batch, length, heads, _ = query.shape
    return masked(query, key, value, np.broadcast_to(seen(**options, length=length), (batch, heads, length, length)))


def masked(query, key, value, mask) -> jax.Array:
    """The attention under a mask [batch, heads, length, length]."""
    out = jax.nn.dot_product_attention(query, key, value, mask=jnp.asarray(mask))
    return jnp.where(jnp.asarray(mask).any(axis=-1).transpose(0, 2, 1)[..., None], out, 0)


def with_gradients(attend, query, key, value, out) -> dict[str, jax.Array]:
    """The result of an attention and its gradients for a cotangent."""
    result, backward = jax.vjp(attend, query, key, value)
    return dict(zip(("result", "query", "key", "value"), (result, *backward(out)), strict=True))


def alone(operands: Any, **options) -> dict[str, jax.Array]:
    """The result and gradients of one device; one program for all masks."""
    batch, length, heads, _ = operands[0].shape
    mask = np.broadcast_to(seen(**options, length=length), (batch, heads, length, length))
    return _alone(*operands, mask)


@jax.jit
def _alone(query, key, value, out, mask):
    return with_gradients(lambda query, key, value: masked(query, key, value, mask), query, key, value, out)


def run(function: Any, *operands: Any) -> Any:
    """The function, compiled quickly, of the operands."""
    return jax.jit(function).lower(*operands).compile(compiler_options=QUICK)(*operands)


def mesh_of(kind: str, context: int, beside: str = "data") -> tuple[Any, Any, int]:
    """A mesh with that many shards of the sequence beside another axis, its context axis or axes, the ring's size."""
    rest = f"{beside}={min(2, 8 // context)}"
    if kind == "hybrid":
        return make_mesh(f"{rest},ring=2,context={context // 2}"), ("ring", "context"), 2
    return make_mesh(f"{rest},context={context}"), "context", context


def attention_of(kind: str, context: int, *, beside: str = "data", largest_tile: int = 4, **options) -> Any:
    """The attention of arrays that are in the order of storage already.

    Beside data and fsdp the batch is divided too, beside tensor the heads; a stage is a region around, manual over its
    axis, in which each rank has its own rows.
    """
    mesh, axis, _ = mesh_of(kind, context, beside)
    axes = {"batch_axes": (beside,)} if beside in ("data", "fsdp") else {}
    axes |= {"head_axes": (beside,)} if beside == "tensor" else {}
    attend = functools.partial(context_attention, kind=kind, axis=axis, largest_tile=largest_tile, **axes)
    if beside != "stage":
        return functools.partial(attend, mesh=mesh, **options)
    labels = {name: x for name, x in options.items() if hasattr(x, "shape")}
    attend = functools.partial(attend, **{name: x for name, x in options.items() if name not in labels})

    def on_stages(query: Any, key: Any, value: Any) -> Any:
        rows = P("stage")
        specs = (rows, rows, rows, {name: rows if len(x) == len(query) else P() for name, x in labels.items()})
        body = lambda query, key, value, labels: attend(query, key, value, **labels)  # noqa: E731
        region = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=rows, axis_names={"stage"}, check_vma=False)
        return region(query, key, value, labels)

    return on_stages


def divided(
    operands: Any, kind: str, context: int, *, placement: str = "contiguous", beside: str = "data", **options
) -> dict[str, Any]:
    """The result and gradients over a divided sequence, of arrays in their original order and in that order."""
    stored = order(operands[0].shape[1], shards=mesh_of(kind, context)[2], placement=placement)
    moved = {name: reordered(x, name, stored) for name, x in options.items()}
    attend = attention_of(kind, context, placement=placement, beside=beside, **moved)
    found = run(functools.partial(with_gradients, attend), *(x[:, stored] for x in operands))
    return {name: np.asarray(leaf)[:, inverse(stored)] for name, leaf in found.items()}


def reordered(x: Any, name: str, stored: Any) -> Any:
    """An option of attention in the order of storage."""
    if name == "mask":
        x = x[..., stored]
        return x[:, :, stored] if x.shape[2] > 1 else x
    return x[:, stored] if name in ("segment_ids", "positions") else x
