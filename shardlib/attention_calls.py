"""How often a loss attends in one evaluation, and which of that it computes again for its gradients.

In: a loss, abstract arguments. Out: its calls of the attention slot, layers of a loop counted.

    calls = attention_calls(loss, params, batch_spec, collections)    # one for each place, `times` for its loops
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxprs_in_params

from shardlib import annotate, batch_spec
from shardlib.context import AttentionCall
from shardlib.jax_compat import alive, is_checkpoint, opened
from shardlib.objective import LossFunction, sums_of

_MARK = "shardlib attention "


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedCall:
    """One place in a loss that attends; a static leaf.

    Args:
        call: what it is called with, the whole batch at once.
        times: how often in one evaluation; of a `while` loop once, since its turns are not known.
        again: it is computed once more in the backward pass (`jax.checkpoint` around it).
    """

    call: AttentionCall
    times: int
    again: bool


def attention_calls(loss: LossFunction, params: Any, spec: Any, collections: Any) -> tuple[RepeatedCall, ...]:
    """The places where a loss calls the slot, found by a trace in which each leaves a mark.

    Args:
        params, collections: abstract.
        spec: of the batch.
    """
    heard: list[AttentionCall] = []

    def marked(query: Any, key: Any, value: Any, **options: Any) -> Any:
        heard.append(AttentionCall.of(query, key, value, **options))
        return checkpoint_name(jnp.zeros((*query.shape[:3], value.shape[3]), query.dtype), f"{_MARK}{len(heard) - 1}")

    slot = annotate.Active(constrain=lambda x, names: x, ops={"attention": marked})
    evaluate = annotate.under(slot, lambda params, batch, key, state: sums_of(loss, params, batch, key, state=state))
    key = jax.eval_shape(lambda: jax.random.key(0))
    jaxpr = alive(jax.make_jaxpr(evaluate)(params, batch_spec.abstract(spec), key, collections))
    marks = _marks(jaxpr, times=1, again=False)
    return tuple(RepeatedCall(call=heard[number], times=times, again=again) for number, times, again in marks)


def _marks(jaxpr: Any, *, times: int, again: bool) -> Iterator[tuple[int, int, bool]]:
    for equation in opened(jaxpr).eqns:
        kind, given = equation.primitive.name, equation.params
        if kind == "name" and given["name"].startswith(_MARK):
            yield int(given["name"].removeprefix(_MARK)), times, again
        inside = times * given["length"] if kind == "scan" else times
        for inner in jaxprs_in_params(given):
            yield from _marks(inner, times=inside, again=again or is_checkpoint(equation))
