"""One virtual stage on one rank: its layers in a loop, what it stores for the backward pass, and that pass.

In: `Parts`, a partition, a policy. Out: functions of (rows, outer, piece, stage number, message).

    work = StageWork(parts=parts, partition=partition, policy=parse_policy("dots"), skip=True)
    message = work.forward(rows, outer, piece, stage, message)
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.pipeline.partition import Partition
from shardlib.pipeline.parts import Leaves, Parts
from shardlib.remat import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """What a rank computes for one virtual stage; a static value.

    Args:
        parts: the cut loss.
        partition: layers per virtual stage.
        policy: what a layer stores for its backward pass.
        skip: where stages are uneven, branch around missing layers; else compute and discard.
    """

    parts: Parts
    partition: Partition
    policy: Policy
    skip: bool

    def forward(self, rows: Leaves, outer: Leaves, piece: Leaves, stage: Any, message: Leaves) -> Leaves:
        """Runs the layers of a virtual stage.

        Args:
            rows: parameters of its layers, [most, ...] each.
            outer: all other parameters.
            piece: the microbatch.
            stage: the number of the virtual stage, an int32 scalar.
            message: the carry, then the outputs of all layers so far.

        Returns:
            The next message.
        """
        partition, parts = self.partition, self.parts
        num_carry, most = len(parts.carry), partition.most
        shared, per_layer = parts.side(outer, piece)
        start, count = jnp.asarray(partition.starts)[stage], jnp.asarray(partition.counts)[stage]
        layers = start + jnp.arange(most)
        # Past the last layer `take` repeats it; a dynamic slice would move its start instead, and give other keys.
        own = [jnp.take(array, jnp.minimum(layers, parts.num_layers - 1), axis=0) for array in per_layer]
        block = self._block()

        def layer(carry: Leaves, inputs: Any) -> tuple[Leaves, Leaves]:
            row, slices, position = inputs
            if partition.is_even:
                return block(row, shared, carry, slices)
            return self._perhaps(position < count, lambda carry: block(row, shared, carry, slices), carry)

        if not (partition.is_even or self.skip):
            # Computed and discarded: on the first layer's parameters, for zeros may divide by zero.
            rows = [jnp.where(_like(jnp.arange(most) < count, row), row, row[:1]) for row in rows]
        carry, made = jax.lax.scan(layer, list(message[:num_carry]), (list(rows), own, jnp.arange(most)))
        if partition.is_even:
            outputs = [
                jax.lax.dynamic_update_slice_in_dim(held, new, start, 0)
                for held, new in zip(message[num_carry:], made, strict=True)
            ]
        else:
            places = jnp.where(jnp.arange(most) < count, layers, parts.num_layers)
            outputs = [held.at[places].set(new, mode="drop") for held, new in zip(message[num_carry:], made)]
        return [*carry, *outputs]

    def _block(self) -> Any:
        if self.policy.kind == "none":
            return self.parts.block
        return jax.checkpoint(self.parts.block, policy=self.policy.saveable(), prevent_cse=False)

    def _perhaps(self, exists: Any, run: Any, carry: Leaves) -> tuple[Leaves, Leaves]:
        """A layer that may be missing: then the carry passes and its outputs are zeros."""
        outputs = [jnp.zeros(leaf.shape[1:], leaf.dtype) for leaf in self.parts.outputs]
        if self.skip:
            return jax.lax.cond(exists, run, lambda carry: (carry, outputs), carry)
        made, new = run(carry)
        return [jnp.where(exists, a, b) for a, b in zip(made, carry, strict=True)], new


def _like(mask: jax.Array, array: jax.Array) -> jax.Array:
    return mask.reshape(-1, *[1] * (array.ndim - 1))
