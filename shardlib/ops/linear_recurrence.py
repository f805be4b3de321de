"""h_t = decay_t h_{t-1} + inputs_t along a sequence that may be divided over a mesh axis, in contiguous order.

In: arrays [batch, length, ...features]. Out: all h, float32. Each shard scans its own part; what crosses between shards
has the size of one step. `context_recurrence` and `context_windows` find out by themselves how an axis is taken.

    states = context_recurrence(forget, (1 - forget) * candidate)           # whole arrays, under any mesh or none
    states = linear_recurrence(decay, inputs, axis="context")               # one shard, in a region manual over it
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from meshes.errors import ShardingError

Exchange = Literal["gather", "permute"]
"""How shards tell each other their carries: all to all of them at once, or permutes over 1, 1, 2, 4, ... shards.

"gather" also works under a condition that differs between devices of another axis, as in the ticks of a pipeline; the
permutes of a condition wait for all devices of the program.
"""

AXIS: Final = "context"


def linear_recurrence(
    decay: jax.Array,
    inputs: jax.Array,
    *,
    axis: str | None,
    initial: jax.Array | None = None,
    exchange: Exchange = "gather",
) -> jax.Array:
    """All states h_t = decay_t h_{t-1} + inputs_t, by an associative scan of pairs (decay, inputs).

    A decay of 0 starts anew: no state crosses into the document that begins there.

    Args:
        decay, inputs: [batch, length_local, ...], the same shape; computed in float32.
        axis: mesh axis over which the region is manual and the sequence divided, shard 0 first; None for one device.
        initial: [batch, ...], the state before the whole sequence; None for 0.
        exchange: between shards.

    Returns:
        States [batch, length_local, ...], float32.

    Communication, over c shards, of n = batch x features numbers on a device, forward and backward alike: "permute"
    sends 8 n bytes in each of 1 + ceil(log2(c - 1)) permutes; "gather" 8 n (c - 1) in one all-gather, or, beside
    automatic axes, 16 n (c - 1) in one all-reduce. The length is in none of them.

    Source: Blelloch 1990 (CMU-CS-90-190) section 1.4.1, recurrences as scans; Martin and Cundy 2018 (1709.04057).
    """
    decay, inputs = decay.astype(jnp.float32), inputs.astype(jnp.float32)
    shards = _Shards(axis=axis, exchange=exchange)
    if initial is not None:
        first = jnp.where(shards.index == 0, decay[:, 0] * initial.astype(jnp.float32), 0)
        inputs = jnp.concatenate([inputs[:, :1] + first[:, None], inputs[:, 1:]], axis=1)
    return _states(shards, decay, inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shards:
    """The static part; hashable."""

    axis: str | None
    exchange: Exchange

    @property
    def count(self) -> int:
        return 1 if self.axis is None else jax.lax.axis_size(self.axis)

    @property
    def index(self) -> Any:
        return 0 if self.axis is None else jax.lax.axis_index(self.axis)

    def before(self, x: jax.Array, distance: int, *, reverse: bool = False) -> jax.Array:
        """x of the shard `distance` earlier, by a permute; 0 where there is none."""
        pairs = [(source, source + distance) for source in range(self.count - distance)]
        pairs = [(there, here) for here, there in pairs] if reverse else pairs
        assert self.axis is not None
        return jax.lax.ppermute(x, self.axis, pairs)

    def every(self, x: jax.Array) -> list[jax.Array]:
        """x of each shard.

        Beside automatic axes as a sum of arrays with one shard's x each: there XLA's partitioner would make the
        operand of an all-gather whole over those axes first (JAX 0.10.2, 0.12.0).
        """
        assert self.axis is not None
        mesh = jax.sharding.get_abstract_mesh()
        if all(mesh.shape[name] == 1 for name in mesh.auto_axes):
            gathered = jax.lax.all_gather(x, self.axis)
        else:
            own = (jnp.arange(self.count) == self.index).reshape(-1, *[1] * x.ndim)
            gathered = jax.lax.psum(jnp.where(own, x[None], 0), self.axis)
        return [gathered[shard] for shard in range(self.count)]

    def entering(self, decay: jax.Array, state: jax.Array, *, reverse: bool) -> jax.Array:
        """The state in which a shard begins, from what each shard does to a state: decay times it, plus its own.

        An exclusive scan over the axis. Zeros stand in for shards before the first: a decay of 0 there multiplies
        nothing, since no state enters the sequence.
        """
        if self.count == 1:
            return jnp.zeros_like(state)
        carry = jnp.stack([decay, state])
        if self.exchange == "gather":
            steps = list(enumerate(self.every(carry)))
            found = entered = jnp.zeros_like(state)
            for shard, step in reversed(steps) if reverse else steps:
                found = jnp.where(self.index == shard, entered, found)
                entered = step[0] * entered + step[1]
            return found
        carry, distance = self.before(carry, 1, reverse=reverse), 1
        while distance < self.count - 1:
            carry = jnp.stack(_joined(self.before(carry, distance, reverse=reverse), carry))
            distance *= 2
        return carry[1]


def _joined(first: Any, second: Any) -> tuple[jax.Array, jax.Array]:
    """Two steps h -> decay h + inputs as one."""
    return first[0] * second[0], second[0] * first[1] + second[1]


def _scan(shards: _Shards, decay: jax.Array, inputs: jax.Array, *, reverse: bool) -> tuple[jax.Array, jax.Array]:
    """States of the local part, and the state that enters it."""
    products, states = jax.lax.associative_scan(_joined, (decay, inputs), axis=1, reverse=reverse)
    last = 0 if reverse else -1
    entering = shards.entering(products[:, last], states[:, last], reverse=reverse)
    if shards.count > 1:
        states = states + products * entering[:, None]
    return states, entering


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _states(shards: _Shards, decay: jax.Array, inputs: jax.Array) -> jax.Array:
    return _scan(shards, decay, inputs, reverse=False)[0]


def _forward(shards: _Shards, decay: jax.Array, inputs: jax.Array):
    states, entering = _scan(shards, decay, inputs, reverse=False)
    return states, (decay, states, entering)


def _backward(shards: _Shards, kept: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same recurrence from the end: u_t = decay_t (g_t + u_{t+1}) is what reaches h_{t-1}.

    Autodiff of the scan would keep every level of it; this keeps the states alone.
    """
    decay, states, entering = kept
    passed, after = _scan(shards, decay, decay * cotangent, reverse=True)
    total = cotangent + jnp.concatenate([passed[:, 1:], after[:, None]], axis=1)
    before = jnp.concatenate([entering[:, None], states[:, :-1]], axis=1)
    return total * before, total


