"""Covering arrays: few cases in which every pair of values of any two factors occurs, if any valid case has it.

In: factors with their values and a validity predicate. Out: cases, the same on every run.

    cases = pairwise({"mesh": ["data=8", "fsdp=8"], "zero": [0, 1]}, valid=lambda case: True)
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]


def product(factors: Mapping[str, Sequence[Any]], *, valid: Callable[[Case], bool]) -> list[Case]:
    """Every valid case."""
    names = list(factors)
    cases = (dict(zip(names, values, strict=True)) for values in itertools.product(*factors.values()))
    return [case for case in cases if valid(case)]


def pairwise(factors: Mapping[str, Sequence[Any]], *, valid: Callable[[Case], bool]) -> list[Case]:
    """A greedy cover: the valid case with most pairs not seen yet comes next, until none is left."""
    cases = product(factors, valid=valid)
    pairs_of = [set(itertools.combinations(case.items(), 2)) for case in cases]
    missing = set().union(*pairs_of)
    chosen: list[Case] = []
    while missing:
        best = max(range(len(cases)), key=lambda i: len(pairs_of[i] & missing))
        missing -= pairs_of[best]
        chosen.append(cases[best])
    return chosen


def name(case: Case) -> str:
    """A readable test id."""
    return " ".join(str(value) for value in case.values())
