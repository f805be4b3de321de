"""Gradients of a loss through a pipeline: parameters to their stages, ticks, gradients back, in three `shard_map`s.

In: a staged model, a layout. Out: `(stored params, batch, rng) -> (gradients with their specs, Sums)`. Gather and
reduce are manual over the whole mesh; the ticks over `stage` and the data-like axes, the rest automatic.

    value = pipelined_gradients(loss, staging, layout=layout, options=options)(stored, batch, rng)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardlib.accumulate import over_slices, scales_of, weights_of
from shardlib.explicit import Layout, cast, check_layout, gather_leaf, manual, reduce_leaf
from shardlib.objective import LossFunction, Sums
from shardlib.pipeline.cutting import cut_traced
from shardlib.pipeline.evaluate import Evaluator
from shardlib.pipeline.execute import STAGE, Executor
from shardlib.pipeline.feeds import Feeds
from shardlib.pipeline.forward_only import forward_only
from shardlib.pipeline.joint import Joint
from shardlib.pipeline.partition import NO_LAYER, Partition
from shardlib.pipeline.parts import Leaves, Parts
from shardlib.pipeline.passes import Chosen, recomputing, storing
from shardlib.pipeline.stage import StageWork
from shardlib.remat import Policy, parse_policy
from shardlib.slices import cut as cut_batch
from shardlib.slices import part_keys
from shardlib.spec_axes import axes_of, is_spec, only, without
from shardlib.staging import Staging
from shardlib.strategies import DATA_LIKE
from shardlib.streamed_inputs import cut_inputs, feeds_inside, own_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How ticks are executed; a static leaf.

    Args:
        residuals: what the layers of a stage keep for their backward pass; None: the stage's input alone.
        skip: branch around idle slots; else compute and discard.
        inside: update ring buffers inside the branches: better on CPU, where TPU copies them.
    """

    residuals: Policy | None
    skip: bool
    inside: bool


def pipelined_gradients(
    loss: LossFunction, staging: Staging, *, layout: Layout, abstract_params: Any, options: Options
) -> Callable[[Any, Any, Any], tuple[Any, Sums]]:
    """Builds `(stored parameters, batch, rng) -> (gradients placed as `layout.grads`, Sums over everything)`.

    Args:
        loss: with constraints that leave `stage` and the data-like axes alone.
        staging: how the model was cut.
        layout: where everything lives; its parameters are the stored ones.
        abstract_params: in the model's own shapes.
        options: how to execute.
    """
    moves = _Moves(staging=staging, layout=layout)
    check_layout(layout, gathered=moves.gathered_over)
    core = _Core(loss=loss, moves=moves, abstract_params=abstract_params, options=options)
    mesh, axes = layout.mesh, layout.axes
    held_specs = moves.held_specs(hoisted=moves.hoisted)
    held = [only(spec, (STAGE, *axes)) for spec in held_specs]
    local_outer = [only(spec, (STAGE,)) for spec in moves.outer_specs]

    def value(params: Any, batch: Any, rng: Any) -> tuple[Any, Sums]:
        leaves = jax.tree.leaves(cast(params, layout.compute_dtype))
        whole = manual(moves.gather, mesh, (moves.specs,), (held_specs, moves.outer_specs))(leaves)
        lead = axes or None
        rows_out = P(lead, STAGE)
        outer_out = [_stacked(spec, axes) for spec in _chosen(local_outer, core.chosen_outer)]
        local = jax.shard_map(
            core,
            mesh=mesh,
            axis_names={STAGE, *axes},
            in_specs=(held, local_outer, layout.batch_over((STAGE, *axes)), P()),
            out_specs=(rows_out, outer_out, P()),
            check_vma=False,
        )
        rows, outer = whole
        rows, outer, sums = local(rows, outer, batch, rng)
        # Out of a partly manual region a spec may name manual axes only; the constraint names the rest.
        row_specs = [P(lead, *spec) for spec in _chosen(moves.row_specs, core.chosen_rows)]
        outer_specs = [_stacked(spec, axes) for spec in _chosen(moves.outer_specs, core.chosen_outer)]
        place = lambda tree, specs: jax.lax.with_sharding_constraint(  # noqa: E731
            tree, [NamedSharding(mesh, spec) for spec in specs]
        )
        rows, outer = place(rows, row_specs), place(outer, outer_specs)
        grads = manual(moves.reduce, mesh, (row_specs, outer_specs), moves.grad_specs)(rows, outer)
        return jax.tree.unflatten(jax.tree.structure(layout.grads, is_leaf=is_spec), grads), sums

    return value


