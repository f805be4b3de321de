"""The fastest order of work as an integer program, for sizes at which `search` finds it but cannot prove it.

In: a placement, `Times`, a limit on live activations, a makespan known to be possible, seconds. Out: rows at least
as fast, or None, and a proved lower bound. Needs scipy (HiGHS): pip install 'shardlib[planner]'.

Start times are continuous; of two actions of a rank whose order is open, a binary says which comes first
(disjunctive constraints with a big M: Manne, On the job-shop scheduling problem, Operations Research 8, 1960).
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from shardlib.pipeline.costs import Times
from shardlib.pipeline.placement import Placement, stages_by_rank
from shardlib.pipeline.table import FORWARD, INPUT, WEIGHT, Action, action

INSTALL: Final = "integer programming needs scipy: pip install 'shardlib[planner]'"
KINDS: Final = (FORWARD, INPUT, WEIGHT)
MOST_ORDERS: Final = 20_000
INFEASIBLE: Final = 2
"""scipy.optimize.milp's status where there is no solution."""
ROUNDING: Final = 1e-3

Operation = tuple[int, int, int]
"""(kind number, virtual stage, microbatch)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """What the integer program found; a static leaf. No rows are faster than `at_least`."""

    rows: tuple[tuple[Action, ...], ...] | None
    at_least: int


def solve(
    placement: Placement, times: Times, *, microbatches: int, limit: int | None, known: int, seconds: float
) -> Solved:
    """Solves for the least makespan.

    Args:
        placement: which rank holds what.
        times: the costs.
        microbatches: how many there are.
        limit: on live activations per rank, in the sizes of `times`; None for no limit.
        known: a makespan that is possible within the limit.
        seconds: time for the solver.

    Raises:
        ImportError: scipy is not installed; the message is the install line.
    """
    try:
        import numpy
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array
    except ImportError:
        raise ImportError(INSTALL) from None
    program = _Program(placement, times, microbatches=microbatches, limit=limit, known=known)
    if len(program.orders) > MOST_ORDERS:
        return Solved(rows=None, at_least=0)
    row, column, value, least = program.matrix()
    count = program.count
    integrality: Any = numpy.zeros(count)
    upper: Any = numpy.full(count, program.known)
    least_array: Any = numpy.array(least, dtype=float)
    binaries = list(program.orders.values())
    integrality[binaries], upper[binaries] = 1, 1
    cost = numpy.zeros(count)
    cost[program.end] = 1
    matrix = coo_array((value, (row, column)), shape=(len(least), count)).tocsr()
    result: Any = milp(
        cost,
        constraints=LinearConstraint(matrix, least_array),
        integrality=integrality,
        bounds=Bounds(0, upper),
        options={"time_limit": seconds, "mip_rel_gap": 0.0},
    )
    if result.status == INFEASIBLE:
        return Solved(rows=None, at_least=known + 1)
    bound = result.mip_dual_bound
    at_least = math.ceil(bound * program.unit - ROUNDING) if bound is not None and math.isfinite(bound) else 0
    rows = None if result.x is None else program.rows(result.x)
    return Solved(rows=rows, at_least=at_least)


class _Program:
    """Variables and constraints `sum of value * variable >= least`, as lists."""

    def __init__(self, placement: Placement, times: Times, *, microbatches: int, limit: int | None, known: int):
        self.placement, self.times, self.microbatches = placement, times, microbatches
        self.limit, self.last = limit, len(placement.ranks) - 1
        # Times in units of the longest action: the solver's tolerances are absolute.
        self.unit = max(*times.forward, *times.input, *times.weight)
        self.known = known / self.unit
        self.starts = {
            operation: number
            for number, operation in enumerate(
                itertools.product(range(3), range(len(placement.ranks)), range(microbatches))
            )
        }
        self.end = len(self.starts)
        self.count = self.end + 1
        self.orders: dict[tuple[Operation, Operation], int] = {}
        for one, other in self._pairs():
            if not self._first(one, other) and not self._first(other, one):
                self.orders[one, other] = self.count
                self.count += 1

    def _pairs(self) -> Iterator[tuple[Operation, Operation]]:
        for stages in stages_by_rank(self.placement):
            mine = [operation for operation in self.starts if operation[1] in stages]
            yield from itertools.combinations(mine, 2)

    def _first(self, one: Operation, other: Operation) -> bool:
        """Whether `one` precedes `other` in every schedule: down the F's, up the I's, each stage in order."""
        (kind, stage, microbatch), (later_kind, later_stage, later) = one, other
        if microbatch > later or kind > later_kind or one == other:
            return False
        if kind == 0:
            return later_kind > 0 or stage <= later_stage
        if kind == 1:
            return stage >= later_stage
        return stage == later_stage

    def _duration(self, operation: Operation) -> float:
        return self.times.of(KINDS[operation[0]])[operation[1]] / self.unit

    def matrix(self) -> tuple[list[int], list[int], list[float], list[float]]:
        """Row, column and value of every entry, and the right-hand sides."""
        row, column, value, least = list[int](), list[int](), list[float](), list[float]()
        for terms, bound in itertools.chain(self._precedence(), self._disjunctions(), self._memory()):
            for variable, factor in terms.items():
                row.append(len(least))
                column.append(variable)
                value.append(factor)
            least.append(bound)
        return row, column, value, least

    def _precedence(self) -> Iterator[tuple[dict[int, float], float]]:
        hops = [
            0.0 if here == there else self.times.link / self.unit
            for here, there in zip(self.placement.ranks, self.placement.ranks[1:])
        ]
        for (kind, stage, microbatch), variable in self.starts.items():
            before: list[tuple[Operation, float]] = []
            if microbatch:
                before.append(((kind, stage, microbatch - 1), 0))
            if kind == 0 and stage:
                before.append(((0, stage - 1, microbatch), hops[stage - 1]))
            if kind:
                before.append(((kind - 1, stage, microbatch), 0))
            if kind == 1 and stage < self.last:
                before.append(((1, stage + 1, microbatch), hops[stage]))
            for operation, hop in before:
                yield {variable: 1, self.starts[operation]: -1}, self._duration(operation) + hop
            yield {self.end: 1, variable: -1}, self._duration((kind, stage, microbatch))

    def _disjunctions(self) -> Iterator[tuple[dict[int, float], float]]:
        for (one, other), order in self.orders.items():
            first, second = self.starts[one], self.starts[other]
            yield {second: 1, first: -1, order: -self.known}, self._duration(one) - self.known
            yield {first: 1, second: -1, order: self.known}, self._duration(other)
        for one, other in self._pairs():  # orders that are the same in every schedule still take their time
            if (one, other) not in self.orders:
                first, second = (one, other) if self._first(one, other) else (other, one)
                yield {self.starts[second]: 1, self.starts[first]: -1}, self._duration(first)

    def _memory(self) -> Iterator[tuple[dict[int, float], float]]:
        """What is alive once an F has started, or an I that leaves more than it frees, stays within the limit."""
        if self.limit is None:
            return
        for stages in stages_by_rank(self.placement):
            mine = [operation for operation in self.starts if operation[1] in stages]
            for operation in mine:
                if self._change(operation) <= 0:
                    continue
                terms, live = dict[int, float](), self._change(operation)
                for other in mine:
                    if other == operation:
                        continue
                    if (other, operation) in self.orders:
                        terms[self.orders[other, operation]] = -self._change(other)
                    elif (operation, other) in self.orders:
                        live += self._change(other)
                        terms[self.orders[operation, other]] = self._change(other)
                    elif self._first(other, operation):
                        live += self._change(other)
                yield terms, live - self.limit

    def _change(self, operation: Operation) -> int:
        activation, stash = self.times.activation[operation[1]], self.times.stash[operation[1]]
        return (activation, stash - activation, -stash)[operation[0]]

    def rows(self, solution: Any) -> tuple[tuple[Action, ...], ...]:
        """The order in which a solution starts each rank's actions; of those at one time, what comes first anyway."""
        rows = []
        for stages in stages_by_rank(self.placement):
            mine = [operation for operation in self.starts if operation[1] in stages]
            mine.sort(
                key=lambda operation: (solution[self.starts[operation]] + self._duration(operation) / 2, operation)
            )
            rows.append(
                tuple(
                    action(KINDS[kind], microbatch, chunk=self.placement.chunk(stage))
                    for kind, stage, microbatch in mine
                )
            )
        return tuple(rows)