_states.defvjp(_forward, _backward)


def windows(
    x: jax.Array,
    *,
    width: int,
    axis: str | None,
    before: jax.Array | None = None,
    exchange: Exchange = "gather",
) -> jax.Array:
    """For each step the last `width` steps, the oldest first, so that a causal convolution is one product.

    Args:
        x: [batch, length_local, features].
        width: steps, the own one included.
        axis: mesh axis that divides the sequence, as for `linear_recurrence`.
        before: [batch, width - 1, features], the steps before the whole sequence; None for 0.
        exchange: of the width - 1 last steps of each shard: one permute, or one gather.

    Returns:
        [batch, length_local, width, features].

    Raises:
        ShardingError: a window that reaches beyond the neighbouring shard.
    """
    batch, length, features = x.shape
    halo, shards = width - 1, _Shards(axis=axis, exchange=exchange)
    if shards.count > 1 and halo > length:
        raise ShardingError(
            f"a window of {width} steps reaches over more than the {length} steps of the shard before",
            fix=f"use at most {length * shards.count // halo} shards of the sequence",
        )
    start = jnp.zeros((batch, halo, features), x.dtype) if before is None else before.astype(x.dtype)
    if halo and shards.count > 1:
        edge = x[:, length - halo :]
        if exchange == "permute":
            received = shards.before(edge, 1)
        else:
            every = shards.every(edge)[:-1]
            received = sum((jnp.where(shards.index == i, each, 0) for i, each in enumerate(every, start=1)), 0 * start)
        start = jnp.where(shards.index == 0, start, received)
    padded = jnp.concatenate([start, x], axis=1)
    return jnp.stack([padded[:, lag : lag + length] for lag in range(width)], axis=2)


