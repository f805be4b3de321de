"""Ring attention: keys and values travel from shard to shard while each shard computes with those it holds.

In: one shard of a sequence, inside a `shard_map` manual over the context axis, made with `check_vma=False`. Out: the
attention of its queries over the whole sequence. KV heads travel, never repeated ones; gradients of keys and values
travel in float32.

    out = ring_attention(query, key, value, axis="context", placement="zigzag", causal=True)
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from shardlib.ops import online_softmax, ring_kernels
from shardlib.ops.attention_mask import Rule, View
from shardlib.ops.context_arguments import Arguments, Shards, check_degrees, cotangents, merged_heads, prepare
from shardlib.ops.context_layout import needed_shifts
from shardlib.ops.fused_attention import call_refusal, fused_attention, platform_of
from shardlib.ops.ring_groups import ring_pairs

LARGEST_TILE = 512
Held = tuple[jax.Array, jax.Array]


def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    axis: str | None,
    placement: str = "contiguous",
    causal: bool = False,
    window: int | None = None,
    mask: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    degrees: Sequence[int] | None = None,
    largest_tile: int = LARGEST_TILE,
    kernels: bool = True,
) -> jax.Array:
    """Softmax attention over a sequence divided over a mesh axis; the meaning is `annotate.reference_attention`'s.

    Sends c - 1 blocks of keys and of values forward and backward, and c - 1 of their gradients, over c shards; with a
    window only as far as some query sees. A block's transfer does not depend on the computation with the block before
    it, so that both may run at once. Rows that may attend to nothing are 0.

    Args:
        query: [batch, length_local, heads, head_dim], in the order of the placement.
        key, value: [batch, length_local, kv_heads, head_dim]; heads is a multiple of kv_heads.
        axis: mesh axis over which the region is manual; None when the device holds the whole sequence.
        placement: which tokens a shard holds (`context_layout.order`).
        causal: a query attends to positions up to its own.
        window: a query attends to keys less than this many positions away, its own included.
        mask: [batch or 1, heads or 1, length_local or 1, keys], boolean, True where a query may attend; keys of the
            whole sequence, in the order of the placement.
        segment_ids: [batch, length_local], integer; tokens attend within their own segment.
        positions: [batch or 1, length_local], integer, for `causal` and `window`, in place of the placement's.
        degrees: sizes of rings into which the axis falls, one behind the other, each with its own sequences, as
            `shardlib.data.arrange` places them; needs segment ids and positions. The largest ring decides how many
            blocks everyone sends.
        largest_tile: rows and columns of scores computed at a time, at most.
        kernels: blocks are computed by the kernel of the platform that the program is compiled for, where it takes
            them (`ring_kernels.refusal`).

    Returns:
        [batch, length_local, heads, head_dim], of the query's dtype.

    Raises:
        ShardingError: shapes that do not fit, a length that does not divide, a window beyond the length.

    Source: Liu et al. 2023 (2310.01889) section 3.
    """
    shards = Shards(
        axis=axis,
        placement=placement,
        positions_given=positions is not None,
        degrees=None if degrees is None else tuple(degrees),
    )
    check_degrees(shards, has_segments=segment_ids is not None, has_positions=positions is not None)
    rule = Rule(causal=causal, window=window)
    arguments = prepare(
        query, key, value, shards=shards, rule=rule, mask=mask, segment_ids=segment_ids, positions=positions
    )
    platform, limits = platform_of(None) if kernels else None, {"causal": causal, "window": window}
    plain = mask is None and positions is None
    if axis is None and plain and call_refusal(platform, query, key, value, **limits) is None:
        assert platform is not None
        return fused_attention(query, key, value, platform=platform, segment_ids=segment_ids, **limits)
    refused = ring_kernels.refusal(
        platform,
        query=query.shape,
        key=key.shape,
        value=value.shape,
        dtype=query.dtype,
        placement=placement,
        has_mask=mask is not None,
        has_positions=positions is not None,
        **limits,
    )
    tile = shards.tile(query.shape[1], largest=largest_tile)
    ring = _Ring(shards=shards, rule=rule, tile=tile, has_kernel=axis is not None and refused is None)
    return merged_heads(_attend(ring, arguments))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ring:
    """The static part; hashable."""

    shards: Shards
    rule: Rule
    tile: int
    has_kernel: bool

    def shifts(self, local_length: int) -> tuple[int, ...]:
        """How far back the blocks come from with which the device computes, in turn."""
        # Given positions are data: any shard may see any other.
        return needed_shifts(
            length=local_length * self.shards.count,
            shards=max(self.shards.rings),
            placement=self.shards.placement,
            causal=self.rule.causal,
            window=None if self.shards.positions_given else self.rule.window,
        )

    def in_turn(self, computed: Any, arriving: Any) -> tuple[Any, Any]:
        """Both, with a kernel the next transfer only after this computation.

        Else the TPU compiler, which does not know how long a kernel takes, sees that no transfer depends on any
        computation, and starts them all beside the first one.
        """
        return jax.lax.optimization_barrier((computed, arriving)) if self.has_kernel else (computed, arriving)

    def sent(self, tree: Any, distance: int | None) -> Any:
        """The tree of the shard `distance` before this one, around the ring; None without a distance."""
        if distance is None:
            return None
        pairs = ring_pairs(self.shards.rings, distance=distance)
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.shards.axis, pairs), tree)

    def attend(self, state: online_softmax.Softmax, arguments: Arguments, held: Held, shift: int | jax.Array):
        """Continues the softmax over the block that came from `shift` shards back."""
        view = self._view(arguments, shift)
        if self.has_kernel:
            return ring_kernels.attend(state, _block(arguments, view), *held, **self._place(shift))
        return online_softmax.attend(state, arguments.query, *held, view=view, **self._tiles)

    def gradients(
        self,
        sums: online_softmax.Gradients,
        arguments: Arguments,
        held: Held,
        shift: int | jax.Array,
        *,
        result,
        cotangent,
    ) -> online_softmax.Gradients:
        """Adds the gradients of that block."""
        view = self._view(arguments, shift)
        if self.has_kernel:
            known = {"result": result, "cotangent": cotangent}
            return ring_kernels.gradients(sums, _block(arguments, view), *held, **known, **self._place(shift))
        return online_softmax.gradients(sums, arguments.query, *held, cotangent=cotangent, view=view, **self._tiles)

    @property
    def _tiles(self) -> dict[str, Any]:
        return {"rule": self.rule, "tiles": (self.tile, self.tile)}

    def _place(self, shift: int | jax.Array) -> dict[str, Any]:
        return {"shift": shift, "shards": self.shards, "causal": self.rule.causal}

    def _view(self, arguments: Arguments, shift: int | jax.Array) -> View:
        local, (source, counts) = arguments.key.shape[2], self.shards.source(shift)
        return arguments.view(source * local, local, counts=counts)


def _block(arguments: Arguments, view: View) -> ring_kernels.Block:
    return ring_kernels.Block(
        query=arguments.query, segments=view.rows.segment_ids, key_segments=view.columns.segment_ids
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: _Ring, arguments: Arguments) -> jax.Array:
    return _forward(ring, arguments)[0]


def _forward(ring: _Ring, arguments: Arguments):
    query, own = arguments.query, (arguments.key, arguments.value)

    def step(stop: _Stop, carry: Any) -> Any:
        state, held = carry
        arriving = ring.sent(held, stop.goes)
        return ring.in_turn(ring.attend(state, arguments, held, stop.shift), arriving)

    start = online_softmax.start(query, value_dim=arguments.value.shape[-1])
    state, _ = _visit(ring.shifts(query.shape[3]), step, (start, own))
    result, log_weight = online_softmax.finish(state)
    result = result.astype(query.dtype)
    return result, (arguments, result, log_weight)


def _backward(ring: _Ring, residuals: Any, out: jax.Array):
    arguments, result, log_weight = residuals
    # The barrier, and the other way around the ring: else a compiler that sees both passes at once sends blocks only
    # once and keeps all of them in between. Where barriers do not hold (CPU), a ring of two is still merged.
    query, own, out = jax.lax.optimization_barrier((arguments.query, (arguments.key, arguments.value), out))
    arguments = arguments._replace(query=query, key=own[0], value=own[1])
    known = {"result": result, "cotangent": online_softmax.cotangent_of(out, result, log_weight)}

    def step(stop: _Stop, carry: Any) -> Any:
        # The own block's gradients wait at home; those of the others follow their block, one step behind it, so that
        # this transfer too runs beside the computation.
        held, travelling, home = carry
        arriving = ring.sent(held, stop.goes)
        block = online_softmax.no_gradients(query, *held)._replace(query=home.query)
        block = ring.gradients(block, arguments, held, stop.shift, **known)
        block, arriving = ring.in_turn(block, arriving)
        if stop.came is None:
            return arriving, None, block
        part = (block.key, block.value)
        if travelling is not None:
            part = jax.tree.map(lambda a, b: a + b, ring.sent(travelling, stop.came), part)
        return arriving, part, home._replace(query=block.query)

    # One hop forward and the others back: no loop mixes a block whose gradients begin to travel with one they follow.
    first, *others = ring.shifts(query.shape[3])
    shifts = (first, *reversed(others))
    _, travelling, home = _visit(shifts, step, (own, None, online_softmax.no_gradients(query, *own)))
    if travelling is not None:
        returned = ring.sent(travelling, -shifts[-1])
        home = home._replace(key=home.key + returned[0], value=home.value + returned[1])
    return (cotangents(arguments, *(ring_kernels.scaled(home) if ring.has_kernel else home)),)


_attend.defvjp(_forward, _backward)


class _Stop(NamedTuple):
    """A block that a device computes with.

    Args:
        shift: how far back it comes from; traced inside of a loop, 0 for the own block.
        came: distance of the hop that brought it; None for the own block.
        goes: distance of the hop to the next one; None for the last.
    """

    shift: int | jax.Array
    came: int | None
    goes: int | None


def _visit(shifts: Sequence[int], step: Callable[[_Stop, Any], Any], carry: Any) -> Any:
    """`step(stop, carry)` for every block; blocks that came and go equally far are a loop.

    So the program does not grow with the ring, and no compiler starts all transfers at once and keeps what arrives.
    """
    hops = [after - before for before, after in itertools.pairwise(shifts)]
    stops = [_Stop(*each) for each in zip(shifts, (None, *hops), (*hops, None), strict=True)]
    for (_, goes), alike in itertools.groupby(stops, key=lambda stop: (stop.came, stop.goes)):
        first, *others = alike

        def turn(number: Any, carry: Any, first: _Stop = first, distance: int = goes or 0) -> Any:
            return step(first._replace(shift=first.shift + number * distance), carry)

        carry = online_softmax.repeated(1 + len(others), turn, carry)
    return carry
