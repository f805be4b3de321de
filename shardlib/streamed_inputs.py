"""Which inputs of a pipeline every stage holds whole, and which the stages hold in parts and stream.

In: a cut loss, its schedule, the plan, the batch spec. Out: an `Input` per array, with the reason, and their specs.

    inputs = inputs_of(parts, lowered, plan, batch_spec)
    batch = place_inputs(resolve(batch_spec, plan.rules, plan.mesh), inputs, plan.mesh)
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import jax
from jax.sharding import PartitionSpec as P

from meshes.shape import MeshShape
from shardlib import batch_spec as batches
from shardlib.batch_spec import ArraySpec
from shardlib.pipeline.feeds import FIRST, LAST, NO_FEEDS, Feeds, feeds_of
from shardlib.pipeline.lowered import Lowered
from shardlib.pipeline.parts import Parts
from shardlib.plan import STAGE, Plan
from shardlib.slices import BATCH, cut
from shardlib.spec_axes import is_spec, without
from shardlib.specs import Resolution, entry_of, itemsize
from shardlib.strategies import DATA_LIKE
from shardlib.tree_paths import leaves_with_paths

FIRST_STAGE: Final = "the first stage"
LAYERS: Final = "the layers"
LAST_STAGE: Final = "the last stage"


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One input of a pipelined loss; a static leaf. Bytes are those of one data shard, whatever other axes divide.

    Args:
        path: in the batch.
        shape: of a microbatch, as the cut loss takes it; dim 0 is that of slices.
        dtype: NumPy dtype name.
        readers: of the first stage (what comes before the layers), the layers themselves, and the last stage.
        streamed: held in parts over the stages.
        reason: why, or why not.
        whole_bytes: of all microbatches.
        held_bytes: of those that a device holds, with the one that is read and the one that comes, for every reader.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    readers: tuple[str, ...]
    streamed: bool
    reason: str
    whole_bytes: int
    held_bytes: int


def inputs_of(
    parts: Parts, lowered: Lowered, plan: Plan, batch_spec: Any, *, spread: bool = False
) -> tuple[Input, ...]:
    """Decides for every input of the batch, in tree order.

    Streamed is what the layers do not read, where it saves each device at least the bytes of one message: the first and
    the last stage get their microbatches when they are due, one while they read another.

    Args:
        parts: the loss, cut at the shapes of one microbatch of one data shard.
        lowered: the schedule.
        plan: its mesh has a stage axis.
        batch_spec: of the whole batch.
        spread: all stages compute embedding and head together.
    """
    reads = ((FIRST_STAGE, parts.reads_pre), (LAYERS, parts.reads_side), (LAST_STAGE, parts.reads_post))
    found = []
    for position, (path, leaf) in enumerate(leaves_with_paths(batch_spec, is_leaf=batches.is_spec)):
        readers = tuple(reader for reader, positions in reads if position in positions)
        made = _whole(path, leaf, readers, plan)
        reason = _why_whole(made, leaf, plan, spread=spread)
        found.append(replace(made, reason=reason) if reason else _decided(made, position, parts, lowered, plan))
    return tuple(found)


def _whole(path: str, leaf: ArraySpec, readers: tuple[str, ...], plan: Plan) -> Input:
    """The input as every stage would hold it."""
    count, shards, array = plan.num_microbatches, plan.num_batch_shards, leaf.abstract()
    shape = (1, *(n // (count * shards) if name == BATCH else n for n, name in zip(leaf.shape, leaf.axes)))
    size = math.prod(shape) * itemsize(str(array.dtype)) * (count if BATCH in leaf.axes else 1)
    return Input(
        path=path,
        shape=shape,
        dtype=str(array.dtype),
        readers=readers,
        streamed=False,
        reason="",
        whole_bytes=size,
        held_bytes=size,
    )


def _why_whole(made: Input, leaf: ArraySpec, plan: Plan, *, spread: bool) -> str:
    """What rules streaming out, whatever it would save; empty for nothing."""
    count, stages = plan.num_microbatches, plan.mesh.size(STAGE)
    unit = count * plan.num_batch_shards
    if BATCH not in leaf.axes:
        return "all rows share it"
    if LAYERS in made.readers:
        return "the layers of every stage read it"
    if spread and made.readers:
        return "all stages compute embedding and head together, and read it"
    if count % stages:
        return f"{count} microbatches do not divide over {stages} stages"
    if (plan.random_slices or unit) > unit:
        return f"random_slices={plan.random_slices} makes every microbatch of several slices, which lie apart"
    return ""


def _decided(made: Input, position: int, parts: Parts, lowered: Lowered, plan: Plan) -> Input:
    """Streamed, where that saves enough."""
    again = position in parts.read_again([True] * len(parts.outer))
    feeds = feeds_for((replace(made, streamed=True),), lowered, again=(0,) if again else ())
    if any(map(feeds.starts_elsewhere, feeds.feeds)):
        return replace(made, reason="the schedule begins with a microbatch that another stage would hold")
    held = (feeds.share + 2 * len(feeds.feeds)) * made.whole_bytes // plan.num_microbatches
    if made.whole_bytes - held < parts.message_bytes:
        saved = f"streaming it would save {max(made.whole_bytes - held, 0):,} bytes"
        return replace(made, reason=f"{saved}, less than a message has ({parts.message_bytes:,})")
    who = _who(made.readers, again=again)
    reason = f"a stage holds {feeds.share} of {plan.num_microbatches} microbatches, and {who}"
    return replace(made, streamed=True, reason=reason, held_bytes=held)


def _who(readers: tuple[str, ...], *, again: bool) -> str:
    if not readers:
        return "no stage reads it"
    if len(readers) == 1:
        return f"{readers[0]} alone reads it{', for F and again for B' if again else ''}"
    return f"{' and '.join(readers)} alone read it{', the first for F and again for B' if again else ''}"


def place_inputs(found: Resolution, inputs: Sequence[Input], mesh: MeshShape) -> Resolution:
    """Specs of a batch in which the rows of streamed inputs are divided over the stages, too, within a data shard."""
    entries = []
    for entry, one in zip(found.entries, inputs, strict=True):
        decisions = tuple(
            replace(decision, mesh_axes=(*decision.mesh_axes, STAGE), reason=f"{decision.reason}; {one.reason}")
            if one.streamed and decision.name == BATCH
            else decision
            for decision in entry.decisions
        )
        entries.append(entry_of(entry.path, entry.shape, entry.dtype, entry.names, decisions, mesh))
    treedef = jax.tree.structure(found.specs, is_leaf=is_spec)
    return replace(found, specs=jax.tree.unflatten(treedef, [e.spec for e in entries]), entries=tuple(entries))


def feeds_for(
    inputs: Sequence[Input], lowered: Lowered, *, again: Collection[int], specs: Sequence[P] | None = None
) -> Feeds:
    """How streamed inputs travel.

    Args:
        again: positions of what B reads, from `Parts.read_again`.
        specs: of the batch, one per input, where the compiler may split inputs over mesh axes of its own; else None.
    """
    streamed = {position: one for position, one in enumerate(inputs) if one.streamed}
    own = lambda spec: P(None, *without(spec, (*DATA_LIKE, STAGE)))  # noqa: E731
    return feeds_of(
        lowered,
        {position: jax.ShapeDtypeStruct(one.shape, one.dtype) for position, one in streamed.items()},
        first=[position for position, one in streamed.items() if FIRST_STAGE in one.readers],
        last=[position for position, one in streamed.items() if LAST_STAGE in one.readers],
        again=[position for position in streamed if position in again],
        specs=None if specs is None else {position: own(specs[position]) for position in streamed},
    )


def feeds_inside(
    parts: Parts, inputs: Sequence[Input], lowered: Lowered, *, chosen: Sequence[bool], specs: Sequence[P] | None
) -> Feeds:
    """`feeds_for` of a loss that was cut again, where it runs.

    Args:
        chosen: which parameters outside of the layers have gradients.
    """
    if not any(one.streamed for one in inputs):
        return NO_FEEDS
    feeds = feeds_for(inputs, lowered, again=parts.read_again(chosen), specs=specs)
    reads = ((FIRST, parts.reads_pre), (None, parts.reads_side), (LAST, parts.reads_post))
    assert all(feeds.serve(*each) for each in reads), "the loss reads other inputs than when it was bound"
    return feeds


def cut_inputs(batch: Any, dims: Any, streamed: Collection[int], *, sizes: Mapping[str, int]) -> Any:
    """`slices.cut` of one device's batch, in the region of the ticks: it has its share of what is streamed.

    Args:
        streamed: positions in tree order.
        sizes: `num_microbatches` of all stages, and `num_slices`.
    """
    share = {**sizes, "num_microbatches": sizes["num_microbatches"] // jax.lax.axis_size(STAGE)}
    leaves, treedef = jax.tree.flatten(batch)
    made = [
        cut(leaf, dim, **share if position in streamed else sizes)
        for position, (leaf, dim) in enumerate(zip(leaves, jax.tree.leaves(dims), strict=True))
    ]
    return jax.tree.unflatten(treedef, made)


def own_share(pieces: Sequence[Any], streamed: Collection[int]) -> list[Any]:
    """The microbatches that a stage holds of what is streamed, of everything else; all, where nothing is.

    Args:
        pieces: [num_microbatches, ...], or a stage's share of them.
        streamed: positions of the latter.
    """
    if not streamed:
        return list(pieces)

    def part(leaf: jax.Array) -> jax.Array:
        share = leaf.shape[0] // jax.lax.axis_size(STAGE)
        return jax.lax.dynamic_slice_in_dim(leaf, jax.lax.axis_index(STAGE) * share, share)

    return [leaf if position in streamed else part(leaf) for position, leaf in enumerate(pieces)]
