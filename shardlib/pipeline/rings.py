"""Ring buffers and messages of the executor: lists of arrays with slots along dim 0; one array per dtype on the wire.

In: abstract arrays of one value. Out: rings that hold several, and packed messages.

    ring = make_ring(value, slots=7)
    ring = write(ring, value, slot)    # slot -1 writes nothing that is ever read
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from shardlib.jax_compat import in_device_memory

Leaves = list[Any]


def zeros(value: Sequence[Any]) -> Leaves:
    """A value of zeros."""
    return [jnp.zeros(leaf.shape, leaf.dtype) for leaf in value]


def make_ring(value: Sequence[Any], *, slots: int) -> Leaves:
    """A ring of zeros, with one slot more for what nobody reads, in the memory that the value is in."""

    def leaf(like: Any) -> Any:
        made = jnp.zeros((slots + 1, *like.shape), like.dtype)
        return made if in_device_memory(like) else jax.device_put(made, jax.memory.Space.Host)

    return [leaf(like) for like in value]


def write(ring: Leaves, value: Leaves, slot: Any) -> Leaves:
    """The ring with a value in a slot; slot -1 is the spare one at the end."""
    return [
        jax.lax.dynamic_update_index_in_dim(held, leaf, jnp.where(slot < 0, held.shape[0] - 1, slot), 0)
        for held, leaf in zip(ring, value, strict=True)
    ]


def read(ring: Leaves, slot: Any) -> Leaves:
    """The value in a slot; slot -1 reads the spare one."""
    return [
        jax.lax.dynamic_index_in_dim(held, jnp.where(slot < 0, held.shape[0] - 1, slot), 0, keepdims=False)
        for held in ring
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How the arrays of a message share collectives: flat, one array per dtype; a static value.

    Args:
        value: the arrays of one message, abstract.
        specs: where each array is placed over mesh axes that the compiler manages; None where there are none. Then
            the largest array of every dtype travels as it is, for flattening it would gather it.
    """

    value: tuple[Any, ...]
    specs: tuple[P, ...] | None

    def placed(self, value: Leaves) -> Leaves:
        """The arrays where they belong, so that both branches of a conditional agree."""
        if self.specs is None:
            return value
        return [jax.lax.with_sharding_constraint(leaf, spec) for leaf, spec in zip(value, self.specs, strict=True)]

    def ring(self, *, slots: int) -> Leaves:
        """A ring for such messages."""
        ring = make_ring(self.value, slots=slots)
        if self.specs is None:
            return ring
        return [jax.lax.with_sharding_constraint(leaf, P(None, *spec)) for leaf, spec in zip(ring, self.specs)]

    def zeros(self) -> Leaves:
        """A message of zeros."""
        return self.placed(zeros(self.value))

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Positions of the arrays that travel together."""
        groups: list[tuple[int, ...]] = []
        for dtype in dict.fromkeys(leaf.dtype for leaf in self.value):
            positions = [i for i, leaf in enumerate(self.value) if leaf.dtype == dtype]
            if self.specs is not None:
                largest = max(positions, key=lambda i: math.prod(self.value[i].shape))
                groups.append((largest,))
                positions.remove(largest)
            if positions:
                groups.append(tuple(positions))
        return tuple(groups)

    def pack(self, value: Leaves) -> Leaves:
        """One array per group."""
        return [
            value[group[0]] if len(group) == 1 else jnp.concatenate([value[i].reshape(-1) for i in group])
            for group in self.groups
        ]

    def unpack(self, packed: Leaves) -> Leaves:
        """The arrays again."""
        value: Leaves = [None] * len(self.value)
        for group, array in zip(self.groups, packed, strict=True):
            if len(group) == 1:
                value[group[0]] = array
                continue
            start = 0
            for i in group:
                size = math.prod(self.value[i].shape)
                value[i] = array[start : start + size].reshape(self.value[i].shape)
                start += size
        return value
