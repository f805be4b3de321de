"""The pipeline transform for somebody's own train step: `value_and_grad`.

In: a loss, a mesh with a stage axis, a schedule. Out: a function with the meaning of `jax.value_and_grad` of the whole
batch's loss, for parameters in the model's own form.

    value_and_grad = shardlib.pipeline.value_and_grad(loss, mesh=mesh, num_microbatches=8, specs=specs)
    value, grads = value_and_grad(params, batch, rng)
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshes.build import shape_of, with_auto_axes
from meshes.errors import ShardingError
from shardlib.batch_spec import ArraySpec, resized, with_axis
from shardlib.gradients import StepSpecs, gradient_function, staged_evaluation
from shardlib.objective import LossFunction
from shardlib.pipeline.parts import Parts
from shardlib.plan import STAGE, Plan, Vocabulary
from shardlib.rules import Rules
from shardlib.separable import NUM_PARTS, NUM_ROWS, check_same, first_rows
from shardlib.slices import BATCH, batch_dims
from shardlib.spec_axes import is_spec
from shardlib.specs import Resolution, array_leaves, resolve
from shardlib.staging import Staging, given, place_on_stages, stage_model
from shardlib.strategies import DATA_LIKE, default_rules
from shardlib.streamed_inputs import place_inputs


def value_and_grad(
    loss: LossFunction | Parts,
    *,
    mesh: Mesh,
    num_microbatches: int,
    schedule: str | None = None,
    chunks: int | None = None,
    rules: Rules | None = None,
    specs: Any = None,
    batch_spec: Any = None,
    residuals: str | None = None,
    vocabulary: Vocabulary = "gathered",
    idle: Any = None,
    random_slices: int | None = None,
    has_aux: bool = False,
    check_separable: bool = True,
) -> Callable[..., tuple[Any, Any]]:
    """Turns a loss into its value and gradients over all microbatches, by a pipeline schedule in one program.

    Args:
        loss: `(params, batch, rng) -> scalar | Loss`, of a model with layers under a scan or between
            `layer_boundary` markers; or its `Parts`, written by hand, or cut
            at the shapes of (one microbatch of one data shard, a key).
        mesh: with a stage axis; its data-like axes divide the batch, the others are left to the compiler.
        num_microbatches: parts of each data shard's rows.
        schedule, chunks, residuals, vocabulary, random_slices: as in a `Plan`.
        rules: logical to mesh axes, for the constraints inside the model and for `specs`.
        specs: a tree of `PartitionSpec` of the parameters over the other mesh axes. None takes them from the logical
            axes that the parameters carry (NNX variables, boxes) or that the rules' patterns name.
        batch_spec: a pytree of `ArraySpec`; None takes dim 0 of every input as its batch dim.
        idle: as in a `Plan`. None skips idle slots, unless the mesh has axes that are left to the compiler: nobody
            looks at the compiled program here, and in branches the compiler's own moves would hang it. Then it is
            "mask"; `audit.divergence` tells whether "skip" is safe.
        has_aux: return `((value, metrics), grads)`.
        check_separable: compare the loss of a few rows with that of their halves, in the first call that is not itself
            traced; not of `Parts`.

    Returns:
        `(params, batch, rng=None) -> (value, grads)`, jitted, and for use in a jitted step; gradients are float32, in
        the structure and shapes of the parameters. Layers move to their stages and back in every call: a `Trainer`
        stores them there.

    Raises:
        ShardingError: a mesh without stages; on the first call, a loss that cannot be cut, or that is not the sum of
            its rows.

    Example:
        >>> mesh = shardlib.make_mesh("stage=4,data=2")
        >>> step = shardlib.pipeline.value_and_grad(loss, mesh=mesh, num_microbatches=8, specs=specs)
    """
    if isinstance(loss, Parts):
        loss, check_separable = loss.loss, False  # they may be made for one number of rows
    mesh = with_auto_axes(mesh)
    shape = shape_of(mesh)
    if STAGE not in shape.names or shape.size(STAGE) == 1:
        raise ShardingError(f"mesh {shape} has no stage axis of more than one stage", fix="name stage=N in the mesh")
    others = [axis for axis in shape.names if axis not in (STAGE, *DATA_LIKE) and shape.size(axis) > 1]
    plan = Plan(
        mesh=shape,
        rules=rules or default_rules(),
        schedule=schedule,
        chunks=chunks,
        num_microbatches=num_microbatches,
        residuals=residuals,
        vocabulary=vocabulary,
        random_slices=random_slices,
        idle=idle or ("mask" if others else "skip"),
    )

    def run(params: Any, batch: Any, rng: Any) -> tuple[Any, Any]:
        found = _batch_spec(batch) if batch_spec is None else batch_spec
        staging, resolution = _staged(loss, plan, params, specs, found)
        place = lambda tree, wanted: jax.lax.with_sharding_constraint(  # noqa: E731
            tree, jax.tree.map(lambda spec: NamedSharding(mesh, spec), wanted, is_leaf=is_spec)
        )
        step = StepSpecs(
            params=resolution.specs,
            grads=resolution.specs,
            batch=place_inputs(resolve(found, plan.rules, mesh), staging.inputs, shape).specs,
            batch_spec=found,
            staging=staging,
            abstract_params=jax.eval_shape(lambda tree: tree, params),
        )
        gradients = gradient_function(loss, plan, mesh=mesh, specs=step)
        grads, sums = gradients(place(staging.store(params), resolution.specs), batch, rng, None)
        metrics = sums.metrics()
        value = metrics.pop("loss")
        return ((value, metrics) if has_aux else value), staging.restore(grads)

    jitted, checked = jax.jit(run), [not check_separable]

    def call(params: Any, batch: Any, rng: Any = None) -> tuple[Any, Any]:
        if not checked[0] and not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((params, batch))):
            checked[0] = True
            _check_separable(loss, plan, mesh, params, batch, specs=specs, batch_spec=batch_spec)
        return jitted(params, batch, rng)

    return call


def _check_separable(
    loss: LossFunction, plan: Plan, mesh: Mesh, params: Any, batch: Any, *, specs: Any, batch_spec: Any
) -> None:
    """Raises for a loss of which some rows together are not the sum of their halves."""
    found = _batch_spec(batch) if batch_spec is None else batch_spec
    if any(leaf.shape[leaf.axes.index(BATCH)] < NUM_ROWS for leaf in with_axis(found, BATCH)):
        return
    small = resized(found, batch=NUM_ROWS)
    rows = jax.device_put(first_rows(batch, batch_dims(found)), NamedSharding(mesh, P()))

    def compare(params: Any, rows: Any) -> list[Any]:
        staging, resolution = _staged(loss, plan, params, specs, found)
        step = StepSpecs(
            params=resolution.specs,
            grads=resolution.specs,
            batch=jax.tree.map(lambda _: P(), rows),
            batch_spec=small,
            staging=staging,
            abstract_params=jax.eval_shape(lambda tree: tree, params),
        )
        stored = staging.store(params)
        evaluate = functools.partial(staged_evaluation, loss, plan, mesh=mesh, specs=step)
        return [evaluate(num_microbatches=parts)(stored, rows, None).metrics() for parts in (1, NUM_PARTS)]

    together, apart = jax.jit(compare)(params, rows)
    check_same(together, apart, compute_dtype=plan.compute_dtype, why=plan.cuts_batch or "into data shards")


def _staged(loss: LossFunction, plan: Plan, params: Any, specs: Any, batch_spec: Any) -> tuple[Staging, Resolution]:
    """The model on its stages, and the specs of its stored parameters."""
    abstract = jax.eval_shape(lambda tree: tree, params)
    names = [leaf.names for leaf in array_leaves(params)]
    staging = stage_model(loss, plan, abstract, batch_spec, names).with_inputs(plan, batch_spec)
    stored = staging.stored_shapes(abstract)
    resolution = resolve(stored, plan.placement_rules, plan.mesh) if specs is None else given(stored, specs, plan.mesh)
    return staging, place_on_stages(resolution, staging, plan.mesh)


def _batch_spec(batch: Any) -> Any:
    """Every input with its dim 0 as the batch; scalars are shared by all rows."""
    return jax.tree.map(
        lambda leaf: ArraySpec(
            shape=tuple(jnp.shape(leaf)),
            dtype=str(jnp.result_type(leaf)),
            axes=(BATCH, *[None] * (jnp.ndim(leaf) - 1)) if jnp.ndim(leaf) else (),
        ),
        batch,
    )
