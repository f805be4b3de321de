"""Sums over a mesh axis of a value that is the same all along it: each multiplies the value by the axis's size.

In: the traced loss. Out: nothing, or an error that names the user's line and the fix.

    check_sums(jax.make_jaxpr(loss)(params, batch, rng))
"""

import contextlib
import math
import os
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import Literal, jaxprs_in_params

from meshes.errors import ShardingError, raise_collected
from shardlib.jax_compat import held_jaxprs, opened, scan_signature, source_line
from shardlib.spec_axes import axes_of

SUMS = ("psum", "psum_invariant", "reduce_scatter")
SAME_EVERYWHERE = ("psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant")
DIFFERENT = ("reduce_scatter", "all_to_all", "ppermute")

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_NOT_THE_USERS = (f"{os.sep}jax{os.sep}", f"{os.sep}flax{os.sep}", _PACKAGE)

# The mesh axes along which a value differs between devices; None for a constant of the program, which depends on
# nothing: summing one over an axis counts devices, and is meant.
Variation = frozenset[str] | None


def check_sums(closed: Any, *, manual: Sequence[str] = ()) -> None:
    """Raises for sums that multiply, and for a region manual over axes that the step is manual over itself.

    A mean of such a value is right and passes.

    Args:
        closed: jaxpr of the loss over the whole batch, outside any manual region.
        manual: mesh axes that the plan's step is manual over around the loss.

    Raises:
        ShardingError: with the line of every such sum.
    """
    for equation in _regions(opened(closed)):
        taken = sorted(set(equation.params["newly_manual_axes"]) & set(manual))
        if taken and not _is_ours(source_line(equation)):
            raise ShardingError(
                f"the loss has a shard_map over {', '.join(taken)} of its own at {source_line(equation)}, and the step "
                "is manual over it already: the explicit lowering and pipelines hand the loss the rows of one device",
                fix="use lowering=automatic, or leave that shard_map out (constrain places arrays without one)",
            )
    flow = _Flow()
    jaxpr = opened(closed)
    flow.through(jaxpr, [frozenset()] * len(jaxpr.invars))
    raise_collected(flow.problems, heading="the loss sums over a mesh axis what was summed before:")


@contextlib.contextmanager
def unbound_axes_explained() -> Iterator[None]:
    """Turns JAX's error about a collective outside any `shard_map` into one with the line and the fix."""
    try:
        yield
    except NameError as error:
        found = str(error).partition("unbound axis name: ")[2].partition(".")[0]
        if not found:
            raise
        raise ShardingError(
            f"the loss has a collective over the mesh axis {found!r} at {_line_of(error)}, outside any shard_map",
            fix="remove it: a loss sees the whole batch, or is one term of a sum that the step adds up over devices",
        ) from error


