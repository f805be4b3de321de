"""How a batch lies on ranks that form rings of unequal sizes, and one program per set of sizes.

In: a `length_groups.Grouping`. Out: arrays over all ranks, for `ring_attention(degrees=)`. Imports no JAX.

    batch = arrange(documents, grouping, tokens_per_rank=2048)      # to place over the axis, 2048 tokens a rank
    step = programs(grouping.degrees)                               # compiled when these sizes come for the first time
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from meshes.errors import ShardingError
from shardlib.data.length_groups import Grouping
from shardlib.data.packing import Piece, fill
from shardlib.ops.context_layout import order

T = TypeVar("T")


def arrange(
    documents: Sequence[np.ndarray[Any, Any]],
    grouping: Grouping,
    *,
    tokens_per_rank: int,
    placement: str = "contiguous",
) -> dict[str, np.ndarray[Any, Any]]:
    """The batch as one row over all ranks, each group's sequences on its own ranks.

    Args:
        documents: each [n], integer, as numbered in the grouping.
        tokens_per_rank: the arrays' share of every rank, whatever the grouping: so shapes never change.
        placement: of the tokens of each group over its ring (`context_layout.order`). Attention needs the positions
            and the segment ids; causal work is balanced by "striped".

    Returns:
        inputs, targets, weights, segment_ids, positions, each [1, ranks x tokens_per_rank], as in `packing.pack`; a
        document's segment id is its number plus 1.

    Raises:
        ShardingError: a group that does not fit on its ranks, a placement that does not divide.
    """
    rows = []
    for group in grouping.groups:
        tokens = [np.asarray(documents[i]) for i in group.sequences]
        length = group.degree * tokens_per_rank
        if sum(map(len, tokens)) > length:
            raise ShardingError(
                f"sequences {list(group.sequences)} have {sum(map(len, tokens))} tokens, and their {group.degree} "
                f"ranks hold {length}",
                fix="plan the groups with the same tokens_per_rank and the lengths of these documents",
            )
        row = fill([Piece(inputs=each, following=each[1:]) for each in tokens], length=length)
        numbers = np.array([0, *(i + 1 for i in group.sequences)], np.int32)
        row["segment_ids"] = numbers[row["segment_ids"]]
        stored = order(length, shards=group.degree, placement=placement)
        rows.append({name: leaf[stored] for name, leaf in row.items()})
    return {name: np.concatenate([row[name] for row in rows])[None] for name in rows[0]}


class Programs(Generic[T]):
    """Programs by degrees, each made once.

    There are no more than groupings met, and no more than partitions of the number of ranks (22 for 8), since
    `plan_groups` puts the largest first.

    Args:
        make: from degrees to a program, such as `lambda degrees: jax.jit(step_for(degrees)).lower(...).compile()`.

    Attributes:
        num_made: how many.
    """

    def __init__(self, make: Callable[[tuple[int, ...]], T]):
        self._make = make
        self._made: dict[tuple[int, ...], T] = {}

    @property
    def num_made(self) -> int:
        """Programs made so far."""
        return len(self._made)

    def __call__(self, degrees: Sequence[int]) -> T:
        """The program for these degrees, in the order in which the rings stand."""
        key = tuple(degrees)
        if key not in self._made:
            self._made[key] = self._make(key)
        return self._made[key]
