"""A model on pipeline stages: which parameters belong to the layers, which rank holds which, how they are stored.

In: a loss, its plan, abstract parameters. Out: `Staging`, which stores and restores parameters and explains itself.

    staging = stage_model(loss, plan, params, batch_spec)
    stored = staging.store(params)    # rows in the order of the ranks, padded where stages are uneven
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshes.build import abstract_mesh
from meshes.errors import ShardingError, nearest, raise_collected
from meshes.shape import MeshShape
from shardlib import annotate
from shardlib import batch_spec as batches
from shardlib.accumulate import over_slices
from shardlib.decide import Decision, decide
from shardlib.explicit import cast
from shardlib.objective import LossFunction
from shardlib.pipeline.costs import Costs
from shardlib.pipeline.cutting import cut_traced
from shardlib.pipeline.lower import lower
from shardlib.pipeline.lowered import Lowered
from shardlib.pipeline.partition import NO_LAYER, Partition
from shardlib.pipeline.parts import Parts
from shardlib.pipeline.schedules import ALL
from shardlib.pipeline.table import BACKWARD, FORWARD, Table
from shardlib.place import active, structure_error
from shardlib.plan import STAGE, Plan
from shardlib.slices import BATCH, check_divides
from shardlib.spec_axes import axes_of, is_spec
from shardlib.specs import Entry, Resolution, entry_of
from shardlib.spread_vocabulary import VOCAB, SpreadCall, local_shape, spread_leaves, with_spread_slots
from shardlib.strategies import DATA_LIKE
from shardlib.streamed_inputs import Input, inputs_of
from shardlib.tree_paths import leaves_with_paths


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """A model cut for a pipeline; a static value.

    Args:
        parts: the cut loss at the shapes of one microbatch of one data shard.
        partition: layers per virtual stage.
        lowered: the schedule in ticks.
        layer_leaves: positions of the parameters that carry the logical axis "layers".
        paths: of the parameters.
        side_inputs: values that layers read beside the carry, as text: those that all share, and those with a slice per
            layer.
        spread: by position, the vocab dim of every parameter that stays in parts over the stages.
        spread_calls: the lookups and losses of such parameters.
        inputs: where the batch's arrays are held, in tree order.
    """

    parts: Parts
    partition: Partition
    lowered: Lowered
    layer_leaves: tuple[int, ...]
    paths: tuple[str, ...]
    side_inputs: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    spread: Mapping[int, int] = field(default_factory=dict)
    spread_calls: tuple[SpreadCall, ...] = ()
    inputs: tuple[Input, ...] = ()

    def with_inputs(self, plan: Plan, batch_spec: Any) -> "Staging":
        """The staging with what is decided about the arrays of the batch, without collections beside them."""
        inputs = inputs_of(self.parts, self.lowered, plan, batch_spec, spread=bool(self.spread))
        return replace(self, inputs=inputs)

    @property
    def streamed(self) -> tuple[int, ...]:
        """Positions in a microbatch of what the stages hold in parts."""
        return tuple(position for position, one in enumerate(self.inputs) if one.streamed)

    @property
    def dims(self) -> dict[int, int]:
        """The dim of the layers of every parameter that holds all of them."""
        return {kind.leaves[0]: kind.dim for kind in self.parts.stacked if kind.dim is not None}

    def store(self, params: Any) -> Any:
        """Parameters as the step holds them: layers in the order of the ranks, zeros in rows that stand for none."""
        if self.partition.in_order:
            return params
        rows = np.asarray(self.partition.rows)
        index = np.maximum(rows, 0)

        def leaf(x: Any, dim: int) -> Any:
            taken = jnp.take(x, index, axis=dim)
            mask = (rows != NO_LAYER).reshape([-1 if d == dim else 1 for d in range(x.ndim)])
            return taken if NO_LAYER not in self.partition.rows else jnp.where(mask, taken, 0)

        return self._mapped(params, leaf)

    def restore(self, stored: Any) -> Any:
        """Stored parameters, or their gradients, in the model's own order: the inverse of `store`."""
        if self.partition.in_order:
            return stored
        rows = np.asarray(self.partition.row_of)
        return self._mapped(stored, lambda x, dim: jnp.take(x, rows, axis=dim))

    def stored_shapes(self, tree: Any) -> Any:
        """A tree with abstract leaves, boxes and all, in the shapes that `store` makes."""
        num_rows = len(self.partition.rows)

        def leaf(x: Any, dim: int) -> Any:
            return jax.ShapeDtypeStruct((*x.shape[:dim], num_rows, *x.shape[dim + 1 :]), x.dtype)

        return self._mapped(tree, leaf)

    def _mapped(self, tree: Any, change: Callable[[Any, int], Any]) -> Any:
        leaves, treedef = jax.tree.flatten(tree)
        for position, dim in self.dims.items():
            leaves[position] = change(leaves[position], dim)
        return jax.tree.unflatten(treedef, leaves)

    def parts_of(self, params: Any) -> Any:
        """Abstract parameters as one rank holds them while it computes: vocabularies that are spread, in parts."""
        leaves, treedef = jax.tree.flatten(params)
        parts = self.partition.placement.num_ranks
        for position, dim in self.spread.items():
            shape = local_shape(leaves[position].shape, dim, parts=parts)
            leaves[position] = jax.ShapeDtypeStruct(shape, leaves[position].dtype)
        return jax.tree.unflatten(treedef, leaves)

    @property
    def loads(self) -> tuple[float, ...]:
        """What every rank computes per microbatch, in layers; embedding and head by their matrix products."""
        together = sum(shares(self.parts).values()) / self.partition.placement.num_ranks if self.spread else 0.0
        return tuple(load + together for load in self.partition.loads(**own_shares(self.parts, self.spread)))


