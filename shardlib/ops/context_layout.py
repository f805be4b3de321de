"""Which shard of a context axis holds which token: contiguous, zigzag and striped placement. Imports no JAX.

In: a length and a number of shards. Out: positions in the order in which they are stored, and batches in that order.

    order(8, shards=2, placement="zigzag")    # [0 1 6 7 2 3 4 5]: shard 0 holds 0, 1, 6 and 7
    batch = reorder(batch, axes={"inputs": ("batch", "length")}, shards=2, placement="zigzag")
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from meshes.errors import ShardingError, nearest, raise_collected

PLACEMENTS: Final = ("contiguous", "zigzag", "striped")
"""Every placement. Under a causal mask the work of shards is equal for zigzag, nearly so for striped."""

REORDERED_AXES: Final = ("length", "keys")
"""Logical axes that run over the tokens of a sequence."""


def shard_positions(steps: Any, index: Any, *, local_length: int, shards: int, placement: str) -> Any:
    """Positions of the tokens that one shard holds at `steps`, 0 to local_length - 1.

    Args:
        steps: [n], integers, NumPy's or JAX's.
        index: of the shard, an integer or a traced scalar.
        local_length: tokens on a shard.

    Returns:
        [n], integers. contiguous: one run; zigzag: chunks `index` and `2 shards - 1 - index` of `2 shards`, an early
        and a late one; striped: every `shards`-th token.

    Source: striped: Brandon et al. 2023 (2311.09431) section 3; zigzag: the README of ring-flash-attention.
    """
    if placement == "striped":
        return shards * steps + index
    if placement == "contiguous":
        return steps + local_length * index
    half = local_length // 2
    late = (steps >= half).astype(np.int32)
    return steps + late * ((2 * shards - 2) * half) + (1 - 2 * late) * half * index


def order(
    length: int, *, shards: int, placement: str, document_lengths: Sequence[int] | None = None
) -> np.ndarray[Any, Any]:
    """The position of every token in the order of storage: shard i holds the i-th of `shards` equal parts.

    Args:
        length: of the sequence; a multiple of the shards, for zigzag of twice the shards.
        shards: size of the context axis (of the ring, where an all-to-all axis divides it further).
        placement: one of `PLACEMENTS`.
        document_lengths: of documents packed one behind the other. Each is spread over all shards by itself, which
            balances causal work inside the documents; attention then needs explicit positions.

    Returns:
        [length], int32.

    Raises:
        ShardingError: an unknown placement, a length that does not divide, documents that do not fill the length.

    >>> order(8, shards=2, placement="striped").tolist()
    [0, 2, 4, 6, 1, 3, 5, 7]
    """
    if document_lengths is None:
        check_length(length, shards=shards, placement=placement)
        place = {"local_length": length // shards, "shards": shards, "placement": placement}
        steps = np.arange(length // shards, dtype=np.int32)
        return np.concatenate([shard_positions(steps, i, **place) for i in range(shards)]).astype(np.int32)
    if sum(document_lengths) != length:
        raise ShardingError(
            f"document_lengths {list(document_lengths)} sum to {sum(document_lengths)}, the length is {length}",
            fix=f"give the padding as a last document of {length - sum(document_lengths)} tokens"
            if sum(document_lengths) < length
            else "cut the documents at the length",
        )
    starts = np.cumsum([0, *document_lengths[:-1]])
    documents = [
        (start + order(size, shards=shards, placement=placement)).reshape(shards, -1)
        for start, size in zip(starts, document_lengths, strict=True)
    ]
    return np.concatenate(documents, axis=1).ravel().astype(np.int32)


def check_length(length: int, *, shards: int, placement: str) -> None:
    """Raises unless the placement exists and the length divides into its chunks."""
    if placement not in PLACEMENTS:
        raise ShardingError(
            f"placement {placement!r} is unknown{nearest(placement, PLACEMENTS)}",
            fix=f"use one of {', '.join(PLACEMENTS)}",
        )
    chunks = 2 * shards if placement == "zigzag" else shards
    if length % chunks:
        twice = f" (two chunks on each of {shards} shards)" if placement == "zigzag" else ""
        fix = f"pad the sequence to length {-(-length // chunks) * chunks} and mask the padding"
        if twice and length % shards == 0:
            fix += ', or use placement="striped"'
        raise ShardingError(
            f"length {length} over a context axis of {shards}, placement {placement!r}: "
            f"not divisible by {chunks}{twice}",
            fix=fix,
        )


def inverse(stored: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Where each position is stored: `x[order][inverse(order)] == x`."""
    return np.argsort(stored).astype(np.int32)


def reorder(
    batch: Mapping[str, Any],
    *,
    axes: Mapping[str, Sequence[str | None]],
    shards: int,
    placement: str,
    document_lengths: Sequence[int] | None = None,
) -> dict[str, Any]:
    """The batch with every dim named "length" or "keys" in the order of storage; do it on the host, before placing.

    Args:
        batch: arrays by name: inputs, targets, weights, segment ids, positions, masks; NumPy or JAX.
        axes: logical axes of each array, one per dim; which dim is the sequence is never guessed.
        shards, placement, document_lengths: as for `order`.

    Raises:
        ShardingError: missing or wrong axes, lengths that differ, `segment_ids` out of order, and what `order` raises.
    """
    length = _sequence_length(batch, axes)
    if "segment_ids" in batch:
        check_segment_ids(np.asarray(batch["segment_ids"]))
    stored = order(length, shards=shards, placement=placement, document_lengths=document_lengths)
    return {name: _taken(leaf, axes[name], stored) for name, leaf in batch.items()}


