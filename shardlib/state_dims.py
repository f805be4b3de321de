"""Which dim of a parameter each dim of an optimizer statistic is: kept, averaged away, or new. Pure shapes.

In: the shape of a state array and of the parameter it follows. Out: one `Origin` per dim of the state array.

    origins((128,), (128, 256))    # (Origin(dim=0, reason="dim 0, averaged over dim 1"),)
"""

from dataclasses import dataclass
from itertools import combinations

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where one dim of a state array comes from; a static leaf.

    Args:
        candidates: dims of the parameter that it may be; one when it is known, none for a dim of its own.
        reason: in words, to be followed by the parameter's name.
    """

    candidates: tuple[int, ...]
    reason: str


def factored_dims(shape: Shape) -> tuple[int, int] | None:
    """`(d1, d0)`: the second largest and the largest dim; among equal sizes the later one counts as larger.

    The row statistic of Adafactor is averaged over d0, the column statistic over d1. None below two dims.

    Source: Shazeer and Stern 2018 (1804.04235) section 4, for the two dims that optax's `scale_by_factored_rms`
    picks with `numpy.argsort` (optax 0.2.8, `_factored_dims`).
    """
    if len(shape) < 2:
        return None
    by_size = sorted(range(len(shape)), key=lambda dim: shape[dim])
    return by_size[-2], by_size[-1]


def averaged_over(dim: int, parameter: Shape) -> tuple[Origin, ...]:
    """Origins of a statistic that is the parameter averaged over one dim."""
    kept = (d for d in range(len(parameter)) if d != dim)
    return tuple(Origin(candidates=(d,), reason=f"dim {d}, averaged over dim {dim}") for d in kept)


def origins(state: Shape, parameter: Shape) -> tuple[Origin, ...]:
    """Origins of every dim of a state array that follows a parameter.

    Recognised, in this order: the parameter's own shape; averages that keep their dims as 1; new dims before or after
    the parameter's; otherwise the longest common subsequence of sizes, with every dim it may be when sizes repeat.

    Args:
        state: shape of the state array.
        parameter: shape of the parameter.

    Example:
        >>> [origin.candidates for origin in origins((8, 256), (128, 256))]
        [(), (1,)]
    """
    num_new = len(state) - len(parameter)
    if num_new == 0 and all(size in (1, whole) for size, whole in zip(state, parameter, strict=True)):
        return tuple(_kept_or_averaged(dim, state, parameter) for dim in range(len(state)))
    if num_new > 0 and state[num_new:] == parameter:
        return (*[_new(size) for size in state[:num_new]], *map(_same, range(len(parameter))))
    if num_new > 0 and state[: len(parameter)] == parameter:
        return (*map(_same, range(len(parameter))), *[_new(size) for size in state[len(parameter) :]])
    return _by_size(state, parameter)


def _same(dim: int) -> Origin:
    return Origin(candidates=(dim,), reason=f"dim {dim}")


def _new(size: int) -> Origin:
    return Origin(candidates=(), reason=f"size {size} is no dim")


def _kept_or_averaged(dim: int, state: Shape, parameter: Shape) -> Origin:
    if state[dim] == parameter[dim]:
        return _same(dim)
    return Origin(candidates=(), reason=f"averaged over dim {dim}")


def _by_size(state: Shape, parameter: Shape) -> tuple[Origin, ...]:
    """Every longest order-preserving match of equal sizes above 1; a dim keeps all the dims that it may be."""
    for length in range(min(len(state), len(parameter)), 0, -1):
        found: list[set[int]] = [set() for _ in state]
        for mine in combinations(range(len(state)), length):
            for theirs in combinations(range(len(parameter)), length):
                if all(state[a] == parameter[b] > 1 for a, b in zip(mine, theirs, strict=True)):
                    for a, b in zip(mine, theirs, strict=True):
                        found[a].add(b)
        if any(found):
            return tuple(_matched(size, sorted(dims), parameter) for size, dims in zip(state, found, strict=True))
    return tuple(_new(size) for size in state)


def _matched(size: int, dims: list[int], parameter: Shape) -> Origin:
    if len(dims) < 2:
        return _same(dims[0]) if dims else _new(size)
    either = " or ".join(map(str, dims))
    return Origin(candidates=tuple(dims), reason=f"size {size} is dim {either} of {list(parameter)}")
