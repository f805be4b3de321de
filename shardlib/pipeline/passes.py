"""The forward and the backward pass of a virtual stage, and what is kept between them.

In: a `StageWork`. Out: `Passes`: either the stage's input is kept and its whole forward pass repeated, or what the
policy of its layers keeps, and each layer repeats what that leaves out.

    passes = recomputing(work, chosen)
    passes = storing(work, chosen, like=(rows, outer, piece, stage, message))
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, jaxpr_as_fun

from shardlib.jax_compat import known_part, opened
from shardlib.pipeline.parts import Leaves
from shardlib.pipeline.stage import StageWork
from shardlib.programs import product_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Which arrays have gradients, by position; a static leaf."""

    rows: tuple[bool, ...]
    outer: tuple[bool, ...]
    message: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Both passes of a virtual stage; a static value.

    Args:
        keeps_input: the backward pass reads the stage's input instead of stored residuals.
        saved: what the forward pass leaves for the backward pass, abstract.
        forward: (rows, outer, piece, stage, message) -> (message, saved).
        backward: (rows, outer, piece, stage, message or saved, cotangents of the message) -> gradients of the chosen
            rows, outer parameters and message.
    """

    keeps_input: bool
    saved: tuple[Any, ...]
    forward: Callable[..., tuple[Leaves, Leaves]]
    backward: Callable[..., tuple[Leaves, Leaves, Leaves]]


def chosen_of(leaves: Sequence[Any], mask: Sequence[bool]) -> Leaves:
    """The leaves that the mask chooses."""
    return [leaf for leaf, wanted in zip(leaves, mask, strict=True) if wanted]


def merged(chosen: Sequence[Any], leaves: Sequence[Any], mask: Sequence[bool]) -> Leaves:
    """The leaves with the chosen ones replaced."""
    new = iter(chosen)
    return [next(new) if wanted else leaf for leaf, wanted in zip(leaves, mask, strict=True)]


def recomputing(work: StageWork, chosen: Chosen) -> Passes:
    """Keeps the input of the stage; the backward pass runs the stage again, with all its layers' residuals at once."""

    def forward(rows: Leaves, outer: Leaves, piece: Leaves, stage: Any, message: Leaves) -> tuple[Leaves, Leaves]:
        return work.forward(rows, outer, piece, stage, message), []

    def backward(rows: Leaves, outer: Leaves, piece: Leaves, stage: Any, message: Leaves, cotangents: Leaves) -> Any:
        _, pull, _ = _vjp(work, chosen, rows, outer, piece, stage, message)
        return pull(cotangents)

    return Passes(keeps_input=True, saved=(), forward=forward, backward=backward)


def storing(work: StageWork, chosen: Chosen, *, like: tuple[Leaves, Leaves, Leaves, Any, Leaves]) -> Passes:
    """Keeps what the backward pass reads, but for what it has anyway or makes again without a matrix product.

    Args:
        work: what a stage computes; its policy decides what the backward pass reads.
        chosen: what has gradients.
        like: arguments of the forward pass, abstract.
    """
    held: list[Any] = []

    def traced(*arguments: Any) -> tuple[Leaves, Leaves]:
        message, pull, rest = _vjp(work, chosen, *arguments)
        leaves, treedef = jax.tree.flatten(pull)
        held[:] = [treedef]
        return merged(message, rest, chosen.message), leaves

    closed = jax.make_jaxpr(traced)(*like)
    run, num_message = jaxpr_as_fun(closed), len(like[-1])
    num_inputs = len(jax.tree.leaves(like[:-1]))
    plan = _plan(closed, num_inputs=num_inputs, num_message=num_message)

    def forward(*arguments: Any) -> tuple[Leaves, Leaves]:
        made = run(*jax.tree.leaves(arguments))
        residuals = made[num_message:]
        return list(made[:num_message]), [residuals[i] for i in plan.stored]

    def backward(
        rows: Leaves, outer: Leaves, piece: Leaves, stage: Any, saved: Leaves, cotangents: Leaves
    ) -> tuple[Leaves, Leaves, Leaves]:
        inputs = jax.tree.leaves((rows, outer, piece, stage))
        pull = jax.tree.unflatten(held[0], plan.residuals(inputs, saved))
        return pull(cotangents)

    residuals = [var.aval for var in opened(closed).outvars[num_message:]]
    return Passes(
        keeps_input=False,
        saved=tuple(residuals[i] for i in plan.stored),
        forward=forward,
        backward=backward,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Residuals:
    """Where each residual of the backward pass comes from.

    Args:
        fixed: literals, by position among the residuals.
        given: residuals that are inputs other than the message, and which.
        recomputed: residuals made again from those inputs.
        stored: residuals to keep.
        copies: residuals that equal an earlier one.
        again: inputs -> the recomputed residuals.
        count: how many residuals there are.
    """

    fixed: dict[int, Any]
    given: dict[int, int]
    recomputed: tuple[int, ...]
    stored: tuple[int, ...]
    copies: dict[int, int]
    again: Callable[..., Any]
    count: int

    def residuals(self, inputs: Leaves, saved: Leaves) -> Leaves:
        """All of them, in order."""
        found: dict[int, Any] = {i: jnp.asarray(value) for i, value in self.fixed.items()}
        found |= {i: inputs[position] for i, position in self.given.items()}
        found |= dict(zip(self.recomputed, self.again(*inputs), strict=True))
        found |= dict(zip(self.stored, saved, strict=True))
        found |= {i: found[first] for i, first in self.copies.items()}
        return [found[i] for i in range(self.count)]


def _plan(closed: Any, *, num_inputs: int, num_message: int) -> _Residuals:
    jaxpr = opened(closed)
    residuals = jaxpr.outvars[num_message:]
    position = {var: i for i, var in enumerate(jaxpr.invars[:num_inputs])}
    fixed, given, copies, first = {}, {}, {}, dict[Any, int]()
    for i, atom in enumerate(residuals):
        if isinstance(atom, Literal):
            fixed[i] = atom.val
        elif atom in first:
            copies[i] = first[atom]
        else:
            first[atom] = i
            if atom in position:
                given[i] = position[atom]
    rest = [i for i in first.values() if i not in given]
    unknown = [False] * num_inputs + [True] * (len(jaxpr.invars) - num_inputs)
    cheap, again = known_part(
        closed, unknown, [num_message + i for i in rest], allow=lambda made: product_flops(made) == 0
    )
    recomputed = tuple(i for i, is_cheap in zip(rest, cheap, strict=True) if is_cheap)
    return _Residuals(
        fixed=fixed,
        given=given,
        recomputed=recomputed,
        stored=tuple(i for i in rest if i not in recomputed),
        copies=copies,
        again=again,
        count=len(residuals),
    )


def _vjp(
    work: StageWork, chosen: Chosen, rows: Leaves, outer: Leaves, piece: Leaves, stage: Any, message: Leaves
) -> tuple[Leaves, Callable[..., Any], Leaves]:
    """The differentiable part of the next message, its pull-back, and the whole next message."""

    def run(some_rows: Leaves, some_outer: Leaves, some_message: Leaves) -> tuple[Leaves, Leaves]:
        made = work.forward(
            merged(some_rows, rows, chosen.rows),
            merged(some_outer, outer, chosen.outer),
            piece,
            stage,
            merged(some_message, message, chosen.message),
        )
        return chosen_of(made, chosen.message), made

    return jax.vjp(
        run,
        chosen_of(rows, chosen.rows),
        chosen_of(outer, chosen.outer),
        chosen_of(message, chosen.message),
        has_aux=True,
    )
