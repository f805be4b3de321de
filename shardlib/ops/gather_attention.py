"""All-gather attention: every shard collects all keys and values, the simple baseline.

In: one shard of a sequence, inside a region manual over the context axis. Out: the attention of its queries over the
whole sequence, at the memory of all keys and values on each device.

    out = gather_attention(query, key, value, axis="context", placement="zigzag", causal=True)
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax

from shardlib.ops import online_softmax
from shardlib.ops.attention_mask import Rule
from shardlib.ops.context_arguments import Arguments, Shards, cotangents, merged_heads, prepare
from shardlib.ops.ring_attention import LARGEST_TILE


def gather_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    axis: str,
    placement: str = "contiguous",
    causal: bool = False,
    window: int | None = None,
    mask: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    largest_tile: int = LARGEST_TILE,
    kernels: bool = True,
) -> jax.Array:
    """Softmax attention over a sequence divided over a mesh axis; arguments, result, errors as for `ring_attention`.

    Gathers keys and values forward and keeps them; reduce-scatters their gradients backward, added in float32.

    Source: Grattafiori et al. 2024 (2407.21783) section 3.3.2.
    """
    del kernels  # none takes labels that depend on the device
    shards, rule = Shards(axis=axis, placement=placement), Rule(causal=causal, window=window)
    arguments = prepare(
        query, key, value, shards=shards, rule=rule, mask=mask, segment_ids=segment_ids, positions=positions
    )
    gather = _Gather(axis=axis, rule=rule, tile=shards.tile(query.shape[1], largest=largest_tile))
    return merged_heads(_attend(gather, arguments))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gather:
    """The static part; hashable."""

    axis: str
    rule: Rule
    tile: int

    def options(self, arguments: Arguments, keys: int) -> dict[str, Any]:
        """For `online_softmax`: all keys as one block."""
        return {"view": arguments.view(0, keys), "rule": self.rule, "tiles": (self.tile, self.tile)}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(gather: _Gather, arguments: Arguments) -> jax.Array:
    return _forward(gather, arguments)[0]


def _forward(gather: _Gather, arguments: Arguments):
    query = arguments.query
    held = [jax.lax.all_gather(x, gather.axis, axis=2, tiled=True) for x in (arguments.key, arguments.value)]
    arguments = arguments._replace(key=held[0], value=held[1])
    state = online_softmax.start(query, value_dim=held[1].shape[-1])
    state = online_softmax.attend(state, query, *held, **gather.options(arguments, held[0].shape[2]))
    result, log_weight = online_softmax.finish(state)
    result = result.astype(query.dtype)
    return result, (arguments, result, log_weight)


def _backward(gather: _Gather, residuals: Any, out: jax.Array):
    arguments, result, log_weight = residuals
    operands = (arguments.query, arguments.key, arguments.value)
    sums = online_softmax.gradients(
        online_softmax.no_gradients(*operands),
        *operands,
        cotangent=online_softmax.cotangent_of(out, result, log_weight),
        **gather.options(arguments, arguments.key.shape[2]),
    )
    key, value = (jax.lax.psum_scatter(x, gather.axis, scatter_dimension=2, tiled=True) for x in (sums.key, sums.value))
    return (cotangents(arguments, sums.query, key, value),)


_attend.defvjp(_forward, _backward)
