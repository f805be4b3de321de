"""What axes that split neither the batch nor the layers move: products split by row or column, vocabularies.

In: a plan, a model's arrays. Out: `PromisedCollective`s of the method's own table, with the backend's known forms.

    promises = of_products(plan, arrays)

Sources: Shoeybi et al. 2019 (1909.08053) section 3, Korthikanti et al. 2022 (2205.05198) section 4.2 (tensor).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardlib.cost.arrays import SUM_BYTES, Arrays, degree, dtype_used
from shardlib.cost.collectives import ring_bytes
from shardlib.cost.pipelines import work_turns
from shardlib.cost.promised_collective import PromisedCollective, Turns, backend_form
from shardlib.plan import STAGE, Plan
from shardlib.specs import Entry, itemsize
from shardlib.strategies import ALL, DATA_LIKE
from shardlib.strategies.promise import Promise


@dataclass(frozen=True, slots=True, kw_only=True)
class _Products:
    """What a tensor axis meets in a model, in one microbatch of one data shard; of a pipeline, in one run of a chunk.

    Args:
        rows, columns: products whose weights it splits by row (their input dim) and by column, layers counted.
        groups: column-split products that share their input, with the logits'.
        logits: whether it splits the logits.
        stream_bytes: the residual stream [batch, length, embed], whole along the axis; 0 when the loss names none.
        tokens: of the stream.
        along_length: whether it splits the stream along length.
        table_bytes: vocabulary tables that it splits, whole along the axis.
        num_tables: how many.
        whole: bytes of each parameter that it does not split.
    """

    rows: float
    columns: float
    groups: float
    logits: bool
    stream_bytes: int
    tokens: int
    along_length: bool
    table_bytes: int
    num_tables: int
    whole: tuple[float, ...]


def of_products(plan: Plan, arrays: Arrays) -> Iterator[PromisedCollective]:
    """Everything such axes promise about one step; of a pipeline, as if every rank had embedding and head as well."""
    lowering, _ = plan.chosen_lowering
    turns = work_turns(plan, arrays.stages) if arrays.stages else Turns(plan.num_microbatches, plan.num_microbatches)
    for strategy in ALL:
        size = 1 if strategy.axis not in plan.mesh.names else plan.mesh.size(strategy.axis)
        if strategy.splits_batch or strategy.axis == STAGE or size == 1:
            continue
        products = _products(plan, arrays, strategy.axis)
        for promise in strategy.promises:
            fits = promise.attention is None and promise.along_length in (None, products.along_length)
            if fits and promise.holds(lowering=lowering, gather=plan.gather, zero=plan.zero):
                times = promise.count * (turns.taken if promise.times == "microbatch" else 1)
                executions, table, form_kind, form = _sizes(plan, promise, products, size)
                yield PromisedCollective(
                    kind=promise.kind,
                    axes=(strategy.axis,),
                    what=promise.tensors,
                    count=round(times * executions),
                    bytes_per_device=times * table,
                    loop=turns.total > 1,
                    exact=False,
                    form_kind=form_kind,
                    form_bytes=times * form,
                    widened_bytes=(2 if itemsize(plan.compute_dtype) == 2 else 1) * times * table,
                    taken=turns.taken / turns.total,
                )


def _sizes(plan: Plan, promise: Promise, of: _Products, size: int) -> tuple[float, float, str, float]:
    """Executions and bytes of a promise each time, and the kind and bytes of the backend's form of it."""
    kind, tensors = promise.kind, promise.tensors

    def ring(buffer_bytes: float, as_kind: str = kind) -> float:
        return ring_bytes(as_kind, buffer_bytes=round(buffer_bytes), group_size=size)

    stream = ring(of.stream_bytes)
    recomputed = recomputes(plan)  # the forward collectives run once more in the backward pass
    if tensors == "column inputs":
        if kind == "all-gather":
            return of.groups, of.groups * stream, kind, of.groups * stream
        # Partial input gradients are summed product by product, not once for those that share their input.
        each = max(of.columns + of.logits, of.groups)
        return of.groups, of.groups * stream, "all-reduce", each * ring(of.stream_bytes, "all-reduce")
    if tensors == "row outputs":
        again = 2 if recomputed else 1
        form_kind, form = backend_form(kind, stream)
        return of.rows, of.rows * stream, form_kind, of.rows * form * again
    if tensors == "whole gradients":
        sent = float(sum(ring(size) for size in of.whole))
        return len(of.whole), sent, kind, sent
    if tensors == "embeddings":
        # The lookup becomes a gather of the whole table, and its gradient a sum of whole tables.
        if kind == "all-gather":
            ids = ring(4 * of.tokens) * of.num_tables
            return of.num_tables, of.num_tables * stream, kind, of.num_tables * stream + ring(of.table_bytes) + ids
        sent = of.num_tables * stream
        return of.num_tables, sent, "all-reduce", sent + ring(of.table_bytes, "all-reduce")
    assert tensors == "token statistics", tensors
    sent = ring(SUM_BYTES * of.tokens) * of.logits
    return int(of.logits), sent, kind, sent


