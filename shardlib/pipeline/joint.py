"""Embedding and head of a pipeline computed by all ranks together, each with its part of the vocabulary.

In: a schedule's grids, which parameters are in parts. Out: what every rank does in a tick, by predicates that depend
on the tick alone, so that collectives over the stages are joined by all of them.

    joint = Joint(placement=placement, spread=(True, False))
    grids |= joint.grids(lowered.arrays())
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from shardlib.pipeline.parts import Leaves
from shardlib.pipeline.placement import Placement
from shardlib.pipeline.rings import Packing

STAGE: Final = "stage"
TOGETHER_SCOPE: Final = "pipeline_together"
"""The scope that collectives of what all stages compute together are named by in a compiled program."""
ENTRY, EXIT, BACK = "joint.entry", "joint.exit", "joint.back"


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """Who begins and ends, and what is in parts; a static value.

    Args:
        placement: which rank holds which virtual stage.
        spread: for every parameter outside of the layers, whether it is in parts over the stages.
    """

    placement: Placement
    spread: tuple[bool, ...]

    @property
    def first(self) -> int:
        """The rank of the first virtual stage."""
        return self.placement.ranks[0]

    @property
    def last(self) -> int:
        """The rank of the last virtual stage."""
        return self.placement.ranks[-1]

    def grids(self, arrays: Mapping[str, NDArray[np.int32]]) -> dict[str, NDArray[np.int32]]:
        """Per tick, [ticks]: the microbatch that enters the layers, that leaves them, whose gradient leaves them.

        Args:
            arrays: "F.microbatch", "F.chunk" and, where there are backward passes, the same for "B".
        """
        last = len(self.placement.ranks) - 1
        wanted = {ENTRY: ("F", 0), EXIT: ("F", last), BACK: ("B", 0)}
        found = {}
        for name, (kind, stage) in wanted.items():
            if f"{kind}.microbatch" in arrays:
                rank, chunk = self.placement.ranks[stage], self.placement.chunk(stage)
                microbatch = arrays[f"{kind}.microbatch"][:, rank]
                found[name] = np.where(arrays[f"{kind}.chunk"][:, rank] == chunk, microbatch, -1).astype(np.int32)
        return found

    def from_rank(self, packing: Packing, value: Leaves, rank: int) -> Leaves:
        """One rank's message on all of them: a sum in which the others have zeros."""
        is_there = jax.lax.axis_index(STAGE) == rank
        return packing.placed(packing.unpack([_summed(leaf, is_there) for leaf in packing.pack(value)]))

    def added(self, sums: Leaves, grads: Leaves, spread: tuple[bool, ...], rank: int) -> Leaves:
        """Sums with gradients that all ranks computed: of what is in parts each adds its own, of the rest only one.

        Args:
            sums, grads: of the chosen parameters.
            spread: which of them are in parts.
            rank: that adds the rest.
        """
        is_there = jax.lax.axis_index(STAGE) == rank
        return [
            held + (new if in_parts else jnp.where(is_there, new, 0)).astype(held.dtype)
            for held, new, in_parts in zip(sums, grads, spread, strict=True)
        ]


def in_tick(microbatch: Any, work: Callable[[], Any], nothing: Callable[[], Any]) -> Any:
    """What all ranks compute in the ticks that have such a microbatch; every rank takes the same branch."""
    return jax.lax.cond(microbatch >= 0, jax.named_scope(TOGETHER_SCOPE)(work), nothing)


def _summed(leaf: jax.Array, is_there: Any) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_summed(jax.random.key_data(leaf), is_there), impl=jax.random.key_impl(leaf))
    # A sum in bfloat16 ends the process on XLA's CPU backend here; with a single term that is not zero all are exact.
    wide = jnp.float32 if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.int32
    wide = leaf.dtype if leaf.dtype.itemsize >= 4 else wide
    return jax.lax.psum(jnp.where(is_there, leaf.astype(wide), 0), STAGE).astype(leaf.dtype)
