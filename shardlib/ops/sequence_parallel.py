"""One half of a transformer block on a residual stream that is divided along its length: one gather, one scatter.

In: x [batch, length, embed]. Out: an array like it, to be added to x, divided the same way.

    y = sequence_parallel(x, before=norm, whole=scale, work=mlp, weights=(up, down), weight_specs=(P(None, "tensor"),
        P("tensor")))
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from meshes.errors import nearest, raise_collected
from meshes.shape import STANDARD_AXES
from shardlib.ops.vocab_shards import BATCH_AXES, LENGTH_AXES, varying
from shardlib.tree_paths import leaves_with_paths

AXIS: Final = "tensor"
"""Mesh axis that divides the stream and the weights unless a caller says otherwise."""
LENGTH_DIM: Final = 1

Keep = Literal["gathered", "parts"]
"""What the forward pass keeps of the gathered array for the gradients of weights: all of it, or the own part."""


def sequence_parallel(
    x: jax.Array,
    *,
    work: Callable[..., jax.Array],
    weights: Any,
    weight_specs: Any,
    before: Callable[[Any, jax.Array], jax.Array] | None = None,
    after: Callable[[Any, jax.Array], jax.Array] | None = None,
    whole: Any = None,
    tokens: Any = None,
    axis: str = AXIS,
    batch_axes: tuple[str, ...] = BATCH_AXES,
    length_axes: tuple[str, ...] = LENGTH_AXES,
    mesh: Mesh | AbstractMesh | None = None,
    keep: Keep = "gathered",
    reduce_dtype: Any = jnp.float32,
) -> jax.Array:
    """Computes after(whole, sum over shards of work(weights, before(whole, x))), x divided along its length.

    `before` (a norm) and `after` (the bias of the last product) see the tokens of one shard. Between them every shard
    sees all tokens and its part of the weights: column-split products first, row-split ones last, whose results are
    parts of a sum. Parameters that are whole on every shard see only its tokens, so that their gradients are summed
    over the axis.

    Works on whole arrays under automatic axes, in regions manual over other axes (made with `check_vma=False`), and on
    the slices of a region manual over `axis`. Inside a region made with `check_vma=False`, differentiate inside it too:
    across its boundary JAX would add up the gradients of whole parameters a second time.

    Args:
        x: [batch, length, embed]; in a region manual over `axis`, the region's part of the length.
        work: `(weights, x) -> [batch, length, embed]`, x with the whole length; `(weights, x, tokens)` with `tokens`.
        weights: pytree of arrays; in a region manual over `axis`, the region's slices.
        weight_specs: pytree of `PartitionSpec` like it, or a prefix of it: the dim that `axis` splits; P() for an
            array that is whole on every shard.
        before, after: `(whole, x) -> [batch, length_local, embed]`; None for the identity.
        whole: pytree of floating arrays, whole on every shard.
        tokens: pytree of arrays [batch, length, ...] that `work` needs beside x, such as segment ids; whole along the
            length, no gradients.
        axis: mesh axis that divides the stream's length and the weights.
        batch_axes, length_axes: mesh axes that split the tokens outside `axis`.
        mesh: for a caller outside any manual region; None for the mesh in force, or one device when there is none.
        keep: "gathered" keeps the gathered array for the gradients of the first products' weights; "parts" keeps the
            shard's own part and gathers again. Other values are kept as they are made: casts belong in `before`.
        reduce_dtype: of sums over shards, never narrower than what is summed. In a partly manual region XLA's CPU
            backend aborts on bfloat16 sums (JAX 0.10.2, 0.12.0), hence the default.

    Returns:
        [batch, length, embed], divided as x is.

    Raises:
        ShardingError: axes, sizes or specs that do not fit, every one with its fix.

    Communication over t shards, N = batch x length x embed on the devices of one `axis` group: forward one all-gather
    of N in the dtype of `before`'s result and one reduce-scatter of N in `reduce_dtype`; backward one all-gather and
    one reduce-scatter, and with keep="parts" a second all-gather. Each sends (t-1)/t of its bytes from every device.
    Gradients of `whole` take an all-reduce of their size.

    Example:
        def norm(scale, x):
            return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale[None, None]

        def mlp(weights, x):
            return jax.nn.gelu(x @ weights["up"]) @ weights["down"]

        # scale ("embed",), up ("embed", "mlp") and down ("mlp", "embed") are parameters of a linen or NNX layer.
        specs = {"up": P(None, "tensor"), "down": P("tensor", None)}
        x = x + sequence_parallel(
            x, before=norm, whole=scale, work=mlp, weights={"up": up, "down": down}, weight_specs=specs
        )

    Source: Korthikanti et al. 2022 (2205.05198) section 4.2.2; its layers keep parts and gather again.
    """
    where = _find(axis, batch_axes=batch_axes, length_axes=length_axes, mesh=mesh)
    leaves, tree = jax.tree.flatten(weights)
    specs = jax.tree.leaves(jax.tree.broadcast(weight_specs, weights, is_leaf=_is_spec), is_leaf=_is_spec)
    dims = _check(where, x, weights, specs, keep=keep)
    before, after = before or _same, after or _same
    whole_leaves, whole_tree = jax.tree.flatten(whole)
    tokens = jax.lax.stop_gradient(tokens)
    reduce_dtype = jnp.dtype(reduce_dtype)

    def body(x: jax.Array, whole_leaves: list[Any], leaves: list[Any], tokens: Any) -> jax.Array:
        whole_leaves = [where.entered(leaf, None, reduce_dtype) for leaf in whole_leaves]
        leaves = [where.entered(leaf, dim, reduce_dtype) for leaf, dim in zip(leaves, dims, strict=True)]
        whole, weights = jax.tree.unflatten(whole_tree, whole_leaves), jax.tree.unflatten(tree, leaves)
        own = before(whole, x)
        given = (weights, own if where.axis is None else _gathered(where.axis, reduce_dtype, own))
        out = work(*given) if tokens is None else work(*given, tokens)
        return after(whole, out if where.axis is None else _scattered(where.axis, reduce_dtype, out))

    if keep == "parts" and where.axis is not None:
        body = jax.checkpoint(body, policy=_is_not_gathered)
    stream = where.spec(divided=True)
    in_specs = (
        stream,
        [where.parameter_spec(leaf, None) for leaf in whole_leaves],
        [where.parameter_spec(leaf, dim) for leaf, dim in zip(leaves, dims, strict=True)],
        where.spec(divided=False),
    )
    given = [where.copied(leaf, None) for leaf in whole_leaves]
    split = [where.copied(leaf, dim) for leaf, dim in zip(leaves, dims, strict=True)]
    return where.run(body, in_specs, stream)(x, given, split, tokens)


def summed_gradients(tree: Any, *, axis: str = AXIS, reduce_dtype: Any = jnp.float32) -> Any:
    """Parameters for use on the tokens of one shard: the identity, with gradients summed over the axis.

    For what is not part of a block's half, such as the last norm, in a region manual over `axis` that was made with
    `check_vma=False`. Elsewhere JAX sums by itself, and nothing changes.

    Args:
        tree: pytree of floating arrays, whole on every shard.
        axis: mesh axis that divides the tokens.
        reduce_dtype: as for `sequence_parallel`.
    """
    if axis not in jax.sharding.get_abstract_mesh().manual_axes or _is_checked(axis):
        return tree
    return jax.tree.map(functools.partial(_summed, axis, jnp.dtype(reduce_dtype)), tree)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Where:
    """What each axis means where the caller stands; one static leaf.

    Args:
        mesh: where `opened` live; None when nothing is opened.
        axis, size: divides stream and weights; None and 1 for one shard.
        batch, length: automatic axes that split tokens; opened with `axis`, since XLA makes the operand of a gather
            whole over axes that are still automatic.
        is_opened: whether `axis` is automatic where the computation stands.
    """

    mesh: Mesh | AbstractMesh | None = None
    axis: str | None = None
    size: int = 1
    batch: tuple[str, ...] = ()
    length: tuple[str, ...] = ()
    is_opened: bool = False

    @property
    def opened(self) -> tuple[str, ...]:
        """Axes of the region that this computation opens."""
        return (*self.batch, *self.length, *((self.axis,) if self.axis and self.is_opened else ()))

    def spec(self, *, divided: bool) -> P:
        """Of an array [batch, length, ...], its length divided over `axis` too, or whole."""
        own = (self.axis,) if divided and self.is_opened else ()
        return P(self.batch or None, (*self.length, *own) or None)

    def copies(self, dim: int | None) -> tuple[str, ...]:
        """Opened axes over which a parameter is whole: its gradient is a sum over them."""
        return self.opened if dim is None else (*self.batch, *self.length)

    def copied(self, leaf: jax.Array, dim: int | None) -> jax.Array:
        """The parameter with a leading dim over the shards it is whole on; one copy on each.

        The sum of its gradients is then the compiler's, which knows how it is stored, and may reduce-scatter.
        """
        if self.mesh is None:
            return leaf
        count = math.prod(self.mesh.shape[axis] for axis in self.copies(dim))
        return jnp.broadcast_to(leaf[None], (count, *leaf.shape))

    def parameter_spec(self, leaf: jax.Array, dim: int | None) -> P:
        """Of `copied(leaf, dim)`."""
        entries: list[Any] = [None] * leaf.ndim
        if dim is not None and self.is_opened:
            entries[dim] = self.axis
        return P(self.copies(dim) or None, *entries)

    def entered(self, leaf: jax.Array, dim: int | None, reduce_dtype: Any) -> jax.Array:
        """A parameter inside the body, where a surrounding region sums no gradient over the axis unless told to."""
        leaf = leaf if self.mesh is None else leaf[0]
        if dim is not None or self.axis is None or self.is_opened:
            return leaf
        return summed_gradients(leaf, axis=self.axis, reduce_dtype=reduce_dtype)

    def run(self, body: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """The body on the arrays at hand, in a region of its own where axes are still automatic."""
        if self.mesh is None:
            return body
        names = set(self.opened)
        return jax.shard_map(
            body, mesh=self.mesh, axis_names=names, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )


def _find(axis: str, *, batch_axes: Any, length_axes: Any, mesh: Mesh | AbstractMesh | None) -> _Where:
    """Decides what each axis means; raises for an axis that the mesh lacks and no plan uses, and for Explicit ones."""
    context = jax.sharding.get_abstract_mesh()
    if mesh is None or context.manual_axes:
        mesh = None if context.empty else context
    if mesh is None:
        return _Where()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    failures = []
    text = ",".join(f"{name}={size}" for name, size in mesh.shape.items())
    named = (axis, *batch_axes, *length_axes)
    for name in dict.fromkeys(named):
        if name not in types and name not in STANDARD_AXES:
            failures.append(f"no axis {name!r} in the mesh {text}{nearest(name, types)}; fix: name one that it has")
        if types.get(name) == AxisType.Explicit and mesh.shape[name] > 1:
            failures.append(f"axis {name!r} is Explicit; fix: make the mesh with axis_types=(AxisType.Auto, ...)")
        if named.count(name) > 1:
            failures.append(f"axis {name!r} is named twice; fix: leave it out of axis=, batch_axes= or length_axes=")
    raise_collected(failures, heading="a stream cannot be divided over these axes:")
    automatic = {name for name, size in mesh.shape.items() if size > 1 and types[name] != AxisType.Manual}
    if axis not in automatic and types.get(axis) != AxisType.Manual:
        return _Where()
    batch, length = (tuple(name for name in names if name in automatic) for names in (batch_axes, length_axes))
    return _Where(
        mesh=mesh if batch or length or axis in automatic else None,
        axis=axis,
        size=mesh.shape[axis],
        batch=batch,
        length=length,
        is_opened=axis in automatic,
    )


def _check(where: _Where, x: jax.Array, weights: Any, specs: list[P], *, keep: str) -> list[int | None]:
    """The dim of each weight that the axis splits, None for none; raises for what does not fit."""
    failures = []
    if x.ndim != 3 or not jnp.issubdtype(x.dtype, jnp.floating):
        failures.append(f"x is {x.dtype}{list(x.shape)}; fix: give a floating array [batch, length, embed]")
    if keep not in get_args(Keep):
        failures.append(f"keep={keep!r}; fix: keep='gathered' or keep='parts'")
    raise_collected(failures, heading="sequence_parallel:")
    sizes = {} if where.mesh is None else dict(where.mesh.shape)
    own = (where.axis,) if where.is_opened else ()
    for name, size, axes in (("batch", x.shape[0], where.batch), ("length", x.shape[1], (*where.length, *own))):
        count = math.prod(sizes[axis] for axis in axes)
        if size % count:
            product = " x ".join(f"{axis}={sizes[axis]}" for axis in axes)
            fix = f"pad it to {-(-size // count) * count} and give the padding weight 0"
            failures.append(f"x: {name} {size} is not divisible by {product}; fix: {fix}")
    dims = []
    for (path, leaf), spec in zip(leaves_with_paths(weights), specs, strict=True):
        found = _split_dims(spec)
        what = f"weights {path}: {list(leaf.shape)} under {spec}"
        if (
            len(spec) > leaf.ndim
            or len(found) > 1
            or any(names != (where.axis or names[0],) for names in found.values())
        ):
            failures.append(
                f"{what}; fix: name {where.axis or 'one axis'!r} once, in a spec of at most {leaf.ndim} dims"
            )
        elif found and where.is_opened and leaf.shape[min(found)] % where.size:
            size = leaf.shape[min(found)]
            fix = f"use a multiple of {where.size}, such as {-(-size // where.size) * where.size}"
            failures.append(f"{what}: {size} is not divisible by {where.axis}={where.size}; fix: {fix}")
        dims.append(min(found, default=None))
    if where.size > 1 and all(dim is None for dim in dims):
        failures.append(
            f"no weight is split over {where.axis}={where.size}: each shard would add the same result; fix: say in "
            f"weight_specs which dim {where.axis!r} splits, or call the products without sequence_parallel"
        )
    raise_collected(failures, heading="a block's half cannot be divided along its sequence:")
    return dims


def _split_dims(spec: P) -> dict[int, tuple[str, ...]]:
    """Mesh axes of each dim that has some."""
    named = {dim: (entry,) if isinstance(entry, str) else tuple(entry or ()) for dim, entry in enumerate(spec)}
    return {dim: axes for dim, axes in named.items() if axes}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gathered(axis: str, reduce_dtype: Any, x: jax.Array) -> jax.Array:
    """All shards' tokens. JAX's own transpose would sum in the array's dtype."""
    return jax.lax.all_gather(x, axis, axis=LENGTH_DIM, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scattered(axis: str, reduce_dtype: Any, x: jax.Array) -> jax.Array:
    """The shard's tokens of the sum over shards."""
    wide = x.astype(jnp.promote_types(x.dtype, reduce_dtype))
    return jax.lax.psum_scatter(wide, axis, scatter_dimension=LENGTH_DIM, tiled=True).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _summed(axis: str, reduce_dtype: Any, x: jax.Array) -> jax.Array:
    """The identity, whose gradient is summed over the axis."""
    return x


def _total(axis: str, reduce_dtype: Any, cotangent: jax.Array) -> jax.Array:
    wide = cotangent.astype(jnp.promote_types(cotangent.dtype, reduce_dtype))
    return jax.lax.psum(wide, axis).astype(cotangent.dtype)


_gathered.defvjp(
    lambda axis, dtype, x: (_gathered(axis, dtype, x), None),
    lambda axis, dtype, _, cotangent: (_scattered(axis, dtype, cotangent),),
)
_scattered.defvjp(
    lambda axis, dtype, x: (_scattered(axis, dtype, x), None),
    lambda axis, dtype, _, cotangent: (_gathered(axis, dtype, cotangent),),
)
_summed.defvjp(lambda axis, dtype, x: (x, None), lambda axis, dtype, _, cotangent: (_total(axis, dtype, cotangent),))


def _is_not_gathered(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """A policy of `jax.checkpoint`: all is kept but what a gather makes, which JAX shows as a call of `_gathered`."""
    inside = [equation.primitive.name for inner in jaxprs_in_params(parameters) for equation in inner.eqns]
    return (inside or [primitive.name]) != ["all_gather"]


def _is_checked(axis: str) -> bool:
    """Whether the surrounding region, manual over the axis, checks types (`check_vma=True`)."""
    return axis in varying(jax.lax.axis_index(axis))


def _same(whole: Any, x: jax.Array) -> jax.Array:
    return x


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)
