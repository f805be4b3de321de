"""Strategies' promises + a model's arrays + a plan -> bytes each device sends in one step, collective by collective.

In: the plan, resolved parameters and activations, specs of the reduced gradients. Out: `PromisedCollective`s.

    promises = promised(plan, arrays)
    print(promises_text(promises))

Sources: Rajbhandari et al. 2019 (1910.02054) section 7 (data, ZeRO, fsdp); Zhao et al. 2023 (2304.11277) section 3.2.2
(replicas); Shoeybi et al. 2019 (1909.08053) section 3, Korthikanti et al. 2022 (2205.05198) section 4.2 (tensor).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from jax.sharding import PartitionSpec as P

from shardlib.cost.collectives import ring_bytes
from shardlib.plan import Plan
from shardlib.spec_axes import axes_of
from shardlib.specs import Entry, itemsize
from shardlib.strategies import ALL, DATA_LIKE
from shardlib.strategies.promise import Promise

_SUM_BYTES: Final = 4  # the loss, its weight and metrics are float32
_FLOATING: Final = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrays:
    """What a step moves; a static value.

    Args:
        parameters: with their specs.
        grad_specs: specs of the reduced gradients, one per parameter.
        activations: the named ones of the loss.
        num_sums: float32 scalars that the loss sums over the batch.
        trainable: per parameter, whether it has a gradient; None for all.
    """

    parameters: tuple[Entry, ...]
    grad_specs: tuple[P, ...]
    activations: tuple[Entry, ...]
    num_sums: int
    trainable: tuple[bool, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromisedCollective:
    """Collectives of one kind that move arrays of one sort over the same mesh axes in one step; a static leaf.

    Args:
        kind: XLA's name.
        axes: mesh axes it runs over together, in mesh order.
        what: which arrays, in the words of the strategies.
        count: executions in one step, each array counted by itself.
        bytes_per_device: sent in one step under ring algorithms.
        loop: it runs inside the loop over microbatches.
        exact: the program must move just that; otherwise the compiler chooses, up to `form_bytes`.
        form_kind: the kind in which XLA's CPU backend is known to express it.
        form_bytes: bytes in that form; more than `bytes_per_device` where the backend knows no better.
        widened_bytes: bytes where the backend widens 16-bit elements to 32 bits, as XLA:CPU does in reductions.
    """

    kind: str
    axes: tuple[str, ...]
    what: str
    count: int
    bytes_per_device: float
    loop: bool
    exact: bool
    form_kind: str
    form_bytes: float
    widened_bytes: float

    @property
    def axis(self) -> str:
        """The axes as text: `data+fsdp`."""
        return "+".join(self.axes)


def promised(plan: Plan, arrays: Arrays) -> tuple[PromisedCollective, ...]:
    """Everything the strategies of the plan's axes promise about one train step, equal ones added up.

    Exact for the data-like axes under the explicit lowering. Under the automatic one, and for other axes, bytes are
    those of the method's own table, and `form_bytes` what the compiler is known to make of it.

    Args:
        plan: its mesh without -1.
        arrays: what the model has.

    Example:
        A parameter of 1 MiB on fsdp=8, explicit: an all-gather and a reduce-scatter of 7/8 MiB, and the sums.
    """
    found: dict[Any, PromisedCollective] = {}
    for one in (*_of_data_like(plan, arrays), *_of_others(plan, arrays)):
        if one.form_bytes == 0:
            continue
        key = (one.kind, one.axes, one.what, one.loop, one.form_kind)
        found[key] = one if key not in found else _added(found[key], one)
    return tuple(found.values())


def _added(one: PromisedCollective, other: PromisedCollective) -> PromisedCollective:
    return replace(
        one,
        count=one.count + other.count,
        bytes_per_device=one.bytes_per_device + other.bytes_per_device,
        form_bytes=one.form_bytes + other.form_bytes,
        widened_bytes=one.widened_bytes + other.widened_bytes,
    )


def _of_data_like(plan: Plan, arrays: Arrays) -> Iterator[PromisedCollective]:
    axes = tuple(axis for axis in plan.mesh.names if axis in DATA_LIKE and plan.mesh.size(axis) > 1)
    in_force = _InForce.of(plan, axes)
    if "sums" in in_force.promises:
        # Accumulation needs the weight before the first backward pass: it is summed once by itself.
        passes = 2 if in_force.exact and plan.num_microbatches > 1 else 1
        size = arrays.num_sums * _SUM_BYTES
        yield from in_force.make("sums", axes, buffer_bytes=size, dtype="float32", passes=passes)
    trainable = arrays.trainable or (True,) * len(arrays.parameters)
    for entry, grad_spec, has_gradient in zip(arrays.parameters, arrays.grad_specs, trainable, strict=True):
        is_floating = entry.dtype in _FLOATING
        used = plan.compute_dtype if is_floating else entry.dtype
        size = _local_elements(plan, entry.shape, entry.spec)
        for split in _data_like(entry.spec, axes):
            size *= _degree(plan, split)
            yield from in_force.make("split parameters", split, buffer_bytes=size * itemsize(used), dtype=used)
        if not has_gradient:
            continue
        wire = plan.reduce_dtype if in_force.exact else used
        yield from _of_gradient(plan, entry, grad_spec, axes=axes, in_force=in_force, wire=wire)


def _of_gradient(
    plan: Plan, entry: Entry, grad_spec: P, *, axes: tuple[str, ...], in_force: "_InForce", wire: str
) -> Iterator[PromisedCollective]:
    """Scattered over the axes that split the reduced gradient, then summed over the rest, the slow axis last."""
    kept = sum((split for split in _data_like(grad_spec, axes)), ())
    size = _local_elements(plan, entry.shape, grad_spec) * _degree(plan, kept)
    whole = _whole_tables(plan, entry, grad_spec) if not in_force.exact else 1
    for split in _data_like(grad_spec, axes):
        scattered = size * itemsize(wire)
        yield from in_force.make("split gradients", split, buffer_bytes=scattered, dtype=wire, form_factor=whole)
        size //= _degree(plan, split)
    rest = tuple(axis for axis in axes if axis not in kept)
    apart = tuple(axis for axis in rest if in_force.alone("whole gradients", axis))
    together = tuple(axis for axis in rest if axis not in apart)
    for group in (together, *((axis,) for axis in apart)):
        summed = size * itemsize(wire)
        yield from in_force.make("whole gradients", group, buffer_bytes=summed, dtype=wire, form_factor=whole)
    own = sum((split for split in _data_like(entry.spec, axes)), ())
    more = tuple(axis for axis in kept if axis not in own)
    size = _local_elements(plan, entry.shape, entry.spec) * itemsize(entry.dtype)
    yield from in_force.make("updated parameters", more, buffer_bytes=size, dtype=entry.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class _InForce:
    """The promises of data-like axes that hold under a plan, by tensors and axis."""

    plan: Plan
    exact: bool
    promises: dict[str, dict[str, Promise]]

    @classmethod
    def of(cls, plan: Plan, axes: tuple[str, ...]) -> "_InForce":
        lowering, _ = plan.chosen_lowering
        promises: dict[str, dict[str, Promise]] = {}
        for strategy in ALL:
            for promise in strategy.promises if strategy.axis in axes else ():
                if promise.holds(lowering=lowering, gather=plan.gather, zero=plan.zero):
                    promises.setdefault(promise.tensors, {})[strategy.axis] = promise
        return cls(plan=plan, exact=lowering == "explicit", promises=promises)

    def alone(self, tensors: str, axis: str) -> bool:
        """Whether an axis reduces these by itself."""
        promise = self.promises.get(tensors, {}).get(axis)
        return promise is not None and promise.alone

    def make(
        self,
        tensors: str,
        axes: tuple[str, ...],
        *,
        buffer_bytes: int,
        dtype: str,
        passes: int = 1,
        form_factor: int = 1,
    ) -> Iterator[PromisedCollective]:
        """One collective over axes together, when their strategies promise it."""
        promise = next((self.promises[tensors][axis] for axis in axes if axis in self.promises.get(tensors, {})), None)
        if promise is None:
            return
        times = promise.count * passes * (self.plan.num_microbatches if promise.times == "microbatch" else 1)
        sent = times * ring_bytes(promise.kind, buffer_bytes=buffer_bytes, group_size=_degree(self.plan, axes))
        form_kind, form_bytes = (promise.kind, sent) if self.exact else _form(promise.kind, sent)
        yield PromisedCollective(
            kind=promise.kind,
            axes=tuple(axis for axis in self.plan.mesh.names if axis in axes),
            what=tensors,
            count=times,
            bytes_per_device=sent,
            loop=promise.times == "microbatch" and self.plan.num_microbatches > 1,
            exact=self.exact,
            form_kind=form_kind,
            form_bytes=form_bytes * form_factor,
            widened_bytes=sent * (4 / itemsize(dtype) if itemsize(dtype) == 2 else 1),
        )


def _whole_tables(plan: Plan, entry: Entry, grad_spec: P) -> int:
    """How much larger the compiler's gradient of a vocabulary table is than its part: it adds up whole tables."""
    split = axes_of(grad_spec[0]) if entry.names[:1] == ("vocab",) else ()
    return _degree(plan, [axis for axis in split if axis not in DATA_LIKE])