def _stacked(spec: P, axes: tuple[str, ...]) -> P:
    """The spec with a leading dim over the devices that each have a gradient of their own."""
    is_in_parts = any(STAGE in axes_of(entry) for entry in spec)
    lead = axes if is_in_parts else (STAGE, *axes)
    return P(lead or None, *spec)


def _chosen(values: list[Any], flags: tuple[bool, ...]) -> list[Any]:
    return [value for value, wanted in zip(values, flags, strict=True) if wanted]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moves:
    """Parameters from where they are stored to the ranks that use them, and gradients back; a static value."""

    staging: Staging
    layout: Layout

    @property
    def parts(self) -> Parts:
        return self.staging.parts

    @property
    def specs(self) -> list[P]:
        """Of the stored parameters."""
        return jax.tree.leaves(self.layout.params, is_leaf=is_spec)

    @property
    def grad_specs(self) -> list[P]:
        """Of the reduced gradients of the chosen parameters."""
        return jax.tree.leaves(self.layout.grads, is_leaf=is_spec)

    @property
    def row_specs(self) -> list[P]:
        """Of each kind of layer parameter, its rows along dim 0, whole along the data-like axes."""
        return [without(spec, DATA_LIKE) for spec in self.held_specs(hoisted=False)]

    def held_specs(self, *, hoisted: bool) -> list[P]:
        """Of the rows that the ticks get: gathered before them (hoisted), or by each F and B for itself.

        Layers that are stored one by one are always gathered before.
        """
        found = []
        for kind in self.parts.stacked:
            spec = self.specs[kind.leaves[0]]
            spec = without(spec, (*DATA_LIKE, STAGE) if hoisted or kind.dim is None else (STAGE,))
            rest = [entry for dim, entry in enumerate(spec) if dim != kind.dim]
            found.append(P(STAGE, *rest))
        return found

    @property
    def hoisted(self) -> bool:
        """Whether layers are gathered once per step."""
        return self.layout.gather == "step"

    def fetch(self, rows: Leaves, turn: Any) -> tuple[Leaves, Any]:
        """Rows of one chunk as the ticks hold them, [most, ...], to whole ones, inside the region of the ticks.

        Args:
            turn: a value of the tick, handed back to be used: each waits for the other, for a compiler that sees the
                same gather in every tick moves it out of the loop, and whole layers stay in memory all the while.
        """
        if self.hoisted:
            return rows, turn
        rows, turn = jax.lax.optimization_barrier((rows, turn))
        held = [P(None, *spec[1:]) for spec in self.held_specs(hoisted=False)]
        automatic = {axis for axis in self.layout.mesh.axis_names if axis not in (STAGE, *self.layout.axes)}
        gather = lambda rows: [gather_leaf(x, spec, over=DATA_LIKE) for x, spec in zip(rows, held)]  # noqa: E731
        if not automatic:
            return gather(rows), turn
        rest = [without(spec, DATA_LIKE) for spec in held]
        mesh = jax.sharding.get_abstract_mesh()
        whole = jax.shard_map(
            gather, mesh=mesh, axis_names=automatic, in_specs=(rest,), out_specs=rest, check_vma=False
        )(rows)
        return whole, turn

    @property
    def outer_specs(self) -> list[P]:
        """Of all other parameters, gathered: but for those that stay in parts over the stages."""
        specs = self.specs
        return [without(specs[leaf], self.gathered_over(leaf)) for leaf in self.parts.outer]

    def gathered_over(self, leaf: int) -> tuple[str, ...]:
        """The axes that a parameter is gathered over before it is used."""
        return DATA_LIKE if leaf in self.staging.spread else (*DATA_LIKE, STAGE)

    def gather(self, leaves: Leaves) -> tuple[Leaves, Leaves]:
        """In a region manual over the mesh: rows of this rank's layers, and the other parameters, both whole."""
        specs, rows = self.specs, []
        for kind in self.parts.stacked:
            spec = specs[kind.leaves[0]]
            if kind.dim is None:
                rows.append(_to_rows([leaves[leaf] for leaf in kind.leaves], spec, self.staging.partition))
            else:
                leaf = leaves[kind.leaves[0]]
                whole = gather_leaf(leaf, spec, over=DATA_LIKE) if self.hoisted else leaf
                rows.append(jnp.moveaxis(whole, kind.dim, 0))
        return rows, [
            gather_leaf(leaves[leaf], specs[leaf], over=self.gathered_over(leaf)) for leaf in self.parts.outer
        ]

    def reduce(self, rows: Leaves, outer: Leaves) -> Leaves:
        """In a region manual over the mesh: gradients summed over devices and split as their specs say, in tree order.

        Args:
            rows, outer: [1, ...] each, this device's, of the chosen parameters.
        """
        layout, made = self.layout, dict[int, Any]()
        mask = _flags(layout)
        position = {leaf: i for i, leaf in enumerate(leaf for leaf, wanted in enumerate(mask) if wanted)}
        spec_of = lambda leaf: self.grad_specs[position[leaf]]  # noqa: E731
        sizes = {"over": layout.axes, "dtype": layout.reduce_dtype}
        kinds = [kind for kind in self.parts.stacked if mask[kind.leaves[0]]]
        for kind, grad in zip(kinds, rows, strict=True):
            if kind.dim is None:
                grads = _from_rows(grad[0], spec_of(kind.leaves[0]), self.staging.partition, layout)
                made |= dict(zip(kind.leaves, grads, strict=True))
            else:
                leaf = kind.leaves[0]
                made[leaf] = reduce_leaf(jnp.moveaxis(grad[0], 0, kind.dim), spec_of(leaf), **sizes)
        everywhere = tuple(axis for axis in layout.mesh.axis_names if axis in (*layout.axes, STAGE))
        for leaf, grad in zip((leaf for leaf in self.parts.outer if mask[leaf]), outer, strict=True):
            over = layout.axes if leaf in self.staging.spread else everywhere
            made[leaf] = reduce_leaf(grad[0], spec_of(leaf), over=over, dtype=layout.reduce_dtype)
        return [made[leaf] for leaf in sorted(made)]


