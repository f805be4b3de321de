"""Covering arrays: few cases in which every combination of values of a few factors occurs, if any valid case has it.

In: factors with their values and a validity predicate. Out: cases, the same on every run.

    cases = covering({"mesh": ["data=8", "fsdp=8"], "zero": [0, 1]}, strength=2, valid=lambda case: True)
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Case = dict[str, Any]


def product(factors: Mapping[str, Sequence[Any]], *, valid: Callable[[Case], bool]) -> list[Case]:
    """Every valid case."""
    names = list(factors)
    cases = (dict(zip(names, values, strict=True)) for values in itertools.product(*factors.values()))
    return [case for case in cases if valid(case)]


def covering(factors: Mapping[str, Sequence[Any]], *, strength: int, valid: Callable[[Case], bool]) -> list[Case]:
    """A greedy cover: the valid case with most combinations not seen yet comes next, until none is left.

    Args:
        factors: values by name.
        strength: of how many factors every combination of values occurs: 2 for pairs, 3 for triples.
        valid: which cases there are.
    """
    cases = product(factors, valid=valid)
    combinations = _combinations(factors, cases, strength)
    missing = np.zeros(combinations.max() + 1, np.uint8)
    missing[combinations] = 1
    chosen: list[Case] = []
    while missing.any():
        best = int(missing[combinations].sum(1, dtype=np.int32).argmax())
        missing[combinations[best]] = 0
        chosen.append(cases[best])
    return chosen


def pairwise(factors: Mapping[str, Sequence[Any]], *, valid: Callable[[Case], bool]) -> list[Case]:
    """`covering` of pairs."""
    return covering(factors, strength=2, valid=valid)


def _combinations(factors: Mapping[str, Sequence[Any]], cases: list[Case], strength: int) -> np.ndarray:
    """A number for each combination in each case: [cases, choices of `strength` factors]."""
    levels = np.array([[factors[name].index(value) for name, value in case.items()] for case in cases], np.int32)
    columns, first = [], 0
    for chosen in itertools.combinations(range(len(factors)), strength):
        sizes = [len(list(factors.values())[factor]) for factor in chosen]
        columns.append(first + np.ravel_multi_index(levels[:, chosen].T, sizes))
        first += int(np.prod(sizes))
    return np.stack(columns, axis=1)


def name(case: Case) -> str:
    """A readable test id."""
    return " ".join(str(value) for value in case.values())
