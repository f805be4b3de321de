"""What a pipeline moves: messages between stages, parameters to the stages that use them, gradients back, sums.

In: a plan with a stage axis, arrays with their `Stages`. Out: `PromisedCollective`s, exact to the byte.

    promises = of_pipeline(plan, arrays)

Sources: Narayanan et al. 2021 (2104.04473) sections 2.2 (a message each way per microbatch and boundary, once more per
chunk) and 3.2 (its size); Rajbhandari et al. 2019 (1910.02054) section 7 (parts gathered and scattered). That a
permute runs in the ticks in which some rank sends, rows that stand for no layer move like all others, and layers held
one by one pass through all-to-alls, is the executor's own (`pipeline.execute`, `pipelined`).
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from shardlib.cost.arrays import SUM_BYTES, Arrays, Stages, degree, dtype_used, local_elements, splits
from shardlib.cost.parameters import of_gradient, of_parameter, of_sum
from shardlib.cost.promised_collective import InForce, PromisedCollective, Turns
from shardlib.ops.vocab_shards import VOCAB_AXES
from shardlib.pipeline.execute import packing
from shardlib.pipeline.rings import Packing
from shardlib.pipeline.stack import Stacked
from shardlib.plan import STAGE, Plan
from shardlib.spec_axes import axes_of
from shardlib.specs import itemsize
from shardlib.strategies import DATA_LIKE
from shardlib.streamed_inputs import feeds_for


def of_pipeline(plan: Plan, arrays: Arrays) -> Iterator[PromisedCollective]:
    """Everything the stage axis and the data-like axes move in one step."""
    stages = arrays.stages
    assert stages is not None, "a plan with a stage axis has stages"
    data_like = tuple(axis for axis in plan.mesh.names if axis in DATA_LIKE and plan.mesh.size(axis) > 1)
    both = tuple(axis for axis in plan.mesh.names if axis in (*data_like, STAGE))
    once = InForce.of(plan, both, gather="step")
    # The weight before the first tick; everything else after the last one. All stages know the weight, unless each
    # holds its part of an input.
    for axes in (both if any(one.streamed for one in stages.inputs) else data_like, both):
        yield from once.make("sums", axes, buffer_bytes=arrays.num_sums * SUM_BYTES, dtype="float32")
    yield from _of_messages(plan, stages, in_force=once)
    yield from _of_inputs(plan, arrays, stages=stages, in_force=once)
    for position in stages.parts.outer:
        entry = arrays.parameters[position]
        axes = data_like if position in stages.spread else both
        yield from of_parameter(plan, entry, axes=axes, in_force=once)
        if arrays.has_gradient(position):
            yield from of_gradient(plan, entry, arrays.grad_specs[position], axes=axes, in_force=once)
    yield from _of_spread_vocabulary(plan, stages, in_force=once)
    for kind in stages.parts.stacked:
        if kind.dim is None:
            yield from _of_single_layers(plan, arrays, kind, stages=stages, axes=data_like, in_force=once)
        else:
            yield from _of_layers(plan, arrays, kind.leaves[0], stages=stages, axes=data_like)


def work_turns(plan: Plan, stages: Stages) -> Turns:
    """In how many ticks a rank runs a chunk forwards, and in as many backwards; masked, it does in all of them."""
    ticks = stages.lowered.num_ticks
    return Turns(taken=ticks if plan.idle == "mask" else stages.chunk_runs, total=ticks)


def _of_messages(plan: Plan, stages: Stages, *, in_force: InForce) -> Iterator[PromisedCollective]:
    """One permute per channel and dtype, in the ticks in which some rank sends; only what has gradients goes back."""
    lowered = stages.lowered
    for channel, sends in zip(lowered.channels, lowered.ticks.sends, strict=True):
        if not channel.shift:
            continue
        is_forward = channel.kind == "F"
        for elements, dtype in _message(plan, stages, kind=channel.kind):
            yield from in_force.make(
                "activations" if is_forward else "cotangents",
                (STAGE,),
                buffer_bytes=elements * itemsize(dtype),
                dtype=dtype,
                turns=Turns(taken=sum(sends), total=lowered.num_ticks),
            )


def _message(plan: Plan, stages: Stages, *, kind: str) -> Iterator[tuple[int, str]]:
    """Elements that a device sends of a message, and their dtype, for every collective that carries part of it."""
    parts = stages.parts
    differentiable = tuple(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in parts.message)
    packed = packing(parts, None if kind == "F" else differentiable, split=_splits_more(plan))
    for elements, dtype in _elements(plan, packed):
        yield elements * stages.num_slices, dtype


def _elements(plan: Plan, packed: Packing) -> Iterator[tuple[int, str]]:
    """Elements on a device and dtype of every array that travels."""
    for group in packed.groups:
        first = packed.value[group[0]]
        elements = sum(math.prod(packed.value[i].shape) for i in group)
        if packed.specs is not None and len(group) == 1:
            elements = local_elements(plan, first.shape, packed.specs[group[0]])
        yield elements, str(first.dtype)


def _splits_more(plan: Plan) -> bool:
    """Whether the compiler may split messages over axes of its own."""
    return any(size > 1 for axis, size in plan.mesh.axes if axis not in (*DATA_LIKE, STAGE))


def _of_inputs(plan: Plan, arrays: Arrays, *, stages: Stages, in_force: InForce) -> Iterator[PromisedCollective]:
    """One permute per reader, stage that holds what it reads, and dtype, in the ticks before it is read."""
    if not any(one.streamed for one in stages.inputs):
        return
    again = stages.parts.read_again([arrays.has_gradient(position) for position in stages.parts.outer])
    specs = stages.input_specs if _splits_more(plan) else None
    feeds = feeds_for(stages.inputs, stages.lowered, again=again, specs=specs)
    for feed in feeds.feeds:
        sources = Counter(away for away in feeds.away(feed) if away)
        for (elements, dtype), ticks in itertools.product(_elements(plan, feed.packing), sources.values()):
            turns = Turns(taken=ticks, total=stages.lowered.num_ticks)
            size = elements * itemsize(dtype)
            yield from in_force.make("inputs", (STAGE,), buffer_bytes=size, dtype=dtype, turns=turns)


def _of_spread_vocabulary(plan: Plan, stages: Stages, *, in_force: InForce) -> Iterator[PromisedCollective]:
    """In the ticks in which a microbatch enters or leaves the layers, all ranks exchange what each knows a part of.

    The message that leaves the layers and the cotangent that comes back are shown to all (`pipeline.joint`); a lookup
    adds up rows; a loss its statistics, and the gradient of what it got.
    """
    if not stages.spread:
        return
    turns = Turns(taken=stages.lowered.table.num_microbatches, total=stages.lowered.num_ticks)
    make = functools.partial(in_force.make, "spread vocabulary", dtype="float32", turns=turns)
    for kind in ("F", "B"):
        for elements, dtype in _message(plan, stages, kind=kind):
            yield from make((STAGE,), buffer_bytes=elements * max(itemsize(dtype), 4))
    together = (STAGE, *(axis for axis in VOCAB_AXES if axis in plan.mesh.names and plan.mesh.size(axis) > 1))
    for call in stages.spread_calls:
        yield from make(together, buffer_bytes=call.tokens * (call.embed + call.statistics) * 4)


def _of_layers(
    plan: Plan, arrays: Arrays, position: int, *, stages: Stages, axes: tuple[str, ...]
) -> Iterator[PromisedCollective]:
    """A parameter of all layers: each rank has whole rows of its own, gathered and reduced over the data-like axes."""
    entry, in_force = arrays.parameters[position], InForce.of(plan, axes)
    if plan.gather == "step":
        yield from of_parameter(plan, entry, axes=axes, in_force=in_force)
    else:  # chunk by chunk, for F and again for B, which does not read every parameter
        chunks, turns = stages.partition.placement.num_chunks, work_turns(plan, stages)
        for one in of_parameter(plan, entry, axes=axes, in_force=in_force, passes=2, pieces=chunks, turns=turns):
            yield replace(one, unread_bytes=one.bytes_per_device / 2)
    if arrays.has_gradient(position):
        yield from of_gradient(plan, entry, arrays.grad_specs[position], axes=axes, in_force=in_force)


def _of_single_layers(
    plan: Plan, arrays: Arrays, kind: Stacked, *, stages: Stages, axes: tuple[str, ...], in_force: InForce
) -> Iterator[PromisedCollective]:
    """Layers that the model holds one by one: rows made of all of them go to their stages, and gradients back."""
    first = kind.leaves[0]
    entry, spec, wire = arrays.parameters[first], arrays.grad_specs[first], plan.reduce_dtype
    used, num_stages = dtype_used(plan, entry), plan.mesh.size(STAGE)
    rows, own = len(stages.partition.rows), stages.rows_per_rank
    is_spread = any(STAGE in axes_of(dim) for dim in entry.spec)
    part = local_elements(plan, entry.shape, entry.spec)
    if is_spread:
        moved = rows * part * itemsize(used)
        yield from in_force.make("single layers", (STAGE,), buffer_bytes=moved, dtype=used)
    size = own * part * (num_stages if is_spread else 1)
    for split in splits(entry.spec, axes):
        size *= degree(plan, split)
        yield from in_force.make("split parameters", split, buffer_bytes=size * itemsize(used), dtype=used)
    if not arrays.has_gradient(first):
        return
    # Axes outside of the stages in their dim scatter first, then stages exchange rows, then the others scatter.
    kept = sum((split for split in splits(spec, (*axes, STAGE))), ())
    size = own * local_elements(plan, entry.shape, spec) * degree(plan, kept)
    before, after = _around_stage(spec, axes)
    for split in before:
        yield from in_force.make("split gradients", split, buffer_bytes=size * itemsize(wire), dtype=wire)
        size //= degree(plan, split)
    rest = tuple(axis for axis in axes if axis not in kept)
    if is_spread:
        moved = size * itemsize("float32")
        yield from in_force.make("gradients of single layers", (STAGE,), buffer_bytes=moved, dtype="float32")
    else:
        size, rest = size * num_stages, (*rest, STAGE)
    for split in after:
        yield from in_force.make("split gradients", split, buffer_bytes=size * itemsize(wire), dtype=wire)
        size //= degree(plan, split)
    yield from of_sum(plan, size, rest, in_force=in_force, wire=wire)
    held = sum((split for split in splits(entry.spec, axes)), ())
    more = tuple(axis for axis in kept if axis not in (*held, STAGE))
    for _ in kind.leaves:
        updated = part * itemsize(entry.dtype)
        yield from in_force.make("updated parameters", more, buffer_bytes=updated, dtype=entry.dtype)


def _around_stage(spec: P, axes: tuple[str, ...]) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Per dim, the axes that split it outside of the stages (all where there is no stage), and those inside."""
    before, after = [], []
    for entry in spec:
        names = axes_of(entry)
        cut_at = names.index(STAGE) if STAGE in names else len(names)
        before.append(tuple(axis for axis in names[:cut_at] if axis in axes))
        after.append(tuple(axis for axis in names[cut_at + 1 :] if axis in axes))
    return [split for split in before if split], [split for split in after if split]
