"""The layers of a program as a loop, and how parameters reach its slices.

In: the equations before a loop and the positions of parameters. Out: `Chain`s from parameters to what the loop slices:
nothing at all, a move of the layers' dim to the front, casts, products with scalars.

    chains = chains_of(program, program.equations[:7], leaf_of, num_layers=12)
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal

from shardlib.programs import Program, subprogram

# Element by element on arrays of one shape, so that the slice of a layer can be computed from that layer's parameters.
ELEMENTWISE = (
    *("abs", "add", "convert_element_type", "copy", "cos", "div", "exp", "integer_pow", "log", "logistic", "max"),
    *("min", "mul", "neg", "pow", "reduce_precision", "rsqrt", "sin", "sqrt", "square", "stop_gradient", "sub", "tanh"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacked:
    """One kind of layer parameter over all layers; a static value.

    Args:
        leaves: positions of the parameters: one array of all layers, or one array per layer.
        dim: the dim of the layers in the one array; None where every layer has its own.
    """

    leaves: tuple[int, ...]
    dim: int | None

    def rows(self, leaves: list[Any]) -> Any:
        """All layers along dim 0, from the parameters of the loss."""
        own = [leaves[leaf] for leaf in self.leaves]
        return jnp.stack(own) if self.dim is None else jnp.moveaxis(own[0], self.dim, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """From parameters to one value of a layer; a static value.

    Args:
        stacked: the parameters.
        run: from one layer's parameters, in the order of `stacked`, to that layer's value.
    """

    stacked: tuple[Stacked, ...]
    run: Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Variables with one value per layer: one array of all layers along dim 0, or one variable per layer."""

    variables: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The layers of a program as a loop; a static value.

    Args:
        num_layers: turns of the loop.
        before, after: the other equations, in order.
        consts, initial: variables that every layer reads, and the first carries.
        sliced: what a layer has of its own.
        body: one turn: (constants, carries, own values) -> (carries, outputs).
        final: the variables of the last carries.
        outputs: what the layers make beside the carry.
        where: what was found, with the model's line.
    """

    num_layers: int
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    consts: tuple[Any, ...]
    initial: tuple[Any, ...]
    sliced: tuple[Chain | Given, ...]
    body: Program
    final: tuple[Any, ...]
    outputs: tuple[Given, ...]
    where: str


@dataclass(frozen=True, slots=True)
class _Made:
    """A variable made layer by layer: from which (parameter, dim of its layers, variable to start from), and how."""

    starts: tuple[tuple[int, int, Any], ...]
    equations: tuple[Any, ...]


def chains_of(
    program: Program, equations: Iterable[Any], leaf_of: dict[Any, int], *, num_layers: int
) -> dict[Any, Chain]:
    """Every variable that is made layer by layer from parameters, parameters themselves included."""
    made = {
        var: _Made(((leaf, 0, var),), ())
        for var, leaf in leaf_of.items()
        if var.aval.shape and var.aval.shape[0] == num_layers
    }
    for equation in equations:
        if len(equation.outvars) != 1:
            continue
        (out,) = equation.outvars
        dim = _moved_dim(equation, leaf_of)
        if dim is not None:
            made[out] = _Made(((leaf_of[equation.invars[0]], dim, out),), ())
        elif equation.primitive.name in ELEMENTWISE:
            arrays = [atom for atom in equation.invars if not isinstance(atom, Literal)]
            if arrays and all(atom in made and atom.aval.shape == out.aval.shape for atom in arrays):
                starts = dict.fromkeys(start for atom in arrays for start in made[atom].starts)
                earlier = {id(e): e for atom in arrays for e in made[atom].equations}
                made[out] = _Made(tuple(starts), (*earlier.values(), equation))
    return {var: _chain(program, var, how) for var, how in made.items()}


def _chain(program: Program, var: Any, how: _Made) -> Chain:
    stacked = tuple(Stacked(leaves=(leaf,), dim=dim) for leaf, dim, _ in how.starts)
    if not how.equations:
        return Chain(stacked=stacked, run=lambda layer: layer)
    made = subprogram(program, how.equations, inputs=[start for _, _, start in how.starts], outputs=[var])
    return Chain(stacked=stacked, run=lambda *layer: made(*(leaf[None] for leaf in layer))[0][0])


def _moved_dim(equation: Any, leaf_of: dict[Any, int]) -> int | None:
    """The dim that an equation moves to the front of a parameter, or None for any other equation."""
    if equation.primitive.name != "transpose" or equation.invars[0] not in leaf_of:
        return None
    permutation = list(equation.params["permutation"])
    dim = permutation[0]
    rest = [d for d in range(len(permutation)) if d != dim]
    return dim if dim > 0 and permutation[1:] == rest else None