def shares(parts: Parts) -> dict[str, float]:
    """What comes before and after the layers, in layers, by matrix products."""
    before, layer, after, _ = parts.flops
    return {"embedding": before / layer, "head": after / layer} if layer else {"embedding": 0.0, "head": 0.0}


def own_shares(parts: Parts, spread: Mapping[int, int]) -> dict[str, float]:
    """`shares` that the first and the last stage have for themselves: none of what all compute together."""
    return {"embedding": 0.0, "head": 0.0} if spread else shares(parts)


def stage_model(
    loss: LossFunction, plan: Plan, params: Any, batch_spec: Any, names: Sequence[tuple[str | None, ...] | None]
) -> Staging:
    """Cuts the loss and deals out its layers; traces the loss once, abstractly.

    Args:
        names: logical axes of the parameters, None for one without.

    Raises:
        ShardingError: rules about the stage axis, no layers, fewer layers than stages, a schedule that cannot be
            executed.
    """
    check_rules(plan)
    table = plan.table()
    check_executable(table)
    calls: list[SpreadCall] = []
    part, params, piece = abstract_part(loss, plan, params, batch_spec, record=calls.append)
    layer_leaves = tuple(i for i, axes in enumerate(names) if axes and annotate.LAYERS in axes)
    closed = jax.make_jaxpr(part)(params, piece)
    parts = cut_traced(closed, params, layer_leaves=layer_leaves)
    _check_names(parts, plan)
    paths = tuple(path for path, _ in leaves_with_paths(params))
    spread = _spread_of(closed, parts, plan, params, names) if plan.vocabulary == "spread" else {}
    leaves = jax.tree.leaves(params)
    shared, sliced = jax.eval_shape(parts.side, [leaves[leaf] for leaf in parts.outer], jax.tree.leaves(piece))
    partition = partition_of(parts, plan, table, spread)
    costs = costs_of(parts, partition, recomputes=recomputes(plan), spread=spread)
    return Staging(
        parts=parts,
        partition=partition,
        lowered=lower(table, costs, idle=plan.idle, form="fused"),
        layer_leaves=layer_leaves,
        paths=paths,
        side_inputs=(tuple(map(_text, shared)), tuple(map(_text, sliced))),
        spread=spread,
        spread_calls=tuple(calls),
    )


def _text(array: Any) -> str:
    return f"{array.dtype}[{', '.join(map(str, array.shape))}]"


def _spread_of(closed: Any, parts: Parts, plan: Plan, params: Any, names: Sequence[Any]) -> dict[int, int]:
    """The parameters outside of the layers whose vocabulary is spread over the stages."""
    dims = {leaf: names[leaf].index(VOCAB) for leaf in parts.outer if VOCAB in (names[leaf] or ())}
    leaves, local = jax.tree.leaves(params), {}
    for leaf, dim in dims.items():
        decisions = decide(names[leaf], leaves[leaf].shape, rules=plan.placement_rules, mesh=plan.mesh)
        local[leaf] = _local(decisions[dim], plan.mesh)
    paths = [path for path, _ in leaves_with_paths(params)]
    return spread_leaves(closed, paths, dims, sizes=local, parts=plan.mesh.size(STAGE))


