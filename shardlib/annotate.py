"""What models say about their axes; inert until a plan gives it meaning.

In: logical axis names ("batch", "embed", "mlp", ...). Out: metadata on parameters, constraints on activations,
and replaceable ops: attention, matrix products. `logical` is for linen, `nnx_logical` and `name_stack` for NNX.

    kernel_init = annotate.logical(nn.initializers.lecun_normal(), "embed", "mlp")
    x = annotate.constrain(x, "batch", "length", "embed")
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import flax.linen as nn
import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from shardlib.attention_shapes import check_shapes

LAYERS = "layers"
METADATA_KEY = "logical_axes"
BOUNDARY = "shardlib_layer_boundary"
EMBED_TOKENS, TOKEN_LOSSES = "embed_tokens", "token_losses"
VOCAB_SHARDS, VOCAB_PARTS = "vocab_shards", "vocab_parts"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Active:
    """What a plan puts in force while a function is traced; a static leaf.

    Args:
        constrain: `(array, names) -> array`, which places the array or raises.
        ops: implementations for the op slots, by slot name ("attention", "dot_general", "by_position", "in_order",
            "embed_tokens", "token_losses"); "vocab_shards" says into how many shards the rows of vocabularies are to
            divide, padded; "vocab_parts" into how many parts those at hand are divided already.
    """

    constrain: Callable[[Any, tuple[str | None, ...]], Any]
    ops: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


_active: ContextVar[Active | None] = ContextVar("shardlib_active", default=None)


def under(active: Active | None, function: Callable[..., T]) -> Callable[..., T]:
    """A fresh function that runs `function` with `active` in force.

    Fresh on purpose: `jax.jit` keys its cache by the function, and ambient state is not in the key.
    """

    def entered(*args: Any, **kwargs: Any) -> T:
        token = _active.set(active)
        try:
            return function(*args, **kwargs)
        finally:
            _active.reset(token)

    return entered


def constrain(x: T, *names: str | None) -> T:
    """Names the dims of an activation so that the plan in force can place it; the identity without a plan.

    Args:
        x: an array with one dim per name.
        names: logical axis names, or None for a dim that is never sharded.

    Raises:
        ShardingError: under a plan, when the rank differs, a name is unknown or a size does not divide.
    """
    active = _active.get()
    return x if active is None else active.constrain(x, names)


def layer_boundary(x: T) -> T:
    """Marks where one layer ends and the next begins, for a pipeline; the identity otherwise.

    For layers in a Python loop, which no scan shows: call it on the activations before the first layer and after every
    layer. What passes from layer to layer must pass through it, all in one call.

    Args:
        x: a pytree of arrays.

    Example:
        x = layer_boundary(x)
        for layer in layers:
            x = layer_boundary(layer(x))
    """
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, BOUNDARY), x)


def by_position(x: jax.Array, *, dim: int = 0) -> jax.Array:
    """An array made for positions 0, 1, 2, ... in the order in which the plan holds the tokens of a sequence.

    A plan may divide a sequence so that each device has an early and a late part, which balances causal attention.
    What a model makes of positions by itself (rows of a table, rotary angles) must follow: it goes through here. A
    model that does not call this keeps its sequences in order. The identity without a plan.

    Args:
        x: its dim `dim` runs over positions, from 0 to the length of the sequence.
        dim: which.
    """
    return slot("by_position", lambda x, *, dim: x)(x, dim=dim)


def in_order(x: T) -> T:
    """Says that what follows goes through the tokens of x one after another, as a recurrent layer does; the identity.

    A plan that divides sequences then holds their tokens in order: a part on each device, the first part on the first.

    Args:
        x: an array with a dim over positions.
    """
    return slot("in_order", lambda x: x)(x)


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool = False,
    mask: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    window: int | None = None,
) -> jax.Array:
    """Softmax attention, scaled by head_dim**-0.5; `heads` is a multiple of `kv_heads`. A plan may replace it.

    Args:
        query: [batch, length, heads, head_dim], floating.
        key, value: [batch, keys, kv_heads, head_dim], each KV head shared by heads / kv_heads query heads.
        causal: position i attends to positions up to i.
        mask: [batch, 1 or heads, length, keys], boolean, True where a query may attend.
        segment_ids: [batch, length], integer; tokens attend only within their own segment.
        window: a token attends to tokens less than this many positions away, itself included.

    Returns:
        [batch, length, heads, head_dim], of the query's dtype.

    Raises:
        ShardingError: arrays that do not fit each other.

    Source: Vaswani et al. 2017 (1706.03762) section 3.2; grouped queries: Ainslie et al. 2023 (2305.13245).
    """
    check_shapes(query, key, value, mask=mask, segment_ids=segment_ids)
    op = slot("attention", reference_attention)
    options = {} if window is None else {"window": window}
    return op(query, key, value, causal=causal, mask=mask, segment_ids=segment_ids, **options)


def reference_attention(query, key, value, *, causal=False, mask=None, segment_ids=None, window=None):
    """`jax.nn.dot_product_attention` with segment ids turned into a mask; the meaning of the attention slot."""
    if segment_ids is not None:
        same = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
        mask = same if mask is None else mask & same
    near = None if window is None else (window - 1, 0 if causal else window - 1)
    return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=causal, local_window_size=near)


def dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    **options: Any,
) -> jax.Array:
    """`jax.lax.dot_general`, for the `dot_general=` of Flax's layers. A plan may choose the dtype of its sums.

    Give it to the layers whose products are split over a tensor axis: where the contracted dim is split, forward or
    backward, partial results are added between devices, and a plan's `tensor_reduce_dtype` says as what.

    Args:
        lhs, rhs, dimension_numbers, precision, preferred_element_type, options: as for `jax.lax.dot_general`.

    Returns:
        What `jax.lax.dot_general` returns, of the same dtype.
    """
    op = slot("dot_general", jax.lax.dot_general)
    return op(
        lhs, rhs, dimension_numbers, precision=precision, preferred_element_type=preferred_element_type, **options
    )


def slot(name: str, default: Callable[..., Any]) -> Callable[..., Any]:
    """The op that a plan puts in a slot, or the default."""
    active = _active.get()
    return default if active is None else active.ops.get(name, default)


def blocks(name: str, count: int) -> str:
    """The name of a flat dim made of `count` equal blocks, which may only be cut between blocks.

    A kernel of shape [embed, kv_heads * head_dim] with 2 KV heads is named `("embed", blocks("kv_heads", 2))`:
    it divides over tensor=2 but not over tensor=4, although 2 * head_dim may.

    >>> blocks("kv_heads", 2)
    'kv_heads[2]'
    """
    return f"{name}[{count}]"


class LogicalAxes(nn.LogicallyPartitioned):
    """Flax's box for logical names, with the stack axis named by default and counted from either end.

    Flax's own box raises under `nn.remat_scan` (no name for the stack axis) and puts the name of an axis at -1
    in the wrong place; it also asks NNX for a mesh when bridged.
    """

    def unbox(self, apply_constraint=True) -> Any:
        """The bare value: placing it is the plan's business."""
        return self.value

    def add_axis(self, index: int, params: dict[Any, Any]) -> "LogicalAxes":
        """Inserts the stack axis at `index`, counted in the stacked array."""
        default = None if LAYERS in self.names else LAYERS
        return self.replace(names=_inserted(self.names, index, params.get(nn.meta.PARTITION_NAME, default)))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "LogicalAxes":
        """Removes the stack axis at `index`, counted in the stacked array."""
        names = list(self.names)
        names.pop(index)
        return self.replace(names=tuple(names))

    def to_nnx_metadata(self) -> dict[str, Any]:
        """Names as inert NNX metadata, for `nnx.bridge.ToNNX`."""
        return {"value": self.value, METADATA_KEY: self.names}

    @classmethod
    def from_nnx_metadata(cls, metadata: dict[str, Any]) -> "LogicalAxes":
        """Back from NNX metadata, for `nnx.bridge.ToLinen`."""
        return cls(metadata["value"], metadata[METADATA_KEY])