def _flags(layout: Layout) -> list[bool]:
    """For every parameter, whether it has a gradient."""
    if layout.mask is None:
        return [True] * len(jax.tree.leaves(layout.params, is_leaf=is_spec))
    return [bool(flag) for flag in jax.tree.leaves(layout.mask)]


def _stage_dim(spec: P) -> int | None:
    return next((dim for dim, entry in enumerate(spec) if STAGE in axes_of(entry)), None)


def _to_rows(leaves: Leaves, spec: P, partition: Partition) -> jax.Array:
    """Layers stored one by one, each in parts over the stages, to whole rows of this rank's own layers."""
    rows = np.asarray(partition.rows)
    stacked = jnp.stack(leaves)[np.maximum(rows, 0)]
    if NO_LAYER in partition.rows:
        stacked = jnp.where((rows != NO_LAYER).reshape(-1, *[1] * (stacked.ndim - 1)), stacked, 0)
    dim = _stage_dim(spec)
    if dim is None:
        own = len(rows) // partition.placement.num_ranks
        stacked = jax.lax.dynamic_slice_in_dim(stacked, jax.lax.axis_index(STAGE) * own, own, 0)
    else:
        stacked = jax.lax.all_to_all(stacked, STAGE, split_axis=0, concat_axis=dim + 1, tiled=True)
    return gather_leaf(stacked, P(None, *spec), over=DATA_LIKE)


