"""Parts of traced programs as functions: chosen equations, from chosen variables to chosen variables.

In: an open jaxpr, its equations, constants. Out: callables on flat lists, counts of products, inlined calls.

    program = flatten(closed, lambda call: holds_a_scan(call))
    head = subprogram(program, program.equations[7:], inputs=[x], outputs=program.outputs)
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal, Var, jaxpr_as_fun, jaxprs_in_params

from shardlib.jax_compat import called, constants_of, opened, renamed


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A traced program with its constants by name; a static value.

    Args:
        like: an open jaxpr to take effects and the like from.
        equations: in an order that runs.
        inputs, outputs: variables; outputs may be literals.
        constants: values of the variables that nothing defines.
    """

    like: Any
    equations: tuple[Any, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    constants: dict[Any, Any]


def flatten(closed: Any, opens: Callable[[Any], bool]) -> Program:
    """The program with the equations of each call in its place whose equation `opens` says yes to.

    Calls are `jit`, `jax.checkpoint` and closed calls; others stay as they are.
    """
    return reflatten(program_of(closed), opens)


def program_of(closed: Any) -> Program:
    """A closed jaxpr as a `Program`."""
    jaxpr = opened(closed)
    return Program(
        like=jaxpr,
        equations=tuple(jaxpr.eqns),
        inputs=tuple(jaxpr.invars),
        outputs=tuple(jaxpr.outvars),
        constants=constants_of(closed),
    )


def reflatten(program: Program, opens: Callable[[Any], bool]) -> Program:
    """`flatten` of a program."""
    constants = dict(program.constants)
    equations, names = _flat(program.equations, {}, constants, opens, caller=None)
    outputs = tuple(_read(names, atom) for atom in program.outputs)
    return replace(program, equations=tuple(equations), outputs=outputs, constants=constants)


def _flat(
    given_equations: Iterable[Any], names: dict[Any, Any], constants: dict[Any, Any], opens: Any, *, caller: Any
) -> Any:
    """Equations under new names, calls opened; and the names of what they define."""
    equations = []
    for equation in given_equations:
        key = called(equation)
        inner = None if key is None else equation.params[key]
        if inner is None or equation.primitive.name == "shard_map" or not opens(equation):
            # Fresh variables: JAX shares one jaxpr between equal calls, and both may be opened here.
            fresh = equation.outvars if caller is None else [Var(var.aval) for var in equation.outvars]
            read = lambda atom, names=names: _read(names, atom)  # noqa: E731
            equations.append(renamed(equation, read, outputs=fresh, caller=caller))
            names.update(zip(equation.outvars, fresh, strict=True))
            continue
        own = constants_of(inner)
        constants.update(own)
        given = dict(zip(opened(inner).invars, (_read(names, atom) for atom in equation.invars), strict=True))
        scope = renamed(equation, lambda atom: atom, outputs=equation.outvars, caller=caller)
        inside, given = _flat(opened(inner).eqns, given, constants, opens, caller=scope)
        equations += inside
        names.update(zip(equation.outvars, (_read(given, atom) for atom in opened(inner).outvars), strict=True))
    return equations, names


def _read(names: dict[Any, Any], atom: Any) -> Any:
    return atom if isinstance(atom, Literal) else names.get(atom, atom)


def needed(equations: Iterable[Any], outputs: Iterable[Any]) -> tuple[list[Any], set[Any]]:
    """The equations that outputs depend on, in order, and every variable these and the outputs read."""
    read = {atom for atom in outputs if not isinstance(atom, Literal)}
    kept = []
    for equation in reversed(list(equations)):
        if any(var in read for var in equation.outvars):
            kept.append(equation)
            read |= {atom for atom in equation.invars if not isinstance(atom, Literal)}
    return kept[::-1], read


def subprogram(
    program: Program, equations: Iterable[Any], *, inputs: Sequence[Any], outputs: Sequence[Any]
) -> Callable[..., list[Any]]:
    """Chosen equations as a function of `inputs`, which are distinct variables, to a list of `outputs`."""
    run = jaxpr_as_fun(closed_part(program, equations, inputs=inputs, outputs=outputs))
    return lambda *given: list(run(*given))


def closed_part(
    program: Program, equations: Iterable[Any], *, inputs: Sequence[Any], outputs: Sequence[Any]
) -> ClosedJaxpr:
    """`subprogram` as a closed jaxpr."""
    kept, read = needed(equations, outputs)
    consts = [var for var in program.constants if var in read]
    missing = read - {var for e in kept for var in e.outvars} - set(inputs) - set(consts)
    assert not missing, f"the part reads {len(missing)} values that nothing gives it"
    jaxpr = program.like.replace(constvars=consts, invars=list(inputs), outvars=list(outputs), eqns=kept)
    return ClosedJaxpr(jaxpr, [program.constants[var] for var in consts])


def product_flops(jaxpr: Any) -> int:
    """FLOPs of matrix products and convolutions, two per multiply and add; the dearest branch of a conditional.

    Source: 2 x the sizes of all dims of the output and of the contracted ones; a convolution's contraction is its
    kernel without the output features.
    """
    return sum(map(equation_flops, opened(jaxpr).eqns))


def equation_flops(equation: Any) -> int:
    """`product_flops` of one equation, loops times their length; a `while` counts one turn."""
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[dim] for dim in contracted)
    if name == "conv_general_dilated":
        kernel, numbers = equation.invars[1].aval.shape, params["dimension_numbers"]
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) // kernel[numbers.rhs_spec[0]]
    inner = [product_flops(jaxpr) for jaxpr in jaxprs_in_params(params)]
    if name == "scan":
        return params["length"] * sum(inner)
    return max(inner, default=0) if name == "cond" else sum(inner)
