"""A loss in four parts: before the layers, one layer, after the layers, and what layers need beside the carry.

In: nothing; `cut` makes these, or a hand. Out: functions on flat lists that the executor runs where they belong.

    carry = parts.pre(outer, piece)
    consts, per_layer = parts.side(outer, piece)
    carry, outputs = parts.block(layer, consts, carry, [a[0] for a in per_layer])
    results = parts.post(outer, piece, carry, [stack of the outputs])
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from shardlib.annotate import layer_boundary
from shardlib.pipeline.stack import Stacked

Leaves = list[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A loss cut at its layers; a static value. Arrays are flat lists, in the order of the loss's own arguments.

    Args:
        num_layers: L.
        stacked: the parameters of the layers.
        outer: positions of all other parameters.
        pre: (outer, piece) -> carry; the embedding.
        side: (outer, piece) -> (values every layer reads, values with a slice per layer along dim 0).
        block: (one layer's parameters, side values, carry, one layer's slices) -> (carry, that layer's outputs).
        post: (outer, piece, carry, outputs of all layers along dim 0) -> the loss's results; head and loss.
        carry: the carry as abstract arrays.
        outputs: the outputs of all layers as abstract arrays [L, ...].
        carry_specs: how the model places each carry over mesh axes that the compiler manages; whole where it does not
            say.
        results: the tree structure of the loss's results; None for a scalar alone.
        reads_pre, reads_side, reads_post: positions in a piece of what each of these reads.
        read_again: (which other parameters have gradients) -> positions in a piece of what these gradients read where
            they pass through pre.
        names: given by `checkpoint_name` to values of a layer.
        where: the scan or the markers that were cut, with the model's line.
        flops: FLOPs of matrix products in pre, one block, post and side, forward.
    """

    num_layers: int
    stacked: tuple[Stacked, ...]
    outer: tuple[int, ...]
    pre: Callable[[Leaves, Leaves], Leaves]
    side: Callable[[Leaves, Leaves], tuple[Leaves, Leaves]]
    block: Callable[[Leaves, Leaves, Leaves, Leaves], tuple[Leaves, Leaves]]
    post: Callable[[Leaves, Leaves, Leaves, Leaves], Leaves]
    carry: tuple[jax.ShapeDtypeStruct, ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    carry_specs: tuple[P, ...] = ()
    results: Any = None
    reads_pre: tuple[int, ...] = ()
    reads_side: tuple[int, ...] = ()
    reads_post: tuple[int, ...] = ()
    read_again: Callable[[Sequence[bool]], tuple[int, ...]] = lambda chosen: ()
    names: tuple[str, ...] = ()
    where: str = "by hand"
    flops: tuple[int, int, int, int] = (0, 0, 0, 0)

    @property
    def message(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What travels from stage to stage: the carry, and the outputs of all layers so far."""
        return (*self.carry, *self.outputs)

    @property
    def message_specs(self) -> tuple[P, ...]:
        """How the arrays of a message are placed."""
        carry = self.carry_specs or (P(),) * len(self.carry)
        return (*carry, *(P() for _ in self.outputs))

    @property
    def message_bytes(self) -> int:
        """Bytes of one message, at the shapes the loss was traced with."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in self.message)

    def loss(self, params: Any, batch: Any, rng: Any = None) -> Any:
        """The parts put together again: the loss on one device, and what a pipeline cuts where parts are by hand."""
        leaves, piece = jax.tree.leaves(params), jax.tree.leaves((batch, rng))
        outer = [leaves[leaf] for leaf in self.outer]
        shared, own = self.side(outer, piece)
        if any(kind.dim is None for kind in self.stacked):
            carry, outputs = self._one_by_one(leaves, self.pre(outer, piece), shared, own)
        else:
            rows = [kind.rows(leaves) for kind in self.stacked]
            layer = lambda carry, own: self.block(own[0], shared, carry, own[1])  # noqa: E731
            carry, outputs = jax.lax.scan(layer, self.pre(outer, piece), (rows, own), length=self.num_layers)
        made = self.post(outer, piece, carry, outputs)
        return made[0] if self.results is None else jax.tree.unflatten(self.results, made)

    def _one_by_one(self, leaves: Leaves, carry: Leaves, shared: Leaves, own: Leaves) -> tuple[Leaves, Leaves]:
        """Layers that have arrays of their own, between markers."""
        made = []
        carry = layer_boundary(carry)
        for position in range(self.num_layers):
            row = [
                leaves[kind.leaves[position]]
                if kind.dim is None
                else jax.lax.index_in_dim(leaves[kind.leaves[0]], position, kind.dim, keepdims=False)
                for kind in self.stacked
            ]
            carry, outputs = self.block(row, shared, carry, [array[position] for array in own])
            carry = layer_boundary(carry)
            made.append(outputs)
        return carry, [jnp.stack(values) for values in zip(*made, strict=True)]