def _from_rows(grad: jax.Array, spec: P, partition: Partition, layout: Layout) -> Leaves:
    """Gradients of this rank's rows to those of single layers, summed over devices and in parts as `spec` says."""
    dim, own = _stage_dim(spec), grad.shape[0]
    # What splits a dim outside of the stages is scattered before the stages exchange rows, what is inside after.
    before = P(None, *(_around(entry, outside=True) for entry in spec))
    after = P(None, *(_around(entry, outside=False) for entry in spec))
    first = tuple(axis for axis in layout.axes if axis in {a for entry in before for a in axes_of(entry)})
    rest = tuple(axis for axis in layout.axes if axis not in first)
    grad = reduce_leaf(grad, only(before, layout.axes), over=first, dtype=layout.reduce_dtype)
    if dim is None:
        whole = jnp.zeros((own * partition.placement.num_ranks, *grad.shape[1:]), grad.dtype)
        grad = jax.lax.dynamic_update_slice_in_dim(whole, grad, jax.lax.axis_index(STAGE) * own, 0)
        rest = (*rest, STAGE)
    else:
        grad = jax.lax.all_to_all(grad, STAGE, split_axis=dim + 1, concat_axis=0, tiled=True)
    grad = reduce_leaf(grad, only(after, layout.axes), over=rest, dtype=layout.reduce_dtype)
    return [grad[row] for row in partition.row_of]


def _around(entry: Any, *, outside: bool) -> Any:
    """The axes of an entry outside (before) or inside (after) the stages; all of them where there is no stage."""
    axes = axes_of(entry)
    if STAGE not in axes:
        return axes if outside else None
    cut_at = axes.index(STAGE)
    return axes[:cut_at] if outside else axes[cut_at + 1 :]


def pipelined_sums(
    loss: LossFunction,
    staging: Staging,
    *,
    layout: Layout,
    abstract_params: Any,
    options: Options,
    divided: bool,
) -> Callable[[Any, Any], Sums]:
    """Builds `(stored parameters, batch) -> Sums` without randomness and without gradients.

    Args:
        loss, staging, abstract_params, options: as for `pipelined_gradients`.
        layout: of this batch.
        divided: whether the data-like axes divide the batch; else every one of them evaluates all of it.
    """
    moves = _Moves(staging=staging, layout=layout)
    core = _Core(loss=loss, moves=moves, abstract_params=abstract_params, options=options)
    mesh, axes = layout.mesh, layout.axes

    def value(params: Any, batch: Any) -> Sums:
        leaves = jax.tree.leaves(cast(params, layout.compute_dtype))
        held_specs = moves.held_specs(hoisted=moves.hoisted)
        rows, outer = manual(moves.gather, mesh, (moves.specs,), (held_specs, moves.outer_specs))(leaves)
        local_outer = [only(spec, (STAGE,)) for spec in moves.outer_specs]
        local = jax.shard_map(
            lambda rows, outer, batch: core.evaluate(rows, outer, batch, over=(STAGE, *(axes if divided else ()))),
            mesh=mesh,
            axis_names={STAGE, *axes},
            in_specs=([only(spec, (STAGE, *axes)) for spec in held_specs], local_outer, layout.batch_over(axes)),
            out_specs=P(),
            check_vma=False,
        )
        return local(rows, outer, batch)

    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """A loss cut inside the region, and the microbatches it takes; a static value.

    Args:
        parts: the cut loss.
        pieces: leaves [num_microbatches, ...], [1, ...] of what all microbatches share.
        results: the structure of its results.
    """

    parts: Parts
    pieces: Leaves
    results: Any

    def objective(self, outer: Leaves, piece: Leaves, message: Leaves) -> tuple[tuple[Any, Any], Leaves]:
        """((total, per_microbatch), all results) of a microbatch from its last message."""
        num_carry = len(self.parts.carry)
        made = self.parts.post(outer, piece, message[:num_carry], message[num_carry:])
        sums = jax.tree.unflatten(self.results, made)
        return (sums.total, sums.per_microbatch), made


