"""How a model's attention runs over a divided sequence: the kind, the order of tokens, and why.

In: the attention calls that a trace of the loss made, a plan. Out: `ContextUse`, or an error with the fix.

    use = choose_context(calls, plan)
    print(use.reason)
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params

from meshes.errors import ShardingError
from meshes.shape import MeshShape
from shardlib import annotate
from shardlib import batch_spec as batches
from shardlib.jax_compat import opened, scope_and_line
from shardlib.objective import LossFunction, sums_of
from shardlib.ops import ring_kernels
from shardlib.ops.attention_mask import Rule
from shardlib.ops.context_choice import Choice, choose
from shardlib.ops.context_layout import REORDERED_AXES, check_length, check_segment_ids, order, reorder
from shardlib.ops.fused_attention import KERNELS, refusal
from shardlib.slices import BATCH
from shardlib.tree_paths import leaves_with_paths

CONTEXT: Final = "context"
LENGTH: Final = "length"
ALL_TO_ALL: Final = "all_to_all"
KINDS: Final = ("ring", ALL_TO_ALL, "gather")
NO_ATTENTION: Final = "none"
BY_POSITION: Final = "by position"
IN_ORDER: Final = "in order"
NUM_ROWS: Final = 16
"""Rows whose metrics are compared in two orders."""

# Of a metric of one row. A shift across the border of a chunk changes the loss of a fresh model by about a hundredth.
_ROUNDING: Final = {2: 1e-2, 4: 1e-4}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """One call of the attention slot, as a trace saw it; a static leaf.

    Args:
        query, key: shapes [batch, length, heads, head_dim].
        causal, window: the mask.
        has_row_mask: a mask with one row per query, which a model makes in the order of positions.
        itemsize: bytes of an element.
        dtype: of the queries, by name.
        mask: shape of the mask, or None.
        value: shape of the values where it is not the keys'.
        has_segments: rows hold several documents.
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    causal: bool
    window: int | None
    has_row_mask: bool
    itemsize: int
    dtype: str = "float32"
    mask: tuple[int, ...] | None = None
    value: tuple[int, ...] | None = None
    has_segments: bool = False

    @classmethod
    def of(cls, query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> "AttentionCall":
        """From what the slot is called with."""
        mask = options.get("mask")
        return cls(
            query=tuple(query.shape),
            key=tuple(key.shape),
            causal=bool(options.get("causal")),
            window=options.get("window"),
            has_row_mask=mask is not None and mask.shape[2] > 1,
            has_segments=options.get("segment_ids") is not None,
            itemsize=query.dtype.itemsize,
            dtype=str(query.dtype),
            mask=None if mask is None else tuple(mask.shape),
            value=tuple(value.shape),
        )

    def refusal(self, platform: str, context: "ContextUse | None") -> str | None:
        """Why the platform's kernel does not take this call; None when it does.

        Args:
            platform: a key of `fused_attention.KERNELS`.
            context: how sequences are divided; None where they are whole.
        """
        options: dict[str, Any] = {"dtype": self.dtype, "causal": self.causal, "window": self.window}
        shapes = {"query": self.query, "key": self.key, "value": self.value or self.key}
        if context is None:
            return refusal(platform, **shapes, mask=self.mask, **options)
        if context.kind == "gather":
            return "the labels of gathered keys depend on the device"
        if context.kind == ALL_TO_ALL:
            hidden = None if self.mask is None else "a mask may hide all keys of a row"
            return hidden or refusal(platform, **shapes, **options)
        local = {name: (x[0], x[1] // context.shards, *x[2:]) for name, x in shapes.items()}
        options |= {"placement": context.placement, "has_mask": self.mask is not None}
        return ring_kernels.refusal(platform, **local, **options)


Heard = AttentionCall | str
"""What a trace of a loss says about its sequences: calls of attention, `BY_POSITION`, `IN_ORDER`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextUse:
    """How sequences are divided; a static leaf.

    Args:
        kind: of attention, one of `KINDS`; `NO_ATTENTION` for a model that has none.
        placement: which device holds which tokens, one of `PLACEMENTS`.
        shards: size of the context axis.
        reason: what was compared, or who decided.
        short_length: a length at which the order of tokens can be checked; small, and no smaller than a window.
    """

    kind: str
    placement: str
    shards: int
    reason: str
    short_length: int

    @property
    def title(self) -> str:
        """What crosses between devices, in words."""
        return "states handed on" if self.kind == NO_ATTENTION else f"{self.kind} attention"

    def order(self, length: int) -> np.ndarray[Any, Any]:
        """The position of every token in the order in which devices hold them."""
        return order(length, shards=self.shards, placement=self.placement)

    def reordered(self, batch: Any, spec: Any) -> Any:
        """A batch in that order.

        Raises:
            ShardingError: an entry "segment_ids" in which an id comes back after another one.
        """
        for path, leaf in leaves_with_paths(batch):
            if path.rpartition("/")[2] == "segment_ids":
                check_segment_ids(np.asarray(leaf))
        if self.placement == "contiguous":
            return batch
        leaves, treedef = jax.tree.flatten(batch)
        named = {str(i): leaf for i, leaf in enumerate(leaves)}
        specs = jax.tree.leaves(spec, is_leaf=batches.is_spec)
        axes = {str(i): leaf.axes for i, leaf in enumerate(specs)}
        moved = reorder(named, axes=axes, shards=self.shards, placement=self.placement)
        return treedef.unflatten([moved[str(i)] for i in range(len(leaves))])

    def check_same_order(self, found: Sequence[Any], wanted: Sequence[Any], *, itemsize: int) -> None:
        """Raises when the metrics of some rows change with the order in which tokens are held.

        Args:
            found, wanted: metrics of each row in this order, and in that of positions.
            itemsize: bytes of what the model computes in.
        """
        rounding = _ROUNDING[min(itemsize, 4)]
        for row, (moved, natural) in enumerate(zip(found, wanted, strict=True)):
            for name, value in natural.items():
                here, there = float(moved[name]), float(value)
                if abs(here - there) > rounding * max(abs(here), abs(there), 1e-3):
                    raise ShardingError(
                        f"the loss depends on the order in which tokens are held (placement={self.placement}): {name} "
                        f"of row {row} is {here:.6g}, and {there:.6g} in the order of positions. It shifts targets "
                        "itself, or makes positions or masks of its own",
                        fix="put targets in the batch, shifted by one before it is given; take position tables through "
                        'annotate.by_position; or placement="contiguous"',
                    )


def kernel_lines(calls: Iterable[AttentionCall], context: ContextUse | None) -> tuple[str, ...]:
    """Which kernels compute attention on which target, and why where none does, in words, for `explain`.

    Args:
        calls: of one trace of the whole batch.
        context: how sequences are divided; None where they are whole.
    """
    calls, lines = list(calls), []
    for platform, kernel in KERNELS.items() if calls else ():
        refusals = [call.refusal(platform, context) for call in calls]
        reasons = dict.fromkeys(why for why in refusals if why is not None)
        name, taken = platform.upper(), refusals.count(None)
        if not reasons:
            lines.append(f"attention, compiled for {name}: {kernel}")
            continue
        partly = f"{kernel} in {taken} of {len(calls)} calls, else " if taken else ""
        other = "the reference" if context is None else "blocks in XLA"
        lines.append(f"attention, compiled for {name}: {partly}{other}, because {'; '.join(reasons)}")
    return tuple(lines)


def some_rows(batch: Any, spec: Any, *, length: int | None) -> tuple[Any, list[Any]]:
    """The first rows of a batch one by one, their first tokens only, and the spec of one.

    One by one, so that differences do not cancel.

    Args:
        batch, spec: of the whole batch.
        length: tokens of each; None for all.
    """
    short = batches.resized(_at_length(spec, length), **dict.fromkeys(_axes_in(spec, (BATCH,)), 1))
    counts = [leaf.shape[leaf.axes.index(BATCH)] for leaf in batches.with_axis(spec, BATCH)]

    def one(row: int) -> Any:
        def cut(leaf: Any, like: batches.ArraySpec) -> Any:
            starts = [row if axis == BATCH else 0 for axis in like.axes]
            return np.asarray(leaf)[tuple(slice(at, at + size) for at, size in zip(starts, like.shape, strict=True))]

        return jax.tree.map(cut, batch, short)

    return short, [one(row) for row in range(min([NUM_ROWS, *counts]))]


def _at_length(spec: Any, length: int | None) -> Any:
    return batches.resized(spec, **dict.fromkeys(_axes_in(spec, REORDERED_AXES), length))


def _axes_in(spec: Any, wanted: Sequence[str]) -> list[str]:
    return [axis for axis in wanted if batches.with_axis(spec, axis)]


def divides_sequence(mesh: MeshShape) -> bool:
    """Whether the mesh has a context axis of more than one shard."""
    return CONTEXT in mesh.names and mesh.size(CONTEXT) > 1


def check_lengths(spec: Any, mesh: MeshShape) -> None:
    """Raises for inputs whose length the context axis does not divide.

    Args:
        spec: of the batch.
        mesh: with or without a context axis.
    """
    shards = mesh.size(CONTEXT) if divides_sequence(mesh) else 1
    lengths = {
        size
        for leaf in jax.tree.leaves(spec, is_leaf=batches.is_spec)
        for axis, size in zip(leaf.axes, leaf.shape, strict=True)
        if axis == LENGTH and size % shards
    }
    if lengths:
        length = max(lengths)
        least, twice = (-(-length // unit) * unit for unit in (shards, 2 * shards))
        also = "" if least == twice else f", or {least} with another placement"
        raise ShardingError(
            f"sequences of length {length} do not divide over context={shards}",
            fix=f"pad or cut them to length {twice}, two chunks for each device, which is what placement=zigzag "
            f"needs{also}; padding has weight 0 in the loss",
        )


def choose_context(
    calls: list[AttentionCall],
    *,
    mesh: MeshShape,
    batch_shards: int,
    follows_positions: bool,
    in_order: bool = False,
    in_branch: bool,
    kind: str | None,
    placement: str | None,
) -> ContextUse:
    """Decides kind and placement for all layers, from the largest call.

    Args:
        calls: of one trace of the whole batch.
        mesh: with a context axis.
        batch_shards: into how many parts the batch is cut on its way to one call.
        follows_positions: the model makes what depends on positions through `annotate.by_position`.
        in_order: the model goes through tokens one after another (`annotate.in_order`).
        in_branch: attention runs in branches that only some pipeline stages take.
        kind, placement: what the plan wants; None chooses.

    Raises:
        ShardingError: attention that does not go through the slot; sizes that do not fit; a placement that the model
            cannot follow.
    """
    shards = mesh.size(CONTEXT)
    if in_order and placement not in (None, "contiguous"):
        raise ShardingError(
            f"placement={placement!r}: the model goes through tokens one after another (annotate.in_order), which "
            "needs each device to hold consecutive ones",
            fix="placement='contiguous', or leave placement out",
        )
    if in_order and not calls:
        return _without_calls(shards, kind)
    if not calls:
        raise ShardingError(
            f"mesh {mesh} divides sequences over context={shards}, and the loss never calls annotate.attention",
            fix="call shardlib.attention(query, key, value, causal=True) in the model, or a layer of "
            "shardlib.layers.recurrent; or leave context out",
        )
    # Of equals one without a window: its work is what a placement balances.
    largest = max(calls, key=lambda call: (np.prod(call.query) * call.key[1], call.window is None))
    batch, length, heads, head_dim = largest.query
    _check_sizes(calls, length=length, shards=shards, placement=placement)
    choice = choose(
        length=length,
        heads=heads,
        kv_heads=largest.key[2],
        head_dim=head_dim,
        batch=max(batch // batch_shards, 1),
        context=shards,
        tensor=mesh.size("tensor") if heads % mesh.size("tensor") == 0 else 1,
        causal=largest.causal,
        window=largest.window,
        dtype_bytes=largest.itemsize,
        in_branch=in_branch,
    )
    _check_kind(kind, choice, placement=placement, in_branch=in_branch)
    taken = kind or (choice.kind if placement in (None, "contiguous") else _best_moving(choice))
    may_move = follows_positions and not in_order and not any(call.has_row_mask for call in calls)
    if placement not in (None, "contiguous") and not may_move:
        raise ShardingError(
            f"placement={placement!r}: the model makes masks or position tables in the order of positions",
            fix="placement='contiguous'; or take position tables through annotate.by_position, and masks as causal=, "
            "window= or segment_ids=",
        )
    balanced = next(candidate.placement for candidate in choice.candidates if candidate.kind == taken)
    chosen = placement or (balanced if may_move and taken != ALL_TO_ALL else "contiguous")
    said = [f"the plan says {name}" for name in (kind, placement) if name is not None]
    why = "\n".join([*([", and ".join(said)] if said else []), choice.reason])
    if chosen == "contiguous" and largest.causal and placement is None and taken == "ring":
        lacks = "has recurrent layers" if in_order else "has no annotate.by_position"
        why += f"\ntokens stay in order (contiguous), so late devices work more: the model {lacks}"
    windows = [call.window or 1 for call in calls]
    return ContextUse(
        kind=taken,
        placement=chosen,
        shards=shards,
        reason=why,
        # Two tokens in each chunk: a border between any two of them, and a pair without one.
        short_length=min(length, -(-max(4 * shards, *windows) // (2 * shards)) * 2 * shards),
    )


def _without_calls(shards: int, kind: str | None) -> ContextUse:
    """For a model of recurrent layers."""
    if kind is not None:
        raise ShardingError(
            f"attention={kind!r}, and the model has recurrent layers and no attention", fix="leave attention out"
        )
    return ContextUse(
        kind=NO_ATTENTION,
        placement="contiguous",
        shards=shards,
        reason="recurrent layers hand a state on from each device to the next, in the order of tokens",
        short_length=2 * shards,
    )


def _check_sizes(calls: Sequence[AttentionCall], *, length: int, shards: int, placement: str | None) -> None:
    """Raises for a length that does not divide, and for windows larger than it."""
    check_length(length, shards=shards, placement=placement or "contiguous")
    for call in calls:
        Rule(causal=call.causal, window=call.window).check_window(call.key[1])


def _check_kind(kind: str | None, choice: Choice, *, placement: str | None, in_branch: bool) -> None:
    """Raises for a kind that cannot run; one that needs memory is the plan's business."""
    refused = next((candidate.refused for candidate in choice.candidates if candidate.kind == kind), None)
    if refused and not refused.startswith("all keys"):
        also = "; or idle='mask', which has no such condition" if kind == "ring" and in_branch else ""
        raise ShardingError(f"attention={kind!r} cannot run here: {refused}", fix=f"attention={choice.kind!r}{also}")
    if kind == ALL_TO_ALL and placement not in (None, "contiguous"):
        raise ShardingError(
            f"attention='all_to_all' computes on whole sequences, so that placement={placement!r} gains nothing",
            fix="leave placement out",
        )


def _best_moving(choice: Choice) -> str:
    """The best kind of those that gain from another placement; all-gather always runs."""
    moving = [candidate for candidate in choice.candidates if candidate.kind != ALL_TO_ALL]
    return next((candidate.kind for candidate in moving if not candidate.refused), "gather")


def _without_attention(loss: LossFunction, heard: list[Any]) -> Callable[..., Any]:
    """`(params, batch, key, collections) -> Sums` of a loss without a plan, the slot empty; its queries are heard."""

    def skipped(query: Any, key: Any, value: Any, **options: Any) -> Any:
        heard.append(query)
        return jax.numpy.zeros((*query.shape[:3], value.shape[3]), query.dtype)

    empty = annotate.Active(constrain=lambda x, names: x, ops={"attention": skipped})
    return annotate.under(empty, lambda params, batch, key, state: sums_of(loss, params, batch, key, state=state))


def attention_itemsize(loss: LossFunction, params: Any, spec: Any, collections: Any) -> int | None:
    """Bytes of an element of the queries that a loss makes of such a batch; None where it takes no such batch.

    Args:
        params, collections: abstract.
        spec: of the batch.
    """
    heard: list[Any] = []
    try:
        jax.eval_shape(_without_attention(loss, heard), params, batches.abstract(spec), None, collections)
    except Exception:  # the user's code, which may raise anything
        return None
    return min(query.dtype.itemsize for query in heard)


def check_slot(loss: LossFunction, params: Any, spec: Any, collections: Any, *, length: int, shards: int) -> None:
    """Raises for products of queries with keys that a loss makes outside the attention slot.

    Args:
        loss: traced with nothing in the slot.
        params, collections: abstract.
        spec: of the batch.
        length: of its sequences.
        shards: of the context axis.
    """

    def found(length: int | None) -> list[str]:
        batch = batches.abstract(_at_length(spec, length))
        key = jax.eval_shape(lambda: jax.random.key(0))
        jaxpr = jax.make_jaxpr(_without_attention(loss, []))(params, batch, key, collections)
        return list(dict.fromkeys(_score_products(jaxpr, length or size)))

    size = length
    places = found(None)
    if places:
        # A dim of another kind may have that size by chance: at half the length it keeps it. A user's code that takes
        # one length alone may raise anything.
        with suppress(Exception):
            places = [place for place in found(length // 2) if place in places]
    if places:
        shown = "; ".join(places[:4]) + ("; ..." if len(places) > 4 else "")
        raise ShardingError(
            f"attention outside the slot makes [{length}, {length}] scores of whole sequences, which context={shards} "
            f"does not divide: {shown}",
            fix="call shardlib.attention(query, key, value, causal=True) there, or leave context out",
        )


def _score_products(jaxpr: Any, length: int, outside: str = "") -> Iterator[str]:
    """Where batched products of one token with another are made.

    Batched: a product with a parameter has no batch dim, and its output may have two dims of one size by chance.
    """
    for equation in opened(jaxpr).eqns:
        scope, line = scope_and_line(equation)
        # Names of transformations and of einsums are in it too.
        path = "/".join(part for part in (outside, *scope.split("/")) if part and not set(part) & set("(),>"))
        if equation.primitive.name == "dot_general":
            sides = zip(equation.params["dimension_numbers"][0], equation.params["dimension_numbers"][1], strict=True)
            free = [
                [size for dim, size in enumerate(atom.aval.shape) if dim not in (*contracted, *batched)]
                for atom, (contracted, batched) in zip(equation.invars, sides, strict=True)
            ]
            if equation.params["dimension_numbers"][1][0] and all(length in sizes for sizes in free):
                yield f"{path or 'the loss'} ({line})" if line else path or "the loss"
        for inner in jaxprs_in_params(equation.params):
            yield from _score_products(inner, length, path)