def context_recurrence(
    decay: jax.Array,
    inputs: jax.Array,
    *,
    initial: jax.Array | None = None,
    axis: str = AXIS,
    exchange: Exchange | None = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> jax.Array:
    """`linear_recurrence` where the caller stands: whole arrays, or the slices of a region manual over the axis.

    A region around that is manual over other axes only must be one with `check_vma=False`, as those of plans are.

    Args:
        decay, inputs, initial: as for `linear_recurrence`; the length whole, unless the region around divides it.
        axis: that divides the sequence, contiguously, where the mesh has it.
        exchange: None for permutes, and for a gather inside a region that is manual over other axes (`Exchange`).
        mesh: None for the one in force; no mesh, no axis: one device's computation.

    Raises:
        ShardingError: a length that does not divide, an Explicit axis.
    """
    given = () if initial is None else (initial,)

    def body(decay: jax.Array, inputs: jax.Array, *given: jax.Array, **how: Any) -> jax.Array:
        return linear_recurrence(decay, inputs, initial=given[0] if given else None, **how)

    return _divided(body, (decay, inputs), given, axis=axis, exchange=exchange, mesh=mesh)


def context_windows(
    x: jax.Array,
    *,
    width: int,
    before: jax.Array | None = None,
    axis: str = AXIS,
    exchange: Exchange | None = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> jax.Array:
    """`windows` where the caller stands; arguments as for `context_recurrence`."""
    given = () if before is None else (before,)

    def body(x: jax.Array, *given: jax.Array, **how: Any) -> jax.Array:
        return windows(x, width=width, before=given[0] if given else None, **how)

    return _divided(body, (x,), given, axis=axis, exchange=exchange, mesh=mesh)


def _divided(
    body: Callable[..., jax.Array],
    divided: tuple[jax.Array, ...],
    whole: tuple[jax.Array, ...],
    *,
    axis: str,
    exchange: Exchange | None,
    mesh: Mesh | AbstractMesh | None,
) -> jax.Array:
    context = jax.sharding.get_abstract_mesh()
    if mesh is None or context.manual_axes:
        mesh = context
    exchange = exchange or ("gather" if context.manual_axes else "permute")
    if axis in mesh.manual_axes:
        return body(*divided, *whole, axis=axis, exchange=exchange)
    if mesh.shape.get(axis, 1) == 1:
        return body(*divided, *whole, axis=None, exchange=exchange)
    _check(mesh, axis, length=divided[0].shape[1])
    # Manual over this axis alone: batch and features stay as the compiler divides them.
    region = jax.shard_map(
        functools.partial(body, axis=axis, exchange=exchange),
        mesh=mesh,
        in_specs=(*[P(None, axis)] * len(divided), *[P()] * len(whole)),
        out_specs=P(None, axis),
        axis_names={axis},
        check_vma=False,
    )
    return region(*divided, *whole)


def _check(mesh: Mesh | AbstractMesh, axis: str, *, length: int) -> None:
    size = mesh.shape[axis]
    if dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[axis] == AxisType.Explicit:
        raise ShardingError(
            f"axis {axis!r} is Explicit", fix="make the mesh with axis_types=(AxisType.Auto, ...), as make_mesh does"
        )
    if length % size:
        raise ShardingError(
            f"length {length} is not divisible by {axis}={size}",
            fix=f"pad the sequence to length {-(-length // size) * size} and give the padding weight 0",
        )
