"""A loss under a plan -> gradients of the whole batch's objective, by the lowering the plan chose.

In: the loss, the plan, a mesh, specs. Out: `(params, batch, rng, collections) -> (gradients, Sums)` for `step`.

    value = gradient_function(loss, plan, mesh=mesh, specs=specs)
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from meshes.errors import ShardingError
from shardlib import accumulate, annotate
from shardlib import batch_spec as batches
from shardlib.constant_collections import as_inputs, specs_with_constants, with_constants
from shardlib.context import ContextUse
from shardlib.explicit import Layout, cast, data_like, explicit_gradients
from shardlib.objective import LossFunction, Sums
from shardlib.pipelined import Options, pipelined_gradients, pipelined_sums
from shardlib.place import active, shardings
from shardlib.plan import STAGE, Plan
from shardlib.remat import parse_policy, with_policy
from shardlib.slices import BATCH, batch_dims, check_divides, cut, part_keys
from shardlib.spec_axes import axes_of, is_spec
from shardlib.spread_vocabulary import with_spread_slots
from shardlib.staging import Staging
from shardlib.whole_gathers import with_whole_gathers

GradientFunction = Callable[[Any, Any, Any, Any], tuple[Any, Sums]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpecs:
    """Specs of what a step reads and makes; a static value.

    Args:
        params: of the stored parameters.
        grads: of the reduced gradients.
        batch: of the batch.
        batch_spec: the batch itself, as `ArraySpec`s.
        mask: a tree of bools, True for the parameters to train; None for all. `grads` has those alone.
        staging: how the layers are staged; for a pipeline.
        abstract_params: parameters in the model's own shapes; for a pipeline.
        context: how sequences are divided; None where they are not.
        constants: collections that the loss does not change, abstract, for a plan that cuts the batch; else None.
    """

    params: Any
    grads: Any
    batch: Any
    batch_spec: Any
    mask: Any = None
    staging: Staging | None = None
    abstract_params: Any = None
    context: ContextUse | None = None
    constants: Any = None

    def with_inputs(self) -> "StepSpecs":
        """The specs of a step whose batch is `(batch, constants)`."""
        return replace(
            self,
            batch=specs_with_constants(self.batch, self.constants),
            batch_spec=with_constants(self.batch_spec, self.constants),
            constants=None,
        )


def gradient_function(loss: LossFunction, plan: Plan, *, mesh: Mesh, specs: StepSpecs) -> GradientFunction:
    """Builds the gradients of a train step.

    Raises:
        ShardingError: a batch that the plan's microbatches or random slices do not divide.
    """
    if specs.constants is not None:
        gradients = gradient_function(as_inputs(loss), plan, mesh=mesh, specs=specs.with_inputs())

        def with_state(params: Any, batch: Any, rng: Any, collections: Any) -> tuple[Any, Sums]:
            grads, sums = gradients(params, (batch, collections), rng, None)
            return grads, replace(sums, state=collections)

        return with_state
    lowering, _ = plan.chosen_lowering
    num_slices = slices_per_microbatch(plan, mesh=mesh, specs=specs)
    if plan.remat is not None:
        loss = with_policy(loss, parse_policy(plan.remat))
    build = _pipelined if plan.is_pipeline else _explicit if lowering == "explicit" else _automatic
    return build(loss, plan, mesh, specs, num_slices)


def slices_per_microbatch(plan: Plan, *, mesh: Mesh, specs: StepSpecs) -> int:
    """How many slices each microbatch has: on each device (explicit lowering), or on all together (automatic)."""
    lowering, _ = plan.chosen_lowering
    shards, microbatches = plan.num_batch_shards, plan.num_microbatches
    parts = plan.random_slices
    if lowering == "explicit":
        unit, why = shards * microbatches, f"{shards} shards x {microbatches} microbatches"
        parts = unit if parts is None else parts
    else:
        unit, why = microbatches, f"{microbatches} microbatches"
        parts = unit if parts is None else parts
        if parts > microbatches:
            unit, why = shards * microbatches, f"{shards} shards x {microbatches} microbatches"
    if parts % unit:
        raise ShardingError(
            f"random_slices={parts} is not a multiple of {unit} ({why})",
            fix=f"use random_slices={(parts // unit + 1) * unit}, or leave it out",
        )
    check_divides(specs.batch_spec, parts=parts, why=f"random_slices={parts}" if plan.random_slices else why)
    return parts // (shards * microbatches if lowering == "explicit" else microbatches)


def _automatic(loss: LossFunction, plan: Plan, mesh: Mesh, specs: StepSpecs, num_slices: int) -> GradientFunction:
    slice_axes = data_like(mesh) if num_slices > 1 else ()
    loss = annotate.under(
        active(
            plan.rules,
            mesh,
            hidden=slice_axes,
            sum_dtype=plan.tensor_reduce_dtype,
            vocab_shards=plan.vocab_shards,
            context=specs.context,
            kernels=plan.kernels == "fused",
        ),
        loss,
    )
    dims, wanted = batch_dims(specs.batch_spec), shardings(specs.grads, mesh)
    sizes = {"num_microbatches": plan.num_microbatches, "num_slices": num_slices}
    # Slices of the plan's own are rows in a row; without them a microbatch takes its rows from every shard.
    num_shards = 1 if plan.random_slices else plan.num_batch_shards

    def value(params: Any, batch: Any, rng: Any, collections: Any) -> tuple[Any, Sums]:
        grads, sums = accumulate.gradients(
            loss,
            params,
            cut(batch, dims, **sizes, num_shards=num_shards),
            part_keys(rng, first=0, **sizes),
            state=collections,
            reduce=lambda sums: sums,
            fetch=lambda params, piece: (cast(params, jnp.dtype(plan.compute_dtype)), piece),
            slice_axes=slice_axes,
            mask=specs.mask,
        )
        return jax.lax.with_sharding_constraint(grads, wanted), sums

    return value


def _explicit(loss: LossFunction, plan: Plan, mesh: Mesh, specs: StepSpecs, num_slices: int) -> GradientFunction:
    manual = data_like(mesh)
    loss = _inside(loss, plan, mesh, specs, hidden=manual)
    gradients = explicit_gradients(loss, _layout(plan, mesh, specs, num_slices))

    def value(params: Any, batch: Any, rng: Any, collections: Any) -> tuple[Any, Sums]:
        assert collections is None, "collections that this lowering takes are among its inputs"
        return gradients(params, batch, rng)

    return value


def _pipelined(loss: LossFunction, plan: Plan, mesh: Mesh, specs: StepSpecs, num_slices: int) -> GradientFunction:
    assert specs.staging is not None, "bind stages the model of a plan with a stage axis"
    gradients = pipelined_gradients(
        _inside(loss, plan, mesh, specs, hidden=(STAGE, *data_like(mesh))),
        specs.staging,
        layout=_layout(plan, mesh, specs, num_slices),
        abstract_params=specs.abstract_params,
        options=_options(plan, mesh),
    )

    def value(params: Any, batch: Any, rng: Any, collections: Any) -> tuple[Any, Sums]:
        assert collections is None, "collections that a pipeline takes are among its inputs"
        return gradients(params, batch, rng)

    return value


def staged_evaluation(
    loss: LossFunction, plan: Plan, *, mesh: Mesh, specs: StepSpecs, num_microbatches: int | None = None
) -> Callable[..., Sums]:
    """Sums of the loss over the stages, without randomness: `(params, batch, collections) -> Sums`.

    Args:
        specs: of a batch of any size: rows that the data-like axes do not divide are evaluated whole on each of them,
            and the largest number of microbatches up to the plan's that divides the rows is taken.
        num_microbatches: exactly so many.
    """
    if specs.constants is not None:
        sums = staged_evaluation(
            as_inputs(loss), plan, mesh=mesh, specs=specs.with_inputs(), num_microbatches=num_microbatches
        )
        return lambda params, batch, collections: sums(params, (batch, collections), None)
    assert specs.staging is not None
    rows = [leaf.shape[leaf.axes.index(BATCH)] for leaf in batches.with_axis(specs.batch_spec, BATCH)]
    divided = any(data_like(mesh)) and all(
        axes_of(entry) for entry in _batch_entries(specs.batch, batch_dims(specs.batch_spec))
    )
    local = [count // (plan.num_batch_shards if divided else 1) for count in rows] or [1]
    fitting = (k for k in range(1, plan.num_microbatches + 1) if all(count % k == 0 for count in local))
    sums = pipelined_sums(
        _inside(loss, plan, mesh, specs, hidden=(STAGE, *data_like(mesh))),
        specs.staging,
        layout=replace(_layout(plan, mesh, specs, 1), num_microbatches=num_microbatches or max(fitting)),
        abstract_params=specs.abstract_params,
        options=_options(plan, mesh),
        divided=divided,
    )
    return lambda params, batch, collections: sums(params, batch)


def _batch_entries(specs: Any, dims: Any) -> list[Any]:
    """The entry of the batch dim in the spec of every input that has one."""
    pairs = zip(jax.tree.leaves(specs, is_leaf=is_spec), jax.tree.leaves(dims), strict=True)
    return [spec[dim] if dim < len(spec) else None for spec, dim in pairs if dim >= 0]


def _inside(loss: LossFunction, plan: Plan, mesh: Mesh, specs: StepSpecs, *, hidden: tuple[str, ...]) -> LossFunction:
    """The loss with constraints for a region manual over some axes, which they leave alone.

    Where the compiler manages several axes in it, gathers get whole operands: it would end the process otherwise.
    """
    in_force = active(
        plan.rules,
        mesh,
        hidden=hidden,
        manual=bool(hidden),
        sum_dtype=plan.tensor_reduce_dtype,
        vocab_shards=plan.vocab_shards,
        context=specs.context,
        kernels=plan.kernels == "fused",
    )
    if plan.vocabulary == "spread":
        in_force = with_spread_slots(in_force, stage=STAGE, parts=plan.mesh.size(STAGE))
    managed = [axis for axis in mesh.axis_names if axis not in hidden and mesh.shape[axis] > 1]
    loss = annotate.under(in_force, loss)
    return with_whole_gathers(loss) if hidden and len(managed) > 1 else loss


def _options(plan: Plan, mesh: Mesh) -> Options:
    platform = mesh.devices.flat[0].platform
    return Options(residuals=plan.kept_residuals, skip=plan.idle == "skip", inside=platform == "cpu")


def _layout(plan: Plan, mesh: Mesh, specs: StepSpecs, num_slices: int) -> Layout:
    return Layout(
        mesh=mesh,
        params=specs.params,
        grads=specs.grads,
        batch=specs.batch,
        batch_dims=batch_dims(specs.batch_spec),
        num_microbatches=plan.num_microbatches,
        num_slices=num_slices,
        gather=plan.gather,
        compute_dtype=jnp.dtype(plan.compute_dtype),
        reduce_dtype=jnp.dtype(plan.reduce_dtype),
        mask=specs.mask,
    )
