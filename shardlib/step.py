"""Loss + optimizer -> train and eval step functions over a whole state; what a plan decides is entered in the trace.

In: a loss in the protocol of `shardlib.loss`, an optax optimizer. Out: pure functions for `jax.jit`.

    step = train_step(loss, optimizer, active=active(rules, mesh), param_shardings=shardings)
    state, metrics = step(state, batch)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from meshes.errors import ShardingError, raise_collected
from shardlib import annotate
from shardlib.loss import Loss, Mean, Sum

LossFunction = Callable[[Any, Any, Any], Any]
Metrics = dict[str, jax.Array]
_RESERVED = ("loss", "weight")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """All that one step hands to the next; a pytree.

    Args:
        step: int32 scalar, optimizer steps done.
        params: parameters, in the model's own structure.
        opt_state: the optimizer's state.
        rng: typed PRNG key of the run; each step folds its number into it.
    """

    step: Any
    params: Any
    opt_state: Any
    rng: Any


def evaluate_loss(loss: LossFunction, params: Any, batch: Any, rng: Any) -> tuple[jax.Array, Metrics]:
    """The objective as a float scalar, and metrics: `loss`, `weight` and the values of the loss's `aux`.

    Raises:
        ShardingError: the loss returned something that is no scalar and no `Loss`.
    """
    result = loss(params, batch, rng)
    if not isinstance(result, Loss):
        _check_scalar(result, "the loss", of=jnp.floating)
        return result, {"loss": result, "weight": jnp.ones((), jnp.float32)}
    # An integer total would have a gradient of zero without a word; a weight may be a count.
    for part, kind in (("total", jnp.floating), ("weight", jnp.number), ("per_microbatch", jnp.floating)):
        _check_scalar(getattr(result, part), f"the {part} of the loss", of=kind)
    _check_aux(result.aux)
    if result.state is not None:
        raise ShardingError(
            "the loss returned updated state (running statistics), which the train step does not carry yet",
            fix="use a model without batch statistics, such as LayerNorm for BatchNorm",
        )
    value = result.value()
    return value, {"loss": value, "weight": result.weight, **{k: metric.value() for k, metric in result.aux.items()}}


def train_step(
    loss: LossFunction,
    optimizer: optax.GradientTransformation,
    *,
    active: annotate.Active,
    param_shardings: Any,
) -> Callable[[TrainState, Any], tuple[TrainState, Metrics]]:
    """One optimizer step over the whole batch: `(state, batch) -> (state, metrics)`.

    Args:
        loss: `(params, batch, rng) -> scalar | Loss`.
        optimizer: an optax transformation.
        active: what constraints mean.
        param_shardings: where parameters and their gradients live.
    """

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        rng = jax.random.fold_in(state.rng, state.step)
        objective = lambda params: evaluate_loss(loss, params, batch, rng)  # noqa: E731
        grads, metrics = jax.grad(objective, has_aux=True)(state.params)
        grads = jax.lax.with_sharding_constraint(grads, param_shardings)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(step=state.step + 1, params=params, opt_state=opt_state, rng=state.rng), metrics

    return annotate.under(active, step)


def eval_step(loss: LossFunction, *, active: annotate.Active) -> Callable[[Any, Any], Metrics]:
    """Metrics of the loss without randomness: `(params, batch) -> metrics`."""
    return annotate.under(active, lambda params, batch: evaluate_loss(loss, params, batch, None)[1])


def _check_scalar(value: Any, what: str, *, of: Any) -> None:
    if not jax.tree_util.all_leaves([value]):
        raise ShardingError(
            f"{what} is a {type(value).__name__}, not a scalar",
            fix="return a scalar or Loss(total, weight, aux=...); metrics go into aux as Mean or Sum",
        )
    shape, dtype = jnp.shape(value), jnp.result_type(value)
    if shape != ():
        raise ShardingError(
            f"{what} has shape {list(shape)}, not a scalar",
            fix="return Loss(total=values.sum(), weight=values.size), or the mean",
        )
    if not jnp.issubdtype(dtype, of):
        wanted = "a floating-point number" if of is jnp.floating else "a number"
        raise ShardingError(f"{what} has dtype {dtype}, not {wanted}", fix="return a floating-point scalar")


def _check_aux(aux: Any) -> None:
    problems: list[str] = []
    for name, metric in aux.items():
        if not isinstance(metric, Mean | Sum):
            problems.append(
                f"metric {name!r} is a {type(metric).__name__}, and only Mean and Sum say how it combines over shards; "
                "fix: write Mean(total, weight) or Sum(total)"
            )
        if name in _RESERVED:
            problems.append(f"metric {name!r} has the name of a metric of the step; fix: call it otherwise")
    raise_collected(problems, heading="the aux of the loss cannot be used:")
