"""How a vocabulary is split where a computation runs: which axes hold it, which of them must be opened, who holds what.

In: names of mesh axes, and a mesh or the surrounding region. Out: `Shards`, which runs a per-shard body.

    shards = find_shards(("tensor",), batch_axes=("data",), mesh=mesh)
    rows = shards.run(body, (shards.vocab_spec(2, 0), shards.token_spec(2)), shards.token_spec(3))(table, ids)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from meshes.errors import nearest, raise_collected
from meshes.shape import STANDARD_AXES

VOCAB_AXES: Final = ("tensor",)
"""Mesh axes that split the vocabulary unless a caller says otherwise."""
BATCH_AXES: Final = ("replica", "data", "fsdp")
"""Mesh axes that split the batch dim unless a caller says otherwise."""
LENGTH_AXES: Final = ("context",)
"""Mesh axes that split the length dim unless a caller says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """The axes a vocabulary-parallel computation runs over; one static leaf.

    Args:
        mesh: where `opened` live; None when nothing is opened.
        sizes: (axis, size) of each of `vocab`.
        vocab: axes that split the vocabulary, major first; all manual inside the body.
        batch, length: automatic axes that split the dims of tokens; opened, so that the gradient of a parameter is
            added up over them once, after the loop over chunks, and no gather meets an automatic axis.
        opened: those of all the axes that are automatic where the computation stands.
    """

    mesh: Mesh | AbstractMesh | None = None
    sizes: tuple[tuple[str, int], ...] = ()
    vocab: tuple[str, ...] = ()
    batch: tuple[str, ...] = ()
    length: tuple[str, ...] = ()
    opened: tuple[str, ...] = ()

    @property
    def num(self) -> int:
        """Into how many shards the vocabulary is split."""
        return math.prod(size for _, size in self.sizes)

    @property
    def num_outside(self) -> int:
        """By how much the surrounding region has already divided the vocab dim of the arrays at hand."""
        return math.prod(size for axis, size in self.sizes if axis not in self.opened)

    def index(self) -> Any:
        """Which shard this is, inside the body."""
        return jax.lax.axis_index(self.vocab) if self.vocab else 0

    def total(self, x: jax.Array) -> jax.Array:
        """The sum over shards, inside the body."""
        return jax.lax.psum(x, self.vocab) if self.vocab else x

    def largest(self, x: jax.Array) -> jax.Array:
        """The maximum over shards, inside the body."""
        return jax.lax.pmax(x, self.vocab) if self.vocab else x

    def vocab_spec(self, rank: int, dim: int) -> P:
        """Of a parameter whose dim `dim` is the vocabulary; its other dims are whole inside the body."""
        entries: list[Any] = [None] * rank
        entries[dim] = _entry(axis for axis in self.vocab if axis in self.opened)
        return P(*entries)

    def token_spec(self, rank: int, *, first: int = 0) -> P:
        """Of an array with dims batch and length from dim `first` on."""
        return P(*[None] * first, _entry(self.batch), _entry(self.length), *[None] * (rank - first - 2))

    def gradient_spec(self, rank: int, dim: int) -> P:
        """Of a parameter's gradient with a leading dim over the shards of tokens, which the caller adds up.

        Added up outside, by the compiler: it knows how the parameter is stored, and may reduce-scatter.
        """
        return P(_entry((*self.batch, *self.length)), *self.vocab_spec(rank, dim))

    def run(self, body: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """The per-shard body on the arrays at hand, in a region of its own where axes are still automatic."""
        if not self.opened:
            return body
        names = set(self.opened)
        return jax.shard_map(
            body, mesh=self.mesh, axis_names=names, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def aligned(self, parameter: jax.Array, *tokens: jax.Array) -> tuple[jax.Array, ...]:
        """The arguments with one manual axis type, so that a hand-written backward pass fits a checked region.

        In a region with `check_vma=True` every array says which manual axes it varies over. What the parameter is
        widened by here, JAX sums its gradient over. Elsewhere arrays say nothing, and nothing changes.
        """
        vocab = set(self.vocab) - set(self.opened)
        known = set().union(*(varying(x) for x in (parameter, *tokens)))
        if not known:
            return parameter, *tokens
        return _widened(parameter, known | vocab), *(_widened(x, known - vocab) for x in tokens)


def find_shards(
    axes: str | tuple[str, ...],
    *,
    batch_axes: tuple[str, ...] = BATCH_AXES,
    length_axes: tuple[str, ...] = LENGTH_AXES,
    mesh: Mesh | AbstractMesh | None = None,
) -> Shards:
    """Decides what each axis means where the caller stands.

    Args:
        axes: axes that split the vocabulary, major first. Where the surrounding region is manual over one, the arrays
            at hand are that region's slices; the others are automatic, the arrays whole, and a region is opened.
        batch_axes, length_axes: axes that split tokens. Those already manual are left to the surrounding region; an
            axis that splits the vocabulary does not split tokens too.
        mesh: for a caller outside any manual region; inside one, and for None, it is the mesh in force
            (`jax.sharding.get_abstract_mesh()`). No mesh: nothing is split.

    Returns:
        Axes that the mesh does not have, and automatic ones of size 1, split nothing and are left out.

    Raises:
        ShardingError: an axis that the mesh lacks and that no plan uses; an Explicit axis; a manual axis after an
            automatic one; an axis named twice.
    """
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    context = jax.sharding.get_abstract_mesh()
    if mesh is None or context.manual_axes:
        mesh = None if context.empty else context
    if mesh is None:
        return Shards()
    token_axes = [axis for axis in (*batch_axes, *length_axes) if axis not in axes]
    _check_axes(mesh, axes, token_axes)
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    manual = {axis for axis in types if types[axis] == AxisType.Manual}
    automatic = {axis for axis, size in mesh.shape.items() if size > 1 and axis not in manual}
    # In a checked region an array varies over a manual axis of size 1 too, until it is added up over it.
    vocab = tuple(axis for axis in axes if axis in automatic or axis in manual)
    batch = tuple(axis for axis in batch_axes if axis in automatic and axis not in axes)
    length = tuple(axis for axis in length_axes if axis in automatic and axis not in axes)
    opened = (*(axis for axis in vocab if axis in automatic), *batch, *length)
    return Shards(
        mesh=mesh if opened else None,
        sizes=tuple((axis, mesh.shape[axis]) for axis in vocab),
        vocab=vocab,
        batch=batch,
        length=length,
        opened=opened,
    )


def check_sizes(shards: Shards, *, parameter: str, stored: int, vocab: int, tokens: tuple[int, ...]) -> None:
    """Raises for sizes that cannot be split, every one with its fix.

    Args:
        shards: the axes.
        parameter: what the array with the vocab dim is called.
        stored: size of its vocab dim.
        vocab: the logical vocabulary.
        tokens: (batch, length).
    """
    failures, sizes = [], dict(shards.mesh.shape) if shards.mesh is not None else {}
    inside = [axis for axis in shards.vocab if axis in shards.opened]
    count = math.prod(sizes[axis] for axis in inside)
    if stored % count:
        outside = shards.num_outside
        failures.append(
            f"{parameter}: vocab dim of size {stored} not divisible by {_product(inside, sizes)}; fix: store "
            f"padded_vocab({vocab}, shards={shards.num}) = {padded_vocab(vocab, shards=shards.num)} rows"
            f"{f', a {outside}th of them here,' if outside > 1 else ''} and pass vocab={vocab}"
        )
    if not 0 < vocab <= stored * shards.num_outside:
        failures.append(f"vocab={vocab} is not in 1 to {stored * shards.num_outside}, the rows that {parameter} stores")
    for name, size, axes in (("batch", tokens[0], shards.batch), ("length", tokens[1], shards.length)):
        if size % math.prod(sizes[axis] for axis in axes):
            failures.append(
                f"tokens: {name} dim of size {size} not divisible by {_product(axes, sizes)}; fix: pad it, or pass "
                f"{name}_axes=() and let the compiler split it"
            )
    raise_collected(failures, heading="a vocabulary-parallel computation cannot be split:")


def padded_vocab(vocab: int, *, shards: int = 1, multiple: int = 1) -> int:
    """The smallest size from `vocab` up that divides into shards and is a multiple of a quantum, both at once.

    >>> padded_vocab(50257, shards=4), padded_vocab(100, shards=6, multiple=8)
    (50260, 120)

    Args:
        vocab: the logical vocabulary.
        shards: into how many shards it is to be split.
        multiple: a quantum of the hardware, such as 128.
    """
    quantum = math.lcm(shards, multiple)
    return -(-vocab // quantum) * quantum


def varying(x: jax.Array) -> frozenset[str]:
    """The manual axes that an array of a checked region says it varies over."""
    return jax.typeof(x).manual_axis_type.varying


def _widened(x: jax.Array, axes: set[str]) -> jax.Array:
    missing = tuple(sorted(axes - varying(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _check_axes(mesh: Mesh | AbstractMesh, axes: tuple[str, ...], token_axes: list[str]) -> None:
    failures = []
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    text = ",".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    named = [*axes, *token_axes]
    for axis in dict.fromkeys(named):
        if axis not in types and axis not in STANDARD_AXES:
            failures.append(f"no axis {axis!r} in the mesh {text}{nearest(axis, types)}")
        if types.get(axis) == AxisType.Explicit and mesh.shape[axis] > 1:
            failures.append(f"axis {axis!r} is Explicit; fix: make the mesh with axis_types=(AxisType.Auto, ...)")
        if named.count(axis) > 1:
            failures.append(f"axis {axis!r} is named twice")
    is_manual = [types[axis] == AxisType.Manual for axis in axes if mesh.shape.get(axis, 1) > 1]
    if is_manual != sorted(is_manual, reverse=True):
        failures.append(
            f"axes {axes}: the region is manual over a later one, whose slices would interleave; fix: name manual "
            "axes first, and store the vocab dim split in that order"
        )
    raise_collected(failures, heading="a vocabulary cannot be split over these axes:")


def _entry(axes: Any) -> Any:
    axes = tuple(axes)
    return axes if len(axes) > 1 else axes[0] if axes else None


def _product(axes: Any, sizes: dict[str, int]) -> str:
    return " x ".join(f"{axis}={sizes[axis]}" for axis in axes)
