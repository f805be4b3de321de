"""Attention by the kernels of the target: splash attention on TPU, cuDNN on NVIDIA GPUs.

In: the arrays of the attention slot, and the platform that the program is compiled for. Out: what
`annotate.reference_attention` means, without an array of [length, length] scores; or why no kernel takes them.

    why = refusal("tpu", query=query.shape, key=key.shape, value=value.shape, dtype=query.dtype)
    out = fused_attention(query, key, value, platform="tpu", mesh=mesh, batch_axes=("data",), causal=True)
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

KERNELS: Final = {"tpu": "splash attention", "gpu": "cuDNN"}
"""The kernel of each platform; others have none."""

# Rows and columns of scores that splash attention works on at a time, the first that divides the length. The memory of
# a TPU core takes tiles of 512 with heads up to 256 (compiled for v5e and v5p).
BLOCKS: Final = (512, 256, 128)
LANES: Final = 128
"""Lanes of a TPU's vector registers: Cloud TPU documentation, "TPU architecture"."""
_HIDDEN: Final = -1
"""The segment of padding; ids of documents count from 0 or 1."""


def platform_of(mesh: Mesh | AbstractMesh | None) -> str | None:
    """The platform that programs on a mesh are compiled for; None for a mesh without devices.

    Args:
        mesh: of real, emulated or compile-only devices, or abstract; None for the one in force.
    """
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0].platform
    return None if mesh.abstract_device is None else mesh.abstract_device.platform


def refusal(
    platform: str | None,
    *,
    query: tuple[int, ...],
    key: tuple[int, ...],
    value: tuple[int, ...],
    dtype: Any,
    causal: bool = False,
    window: int | None = None,
    mask: tuple[int, ...] | None = None,
) -> str | None:
    """Why the kernel of a platform cannot take a call of the attention slot; None when it can.

    Args:
        platform: "tpu", "gpu", or another, which has no kernel.
        query: shape [batch, length, heads, head_dim].
        key, value: shapes [batch, keys, kv_heads, head_dim].
        dtype: of all three.
        causal, window: as for `annotate.attention`.
        mask: the mask's shape [batch or 1, heads or 1, length or 1, keys].

    Source: the conditions in `jax.experimental.pallas.ops.tpu.splash_attention` and `jax.nn.dot_product_attention`
        of JAX 0.10.2 and 0.12.0.
    """
    if platform not in KERNELS:
        return f"there is no kernel for {platform or 'a mesh without devices'}"
    check = _tpu_problem if platform == "tpu" else _gpu_problem
    return check(
        query=query, key=key, value=value, dtype=jnp.dtype(dtype), one_sided=causal or window is None, mask=mask
    )


def call_refusal(platform: str | None, query: Any, key: Any, value: Any, **options: Any) -> str | None:
    """`refusal` of a call with the arguments of `annotate.attention`."""
    mask, limits = options.get("mask"), {name: options[name] for name in ("causal", "window") if name in options}
    return refusal(
        platform,
        query=query.shape,
        key=key.shape,
        value=value.shape,
        dtype=query.dtype,
        mask=None if mask is None else mask.shape,
        **limits,
    )


def _tpu_problem(*, query, key, value, dtype, one_sided: bool, mask) -> str | None:
    del one_sided
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"splash attention takes bfloat16 and float32, and queries are {dtype}"
    for name, size in (("head_dim", query[3]), ("head_dim of the values", value[3])):
        if size % LANES:
            return f"splash attention takes heads of a multiple of {LANES}, and {name} is {size}"
    for name, size in (("length", query[1]), ("number of keys", key[1])):
        if size % LANES:
            return f"splash attention takes lengths that are a multiple of {LANES}, and the {name} is {size}"
    if mask is not None and (mask[1] != 1 or mask[2] != 1):
        return (
            f"splash attention takes masks of keys [batch, 1, 1, keys], and this one is {list(mask)}; say causal=, "
            "window= or segment_ids= instead"
        )
    return None


def _gpu_problem(*, query, key, value, dtype, one_sided: bool, mask) -> str | None:
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN takes bfloat16 and float16, and queries are {dtype}"
    if query[3] % 8 or query[3] > 128:
        return f"cuDNN takes heads of a multiple of 8 up to 128, and head_dim is {query[3]}"
    if value[3] != query[3]:
        return f"cuDNN takes keys and values of one size, and head_dim is {query[3]} and {value[3]}"
    if not one_sided:
        return "cuDNN takes a window only when causal"
    if query[1] % 2 or key[1] % 2:
        return f"cuDNN takes even lengths, and there are {query[1]} queries and {key[1]} keys"
    del mask
    return None