@dataclass(frozen=True, slots=True, kw_only=True)
class _Core:
    """The ticks, as a function of one device's part of everything; a static value."""

    loss: LossFunction
    moves: _Moves
    abstract_params: Any
    options: Options

    @property
    def staging(self) -> Staging:
        """How the model was cut."""
        return self.moves.staging

    @property
    def layout(self) -> Layout:
        """Where everything lives."""
        return self.moves.layout

    @property
    def chosen_rows(self) -> tuple[bool, ...]:
        """Which kinds of layer parameters have gradients."""
        flags = _flags(self.layout)
        return tuple(flags[kind.leaves[0]] for kind in self.staging.parts.stacked)

    @property
    def chosen_outer(self) -> tuple[bool, ...]:
        """Which other parameters have gradients."""
        flags = _flags(self.layout)
        return tuple(flags[leaf] for leaf in self.staging.parts.outer)

    def __call__(self, rows: Leaves, outer: Leaves, batch: Any, rng: Any) -> tuple[Leaves, Leaves, Sums]:
        """Gradients [1, ...] of this device, and the sums over all."""
        layout = self.layout
        shard = jax.lax.axis_index(layout.axes) if layout.axes else 0
        sizes = {"num_microbatches": layout.num_microbatches, "num_slices": layout.num_slices}
        pieces = cut_inputs(batch, layout.batch_dims, self.staging.streamed, sizes=sizes)
        keys = (
            None if rng is None else part_keys(rng, first=shard * layout.num_microbatches * layout.num_slices, **sizes)
        )
        cut, weights = self._cut(over_slices(self.loss, layout.num_slices, ()), pieces, keys)
        # Where stages hold inputs in parts, each knows the weight of its own.
        total = weights().summed((STAGE, *layout.axes) if self.staging.streamed else layout.axes)
        rows = self._by_chunk(rows)
        executor = self._executor(cut, rows, outer)
        row_grads, outer_grads, results = executor.gradients(rows, outer, cut.pieces, scales_of(total))
        sums = jax.tree.unflatten(cut.results, results).summed((STAGE, *layout.axes))
        row_grads = [leaf.reshape(1, leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]) for leaf in row_grads]
        return row_grads, [leaf[None] for leaf in outer_grads], sums

    def evaluate(self, rows: Leaves, outer: Leaves, batch: Any, *, over: tuple[str, ...]) -> Sums:
        """The sums over devices that differ along `over`."""
        layout = self.layout
        pieces = cut_batch(batch, layout.batch_dims, num_microbatches=layout.num_microbatches, num_slices=1)
        cut, _ = self._cut(over_slices(self.loss, 1, ()), pieces, None)
        placement = self.staging.partition.placement
        evaluator = Evaluator(
            work=self._work(cut.parts, None),
            ticks=forward_only(placement, num_microbatches=layout.num_microbatches),
            objective=cut.objective,
            skip=self.options.skip,
            split=self._split,
            fetch=self.moves.fetch,
            joint=self._joint,
        )
        results = evaluator.results(self._by_chunk(rows), outer, cut.pieces)
        return jax.tree.unflatten(cut.results, results).summed(over)

    def _params(self) -> Any:
        """The model's own parameters as the loss sees them on one rank, abstract."""
        whole = jax.eval_shape(lambda tree: cast(tree, self.layout.compute_dtype), self.abstract_params)
        return self.staging.parts_of(whole)

    @property
    def _joint(self) -> Joint | None:
        """How all ranks compute embedding and head together, where their parameters are in parts."""
        staging = self.staging
        if not staging.spread:
            return None
        spread = tuple(leaf in staging.spread for leaf in staging.parts.outer)
        return Joint(placement=staging.partition.placement, spread=spread)

    def _by_chunk(self, rows: Leaves) -> Leaves:
        partition = self.staging.partition
        return [leaf.reshape(partition.placement.num_chunks, partition.most, *leaf.shape[1:]) for leaf in rows]

    def _cut(self, part: Any, pieces: Any, keys: Any) -> tuple[_Cut, Callable[[], Sums]]:
        """The loss, traced once and cut; and the weights of all microbatches."""
        flat, treedef = jax.tree.flatten((pieces, keys))
        first = [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in flat]
        run = lambda params, piece: part(params, *piece, None)  # noqa: E731
        params = self._params()
        closed, shape = jax.make_jaxpr(run, return_shape=True)(params, jax.tree.unflatten(treedef, first))
        parts = cut_traced(closed, params, layer_leaves=self.staging.layer_leaves)
        assert parts.stacked == self.staging.parts.stacked, "the loss was cut in another way than when it was bound"
        dims = jax.tree.leaves(self.layout.batch_dims)
        shared = [dim < 0 for dim in dims] + [False] * (len(flat) - len(dims))
        # Inputs that all rows share are repeated by reference; a loop would hold every repetition.
        once = [leaf[:1] if is_shared else leaf for leaf, is_shared in zip(flat, shared, strict=True)]
        found = _Cut(parts=parts, pieces=once, results=jax.tree.structure(shape))
        return found, lambda: weights_of(closed, shape, own_share(flat, self.staging.streamed))

    def _work(self, parts: Parts, policy: Policy | None) -> StageWork:
        policy = policy or parse_policy("none")
        return StageWork(parts=parts, partition=self.staging.partition, policy=policy, skip=self.options.skip)

    @property
    def _split(self) -> bool:
        """Whether the compiler may split messages over axes of its own."""
        mesh = self.layout.mesh
        return any(mesh.shape[axis] > 1 for axis in mesh.axis_names if axis not in (STAGE, *DATA_LIKE))

    def _feeds(self, parts: Parts) -> Feeds:
        """How streamed inputs travel."""
        specs = jax.tree.leaves(self.layout.batch, is_leaf=is_spec) if self._split else None
        inputs, lowered = self.staging.inputs, self.staging.lowered
        return feeds_inside(parts, inputs, lowered, chosen=self.chosen_outer, specs=specs)

    def _executor(self, cut: _Cut, rows: Leaves, outer: Leaves) -> Executor:
        parts, policy = cut.parts, self.options.residuals
        work = self._work(parts, policy)
        chosen = Chosen(
            rows=self.chosen_rows,
            outer=self.chosen_outer,
            message=tuple(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in parts.message),
        )
        if policy is None:
            passes = recomputing(work, chosen)
        else:
            first = lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)  # noqa: E731
            turn = jax.ShapeDtypeStruct((), jnp.int32)
            rows, _ = jax.eval_shape(self.moves.fetch, [first(leaf) for leaf in rows], turn)
            whole = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in outer]
            like = (rows, whole, [first(leaf) for leaf in cut.pieces], turn)
            passes = storing(work, chosen, like=(*like, list(parts.message)))
        return Executor(
            parts=parts,
            passes=passes,
            lowered=self.staging.lowered,
            partition=self.staging.partition,
            chosen=chosen,
            objective=cut.objective,
            skip=self.options.skip,
            split=self._split,
            inside=self.options.inside,
            fetch=self.moves.fetch,
            joint=self._joint,
            feeds=self._feeds(parts),
        )
