"""How a model's attention runs over a divided sequence: the kind, the order of tokens, and why.

In: the attention calls that a trace of the loss made, a plan. Out: `ContextUse`, or an error with the fix.

    use = choose_context(calls, plan)
    print(use.reason)
"""

from dataclasses import dataclass
from typing import Any, Final

import jax
import numpy as np

from meshes.errors import ShardingError
from meshes.shape import MeshShape
from shardlib import batch_spec as batches
from shardlib.ops.context_choice import choose
from shardlib.ops.context_layout import order, reorder

CONTEXT: Final = "context"
KINDS: Final = ("ring", "all_to_all", "gather")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """One call of the attention slot, as a trace saw it; a static leaf.

    Args:
        query, key: shapes [batch, length, heads, head_dim].
        causal, window: the mask.
        has_row_mask: a mask with one row per query, which a model makes in the order of positions.
        itemsize: bytes of an element.
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    causal: bool
    window: int | None
    has_row_mask: bool
    itemsize: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextUse:
    """How sequences are divided; a static leaf.

    Args:
        kind: of attention, one of `KINDS`.
        placement: which device holds which tokens, one of `PLACEMENTS`.
        shards: size of the context axis.
        reason: what was compared, or who decided.
    """

    kind: str
    placement: str
    shards: int
    reason: str

    def order(self, length: int) -> np.ndarray[Any, Any]:
        """The position of every token in the order in which devices hold them."""
        return order(length, shards=self.shards, placement=self.placement)

    def reordered(self, batch: Any, spec: Any) -> Any:
        """A batch in that order."""
        if self.placement == "contiguous":
            return batch
        leaves, treedef = jax.tree.flatten(batch)
        named = {str(i): leaf for i, leaf in enumerate(leaves)}
        specs = jax.tree.leaves(spec, is_leaf=batches.is_spec)
        axes = {str(i): leaf.axes for i, leaf in enumerate(specs)}
        moved = reorder(named, axes=axes, shards=self.shards, placement=self.placement)
        return treedef.unflatten([moved[str(i)] for i in range(len(leaves))])


def divides_sequence(mesh: MeshShape) -> bool:
    """Whether the mesh has a context axis of more than one shard."""
    return CONTEXT in mesh.names and mesh.size(CONTEXT) > 1


def choose_context(
    calls: list[AttentionCall],
    *,
    mesh: MeshShape,
    batch_shards: int,
    follows_positions: bool,
    in_branch: bool,
    kind: str | None,
    placement: str | None,
) -> ContextUse:
    """Decides kind and placement for all layers, from the largest call.

    Args:
        calls: of one trace of the whole batch.
        mesh: with a context axis.
        batch_shards: into how many parts the batch is cut on its way to one call.
        follows_positions: the model makes what depends on positions through `annotate.by_position`.
        in_branch: attention runs in branches that only some pipeline stages take.
        kind, placement: what the plan wants; None chooses.

    Raises:
        ShardingError: attention that does not go through the slot; sizes that do not fit; a placement that the model
            cannot follow.
    """
    shards = mesh.size(CONTEXT)
    if not calls:
        raise ShardingError(
            f"mesh {mesh} divides sequences over context={shards}, and the loss never calls annotate.attention: "
            "attention of its own would be computed on gathered sequences",
            fix="call shardlib.attention(query, key, value, causal=True) in the model, or leave context out",
        )
    largest = max(calls, key=lambda call: np.prod(call.query) * call.key[1])
    batch, length, heads, head_dim = largest.query
    if length % shards:
        raise ShardingError(
            f"length {length} is not divisible by context={shards}",
            fix=f"--length {-(-length // (2 * shards)) * 2 * shards}, a multiple of twice the axis, which zigzag needs",
        )
    choice = choose(
        length=length,
        heads=heads,
        kv_heads=largest.key[2],
        head_dim=head_dim,
        batch=max(batch // batch_shards, 1),
        context=shards,
        tensor=mesh.size("tensor") if heads % mesh.size("tensor") == 0 else 1,
        causal=largest.causal,
        window=largest.window,
        dtype_bytes=largest.itemsize,
        in_branch=in_branch,
    )
    why = choice.reason
    fitting = [candidate for candidate in choice.candidates if candidate.kind == (kind or choice.kind)]
    refused = fitting[0].refused
    if kind is not None and refused and not refused.startswith("all keys"):
        raise ShardingError(f"attention={kind!r} cannot run here: {refused}", fix=f"attention={choice.kind!r}")
    if kind is not None:
        why = f"the plan says {kind}\n{why}"
    chosen = placement or (fitting[0].placement if _may_move(calls, follows_positions) else "contiguous")
    if placement not in (None, "contiguous") and not _may_move(calls, follows_positions):
        raise ShardingError(
            f"placement={placement!r}: the model makes masks or position tables in the order of positions",
            fix="placement='contiguous'; or take position tables through annotate.by_position, and masks as causal=, "
            "window= or segment_ids=",
        )
    if (kind or choice.kind) == "all_to_all" and placement is None:
        chosen = "contiguous"
    if chosen == "contiguous" and largest.causal and placement is None and (kind or choice.kind) == "ring":
        why += "\ntokens stay in order (contiguous), so late devices work more: the model has no annotate.by_position"
    return ContextUse(kind=kind or choice.kind, placement=chosen, shards=shards, reason=why)


def _may_move(calls: list[AttentionCall], follows_positions: bool) -> bool:
    """Whether tokens may be held in another order than that of positions."""
    return follows_positions and not any(call.has_row_mask for call in calls)