def logical(initializer: Callable[..., Any], *names: str | None) -> Callable[..., Any]:
    """A linen initializer whose parameter carries logical names; like `nn.with_logical_partitioning`."""

    def initialize(*args: Any, **kwargs: Any) -> LogicalAxes:
        return LogicalAxes(initializer(*args, **kwargs), names)

    return initialize


def nnx_logical(initializer: Callable[..., Any], *names: str | None) -> Callable[..., Any]:
    """An NNX initializer whose variable carries logical names under a key that needs no mesh."""
    # The box type lets a bridged layer keep and grow its names when linen stacks it.
    return nnx.with_metadata(initializer, **{METADATA_KEY: names, "linen_meta_type": LogicalAxes})


def name_stack(module: T, *, axis: int = 0, name: str | None = LAYERS) -> T:
    """Adds the stack axis to the names of every variable of an NNX module made by `nnx.vmap`; returns the module.

    Args:
        module: a module whose variables were stacked along `axis` and still carry the names of one layer.
        axis: the `out_axes` given to `nnx.vmap`, negative from the end.
    """
    for _, variable in nnx.to_flat_state(nnx.state(module)):
        names = variable.get_metadata().get(METADATA_KEY)
        if names is not None and len(names) + 1 == len(variable.shape):
            variable.set_metadata(**{METADATA_KEY: _inserted(names, axis, name)})
    return module


def _inserted(names: tuple[str | None, ...], index: int, name: str | None) -> tuple[str | None, ...]:
    at = index if index >= 0 else len(names) + 1 + index
    return (*names[:at], name, *names[at:])
