"""Gathers that the compiler's partitioner survives: their operands whole over the mesh axes it manages.

In: a loss traced inside a partly manual region. Out: the same loss, each gather's operand constrained to be whole.

    loss = with_whole_gathers(loss)

XLA's partitioner ends the process (PartitionGather, a failed check) on a gather whose operand is split over one such
axis beside another one; `jnp.take`, `take_along_axis` and losses with integer labels are gathers. Seen on XLA of JAX
0.10.2 and 0.12.0. The price is the operand on every device; comparing with an iota avoids gather and price.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Var, jaxpr_as_fun
from jax.sharding import PartitionSpec as P

from shardlib.jax_compat import held_jaxprs, opened, renamed, with_jaxpr


def with_whole_gathers(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The loss with whole operands of gathers; same values and gradients, whose scatters are whole, too."""

    def remade(*arguments: Any) -> Any:
        closed, shape = jax.make_jaxpr(loss, return_shape=True)(*arguments)
        outputs = jaxpr_as_fun(with_jaxpr(closed, _rewritten(opened(closed))))(*jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    return remade


def _rewritten(jaxpr: Any) -> Any:
    equations = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "gather":
            operand = equation.invars[0]
            whole = Var(operand.aval)
            equations.append(_constraint(operand, whole))
            given = iter([whole, *equation.invars[1:]])
            equation = renamed(equation, lambda atom, given=given: next(given), outputs=equation.outvars)
        elif any(_has_gather(inner) for _, inner in held_jaxprs(equation)):
            params = dict(equation.params)
            for name, inner in held_jaxprs(equation):
                params[name] = _within(inner)
            equation = equation.replace(params=params)
        equations.append(equation)
    return jaxpr.replace(eqns=equations)


def _within(held: Any) -> Any:
    """A parameter that holds a jaxpr, or several, rewritten."""
    if isinstance(held, tuple | list):
        return type(held)(with_jaxpr(one, _rewritten(opened(one))) for one in held)
    return with_jaxpr(held, _rewritten(opened(held)))


def _has_gather(held: Any) -> bool:
    several = held if isinstance(held, tuple | list) else [held]
    return any(
        equation.primitive.name == "gather" or any(_has_gather(inner) for _, inner in held_jaxprs(equation))
        for one in several
        for equation in opened(one).eqns
    )


def _constraint(operand: Any, result: Any) -> Any:
    """An equation that constrains a variable to be whole."""
    made = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, P()))(
        jax.ShapeDtypeStruct(operand.aval.shape, operand.aval.dtype)
    )
    return renamed(opened(made).eqns[0], lambda atom: operand, outputs=[result])