def _form(kind: str, sent: float) -> tuple[str, float]:
    """XLA's CPU partitioner makes no reduce-scatter: it reduces everything everywhere and slices."""
    return ("all-reduce", 2 * sent) if kind == "reduce-scatter" else (kind, sent)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Products:
    """What a tensor axis meets in a model, in one microbatch of one data shard.

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

    rows: int
    columns: int
    groups: int
    logits: bool
    stream_bytes: int
    tokens: int
    along_length: bool
    table_bytes: int
    num_tables: int
    whole: tuple[int, ...]


def _of_others(plan: Plan, arrays: Arrays) -> Iterator[PromisedCollective]:
    lowering, _ = plan.chosen_lowering
    for strategy in ALL:
        degree = 1 if strategy.axis not in plan.mesh.names else plan.mesh.size(strategy.axis)
        if strategy.splits_batch or degree == 1:
            continue
        products = _products(plan, arrays, strategy.axis)
        for promise in strategy.promises:
            fits = promise.along_length in (None, products.along_length)
            if fits and promise.holds(lowering=lowering, gather=plan.gather, zero=plan.zero):
                times = promise.count * (plan.num_microbatches if promise.times == "microbatch" else 1)
                executions, table, form_kind, form = _sizes(plan, promise, products, degree)
                yield PromisedCollective(
                    kind=promise.kind,
                    axes=(strategy.axis,),
                    what=promise.tensors,
                    count=times * executions,
                    bytes_per_device=times * table,
                    loop=plan.num_microbatches > 1,
                    exact=False,
                    form_kind=form_kind,
                    form_bytes=times * form,
                    widened_bytes=2 * times * table,
                )


def _sizes(plan: Plan, promise: Promise, of: _Products, degree: int) -> tuple[int, float, str, float]:
    """Executions and bytes of a promise each time, and the kind and bytes of the backend's form of it."""
    kind, tensors = promise.kind, promise.tensors

    def ring(buffer_bytes: int, as_kind: str = kind) -> float:
        return ring_bytes(as_kind, buffer_bytes=buffer_bytes, group_size=degree)

    stream = ring(of.stream_bytes)
    recomputed = plan.remat not in (None, "none")  # the forward collectives run once more in the backward pass
    if tensors == "column inputs":
        if kind == "all-gather":
            return of.groups, of.groups * stream, kind, of.groups * stream
        # Partial input gradients are summed product by product, not once for those that share their input.
        each = max(of.columns + of.logits, of.groups)
        return of.groups, of.groups * stream, "all-reduce", each * ring(of.stream_bytes, "all-reduce")
    if tensors == "row outputs":
        again = 2 if recomputed else 1
        form_kind, form = _form(kind, stream)
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
    sent = ring(_SUM_BYTES * of.tokens) * of.logits
    return int(of.logits), sent, kind, sent