@dataclass(slots=True)
class _Flow:
    """Follows variation through a program; collects sums over axes along which nothing varies."""

    sizes: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    silent: int = 0

    def through(self, jaxpr: Any, given: Sequence[Variation]) -> list[Variation]:
        """Variation of the outputs of an open jaxpr; of its constants there is none."""
        known: dict[Any, Variation] = dict(zip(jaxpr.invars, given, strict=True))
        read = lambda atom: None if isinstance(atom, Literal) else known.get(atom)  # noqa: E731
        for equation in jaxpr.eqns:
            found = self._outputs(equation, [read(atom) for atom in equation.invars], jaxpr)
            known.update(zip(equation.outvars, found, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _outputs(self, equation: Any, given: list[Variation], jaxpr: Any) -> list[Variation]:
        name, params, count = equation.primitive.name, equation.params, len(equation.outvars)
        axes = _named_axes(params)
        grouped = params.get("axis_index_groups") is not None
        if name in SUMS and not grouped and not self.silent:
            self._note(equation, given, axes, jaxpr)
        if name == "axis_index":
            return [axes] * count
        if name in DIFFERENT:
            return [_union([*given, axes])] * count
        if name in SAME_EVERYWHERE and not grouped:
            pairs = given if len(given) == count else [_union(given)] * count
            return [None if one is None else one - axes for one in pairs]
        if name == "shard_map":
            return self._region(equation, given)
        if name == "scan":
            return self._scan(equation, given)
        if name == "cond":
            outs = [self.through(opened(branch), given[1:]) for branch in params["branches"]]
            return [_union([given[0], *ways]) for ways in zip(*outs, strict=True)]
        held = held_jaxprs(equation)
        if held:
            inner = opened(held[0][1]) if len(held) == 1 and not isinstance(held[0][1], tuple | list) else None
            if inner is not None and len(inner.invars) == len(given) and len(inner.outvars) == count:
                return self.through(inner, given)
            return [_union([*given, frozenset(self.sizes)])] * count  # a loop on a condition, or unknown: anything
        return [_union(given)] * count

    def _region(self, equation: Any, given: list[Variation]) -> list[Variation]:
        params = equation.params
        manual, outer = frozenset(params["newly_manual_axes"]), dict(self.sizes)
        self.sizes.update({axis: params["mesh"].shape[axis] for axis in manual})
        entering = []
        for spec, one in zip(params["in_specs"], given, strict=True):
            split = frozenset(axis for entry in spec for axis in axes_of(entry)) & manual
            entering.append(_union([one, split]) if split else one)
        leaving = self.through(opened(params["jaxpr"]), entering)
        self.sizes = outer
        return [None if one is None else one - manual for one in leaving]

    def _scan(self, equation: Any, given: list[Variation]) -> list[Variation]:
        num_consts, num_carry = scan_signature(equation)
        body, end = opened(equation.params["jaxpr"]), num_consts + num_carry
        carry, before = given[num_consts:end], None
        self.silent += 1
        while carry != before:  # more variation each time, and there are finitely many axes
            before = carry
            after = self.through(body, [*given[:num_consts], *carry, *given[end:]])
            carry = [_union(pair) for pair in zip(carry, after[:num_carry], strict=True)]
        self.silent -= 1
        return self.through(body, [*given[:num_consts], *carry, *given[end:]])

    def _note(self, equation: Any, given: list[Variation], axes: frozenset[str], jaxpr: Any) -> None:
        for one, result in zip(given, equation.outvars, strict=True):
            same = {axis for axis in axes - (one or frozenset()) if self.sizes.get(axis, 1) > 1}
            if one is None or not same:
                continue
            factor = math.prod(self.sizes[axis] for axis in same)
            if _divided(jaxpr, result, math.prod(self.sizes.get(axis, 1) for axis in axes)):
                continue
            name, line = equation.primitive.name.removesuffix("_invariant"), source_line(equation) or "an unknown line"
            named = ", ".join(f"{axis}={self.sizes[axis]}" for axis in sorted(same))
            self.problems.append(
                f"{name} at {line}: its operand is the same on all devices of {named}, so the sum multiplies it by "
                f"{factor}; fix: remove it, or use jax.lax.pmean"
            )


def _regions(jaxpr: Any) -> Iterator[Any]:
    """The `shard_map` equations of a program and of those it holds."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "shard_map":
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from _regions(opened(inner))


def _is_ours(line: str) -> bool:
    # Under the plan our own regions leave alone what the step is manual over; this trace is not yet under it.
    return os.path.abspath(line).startswith(_PACKAGE)


def _line_of(error: NameError) -> str:
    """The innermost line outside JAX, Flax and this library."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(part in frame.filename for part in _NOT_THE_USERS)]
    frame = (own or frames)[-1]
    path = os.path.relpath(frame.filename)
    return f"{frame.filename if path.startswith('..') else path}:{frame.lineno}"


def _named_axes(params: Any) -> frozenset[str]:
    """The mesh axes of a collective; empty for other equations, and without positions of a vmap."""
    named = params.get("axes", params.get("axis_name", ()))
    return frozenset(axis for axis in (named if isinstance(named, tuple) else (named,)) if isinstance(axis, str))


def _divided(jaxpr: Any, value: Any, size: int) -> bool:
    """Whether a sum is only divided by the number of its terms: a mean."""
    users = [equation for equation in jaxpr.eqns if any(atom is value for atom in equation.invars)]
    is_mean = lambda user: (  # noqa: E731
        user.primitive.name == "div" and isinstance(user.invars[1], Literal) and user.invars[1].val == size
    )
    return bool(users) and all(map(is_mean, users)) and not any(atom is value for atom in jaxpr.outvars)


def _union(given: Sequence[Variation]) -> Variation:
    found = [one for one in given if one is not None]
    return frozenset().union(*found) if found else None