def fused_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    platform: str,
    causal: bool = False,
    window: int | None = None,
    mask: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    batch_axes: tuple[str, ...] = (),
    head_axes: tuple[str, ...] = (),
    mesh: Mesh | AbstractMesh | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Softmax attention by the platform's kernel, which `refusal` must not refuse.

    No compiler partitions these kernels, so each device runs one on its rows and heads in a region manual over every
    axis of the mesh; what is manual around it already stays so. Over axes that divide neither rows nor heads all
    devices compute the same. A row that may attend to nothing has a finite result without meaning.

    Args:
        query: [batch, length, heads, head_dim].
        key, value: [batch, keys, kv_heads, head_dim]; kv_heads divides heads, and `head_axes` divide kv_heads.
        platform: a key of `KERNELS`.
        causal, window: as for `annotate.attention`.
        mask: [batch or 1, heads or 1, length or 1, keys], boolean.
        segment_ids: [batch, length], integer, none of them negative.
        batch_axes, head_axes: mesh axes that divide rows and heads.
        mesh: None for the one in force (`jax.set_mesh`, or the region around).
        interpret: run the TPU kernel step by step, on any platform.

    Returns:
        [batch, length, heads, head_dim], of the query's dtype.
    """
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    batch, heads = (tuple(name for name in names if name not in mesh.manual_axes) for names in (batch_axes, head_axes))
    options: dict[str, Any] = {"causal": causal, "window": window}
    body = functools.partial(_splash, interpret=interpret) if platform == "tpu" else _cudnn
    labels = {"mask": (mask, (batch, heads, (), ())), "segment_ids": (segment_ids, (batch, ()))}
    given = {name: (x, _spec(x, dims)) for name, (x, dims) in labels.items() if x is not None}
    whole = P(batch or None, None, heads or None, None)
    operands = (query, key, value, {name: x for name, (x, _) in given.items()})
    specs = (whole, whole, whole, {name: spec for name, (_, spec) in given.items()})
    return _manual(functools.partial(body, **options), operands, mesh=mesh, specs=specs)


def _manual(body: Callable[..., jax.Array], operands: Any, *, mesh: Any, specs: Any) -> jax.Array:
    """The body of the operands (the last one its labels) in a region manual over all axes of the mesh."""

    def local(query, key, value, labels):
        return body(query, key, value, **labels)

    axes = {name for name in mesh.axis_names if name not in mesh.manual_axes}
    if not axes:
        return local(*operands)
    if AxisType.Explicit in mesh.axis_types:
        operands = jax.tree.map(jax.sharding.reshard, operands, specs)
    region = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[0], axis_names=axes, check_vma=False)
    return region(*operands)


def _spec(x: jax.Array, dims: tuple[tuple[str, ...], ...]) -> P:
    """Dims over their axes; those of size 1 stand for all and stay whole."""
    return P(*(names if names and size != 1 else None for size, names in zip(x.shape, dims, strict=True)))


def _splash(query, key, value, *, causal, window, mask=None, segment_ids=None, interpret=False):
    """Splash attention on one device, all rows of the batch."""
    kernel = splash_kernel(query.shape[1:3], keys=key.shape[1], causal=causal, window=window, interpret=interpret)
    query = (query * scale(query)).astype(query.dtype)
    by_head = [x.transpose(0, 2, 1, 3) for x in (query, key, value)]
    segments = _segments(query.shape[:2], key.shape[:2], mask=mask, segment_ids=segment_ids)
    out = jax.vmap(kernel)(*by_head) if segments is None else jax.vmap(kernel)(*by_head, segments)
    return out.transpose(0, 2, 1, 3)


def scale(query: jax.Array) -> float:
    """The factor of the scores: the TPU kernel takes scaled queries, which rounds them once more."""
    return query.shape[-1] ** -0.5


def manual_over_rest(body: Callable[..., Any], *operands: Any) -> Any:
    """The body in a region manual over the axes that are still automatic, each device with the same operands."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = {name for name in mesh.axis_names if name not in mesh.manual_axes}
    if not axes:
        return body(*operands)
    return jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), axis_names=axes, check_vma=False)(*operands)