def _products(plan: Plan, arrays: Arrays, axis: str) -> _Products:
    rows = columns = num_tables = table_bytes = 0
    whole: list[int] = []
    for entry in arrays.parameters:
        split = [axis in decision.mesh_axes for decision in entry.decisions]
        size = _without(plan, entry, (*DATA_LIKE, axis)) * itemsize(
            plan.compute_dtype if entry.dtype in _FLOATING else entry.dtype
        )
        if not any(split):
            whole.append(size)
            continue
        names = [str(name) for name in entry.names]
        if "embed" not in names:
            continue
        layers = math.prod(n for name, n in zip(names, entry.shape, strict=True) if name == "layers")
        comes_first = split.index(True) < names.index("embed")
        if names[split.index(True)] == "vocab":
            num_tables, table_bytes = num_tables + comes_first, table_bytes + comes_first * size
        else:
            rows, columns = rows + layers * comes_first, columns + layers * (not comes_first)
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


def _without(plan: Plan, entry: Entry, gathered: Sequence[str]) -> int:
    """Elements of an array on one device once some axes no longer split it."""
    split = [axis for decision in entry.decisions for axis in decision.mesh_axes if axis not in gathered]
    return math.prod(entry.shape) // _degree(plan, split)


def _data_like(spec: P, axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """For every dim that data-like axes split, those axes."""
    found = [tuple(axis for axis in axes_of(entry) if axis in axes) for entry in spec]
    return [split for split in found if split]


def _local_elements(plan: Plan, shape: tuple[int, ...], spec: P) -> int:
    return math.prod(shape) // _degree(plan, [axis for entry in spec for axis in axes_of(entry)])


def _degree(plan: Plan, axes: Sequence[str]) -> int:
    return math.prod(plan.mesh.size(axis) for axis in axes)
