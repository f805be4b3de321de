"""Specs + a mesh -> arrays where they belong: shardings, constraints in a trace, placement without aliasing.

In: specs from `resolve`, a mesh. Out: `NamedSharding`s, functions that run under rules, placed trees.

    params = jax.device_put(params, shardings(specs, mesh))
    step = jax.jit(with_rules(step, rules, mesh))
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshes.errors import ShardingError, raise_collected
from meshes.shape import MeshShape
from shardlib import annotate
from shardlib.context import BY_POSITION, CONTEXT, IN_ORDER, AttentionCall, ContextUse, Heard, divides_sequence
from shardlib.decide import Decision, Names, decide, spec_of
from shardlib.ops.attention import sharded_heads_attention
from shardlib.ops.context_attention import context_attention
from shardlib.ops.fused_attention import platform_of
from shardlib.ops.products import products_summed_in
from shardlib.rules import Rules
from shardlib.specs import mesh_shape
from shardlib.tree_paths import leaves_with_paths

T = TypeVar("T")
Record = Callable[[Names, Any, tuple[Decision, ...]], None]


def shardings(specs: Any, mesh: Mesh | AbstractMesh) -> Any:
    """A tree of `NamedSharding` from a tree of `PartitionSpec`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda node: isinstance(node, P))


def with_rules(function: Callable[..., T], rules: Rules, mesh: Mesh | AbstractMesh) -> Callable[..., T]:
    """A fresh function in which `constrain` and `attention` follow the rules on the mesh.

    Jit the result, not the function inside it: JAX keys its cache by the function, and rules are not in the key.

    Args:
        function: anything that traces a model with annotations.
        rules: what the names mean.
        mesh: concrete or abstract, with Auto or Explicit axes.
    """
    return annotate.under(active(rules, mesh), function)