def recomputes(plan: Plan) -> bool:
    """Whether the plan computes layers once more in the backward pass."""
    if plan.is_pipeline:
        return plan.kept_residuals is None or plan.kept_residuals.kind != "none"
    return plan.remat not in (None, "none")


def _products(plan: Plan, arrays: Arrays, axis: str) -> _Products:
    rows = columns = 0.0
    num_tables = table_bytes = 0
    whole: list[float] = []
    layers, shares = _layers_of(arrays)
    for position, entry in enumerate(arrays.parameters):
        split = [axis in decision.mesh_axes for decision in entry.decisions]
        gathered = (*DATA_LIKE, STAGE, axis)
        size = _without(plan, entry, gathered) * itemsize(dtype_used(plan, entry))
        if not any(split):
            whole.append(size * shares[position])
            continue
        names = [str(name) for name in entry.names]
        if "embed" not in names:
            continue
        comes_first = split.index(True) < names.index("embed")
        if names[split.index(True)] == "vocab":
            num_tables, table_bytes = num_tables + comes_first, table_bytes + comes_first * size
        else:
            here = layers[position]
            rows, columns = rows + here * comes_first, columns + here * (not comes_first)
    logits = any(
        name == "vocab" and axis in decision.mesh_axes
        for entry in arrays.activations
        for name, decision in zip(entry.names, entry.decisions, strict=True)
    )
    stream = next((entry for entry in arrays.activations if {"batch", "embed"} <= set(entry.names)), None)
    stream_bytes = 0 if stream is None else _without(plan, stream, (axis,)) * itemsize(stream.dtype)
    stream_bytes //= plan.num_microbatches
    width = 1 if stream is None else stream.shape[stream.names.index("embed")]
    return _Products(
        rows=rows,
        columns=columns,
        groups=(rows or columns) + logits,
        logits=logits,
        stream_bytes=stream_bytes,
        tokens=0 if stream is None else stream_bytes // itemsize(stream.dtype) // width,
        along_length=stream is not None and any(axis in decision.mesh_axes for decision in stream.decisions),
        table_bytes=table_bytes,
        num_tables=num_tables,
        whole=tuple(whole),
    )


def _layers_of(arrays: Arrays) -> tuple[list[float], list[float]]:
    """Per parameter, how many layers' products it is in at a time, and which share of it: that of one chunk."""
    if arrays.stages is None:
        layers = [
            math.prod(size for name, size in zip(entry.names, entry.shape, strict=True) if name == "layers")
            for entry in arrays.parameters
        ]
        return [float(count) for count in layers], [1.0] * len(layers)
    partition = arrays.stages.partition
    layers, shares = [1.0] * len(arrays.parameters), [1.0] * len(arrays.parameters)
    for kind in arrays.stages.parts.stacked:
        for leaf in kind.leaves:
            layers[leaf] = partition.most / len(kind.leaves)
            shares[leaf] = partition.most / (len(kind.leaves) if kind.dim is None else len(partition.rows))
    return layers, shares


def _without(plan: Plan, entry: Entry, gathered: Sequence[str]) -> int:
    """Elements of an array on one device once some axes no longer split it."""
    split = [axis for decision in entry.decisions for axis in decision.mesh_axes if axis not in gathered]
    return math.prod(entry.shape) // degree(plan, split)
