"""Every use of private JAX, each with the version it was seen in and the public API that would replace it.

In: values of public JAX. Out: what only private modules tell.

    used = inputs_used(closed_jaxpr, [False, True])
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

# Seen in JAX 0.10.2 and 0.12.0: the dead-code pass that jax.checkpoint and jax.linearize use. There is no public
# way to ask which inputs an output depends on through nested jit, scan and cond; a public one would replace it.
from jax._src.interpreters.partial_eval import dce_jaxpr
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun


def inputs_used(closed_jaxpr: Any, outputs: Sequence[bool]) -> list[bool]:
    """For every input of the jaxpr, whether one of the chosen outputs depends on it."""
    _, used = dce_jaxpr(closed_jaxpr.jaxpr, list(outputs))
    return list(used)


def pruned(function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    """The function with only the equations its outputs need, without its last argument, which it must not use.

    Args:
        function: traced once.
        arguments: arrays or abstract values; the last one may be abstract only.

    Raises:
        ValueError: an output depends on the last argument.
    """
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
    jaxpr, used = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    num_last = len(jax.tree.leaves(arguments[-1]))
    if any(used[len(used) - num_last :]):
        raise ValueError("an output depends on the argument that is to be pruned away")
    run = jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))
    treedef = jax.tree.structure(shape)

    def call(*given: Any) -> Any:
        leaves = [leaf for leaf, is_used in zip(jax.tree.leaves(given), used, strict=False) if is_used]
        return jax.tree.unflatten(treedef, run(*leaves))

    return call
