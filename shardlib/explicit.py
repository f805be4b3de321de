"""The explicit lowering of data-like axes: parameters gathered and gradients reduced by us, exactly when planned.

In: specs, a mesh, a loss. Out: `(params, batch, rng) -> (gradients with their specs, Sums)` in three `shard_map`s:
gather (manual over the whole mesh), the loss (manual over data-like axes, the rest automatic), reduce (manual over the
whole mesh). Gather and reduce are apart because a gather beside an automatic axis first gathers that axis too.

    value = explicit_gradients(loss, layout=layout, ...)(params, batch, rng)
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshes.errors import raise_collected
from shardlib.accumulate import gradients
from shardlib.objective import LossFunction, Sums
from shardlib.slices import cut, part_keys
from shardlib.spec_axes import axes_of, is_spec, only, without
from shardlib.strategies import DATA_LIKE
from shardlib.trainable import split
from shardlib.tree_paths import leaves_with_paths


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where everything of an explicit step lives; a static value.

    Args:
        mesh: Auto axes.
        params: specs of the parameters as stored.
        grads: specs of the reduced gradients (those of the parameters, or more sharded).
        batch: specs of the batch.
        batch_dims: position of each batch leaf's batch dim, -1 for none.
        num_microbatches: parts of each device's rows, one after another.
        num_slices: logical slices per device and microbatch, each with its own key.
        gather: parameters gathered once per "step", or per "microbatch".
        compute_dtype: of the parameters inside the loss, and on the wire.
        reduce_dtype: of the gradients on the wire.
        mask: a tree of bools, True for the parameters that have gradients; None for all. `grads` has those alone.
    """

    mesh: Mesh
    params: Any
    grads: Any
    batch: Any
    batch_dims: Any
    num_microbatches: int
    num_slices: int
    gather: str
    compute_dtype: Any
    reduce_dtype: Any
    mask: Any = None

    @property
    def axes(self) -> tuple[str, ...]:
        """Data-like mesh axes of size above 1, in mesh order: manual in the loss."""
        return data_like(self.mesh)

    def batch_over(self, axes: tuple[str, ...]) -> Any:
        """Specs of the batch over these axes alone: a partly manual region may name no others."""
        return jax.tree.map(lambda spec: only(spec, axes), self.batch, is_leaf=is_spec)

    @property
    def num_shards(self) -> int:
        """Into how many shards the batch is divided."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)


def data_like(mesh: Mesh) -> tuple[str, ...]:
    """The data-like axes of a mesh with size above 1, in mesh order."""
    return tuple(axis for axis in mesh.axis_names if axis in DATA_LIKE and mesh.shape[axis] > 1)


def check_layout(layout: Layout, *, gathered: Callable[[int], Collection[str]] = lambda leaf: DATA_LIKE) -> None:
    """Raises for a dim that a gathered axis splits outside another axis: gathering it would interleave the rest.

    Args:
        layout: with the specs of the parameters.
        gathered: from a parameter's position to the axes it is gathered over.
    """
    failures = []
    for leaf, (path, spec) in enumerate(leaves_with_paths(layout.params, is_leaf=is_spec)):
        for dim, entry in enumerate(spec):
            kinds = [axis in gathered(leaf) for axis in axes_of(entry)]
            if kinds != sorted(kinds):
                failures.append(
                    f"{path} dim {dim} is split by {'+'.join(axes_of(entry))}; fix: put the data-like axis last"
                )
    raise_collected(failures, heading="the explicit lowering cannot gather these parameters:")


def explicit_gradients(loss: LossFunction, layout: Layout) -> Callable[[Any, Any, Any], tuple[Any, Sums]]:
    """Builds `(params, batch, rng) -> (gradients placed as `layout.grads`, Sums over everything)`.

    Args:
        loss: the loss with constraints that leave data-like axes alone.
        layout: where everything lives.
    """
    check_layout(layout)
    mesh, axes = layout.mesh, layout.axes
    hoisted = layout.gather == "step"
    whole = jax.tree.map(lambda spec: without(spec, DATA_LIKE), layout.params, is_leaf=is_spec)
    differentiated = whole if layout.mask is None else split(whole, layout.mask)[0]
    stacked = jax.tree.map(lambda spec: P(axes, *spec), differentiated, is_leaf=is_spec)
    held = jax.tree.map(lambda spec: only(spec, axes), layout.params, is_leaf=is_spec)

    def core(params: Any, batch: Any, rng: Any) -> tuple[Any, Sums]:
        shard = jax.lax.axis_index(axes) if axes else 0
        per_shard = layout.num_microbatches * layout.num_slices
        sizes = {"num_microbatches": layout.num_microbatches, "num_slices": layout.num_slices}
        pieces = cut(batch, layout.batch_dims, **sizes)
        keys = part_keys(rng, first=shard * per_shard, **sizes)
        held = lambda params, piece: (params, piece)  # noqa: E731
        fetch = held if hoisted else lambda params, piece: _fetch(params, piece, layout)
        reduce = lambda sums: sums.summed(axes)  # noqa: E731
        grads, sums = gradients(loss, params, pieces, keys, state=None, reduce=reduce, mask=layout.mask, fetch=fetch)
        return jax.tree.map(lambda leaf: leaf[None], grads), sums

    def value(params: Any, batch: Any, rng: Any) -> tuple[Any, Sums]:
        params = cast(params, layout.compute_dtype)
        if hoisted:
            params = manual(lambda params: _gather(params, layout.params), mesh, (layout.params,), whole)(params)
        in_specs = (P() if hoisted else held, layout.batch_over(axes), P())
        if axes:
            # Out of a partly manual region a spec may name manual axes only; the constraint below names the rest.
            local = jax.shard_map(
                core, mesh=mesh, axis_names=set(axes), in_specs=in_specs, out_specs=(P(axes), P()), check_vma=False
            )
        else:
            local = core
        grads, sums = local(params, batch, rng)
        wanted = jax.tree.map(lambda spec: NamedSharding(mesh, spec), stacked, is_leaf=is_spec)
        grads = jax.lax.with_sharding_constraint(grads, wanted)
        reduce = lambda grads: jax.tree.map(  # noqa: E731
            lambda leaf, spec: reduce_leaf(leaf[0], spec, over=axes, dtype=layout.reduce_dtype), grads, layout.grads
        )
        return manual(reduce, mesh, (stacked,), layout.grads)(grads), sums

    return value


def cast(params: Any, dtype: Any) -> Any:
    """Floating-point leaves in `dtype`; the others as they are."""
    is_floating = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating)  # noqa: E731
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if is_floating(leaf) else leaf, params)


def manual(function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """The function in a region manual over the whole mesh."""
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def gather_leaf(x: jax.Array, spec: P, *, over: Collection[str]) -> jax.Array:
    """Inside a region manual over these axes: the array whole along them."""
    for dim, entry in enumerate(spec):
        axes = tuple(axis for axis in axes_of(entry) if axis in over)
        if axes:
            x = jax.lax.all_gather(x, axes, axis=dim, tiled=True)
    return x


def _gather(params: Any, specs: Any) -> Any:
    return jax.tree.map(lambda x, spec: gather_leaf(x, spec, over=DATA_LIKE), params, specs)


def _fetch(params: Any, piece: Any, layout: Layout) -> tuple[Any, Any]:
    """Parameters gathered for one microbatch, and the microbatch.

    Each waits for the other: a compiler that sees the same gather in every turn of a loop moves it out, and then
    whole parameters stay in memory all the while.
    """
    params, piece = jax.lax.optimization_barrier((params, piece))
    return _gather_nested(params, layout), piece


def _gather_nested(params: Any, layout: Layout) -> Any:
    """`_gather` in a region where other axes are automatic: they are made manual around just the gather."""
    automatic = {axis for axis in layout.mesh.axis_names if axis not in layout.axes}
    if not automatic:
        return _gather(params, layout.params)
    tensor = jax.tree.map(lambda spec: without(spec, DATA_LIKE), layout.params, is_leaf=is_spec)
    gather = lambda params: _gather(params, layout.params)  # noqa: E731
    mesh = jax.sharding.get_abstract_mesh()
    return jax.shard_map(
        gather, mesh=mesh, axis_names=automatic, in_specs=(tensor,), out_specs=tensor, check_vma=False
    )(params)


def reduce_leaf(grad: jax.Array, spec: P, *, over: tuple[str, ...], dtype: Any) -> jax.Array:
    """One device's gradient to the sum over devices, split as `spec` says; the slow axis last and smallest.

    Args:
        grad: this device's, whole along the axes to sum over.
        spec: of the result.
        over: mesh axes to sum over, in mesh order.
        dtype: on the wire.
    """
    grad = grad.astype(dtype)
    scattered: set[str] = set()
    for dim, entry in enumerate(spec):
        axes = tuple(axis for axis in axes_of(entry) if axis in over)
        if axes:
            grad = jax.lax.psum_scatter(grad, axes, scatter_dimension=dim, tiled=True)
            scattered |= set(axes)
    rest = tuple(axis for axis in over if axis not in scattered)
    fast = tuple(axis for axis in rest if axis != "replica")
    for group in (fast, ("replica",) if "replica" in rest else ()):
        if group:
            grad = jax.lax.psum(grad, group)
    return grad.astype(jnp.float32)