def splash_kernel(
    queries: tuple[int, int],
    *,
    keys: int,
    causal: bool,
    window: int | None,
    interpret: bool = False,
    with_log_weight: bool = False,
) -> Callable[..., Any]:
    """The TPU kernel of one row of a batch: ([heads, length, head_dim], keys and values of KV heads) -> the result.

    Args:
        queries: length and heads.
        keys: length of keys and values.
        causal, window: as for `annotate.attention`.
        interpret: run it step by step, on any platform.
        with_log_weight: return (result, (log of the softmax's denominator [heads, length], float32)), which the
            kernel does not differentiate.
    """
    length, heads = queries
    rows, columns = (next(block for block in BLOCKS if size % block == 0) for size in (length, keys))
    blocks = splash.BlockSizes(
        block_q=rows,
        block_kv=columns,
        block_kv_compute=columns,
        block_q_dkv=rows,
        block_kv_dkv=columns,
        block_kv_dkv_compute=columns,
        block_q_dq=rows,
        block_kv_dq=columns,
    )
    mask = splash.MultiHeadMask([_splash_mask((length, keys), causal=causal, window=window)] * heads)
    kernel: Any = splash.make_splash_mha_single_device(
        mask, block_sizes=blocks, interpret=interpret, save_residuals=with_log_weight
    )
    return kernel


def _splash_mask(shape: tuple[int, int], *, causal: bool, window: int | None) -> splash.Mask:
    if window is not None:
        # The own position counts in our windows and not in its.
        return _Near(shape, window_size=(window - 1, 0 if causal else window - 1), offset=0)
    return _Causal(shape) if causal else splash.FullMask(shape)


class _Causal(splash.CausalMask):
    """The library's mask, its tiles of one value made at once: each trace reads them all, 128k tokens for a minute."""

    def __getitem__(self, idx: Any) -> np.ndarray[Any, Any]:
        tile = _uniform(*idx, before=math.inf, after=0)
        return super().__getitem__(idx) if tile is None else tile


class _Near(splash.LocalMask):
    """The same for windows."""

    def __getitem__(self, idx: Any) -> np.ndarray[Any, Any]:
        before, after = self.window_size
        assert before is not None and after is not None
        tile = _uniform(*idx, before=before, after=after)
        return super().__getitem__(idx) if tile is None else tile


def _uniform(rows: slice, columns: slice, *, before: float, after: float) -> np.ndarray[Any, Any] | None:
    """The tile of a mask in which keys from `before` behind to `after` ahead count; None where it has both values."""
    furthest, nearest = rows.stop - 1 - columns.start, rows.start - (columns.stop - 1)
    shape = (rows.stop - rows.start, columns.stop - columns.start)
    if -after <= nearest and furthest <= before:
        return _constant(shape, True)
    return _constant(shape, False) if furthest < -after or nearest > before else None


@functools.lru_cache(maxsize=8)
def _constant(shape: tuple[int, int], value: bool) -> np.ndarray[Any, Any]:
    # Written out and kept: reading a broadcast value is ten times as slow.
    return np.full(shape, value)


def _segments(rows: tuple[int, int], columns: tuple[int, int], *, mask, segment_ids) -> splash.SegmentIds | None:
    """Segment ids of queries and keys; keys that the mask hides are in a segment of their own."""
    if mask is None and segment_ids is None:
        return None
    of_queries = jnp.zeros(rows, jnp.int32) if segment_ids is None else segment_ids.astype(jnp.int32)
    of_keys = jnp.zeros(columns, jnp.int32) if segment_ids is None else of_queries
    if mask is not None:
        of_keys = jnp.where(mask[:, 0, 0, :], of_keys, _HIDDEN)
    return splash.SegmentIds(q=of_queries, kv=of_keys)


def _cudnn(query, key, value, *, causal, window, mask=None, segment_ids=None):
    """cuDNN's attention on one device."""
    if segment_ids is not None:
        same = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
        mask = same if mask is None else mask & same
    if mask is not None:
        # It adds a bias of one value per score, rows and columns written out.
        mask = jnp.broadcast_to(mask, (*mask.shape[:2], query.shape[1], key.shape[1]))
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=mask,
        is_causal=causal,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )


def shards_of(mesh: Mesh | AbstractMesh, axes: tuple[str, ...]) -> int:
    """Into how many parts some axes of a mesh divide a dim."""
    return math.prod(mesh.shape[name] for name in axes)
