"""An axis that falls into rings of unequal sizes: who belongs together, who sends to whom.

In: the sizes of the rings, which stand one behind the other. Out: ranks and pairs, for collectives. Imports no JAX.

    jax.lax.ppermute(x, axis, ring_pairs((3, 1)))
    jax.lax.psum(x, axis, axis_index_groups=group_ranks((3, 1)))
"""

import itertools
from collections.abc import Sequence


def group_ranks(degrees: Sequence[int]) -> list[list[int]]:
    """The ranks of each ring, in order.

    >>> group_ranks((3, 1))
    [[0, 1, 2], [3]]
    """
    starts = itertools.accumulate(degrees, initial=0)
    return [list(range(start, start + degree)) for start, degree in zip(starts, degrees)]


def ring_pairs(degrees: Sequence[int], *, distance: int = 1) -> list[tuple[int, int]]:
    """(source, destination) of a hop around all rings at once.

    A ring of d ranks has its own block back after d steps; of a program of max(degrees) steps only the first d count.

    >>> ring_pairs((3, 1))
    [(0, 1), (1, 2), (2, 0), (3, 3)]
    """
    return [(rank, ring[(at + distance) % len(ring)]) for ring in group_ranks(degrees) for at, rank in enumerate(ring)]
