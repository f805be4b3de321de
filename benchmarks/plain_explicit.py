"""The explicit lowering by hand: `shard_map` over the data-like axis, gathers and reductions written out, accumulation.

In: the model of `plain_gpt`, a number of microbatches. Out: two train steps: with one reduction per step outside the
loop, and the usual `jax.jit` with `lax.scan` over microbatches, whose reductions the compiler puts inside it.

    step = functools.partial(explicit_step, config=config, at=at, optimizer=optimizer, num_microbatches=8)
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from benchmarks import plain_gpt
from benchmarks.plain_gpt import Layout
from models.gpt import Config


class ManualLayout(Layout):
    """Constraints inside a region manual over the batch's axis: only tensor is left to name."""

    def put(self, x: jax.Array, *spec: str | None) -> jax.Array:
        """Constrains an activation along tensor, if there is one."""
        if self.tensor is None:
            return x
        return jax.lax.with_sharding_constraint(x, P(*(axis if axis == self.tensor else None for axis in spec)))


def explicit_step(
    state: Any,
    batch: Any,
    *,
    config: Config,
    at: Layout,
    optimizer: optax.GradientTransformation,
    num_microbatches: int,
) -> Any:
    """One step: parameters gathered once, gradients accumulated locally, each reduced once."""
    params, opt_state = state
    specs = plain_gpt.param_specs(at)
    manual = jax.tree.map(lambda spec: _only(spec, at.batch), specs, is_leaf=_is_spec)
    inner = ManualLayout(mesh=at.mesh, batch=at.batch, fsdp=at.fsdp, tensor=at.tensor)

    def local(params: Any, batch: Any) -> Any:
        whole = jax.tree.map(lambda x, spec: _gather(x, spec, at.batch), params, manual)
        grads, metrics = accumulated(whole, batch, config=config, at=inner, num_microbatches=num_microbatches)
        metrics = {name: jax.lax.pmean(value, at.batch) for name, value in metrics.items()}
        shards = at.mesh.shape[at.batch]
        return jax.tree.map(lambda x, spec: _reduce(x, spec, at.batch) / shards, grads, manual), metrics

    grads, metrics = jax.shard_map(
        local,
        mesh=at.mesh,
        axis_names={at.batch},
        in_specs=(manual, P(at.batch)),
        out_specs=(manual, P()),
        check_vma=False,
    )(params, batch)
    grads = jax.lax.with_sharding_constraint(grads, plain_gpt.named(specs, at.mesh))
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), metrics


def scanned_step(
    state: Any,
    batch: Any,
    *,
    config: Config,
    at: Layout,
    optimizer: optax.GradientTransformation,
    num_microbatches: int,
) -> Any:
    """The usual way: `lax.scan` over microbatches under `jax.jit`, every collective left to the compiler."""
    params, opt_state = state
    grads, metrics = accumulated(params, batch, config=config, at=at, num_microbatches=num_microbatches)
    grads = jax.lax.with_sharding_constraint(grads, plain_gpt.named(plain_gpt.param_specs(at), at.mesh))
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), metrics


def accumulated(params: Any, batch: Any, *, config: Config, at: Layout, num_microbatches: int) -> Any:
    """Mean gradients and metrics over equal microbatches, one after another."""
    gradient = jax.grad(plain_gpt.loss, has_aux=True)
    if num_microbatches == 1:
        return gradient(params, batch, config=config, at=at)
    # Each microbatch takes every num_microbatches-th row, so that no row leaves its device.
    parts = jax.tree.map(lambda x: x.reshape(-1, num_microbatches, *x.shape[1:]).swapaxes(0, 1), batch)

    def body(total: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, gradient(params, part, config=config, at=at)), None

    shapes = jax.eval_shape(lambda: gradient(params, jax.tree.map(lambda x: x[0], parts), config=config, at=at))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    total, _ = jax.lax.scan(body, zeros, parts)
    return jax.tree.map(lambda leaf: leaf / num_microbatches, total)


def _gather(x: jax.Array, spec: P, axis: str) -> jax.Array:
    return jax.lax.all_gather(x, axis, axis=spec.index(axis), tiled=True) if axis in spec else x


def _reduce(x: jax.Array, spec: P, axis: str) -> jax.Array:
    if axis in spec:
        return jax.lax.psum_scatter(x, axis, scatter_dimension=spec.index(axis), tiled=True)
    return jax.lax.psum(x, axis)


def _only(spec: P, axis: str) -> P:
    return P(*(name if name == axis else None for name in spec))


def _is_spec(node: Any) -> bool:
    return isinstance(node, P)
