"""Rings of unequal sizes for the sequences of one batch: long ones are divided over many ranks, short ones over few.

In: the lengths of a batch, a number of ranks, what a rank can hold, what work costs. Out: groups of ranks and their
sequences. Imports no JAX; plans in milliseconds, so that every batch may have its own.

    grouping = plan_groups([600, 100, 100], ranks=8, tokens_per_rank=100, costs=costs)
    grouping.degrees    # (6, 2): the long sequence on a ring of six ranks, the others on one of two
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from meshes.errors import ShardingError, raise_collected

EXACT_SEQUENCES: Final = 6
"""Up to so many sequences the plan is the best there is; for more it is no worse than any grouping of equal size."""

_MOST_UNITS: Final = 12  # 77 partitions
_FINALISTS: Final = 4
_ROUNDING: Final = 1 + 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a group's step takes; a static leaf.

    Args:
        pair_seconds: for one query and one key that attend to each other, all layers, forward and backward.
        token_seconds: for the rest of the work on one token.
        sent_token_seconds: to send the keys and values of one token to the next rank, where not hidden by computation.
        hop_seconds: latency of one step around the ring.
    """

    pair_seconds: float
    token_seconds: float
    sent_token_seconds: float = 0.0
    hop_seconds: float = 0.0

    def __post_init__(self):
        values = {name: getattr(self, name) for name in self.__slots__}
        raise_collected(
            [f"{name}={value} is no time" for name, value in values.items() if not 0 <= value < math.inf],
            heading="costs cannot be used:",
        )

    def load(self, lengths: Iterable[int]) -> "Load":
        """What causal sequences of these lengths are together, each attending within itself."""
        lengths = list(lengths)
        pairs = sum(length * (length + 1) // 2 for length in lengths)
        tokens = sum(lengths)
        return Load(tokens=tokens, work=self.pair_seconds * pairs + self.token_seconds * tokens)

    def seconds(self, load: "Load", degree: Any) -> Any:
        """A group's step on `degree` ranks: work / d + sent tokens (d - 1) / d + hops (d - 1)."""
        return self.seconds_of(load.tokens, load.work, degree)

    def seconds_of(self, tokens: Any, work: Any, degree: Any) -> Any:
        """The same from a load's numbers; arrays broadcast."""
        sent = self.sent_token_seconds * tokens
        return (work - sent) / degree + sent + self.hop_seconds * (degree - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Sequences seen as numbers to add up; a static leaf.

    Args:
        tokens: how many.
        work: seconds on one rank.
    """

    tokens: int
    work: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that form one ring, and the sequences it holds; a static leaf.

    Args:
        degree: number of ranks.
        sequences: positions in the batch, ascending; none for a rank that idles.
    """

    degree: int
    sequences: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """Groups over consecutive ranks, the largest first; a static leaf.

    Args:
        groups: their degrees add up to the ranks.
        seconds: of the slowest group.
    """

    groups: tuple[Group, ...]
    seconds: float

    @property
    def degrees(self) -> tuple[int, ...]:
        """All that a compiled program depends on, in descending order: a partition of the number of ranks."""
        return tuple(group.degree for group in self.groups)


def plan_groups(lengths: Sequence[int], *, ranks: int, tokens_per_rank: int, costs: Costs) -> Grouping:
    """Divides ranks and sequences into groups so that the slowest group is as fast as possible.

        minimise max over groups g of costs.seconds(load of g, d_g)
        subject to sum of d_g <= ranks, tokens of g <= d_g tokens_per_rank, every sequence in one group

    For up to `EXACT_SEQUENCES` sequences all sets are tried. For more, sequences are dealt greedily to every way to
    divide the ranks, and for the sets of the best few of these the degrees are made as good as they can be.

    Args:
        lengths: tokens of each sequence, positive.
        ranks: of the axis that is divided.
        tokens_per_rank: what a rank can hold, the memory constraint.
        costs: of work and transfers.

    Raises:
        ShardingError: sizes out of range, or more tokens than all ranks hold.

    Source: Niu et al. 2026 (2602.21788): groups and degrees per batch, packing under memory before degrees are given.
    The search is ours.
    """
    _check(lengths, ranks=ranks, tokens_per_rank=tokens_per_rank)
    problem = _Problem(lengths=tuple(lengths), ranks=ranks, tokens_per_rank=tokens_per_rank, costs=costs)
    if len(lengths) <= EXACT_SEQUENCES:
        return problem.grouping(problem.best_sets())
    seconds, places = problem.dealt(problem.candidates())
    chosen = np.argsort(seconds, kind="stable")[:_FINALISTS]
    finalists = [problem.grouping(_sets(places[i])) for i in chosen if seconds[i] < math.inf]
    return min(finalists, key=lambda grouping: grouping.seconds)


def equal_groups(lengths: Sequence[int], *, degree: int, ranks: int, tokens_per_rank: int, costs: Costs) -> Grouping:
    """The usual division, for comparison: ranks / degree groups of one size, the longest sequence to the least busy.

    Raises:
        ShardingError: as `plan_groups`, or when this division does not fit in memory.
    """
    _check(lengths, ranks=ranks, tokens_per_rank=tokens_per_rank)
    problem = _Problem(lengths=tuple(lengths), ranks=ranks, tokens_per_rank=tokens_per_rank, costs=costs)
    candidate = np.full((1, ranks // degree), degree)
    (seconds,), (places,) = problem.dealt(candidate)
    if ranks % degree or seconds == math.inf:
        raise ShardingError(
            f"{ranks} ranks of {tokens_per_rank} tokens in groups of {degree} do not hold sequences of {list(lengths)}",
            fix="use plan_groups, whose groups may have unequal sizes",
        )
    members = [tuple(np.flatnonzero(places == at).tolist()) for at in range(ranks // degree)]
    groups = [Group(degree=degree, sequences=chosen) for chosen in sorted(members, reverse=True)]
    return Grouping(groups=tuple(groups), seconds=float(seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    lengths: tuple[int, ...]
    ranks: int
    tokens_per_rank: int
    costs: Costs

    def load(self, sequences: Iterable[int]) -> Load:
        return self.costs.load(self.lengths[i] for i in sequences)

    def degree(self, load: Load, deadline: float) -> int | None:
        """The fewest ranks that hold a load and end it before the deadline."""
        least = max(1, -(-load.tokens // self.tokens_per_rank))
        # work' / d + hops d <= rest, solved for the smaller d; without hops, work' / rest.
        sent = self.costs.sent_token_seconds * load.tokens
        work, rest = load.work - sent, deadline * _ROUNDING - sent + self.costs.hop_seconds
        inside = rest * rest - 4 * self.costs.hop_seconds * work
        if work > 0:
            if rest <= 0 or inside < 0:
                return None
            least = max(least, math.ceil(2 * work / (rest + math.sqrt(inside)) - 1e-9))
        for degree in (least, least + 1):  # the root may be off by its rounding
            if degree <= self.ranks and self.costs.seconds(load, degree) <= deadline * _ROUNDING:
                return degree
        return None

    def grouping(self, sets: Sequence[Sequence[int]]) -> Grouping:
        """The best degrees for sets of sequences; ranks that remain idle."""
        loads = [self.load(chosen) for chosen in sets]
        every = np.arange(1, self.ranks + 1)
        times = sorted({float(t) for load in loads for t in self.costs.seconds(load, every)})
        degrees: list[int] = []

        def fits(deadline: float) -> bool:
            found = [self.degree(load, deadline) for load in loads]
            chosen = [degree for degree in found if degree is not None]
            if len(chosen) < len(found) or sum(chosen) > self.ranks:
                return False
            degrees[:] = chosen
            return True

        _first_true(times, fits)
        assert degrees, "sets that were packed under a deadline fit under the longest"
        groups = [Group(degree=d, sequences=tuple(sorted(chosen))) for d, chosen in zip(degrees, sets, strict=True)]
        groups.sort(key=lambda group: (-group.degree, group.sequences))
        idle = [Group(degree=1, sequences=())] * (self.ranks - sum(degrees))
        seconds = max(float(self.costs.seconds(load, d)) for load, d in zip(loads, degrees, strict=True))
        return Grouping(groups=(*groups, *idle), seconds=seconds)

    def best_sets(self) -> list[list[int]]:
        """All partitions of few sequences: `fewest[mask]` ranks end the sequences of a mask before a deadline."""
        full = (1 << len(self.lengths)) - 1
        members = [[i for i in range(len(self.lengths)) if mask >> i & 1] for mask in range(full + 1)]
        loads = [self.load(chosen) for chosen in members]
        every = np.arange(1, self.ranks + 1)
        times = sorted({float(t) for load in loads[1:] for t in self.costs.seconds(load, every)})
        found: list[list[int]] = []

        def fits(deadline: float) -> bool:
            alone = [self.degree(load, deadline) or self.ranks + 1 for load in loads]
            fewest, chosen = [0] * (full + 1), [0] * (full + 1)
            for mask in range(1, full + 1):
                part, lowest = mask, mask & -mask
                best = self.ranks + 1
                while part:
                    if part & lowest and alone[part] + fewest[mask ^ part] < best:
                        best, chosen[mask] = alone[part] + fewest[mask ^ part], part
                    part = (part - 1) & mask
                fewest[mask] = best
            if fewest[full] > self.ranks:
                return False
            found.clear()
            mask = full
            while mask:
                found.append(members[chosen[mask]])
                mask ^= chosen[mask]
            return True

        _first_true(times, fits)
        return found

    def dealt(self, degrees: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """The heaviest sequence first, each to the group that then ends first, of those that have room for it.

        Args:
            degrees: [candidates, groups], 0 where a candidate has fewer groups; all candidates at once.

        Returns:
            Seconds of each candidate's slowest group, infinite where a sequence found no room; and the group of every
            sequence, [candidates, sequences].
        """
        costs, rows = self.costs, np.arange(len(degrees))
        is_group, sizes = degrees > 0, np.maximum(degrees, 1)
        tokens, work, seconds = np.zeros(degrees.shape), np.zeros(degrees.shape), np.zeros(len(degrees))
        places = np.empty((len(degrees), len(self.lengths)), int)
        for sequence in sorted(range(len(self.lengths)), key=lambda i: -self.lengths[i]):
            load = self.load([sequence])
            after = tokens + load.tokens
            ends = costs.seconds_of(after, work + load.work, sizes)
            ends[~is_group | (after > sizes * self.tokens_per_rank)] = np.inf
            places[:, sequence] = at = ends.argmin(axis=1)
            seconds = np.maximum(seconds, ends[rows, at])
            tokens[rows, at] += load.tokens
            work[rows, at] += load.work
        return seconds, places

    def candidates(self) -> np.ndarray[Any, Any]:
        """Degrees to deal sequences to: all partitions of the ranks, of their coarser parts where these are many.

        Equal groups of every size are among them, last of all one group of all ranks, which holds any batch.
        """
        unit = -(-self.ranks // _MOST_UNITS)
        found = [[unit * part for part in parts] for parts in _partitions(self.ranks // unit, self.ranks // unit)]
        found += [[size] * (self.ranks // size) for size in range(1, self.ranks + 1) if self.ranks % size == 0]
        widest = max(map(len, found))
        return np.array([degrees + [0] * (widest - len(degrees)) for degrees in found])


def _sets(places: np.ndarray[Any, Any]) -> list[list[int]]:
    return [np.flatnonzero(places == at).tolist() for at in np.unique(places)]


def _partitions(total: int, largest: int) -> Iterator[list[int]]:
    if total == 0:
        yield []
    for first in range(min(total, largest), 0, -1):
        for rest in _partitions(total - first, first):
            yield [first, *rest]


def _first_true(values: Sequence[float], holds: Any) -> None:
    """Bisects ascending values, calling `holds` last-but-failures on the first for which it is true."""
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if holds(values[middle]):
            high = middle
        else:
            low = middle + 1


def _check(lengths: Sequence[int], *, ranks: int, tokens_per_rank: int) -> None:
    failures = []
    if not lengths:
        failures.append("there are no sequences")
    failures += [f"sequence {i} has length {length}" for i, length in enumerate(lengths) if length < 1]
    sizes = {"ranks": ranks, "tokens_per_rank": tokens_per_rank}
    failures += [f"{name}={size} is not positive" for name, size in sizes.items() if size < 1]
    if not failures and sum(lengths) > ranks * tokens_per_rank:
        failures.append(
            f"{sum(lengths)} tokens exceed the {ranks * tokens_per_rank} that {ranks} ranks of {tokens_per_rank} hold; "
            f"fix: tokens_per_rank={-(-sum(lengths) // ranks)}, or fewer sequences in the batch"
        )
    raise_collected(failures, heading="sequences cannot be grouped:")
