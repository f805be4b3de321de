"""Every use of private JAX, each with the version it was seen in and the public API that would replace it.

In: values of public JAX. Out: what only private modules tell.

    used = inputs_used(closed_jaxpr, [False, True])
"""

from collections.abc import Sequence
from typing import Any

# Seen in JAX 0.10.2 and 0.12.0: the dead-code pass that jax.checkpoint and jax.linearize use. There is no public
# way to ask which inputs an output depends on through nested jit, scan and cond; a public one would replace it.
from jax._src.interpreters.partial_eval import dce_jaxpr


def inputs_used(closed_jaxpr: Any, outputs: Sequence[bool]) -> list[bool]:
    """For every input of the jaxpr, whether one of the chosen outputs depends on it."""
    _, used = dce_jaxpr(closed_jaxpr.jaxpr, list(outputs))
    return list(used)
