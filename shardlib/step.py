"""Gradients + optimizer -> train and eval step functions over a whole state.

In: a gradient function (see `shardlib.gradients`), an optax optimizer. Out: pure functions for `jax.jit`.

    step = train_step(gradients, optimizer, param_shardings=shardings)
    state, metrics = step(state, batch)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import optax

from shardlib import annotate
from shardlib.explicit import cast
from shardlib.gradients import GradientFunction
from shardlib.objective import LossFunction, Metrics, Sums, sums_of
from shardlib.trainable import merge, split


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """All that one step hands to the next; a pytree.

    Args:
        step: int32 scalar, optimizer steps done.
        params: parameters, in the model's own structure.
        opt_state: the optimizer's state.
        rng: typed PRNG key of the run; each step folds its number into it.
        collections: what the loss reads and updates beside parameters (running statistics), or None.
    """

    step: Any
    params: Any
    opt_state: Any
    rng: Any
    collections: Any = None


def train_step(
    gradients: GradientFunction, optimizer: optax.GradientTransformation, *, param_shardings: Any, mask: Any = None
) -> Callable[[TrainState, Any], tuple[TrainState, Metrics]]:
    """One optimizer step over the whole batch: `(state, batch) -> (state, metrics)`.

    Args:
        gradients: `(params, batch, rng, collections) -> (gradients, Sums)`.
        optimizer: an optax transformation.
        param_shardings: where the new parameters live; the optimizer's state may be split further (ZeRO).
        mask: a tree of bools, True for the parameters to train; None for all.
    """

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        rng = jax.random.fold_in(state.rng, state.step)
        grads, sums = gradients(state.params, batch, rng, state.collections)
        chosen, frozen = (state.params, None) if mask is None else split(state.params, mask)
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(grads, state.opt_state, chosen)
        chosen = optax.apply_updates(chosen, updates)
        params = chosen if mask is None else merge(chosen, frozen)
        params = jax.lax.with_sharding_constraint(params, param_shardings)
        return TrainState(
            step=state.step + 1, params=params, opt_state=opt_state, rng=state.rng, collections=sums.state
        ), sums.metrics()

    return step


def eval_step(loss: LossFunction, *, active: annotate.Active, compute_dtype: Any) -> Callable[[Any, Any, Any], Sums]:
    """Sums of the loss without randomness: `(params, batch, collections) -> Sums`, to be added over batches."""

    def step(params: Any, batch: Any, collections: Any) -> Sums:
        return sums_of(loss, cast(params, compute_dtype), batch, None, state=collections)

    return annotate.under(active, step)