def restore(
    batch: Mapping[str, Any],
    *,
    axes: Mapping[str, Sequence[str | None]],
    shards: int,
    placement: str,
    document_lengths: Sequence[int] | None = None,
) -> dict[str, Any]:
    """The inverse of `reorder`, for batches and for results of the model such as logits; same arguments."""
    length = _sequence_length(batch, axes)
    stored = inverse(order(length, shards=shards, placement=placement, document_lengths=document_lengths))
    return {name: _taken(leaf, axes[name], stored) for name, leaf in batch.items()}


def _sequence_length(batch: Mapping[str, Any], axes: Mapping[str, Sequence[str | None]]) -> int:
    failures, lengths = [], {}
    for name, leaf in batch.items():
        if name not in axes:
            failures.append(f"{name} {list(leaf.shape)} has no axes: name its dims, as in ('batch', 'length')")
        elif len(axes[name]) != leaf.ndim:
            failures.append(f"{name} {list(leaf.shape)} has {len(axes[name])} axes {tuple(axes[name])}")
        else:
            sizes = {size for axis, size in zip(axes[name], leaf.shape, strict=True) if axis in REORDERED_AXES}
            lengths |= {size: name for size in sizes if size != 1}
    if len(lengths) > 1:
        failures.append("lengths differ: " + ", ".join(f"{size} in {name}" for size, name in sorted(lengths.items())))
    raise_collected(failures, heading="a batch to reorder over a context axis:")
    if not lengths:
        raise ShardingError("a batch to reorder has no dim named 'length'", fix="name it in axes")
    return next(iter(lengths))


def _taken(leaf: Any, names: Sequence[str | None], stored: np.ndarray[Any, Any]) -> Any:
    for dim, name in enumerate(names):
        if name in REORDERED_AXES and leaf.shape[dim] != 1:
            leaf = leaf.take(stored, axis=dim)
    return leaf


def next_tokens(
    tokens: np.ndarray[Any, Any], *, segment_ids: np.ndarray[Any, Any] | None = None
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Targets and weights of next-token prediction, shifted over the whole sequence: do it before `reorder`.

    A shift after the sequence is split loses the target of the last token of every shard.

    Args:
        tokens: [batch, length], integer.
        segment_ids: [batch, length]; the last token of a document has no target in the next one.

    Returns:
        Targets [batch, length], 0 where there is none, and weights [batch, length], float32, 1 where there is one.
    """
    weights = np.ones(tokens.shape, np.float32)
    weights[:, -1] = 0
    if segment_ids is not None:
        weights[:, :-1] = segment_ids[:, 1:] == segment_ids[:, :-1]
    following = np.concatenate([tokens[:, 1:], np.zeros_like(tokens[:, :1])], axis=1)
    return np.where(weights > 0, following, 0).astype(tokens.dtype), weights


def document_positions(segment_ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Positions that restart at 0 in every document: [batch, length], int32, for rotary angles and causal masks."""
    steps = np.broadcast_to(np.arange(segment_ids.shape[1], dtype=np.int32), segment_ids.shape)
    starts = np.concatenate([np.ones_like(segment_ids[:, :1]), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)
    return steps - np.maximum.accumulate(np.where(starts, steps, 0), axis=1).astype(np.int32)


def check_segment_ids(segment_ids: np.ndarray[Any, Any]) -> None:
    """Raises unless every id of a row, in the original order, names one run of tokens.

    An id that comes back names two documents by one number, and they would attend to each other.

    Args:
        segment_ids: [batch, length], integer; padding may have any id of its own.
    """
    if segment_ids.ndim != 2 or not np.issubdtype(segment_ids.dtype, np.integer):
        raise ShardingError(
            f"segment_ids are {segment_ids.dtype} {list(segment_ids.shape)}", fix="give integers [batch, length]"
        )
    for row, ids in enumerate(segment_ids):
        starts = np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1))
        seen: dict[int, int] = {}
        for at in starts:
            if ids[at] in seen:
                raise ShardingError(
                    f"segment_ids out of order in row {row}: id {ids[at]} starts at token {seen[ids[at]]} and again "
                    f"at token {at}, so two documents would attend to each other",
                    fix="number the documents of a row 1, 2, 3, ... and check before the batch is reordered",
                )
            seen[int(ids[at])] = int(at)


def needed_shifts(*, length: int, shards: int, placement: str, causal: bool, window: int | None) -> tuple[int, ...]:
    """Ring distances at which some shard still attends: from shard i the keys of shard i - shift, modulo `shards`.

    Without a window all of them. A causal window over contiguous shards needs the nearest ones only.

    Args:
        length: of the whole sequence.
        window: tokens a query may look back (and ahead, when not causal), itself included.

    Returns:
        Shifts, ascending, 0 first.
    """
    if window is None:
        return tuple(range(shards))
    local = length // shards
    if placement == "striped":  # the nearest key at a shift is that many tokens back, or shards - shift ahead
        distances = {shift: (shift, shards - shift) for shift in range(shards)}
        return tuple(s for s, (back, ahead) in distances.items() if back < window or (not causal and ahead < window))
    lowest = 0 if causal else 1 - window
    size = local if placement == "contiguous" else local // 2

    def starts(shard: int) -> list[int]:
        first = np.arange(0, local, size)
        return shard_positions(first, shard, local_length=local, shards=shards, placement=placement).tolist()

    def meet(query: int, key: int) -> bool:
        # Distances query - key of two runs of `size` tokens are all integers between these two.
        return query - key - size + 1 < window and query - key + size - 1 >= lowest

    return tuple(
        shift
        for shift in range(shards)
        if any(meet(q, k) for i in range(shards) for q in starts(i) for k in starts((i - shift) % shards))
    )
