"""The fastest order of work on given ranks: exact where the state space is small, a beam where it is not.

In: a placement, `Times`, a limit on live activations and a makespan to beat. Out: rows that beat it, or None, and
whether the answer is proved. Microbatches are alike, so each virtual stage works on them in order, and what has
been done is told by counts; of two ways to the same counts, one that is nowhere later makes the other useless.

Source: dynamic programming over sets of jobs with dominance, Held and Karp, SIAM J. Appl. Math. 10 (1962); the
lower bounds are our own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from shardlib.pipeline.costs import Times
from shardlib.pipeline.placement import Placement
from shardlib.pipeline.table import FORWARD, INPUT, WEIGHT, Action, action

KINDS: Final = (FORWARD, INPUT, WEIGHT)

Counts = tuple[int, ...]
"""How many F, I and W each virtual stage has done: three numbers per stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found; a static leaf. `rows` is None if nothing beats the makespan to beat."""

    rows: tuple[tuple[Action, ...], ...] | None
    makespan: int
    proved: bool


@dataclass(frozen=True, slots=True)
class _Label:
    """One way to some counts: when ranks are free, when what they wait for arrives, and how it came about."""

    free: tuple[int, ...]
    arrivals: tuple[tuple[int, ...], ...]
    bound: int
    last: tuple[int, int] | None
    before: "_Label | None"


class _Problem:
    """The instance, with what every bound needs computed once."""

    def __init__(self, placement: Placement, times: Times, *, microbatches: int, limit: int | None):
        self.ranks, self.num_ranks = placement.ranks, placement.num_ranks
        self.stages = len(placement.ranks)
        self.microbatches, self.limit, self.times, self.placement = microbatches, limit, times, placement
        self.duration = tuple(
            time
            for stage in range(self.stages)
            for time in (times.forward[stage], times.input[stage], times.weight[stage])
        )
        hop = [0 if a == b else times.link for a, b in zip(self.ranks, self.ranks[1:])]
        self.forward_hop, self.backward_hop = (*hop, 0), (0, *hop)
        # From the end of a stage's last I: the I's before it in the model, each after a message, then one W.
        self.tail = [0] * self.stages
        for stage in range(1, self.stages):
            self.tail[stage] = self.backward_hop[stage] + times.input[stage - 1] + self.tail[stage - 1]
        self.last_weight = times.weight[0]
        self.drain = [tail + self.last_weight for tail in self.tail]

    def room(self, counts: Counts, stage: int) -> bool:
        """Whether the rank of `stage` can hold what one more F leaves."""
        if self.limit is None:
            return True
        live = self.times.activation[stage]
        for other in range(self.stages):
            if self.ranks[other] == self.ranks[stage]:
                forwards, inputs, weights = counts[3 * other : 3 * other + 3]
                live += self.times.activation[other] * (forwards - inputs) + self.times.stash[other] * (
                    inputs - weights
                )
        return live <= self.limit

    def steps(self, counts: Counts) -> Iterator[tuple[int, int]]:
        """(stage, kind number) of everything that may come next."""
        for stage in range(self.stages):
            forwards, inputs, weights = counts[3 * stage : 3 * stage + 3]
            above = self.microbatches if stage == 0 else counts[3 * stage - 3]
            below = self.microbatches if stage == self.stages - 1 else counts[3 * stage + 4]
            if inputs < min(forwards, below):
                yield stage, 1
            if forwards < above and self.room(counts, stage):
                yield stage, 0
            if weights < inputs:
                yield stage, 2

    def bound(self, counts: Counts, free: tuple[int, ...], *, arrivals: tuple[tuple[int, ...], ...]) -> int:
        """No schedule that goes on from here ends earlier."""
        left, passing = list(free), list(free)
        arrival = 0
        for stage in range(self.stages):
            rank = self.ranks[stage]
            if counts[3 * stage] == 0 and stage > 0:
                arrival = max(arrival, free[self.ranks[stage - 1]] if counts[3 * stage - 3] == 0 else 0)
                waits = arrivals[2 * stage]
                arrival = waits[0] if waits else arrival + self.duration[3 * stage - 3] + self.forward_hop[stage - 1]
                if counts[3 * stage] == 0 and self._idle_rank(counts, rank):
                    left[rank] = max(left[rank], arrival)
                    passing[rank] = max(passing[rank], arrival)
        best = 0
        for stage in range(self.stages):
            rank, base = self.ranks[stage], 3 * stage
            work = [(self.microbatches - counts[base + kind]) * self.duration[base + kind] for kind in range(3)]
            left[rank] += sum(work)
            passing[rank] += work[0] + work[1]
        for rank in range(self.num_ranks):
            best = max(best, left[rank])
        for stage in range(self.stages):
            if counts[3 * stage + 1] < self.microbatches and self.placement.num_chunks == 1:
                best = max(best, passing[self.ranks[stage]] + self.drain[stage])
        return best

    def _idle_rank(self, counts: Counts, rank: int) -> bool:
        """Whether a rank has not begun."""
        return all(counts[3 * stage] == 0 for stage in range(self.stages) if self.ranks[stage] == rank)

    def step(self, counts: Counts, label: _Label, *, stage: int, kind: int) -> tuple[Counts, _Label]:
        """The state after one more operation, each begun as early as it can."""
        rank, base = self.ranks[stage], 3 * stage
        start, arrivals = label.free[rank], list(label.arrivals)
        queue = 2 * stage + kind
        if kind < 2 and arrivals[queue]:
            start = max(start, arrivals[queue][0])
            arrivals[queue] = arrivals[queue][1:]
        end = start + self.duration[base + kind]
        if kind == 0 and stage < self.stages - 1:
            arrivals[queue + 2] = (*arrivals[queue + 2], end + self.forward_hop[stage])
        elif kind == 1 and stage > 0:
            arrivals[queue - 2] = (*arrivals[queue - 2], end + self.backward_hop[stage])
        free = (*label.free[:rank], end, *label.free[rank + 1 :])
        for other in range(self.stages):  # what arrived before its rank is free might as well arrive then
            if self.ranks[other] == rank:
                for number in (2 * other, 2 * other + 1):
                    if arrivals[number] and arrivals[number][0] < end:
                        arrivals[number] = tuple(max(time, end) for time in arrivals[number])
        after = (*counts[: base + kind], counts[base + kind] + 1, *counts[base + kind + 1 :])
        waits = tuple(arrivals)
        bound = max(label.bound, self.bound(after, free, arrivals=waits))
        return after, _Label(free, waits, bound, (stage, kind), label)


def search(
    placement: Placement,
    times: Times,
    *,
    microbatches: int,
    limit: int | None,
    beat: int,
    width: int,
) -> Found:
    """Looks for rows with a makespan below `beat`.

    Args:
        placement: which rank holds what.
        times: the costs.
        microbatches: how many there are.
        limit: on live activations per rank, in the sizes of `times`; None for no limit.
        beat: a makespan already known to be possible.
        width: how many states to keep after each operation; the answer is proved if that was always enough.
    """
    problem = _Problem(placement, times, microbatches=microbatches, limit=limit)
    start = _Label((0,) * problem.num_ranks, ((),) * (2 * problem.stages), 0, None, None)
    layer: dict[Counts, list[_Label]] = {(0,) * (3 * problem.stages): [start]}
    proved = True
    for _ in range(3 * problem.stages * microbatches):
        following: dict[Counts, list[_Label]] = {}
        for counts, labels in layer.items():
            steps = list(problem.steps(counts))
            for label in labels:
                for stage, kind in steps:
                    after, new = problem.step(counts, label, stage=stage, kind=kind)
                    if new.bound < beat:
                        _keep(following.setdefault(after, []), new)
        total = sum(map(len, following.values()))
        if total > width:
            proved = False
            ranked = sorted(
                ((label.bound, sum(label.free), counts, number) for counts, labels in following.items()
                 for number, label in enumerate(labels)),
            )[:width]  # fmt: skip
            kept: dict[Counts, list[_Label]] = {}
            for _, _, counts, number in ranked:
                kept.setdefault(counts, []).append(following[counts][number])
            following = kept
        layer = following
        if not layer:
            return Found(rows=None, makespan=beat, proved=proved)
    best = min((label for labels in layer.values() for label in labels), key=lambda label: max(label.free))
    return Found(rows=_rows(best, placement), makespan=max(best.free), proved=proved)


def _keep(labels: list[_Label], new: _Label) -> None:
    """Adds a label unless one of the same counts is nowhere later; drops those that are nowhere earlier."""
    for label in labels:
        if _no_later(label, new):
            return
    labels[:] = [label for label in labels if not _no_later(new, label)]
    labels.append(new)


def _no_later(one: _Label, other: _Label) -> bool:
    if any(a > b for a, b in zip(one.free, other.free)):
        return False
    return all(a <= b for mine, theirs in zip(one.arrivals, other.arrivals) for a, b in zip(mine, theirs))


def _rows(label: _Label, placement: Placement) -> tuple[tuple[Action, ...], ...]:
    steps = list[tuple[int, int]]()
    step: _Label | None = label
    while step is not None and step.last is not None:
        steps.append(step.last)
        step = step.before
    rows: list[list[Action]] = [[] for _ in range(placement.num_ranks)]
    counts = dict[tuple[int, int], int]()
    for stage, kind in reversed(steps):
        microbatch = counts.get((stage, kind), 0)
        counts[stage, kind] = microbatch + 1
        rows[placement.ranks[stage]].append(action(KINDS[kind], microbatch, chunk=placement.chunk(stage)))
    return tuple(map(tuple, rows))
