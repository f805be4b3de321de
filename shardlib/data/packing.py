"""Documents of any length packed into blocks of one length: nothing dropped, the same number of blocks on every rank.

In: documents, each a row of token ids. Out: batches of blocks that say where each document starts. NumPy only.

    for batch in pack(documents, length=128, batch=16, ranks=8):
        batch["inputs"], batch["targets"], batch["weights"], batch["segment_ids"], batch["positions"]    # [16, 128]
"""

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshes.errors import ShardingError, raise_collected

POOL = 1024
"""Pieces to choose from while a block is filled, unless a caller says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """A document, or a part of one that is longer than a block; holds an array.

    Args:
        inputs: [n], integer.
        following: [n] or [n - 1], integer, the token after each input; the last token of a document has none.
    """

    inputs: np.ndarray[Any, Any]
    following: np.ndarray[Any, Any]


def pieces_of(document: np.ndarray[Any, Any], *, length: int) -> list[Piece]:
    """A document cut into pieces of at most `length` tokens.

    Every token is an input once. The last one of a piece has the first of the next piece as its target, so that a cut
    costs context and no target.

    >>> [(piece.inputs.tolist(), piece.following.tolist()) for piece in pieces_of(np.arange(5), length=3)]
    [([0, 1, 2], [1, 2, 3]), ([3, 4], [4])]
    """
    return [
        Piece(inputs=document[start : start + length], following=document[start + 1 : start + length + 1])
        for start in range(0, len(document), length)
    ]


def pack(
    documents: Iterable[np.ndarray[Any, Any]],
    *,
    length: int,
    batch: int,
    ranks: int = 1,
    pool: int = POOL,
    seed: int = 0,
) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
    """Packs documents into batches of blocks, in one pass over them.

    A block begins with a piece drawn at random from the pool and goes on with the longest that still fits. The result
    is a function of the arguments alone: to resume at a step, skip the steps before it (`itertools.islice`).

    Args:
        documents: each [n], integer, n at least 1; those longer than a block are cut (`pieces_of`).
        length: tokens per block.
        batch: blocks per step, a multiple of `ranks`; rank r gets the r-th of `ranks` equal parts of the rows.
        ranks: devices or processes that share a batch. Those of one batch get about the same work in attention.
        pool: pieces held at a time; more of them leave less padding.
        seed: non-negative; it decides which pieces meet in a block.

    Yields:
        Arrays [batch, length]; the last batch may end in blocks that are all padding.
        inputs, targets: int32, 0 in padding; a target never belongs to another document.
        weights: float32, 1 where there is a target, 0 at the end of a document and in padding.
        segment_ids: int32, 1, 2, ... along a block, 0 in padding.
        positions: int32, 0 at the start of every piece and everywhere in padding.

    Raises:
        ShardingError: sizes out of range; a document that is empty or no row of integers, by its number.

    Source: Ruschel et al. 2023 (2310.10879): blocks of one length with a table of resets. The choice of the longest
    that fits is ours.
    """
    _check(length=length, batch=batch, ranks=ranks, pool=pool, seed=seed)
    return _batches(documents, length=length, batch=batch, ranks=ranks, pool=pool, seed=seed)


def _batches(documents: Any, *, length: int, batch: int, ranks: int, pool: int, seed: int) -> Iterator[dict[str, Any]]:
    # RandomState: NumPy keeps its stream fixed over versions (NEP 19).
    draw = np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32])
    pieces = (piece for document in _checked(documents) for piece in pieces_of(document, length=length))
    blocks = _blocks(pieces, length=length, pool=pool, draw=draw)
    while made := list(itertools.islice(blocks, batch)):
        filled = [fill(block, length=length) for block in _dealt(made, batch=batch, ranks=ranks)]
        yield {name: np.stack([block[name] for block in filled]) for name in filled[0]}


def _blocks(pieces: Iterator[Piece], *, length: int, pool: int, draw: Any) -> Iterator[list[Piece]]:
    held: list[Piece] = []  # by size; pieces of one size in the order of arrival

    def refill() -> None:
        for piece in itertools.islice(pieces, pool - len(held)):
            bisect.insort(held, piece, key=_size)

    refill()
    while held:
        block = [held.pop(draw.randint(len(held)))]
        free = length - _size(block[0])
        refill()
        while fits := bisect.bisect_right(held, free, key=_size):
            block.append(held.pop(fits - 1))
            free -= _size(block[-1])
            refill()
        yield block


def _dealt(blocks: list[list[Piece]], *, batch: int, ranks: int) -> list[list[Piece]]:
    """The blocks and empty ones, `batch` in all, so that ranks have equal numbers and much the same work.

    The heaviest first, each to the rank with the least work of those that have room. Work is the pairs of tokens that
    attend to each other.
    """
    work = lambda block: sum(_size(piece) ** 2 for piece in block)  # noqa: E731
    rows: list[list[list[Piece]]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for block in sorted(blocks, key=work, reverse=True):
        rank = min((r for r in range(ranks) if len(rows[r]) < batch // ranks), key=lambda r: (totals[r], len(rows[r])))
        rows[rank].append(block)
        totals[rank] += work(block)
    return [block for row in rows for block in row + [[]] * (batch // ranks - len(row))]


def fill(block: Sequence[Piece], *, length: int) -> dict[str, np.ndarray[Any, Any]]:
    """One block, arrays [length] by name as in `pack`; the pieces one behind the other, then padding."""
    dtypes = dict.fromkeys(("inputs", "targets", "segment_ids", "positions"), np.int32) | {"weights": np.float32}
    found: dict[str, np.ndarray[Any, Any]] = {name: np.zeros(length, dtype) for name, dtype in dtypes.items()}
    start = 0
    for number, piece in enumerate(block, start=1):
        end, last_target = start + len(piece.inputs), start + len(piece.following)
        found["inputs"][start:end] = piece.inputs
        found["targets"][start:last_target] = piece.following
        found["weights"][start:last_target] = 1
        found["segment_ids"][start:end] = number
        found["positions"][start:end] = np.arange(end - start)
        start = end
    return found


def _size(piece: Piece) -> int:
    return len(piece.inputs)


def _checked(documents: Iterable[Any]) -> Iterator[np.ndarray[Any, Any]]:
    for number, document in enumerate(documents):
        tokens = np.asarray(document)
        if tokens.ndim != 1 or tokens.size == 0 or not np.issubdtype(tokens.dtype, np.integer):
            raise ShardingError(
                f"document {number} is {tokens.dtype} {list(tokens.shape)}, and packing takes rows of integers",
                fix="leave empty documents out" if tokens.size == 0 else "give each document as integers [tokens]",
            )
        yield tokens


def _check(*, length: int, batch: int, ranks: int, pool: int, seed: int) -> None:
    sizes = {"length": length, "batch": batch, "ranks": ranks, "pool": pool}
    failures = [f"{name}={size} is not positive" for name, size in sizes.items() if size < 1]
    if seed < 0:
        failures.append(f"seed={seed} is negative")
    if ranks > 0 and batch % ranks:
        failures.append(
            f"batch={batch} blocks do not divide over {ranks} ranks; fix: batch={-(-batch // ranks) * ranks}"
        )
    raise_collected(failures, heading="documents cannot be packed:")