def _check_names(parts: Parts, plan: Plan) -> None:
    policy = plan.kept_residuals
    raise_collected(
        [
            f"no layer names a value {name!r}{nearest(name, parts.names)}"
            for name in (policy.names if policy is not None else ())
            if name not in parts.names
        ],
        heading=f"residuals='{policy}': names in the layers: {', '.join(parts.names) or 'none'}; fix: choose of these, "
        'or mark the value in the layer with checkpoint_name(x, "NAME"):',
    )


def partition_of(parts: Parts, plan: Plan, table: Table, spread: Mapping[int, int]) -> Partition:
    """Layers per virtual stage as the plan wants them."""
    placement = table.placement
    if plan.balance == "even" and parts.num_layers % len(placement.ranks) == 0:
        return Partition.even(parts.num_layers, placement)
    return Partition.balanced(parts.num_layers, placement, **own_shares(parts, spread))


def costs_of(parts: Parts, partition: Partition, *, recomputes: bool, spread: Mapping[int, int]) -> Costs:
    """F and B of every virtual stage in layers, by matrix products.

    A backward pass is two forward ones, three where the layers run again. The head's is part of the last stage's F.

    Args:
        recomputes: whether the backward pass runs the layers again.
        spread: parameters whose vocabulary is spread: all ranks compute their part in the ticks of the first and the
            last stage.
    """
    divided = partition.placement.num_ranks if spread else 1
    share = {name: value / divided for name, value in shares(parts).items()}
    again = 3 if recomputes else 2
    forward = [float(count) for count in partition.counts]
    backward = [again * count for count in forward]
    forward[0] += share["embedding"]
    backward[0] += 3 * share["embedding"]
    forward[-1] += 3 * share["head"]
    weight = tuple(float(count) for count in partition.counts)
    return Costs(forward=tuple(forward), backward=tuple(backward), weight=weight)


def recomputes(plan: Plan) -> bool:
    """Whether a plan's backward passes run the layers again; products are what a policy of dots keeps."""
    policy = plan.kept_residuals
    return policy is None or policy.kind not in ("none", "dots")


def check_rules(plan: Plan) -> None:
    """Raises for rules that split anything but layers over the stages, which the ticks use for themselves."""
    raise_collected(
        [
            f"rule {str(rule)!r} splits {rule.logical!r} over {STAGE}, and only layers are staged; fix: delete it, or "
            "name another mesh axis"
            for rule in plan.rules.rules
            if STAGE in rule.mesh_axes and rule.logical != annotate.LAYERS
        ],
        heading=f"mesh {plan.mesh} is a pipeline:",
    )


def check_executable(table: Table) -> None:
    """Raises for a table with split backward passes."""
    kinds = {cell.kind for row in table.rows for cell in row}
    if kinds - {FORWARD, BACKWARD}:
        whole = [schedule.name for schedule in ALL if schedule.name in ("gpipe", "1f1b", "interleaved_1f1b")]
        raise ShardingError(
            f"schedule {table.name!r} splits the backward pass into I and W, which the executor does not do yet",
            fix=f"use {', '.join(whole)}, or a table of F and B",
        )


def abstract_part(
    loss: LossFunction,
    plan: Plan,
    params: Any,
    batch_spec: Any,
    *,
    record: Callable[[SpreadCall], None] = lambda call: None,
) -> tuple[Any, Any, Any]:
    """The loss of one microbatch of one data shard, with abstract arguments: what `cut` takes.

    Args:
        loss, plan, params, batch_spec: as for `stage_model`.
        record: hears the lookups and losses of a spread vocabulary, every time the loss is traced.
    """
    parts = plan.num_batch_shards * plan.num_microbatches
    why = f"{plan.num_batch_shards} shards x {plan.num_microbatches} microbatches"
    check_divides(batch_spec, parts=parts, why=why)
    rows = {leaf.shape[leaf.axes.index(BATCH)] // parts for leaf in batches.with_axis(batch_spec, BATCH)}
    small = batches.resized(batch_spec, batch=max(min(rows), 1)) if rows else batch_spec
    piece = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), batches.abstract(small))
    key = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
    hidden = (*DATA_LIKE, STAGE)
    in_force = active(
        plan.rules,
        abstract_mesh(plan.mesh),
        hidden=hidden,
        sum_dtype=plan.tensor_reduce_dtype,
        vocab_shards=plan.vocab_shards,
    )
    if plan.vocabulary == "spread":
        in_force = with_spread_slots(in_force, stage=STAGE, parts=1, record=record)
    part = over_slices(annotate.under(in_force, loss), 1, ())
    params = jax.eval_shape(lambda tree: cast(tree, plan.compute_dtype), params)
    return lambda params, piece: part(params, *piece, None), params, (piece, key)