def active(
    rules: Rules,
    mesh: Mesh | AbstractMesh,
    *,
    record: Record | None = None,
    hidden: tuple[str, ...] = (),
    manual: bool = False,
    sum_dtype: str | None = None,
    context: ContextUse | None = None,
    record_attention: Callable[[Heard], None] | None = None,
    kernels: bool = True,
    vocab_shards: int = 1,
) -> annotate.Active:
    """The value that puts rules in force in a trace.

    Args:
        rules: what the names mean.
        mesh: the mesh.
        record: hears `(names, array, decisions)` for every named activation.
        hidden: mesh axes that constraints leave alone, because something outside already divides by them: a manual
            region, or a `vmap` over slices of the batch.
        manual: the trace is inside a region manual over the hidden axes.
        sum_dtype: of the sums in the model's matrix products, by name; None leaves them to the products' dtype.
        context: how attention runs where the mesh divides sequences; None: they are gathered for it.
        record_attention: hears every call of the attention slot; `BY_POSITION` for every array that follows the order
            of tokens, `IN_ORDER` for every sequence that must be in order.
        kernels: attention uses the kernels of the mesh's platform where they take its calls.
        vocab_shards: into how many shards the rows of vocabularies are to divide, padded (`Plan.vocab_shards`).
    """
    shape = mesh_shape(mesh)
    visible = MeshShape(axes=tuple((axis, 1 if axis in hidden else size) for axis, size in shape.axes))
    explicit = AxisType.Explicit in mesh.axis_types

    def constrain(x: Any, names: Names) -> Any:
        decisions = decide_activation(names, x.shape, rules=rules, mesh=visible)
        if record is not None:
            record(names, x, decisions)
        if visible.num_devices == 1:
            return x
        if manual:
            return jax.lax.with_sharding_constraint(x, spec_of(decisions))
        sharding = NamedSharding(mesh, spec_of(decisions))
        return jax.sharding.reshard(x, sharding) if explicit else jax.lax.with_sharding_constraint(x, sharding)

    def axes_of(query_shape: tuple[int, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        names = known(("batch", "length", "heads", "head_dim"))
        decisions = decide_activation(names, query_shape, rules=rules, mesh=visible)
        return decisions[0].mesh_axes, decisions[2].mesh_axes

    def known(names: Names) -> Names:
        # The names of the attention slot are ours, not the model's: rules that know none of them are complete.
        return tuple(name if name and rules.for_name(name) else None for name in names)

    attention = sharded_heads_attention(
        axes_of,
        lambda x, names: constrain(x, known(names)),
        mesh=mesh,
        platform=platform_of(mesh) if kernels else None,
        manual=manual,
    )
    by_position = lambda x, dim: x  # noqa: E731
    if context is not None and divides_sequence(visible):
        attention = _divided_attention(
            context, rules=rules, visible=visible, mesh=None if manual else mesh, kernels=kernels
        )
        if context.placement != "contiguous":
            by_position = lambda x, dim: jnp.take(x, context.order(x.shape[dim]), axis=dim)  # noqa: E731
    ops: dict[str, Any] = {"attention": attention, "by_position": by_position}
    if record_attention is not None:
        ops |= _recorded(dict(ops), record_attention)
    if sum_dtype is not None:
        ops["dot_general"] = products_summed_in(sum_dtype)
    ops[annotate.VOCAB_SHARDS] = lambda: vocab_shards
    return annotate.Active(constrain=constrain, ops=ops)


def _divided_attention(
    context: ContextUse, *, rules: Rules, visible: MeshShape, mesh: Mesh | AbstractMesh | None, kernels: bool
) -> Callable[..., jax.Array]:
    """The attention slot where sequences are divided.

    Args:
        visible: the mesh, axes that are divided by already at size 1.
        mesh: None inside a manual region.
        kernels: attention uses the kernels of the platform where they take its calls.
    """

    def attention(query, key, value, **options):
        names = tuple(name if rules.for_name(name) else None for name in ("batch", "length", "heads", "head_dim"))
        decisions = decide_activation(names, query.shape, rules=rules, mesh=visible)
        return context_attention(
            query,
            key,
            value,
            kind=context.kind,
            axis=CONTEXT,
            placement=context.placement,
            batch_axes=decisions[0].mesh_axes,
            head_axes=decisions[2].mesh_axes,
            mesh=mesh,
            kernels=kernels,
            **options,
        )

    return attention


def _recorded(ops: dict[str, Any], record: Callable[[Heard], None]) -> dict[str, Any]:
    """The slots, heard."""

    def attention(query, key, value, **options):
        record(AttentionCall.of(query, key, value, **options))
        return ops["attention"](query, key, value, **options)

    def by_position(x, dim):
        record(BY_POSITION)
        return ops["by_position"](x, dim=dim)

    def in_order(x):
        record(IN_ORDER)
        return x

    return {"attention": attention, "by_position": by_position, "in_order": in_order}


def decide_activation(
    names: Names, shape: tuple[int, ...], *, rules: Rules, mesh: Mesh | AbstractMesh | MeshShape
) -> tuple[Decision, ...]:
    """Decisions for an array named inside a model.

    Raises:
        ShardingError: another rank than names, an unknown name, or a size that does not divide.
    """
    text = ", ".join(str(name) for name in names)
    if len(names) != len(shape):
        raise ShardingError(
            f"constrain(x, {text}): {len(names)} names for an array of rank {len(shape)} {list(shape)}",
            fix="give one name (or None) per dim",
        )
    decisions = decide(names, shape, rules=rules, mesh=mesh_shape(mesh))
    problems = [decision.problem for decision in decisions if decision.problem]
    raise_collected(problems, heading=f"activation {list(shape)} named ({text}) on mesh {mesh_shape(mesh)}:")
    return decisions


def place(tree: T, wanted: Any) -> T:
    """The tree on its shardings, every leaf in a buffer of its own, so that all of it may be donated.

    Args:
        tree: arrays anywhere: on the host, on one device, or placed already.
        wanted: a tree of shardings of the same structure.

    Raises:
        ShardingError: the structures differ.
    """
    if jax.tree.structure(tree) != jax.tree.structure(wanted):
        raise structure_error(tree, wanted)
    placed = jax.device_put(tree, wanted)
    seen: set[int] = set()
    return jax.tree.map(lambda leaf: _own_buffer(leaf, seen), placed)


def _own_buffer(leaf: jax.Array, seen: set[int]) -> jax.Array:
    """The leaf, copied when an earlier leaf uses its memory: donating one buffer twice kills the process."""
    pointers = {shard.data.unsafe_buffer_pointer() for shard in _raw(leaf).addressable_shards if shard.data.size}
    if pointers & seen:
        leaf = jax.tree.map(lambda x: x.copy(), leaf)
        pointers = {shard.data.unsafe_buffer_pointer() for shard in _raw(leaf).addressable_shards}
    seen |= pointers
    return leaf


def _raw(leaf: jax.Array) -> jax.Array:
    """The array that holds the bits: typed PRNG keys wrap one."""
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def structure_error(tree: Any, wanted: Any) -> ShardingError:
    """The error for a tree that has another structure than wanted: paths that are missing and unknown."""
    have, want = ({path for path, _ in leaves_with_paths(side)} for side in (tree, wanted))
    lines = [f"- missing: {path}" for path in sorted(want - have)] + [
        f"- unknown: {path}" for path in sorted(have - want)
    ]
    detail = "\n".join(lines[:8]) or f"- {jax.tree.structure(tree)}\n- {jax.tree.structure(wanted)}"
    return ShardingError(f"the tree to place has another structure than its shardings:\n{detail}")