def given(tree: Any, specs: Any, mesh: MeshShape) -> Resolution:
    """Specs that somebody decided, as a `Resolution`.

    Raises:
        ShardingError: another structure than the tree's, or a spec longer than its array has dims.
    """
    if jax.tree.structure(specs, is_leaf=is_spec) != jax.tree.structure(tree):
        raise structure_error(jax.tree.map(lambda _: 0, specs, is_leaf=is_spec), tree)
    entries = []
    for (path, leaf), spec in zip(leaves_with_paths(tree), jax.tree.leaves(specs, is_leaf=is_spec), strict=True):
        if len(spec) > len(leaf.shape):
            raise ShardingError(f"{path} has {len(leaf.shape)} dims and the spec {spec}", fix="one entry per dim")
        decisions = tuple(
            Decision(dim=dim, name=None, size=size, mesh_axes=axes_of(entry), reason="given")
            for dim, (size, entry) in enumerate(itertools.zip_longest(leaf.shape, spec))
        )
        names = (None,) * len(leaf.shape)
        entries.append(entry_of(path, leaf.shape, str(leaf.dtype), names, decisions, mesh))
    return Resolution(specs=specs, entries=tuple(entries), notices=())


def place_on_stages(found: Resolution, staging: Staging, mesh: MeshShape) -> Resolution:
    """Specs in which layers are split over stages, and every other parameter is stored in parts over them."""
    unrolled = {leaf for kind in staging.parts.stacked if kind.dim is None for leaf in kind.leaves}
    entries = [
        _layers(entry, staging, staging.dims[position], mesh)
        if position in staging.dims
        else _in_vocabulary(entry, staging.spread[position], mesh)
        if position in staging.spread
        else _spread(entry, mesh, alone=position in unrolled)
        for position, entry in enumerate(found.entries)
    ]
    treedef = jax.tree.structure(found.specs, is_leaf=is_spec)
    return replace(found, specs=jax.tree.unflatten(treedef, [e.spec for e in entries]), entries=tuple(entries))


def _layers(entry: Entry, staging: Staging, dim: int, mesh: MeshShape) -> Entry:
    partition = staging.partition
    stored = "" if partition.in_order else f", stored as {len(partition.rows)} rows in the order of the ranks"
    reason = f"{partition.num_layers} layers over {mesh.size(STAGE)} stages{stored}"
    decisions = [_without_stage(decision) for decision in entry.decisions]
    decisions[dim] = replace(decisions[dim], mesh_axes=(STAGE,), reason=reason, problem=None)
    return entry_of(entry.path, entry.shape, entry.dtype, entry.names, tuple(decisions), mesh)


def _in_vocabulary(entry: Entry, dim: int, mesh: MeshShape) -> Entry:
    """The vocabulary is divided over the stages first, and stays so."""
    decisions = [_without_stage(decision) for decision in entry.decisions]
    old = decisions[dim]
    reason = f"{old.reason}; spread over {STAGE}={mesh.size(STAGE)}: every stage computes with its own words"
    decisions[dim] = replace(old, mesh_axes=(STAGE, *old.mesh_axes), reason=reason)
    return entry_of(entry.path, entry.shape, entry.dtype, entry.names, tuple(decisions), mesh)


def _spread(entry: Entry, mesh: MeshShape, *, alone: bool) -> Entry:
    """The largest dim that divides is stored in parts over the stages.

    Args:
        alone: it is a layer's, stored by itself; else all stages gather it.
    """
    stages = mesh.size(STAGE)
    decisions = [_without_stage(decision) for decision in entry.decisions]
    local = [_local(decision, mesh) for decision in decisions]
    fitting = [dim for dim, size in enumerate(local) if size % stages == 0 and size]
    if fitting:
        dim = max(fitting, key=lambda d: local[d])
        old = decisions[dim]
        moved = "exchanged for whole layers once per step" if alone else "gathered once per step"
        reason = f"{old.reason}; stored in parts over {STAGE}={stages}, {moved}"
        decisions[dim] = replace(old, mesh_axes=(*old.mesh_axes, STAGE), reason=reason)
    return entry_of(entry.path, entry.shape, entry.dtype, entry.names, tuple(decisions), mesh)


def _without_stage(decision: Decision) -> Decision:
    return replace(decision, mesh_axes=tuple(axis for axis in decision.mesh_axes if axis != STAGE))


def _local(decision: Decision, mesh: MeshShape) -> int:
    size = decision.size
    for axis in decision.mesh_axes:
        size //= mesh.size(axis)
    return size
