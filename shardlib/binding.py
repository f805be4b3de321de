"""Model + loss + plan -> `Bound`: every decision of the plan about this model; no devices, nothing allocated.

In: a linen module, or an NNX module or factory; a loss; a plan; a batch spec. Out: a value that explains itself,
initialises the model, and is what a trainer runs.

    bound = bind(model, loss, Plan(mesh="data=2,tensor=4"), batch_spec)
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import optax
from flax import nnx

from meshes.build import abstract_mesh
from meshes.errors import ShardingError, nearest, raise_collected
from meshes.shape import STANDARD_AXES
from shardlib import batch_spec as batches
from shardlib.annotate import under
from shardlib.attention_calls import attention_calls
from shardlib.audit.redundant_sums import check_sums, unbound_axes_explained
from shardlib.constant_collections import as_inputs, changed, with_constants
from shardlib.context import (
    BY_POSITION,
    CONTEXT,
    IN_ORDER,
    LENGTH,
    NO_ATTENTION,
    AttentionCall,
    ContextUse,
    Heard,
    check_lengths,
    check_slot,
    choose_context,
    divides_sequence,
    kernel_lines,
)
from shardlib.cost.promises import Arrays, Attention, PromisedCollective, Stages, promised
from shardlib.decide import Decision, Names, split_blocks
from shardlib.explanation import Explanation, tree_bytes
from shardlib.explicit import cast
from shardlib.jax_compat import inputs_used
from shardlib.objective import LossFunction, Sums, sums_of
from shardlib.optimizer_specs import resolve_state
from shardlib.pipeline.cutting import cut
from shardlib.place import active
from shardlib.plan import STAGE, Plan
from shardlib.propose import is_bare
from shardlib.spec_axes import is_spec
from shardlib.specs import Entry, Resolution, array_leaves, entry_of, notices_of, resolve
from shardlib.staging import Staging, abstract_part, place_on_stages, stage_model
from shardlib.staging_facts import staging_facts
from shardlib.strategies import DATA_LIKE, default_rules
from shardlib.streamed_inputs import place_inputs
from shardlib.variables import abstract_variables, creator, model_name, padded, padding, unboxed, unpadded
from shardlib.zero import zero_specs


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A model under a plan; a static value.

    Args:
        plan: the plan, its mesh without -1.
        loss: `(params, batch, rng) -> scalar | Loss`.
        batch_spec: what one batch looks like.
        init: PRNG key -> (parameters, collections); pure, to be jitted with their shardings.
        abstract_params: parameters as `jax.ShapeDtypeStruct`s, without boxes, as the loss gets them under the plan.
        logical_params: the same without the padding of vocabularies that the rules ask for: the model's own form.
        params: specs of the parameters, with reasons.
        abstract_collections, collections: the same for what the loss reads and updates beside parameters; None
            for a model without.
        batch: specs of the batch, with reasons.
        activations: decisions about every distinct named activation of the loss.
        ready_params: the parameters of a module that was given built, or None.
        num_sums: scalars that the loss sums over the batch: its total, weight and metrics.
        notices: what is legal and still worth saying about rules and arrays.
        staging: how the layers are staged; None without a stage axis.
        context: how sequences are divided; None without a context axis.
        kernels: which kernels compute attention, by target, in words.
        constants: the collections, abstract, where the loss does not change them and the plan cuts the batch; else
            None.
    """

    plan: Plan
    loss: LossFunction
    batch_spec: Any
    init: Callable[[Any], Any]
    abstract_params: Any
    logical_params: Any
    params: Resolution
    abstract_collections: Any
    collections: Resolution | None
    batch: Resolution
    activations: tuple[Entry, ...]
    ready_params: Any
    num_sums: int
    notices: tuple[str, ...]
    staging: Staging | None = None
    context: ContextUse | None = None
    kernels: tuple[str, ...] = ()
    constants: Any = None

    @property
    def stored_params(self) -> Any:
        """The parameters as a step holds them, abstract: a pipeline keeps layers in the order of its ranks."""
        return self.abstract_params if self.staging is None else self.staging.stored_shapes(self.abstract_params)

    def store(self, params: Any) -> Any:
        """The model's own parameters in the form a step holds them; the inverse of `restore`."""
        stored = jax.tree.map(padded, params, self.abstract_params)
        return stored if self.staging is None else self.staging.store(stored)

    def restore(self, stored: Any) -> Any:
        """Parameters that a step holds, in the model's own form: layers in order, vocabularies without padding."""
        own = stored if self.staging is None else self.staging.restore(stored)
        return jax.tree.map(unpadded, own, self.logical_params)

    def explain(self, optimizer: optax.GradientTransformation | None = None) -> Explanation:
        """Every array with its spec and reasons, and bytes per device; adamw unless another optimizer is given."""
        optimizer = optimizer or optax.adamw(1e-3)
        state_like, zero_notices = self.state_specs()
        names = [entry.names for entry in self.params.entries]
        state = resolve_state(optimizer, self.stored_params, state_like, mesh=self.plan.mesh, names=names)
        facts = None if self.staging is None else staging_facts(self.staging, self.plan, self.abstract_params)
        return Explanation(
            mesh=self.plan.mesh,
            parameters=self.params.entries,
            batch=self.batch.entries,
            activations=self.activations,
            gradient_bytes=tree_bytes(self.stored_params, state_like, self.plan.mesh),
            optimizer=state.entries,
            choices=(*self.plan.choices, *self._context_lines(), *self.kernels),
            promises=self.promised(),
            notices=(*self.notices, *zero_notices, *state.notices, *(facts.notices if facts else ())),
            pipeline=facts,
        )

    def _context_lines(self) -> tuple[str, ...]:
        if self.context is None:
            return ()
        first, *rest = self.context.reason.splitlines()
        return (
            f"sequences divided over context={self.context.shards}: {self.context.title}, tokens held "
            f"{self.context.placement}, because {first}",
            *rest,
        )

    def promised(self, trainable: Any = None) -> tuple[PromisedCollective, ...]:
        """What one train step will move between devices, by mesh axis, in bytes that each device sends.

        Args:
            trainable: booleans in the parameters' structure, for a step that trains a subset; None for all.
        """
        grad_specs, _ = self.state_specs()
        return promised(
            self.plan,
            Arrays(
                parameters=self.params.entries,
                grad_specs=tuple(jax.tree.leaves(grad_specs, is_leaf=is_spec)),
                activations=self.activations,
                num_sums=self.num_sums,
                trainable=None if trainable is None else tuple(map(bool, jax.tree.leaves(trainable))),
                stages=self._stages(),
                attention=self._attention(),
            ),
        )

    def _attention(self) -> Attention | None:
        """What its promises need of attention over divided sequences; the loss is traced once more to count calls."""
        if self.context is None or self.context.kind == NO_ATTENTION:
            return None
        params = jax.eval_shape(lambda tree: cast(tree, self.plan.compute_dtype), self.logical_params)
        calls = attention_calls(self.loss, params, self.batch_spec, self.abstract_collections)
        return Attention(kind=self.context.kind, placement=self.context.placement, calls=calls)

    def _stages(self) -> Stages | None:
        """What its promises need of a pipeline; messages are traced again where the plan changes their form."""
        plan, staging = self.plan, self.staging
        if staging is None:
            return None
        parts, shares = staging.parts, plan.num_batch_shards * plan.num_microbatches
        num_slices = max((plan.random_slices or shares) // shares, 1)
        if num_slices > 1 or plan.compute_dtype != "float32":
            smaller = replace(
                plan,
                num_microbatches=plan.num_microbatches * num_slices,
                random_slices=None,
                schedule=None,
                chunks=None,
            )
            params = jax.eval_shape(lambda tree: cast(tree, plan.compute_dtype), self.abstract_params)
            loss, batch_spec = _with_constants(self.loss, self.batch_spec, self.constants)
            part, params, piece = abstract_part(loss, smaller, params, batch_spec)
            parts = cut(part, params, piece, layer_leaves=staging.layer_leaves)
        return Stages(
            parts=parts,
            num_slices=num_slices,
            partition=staging.partition,
            lowered=staging.lowered,
            spread=tuple(staging.spread),
            spread_calls=staging.spread_calls,
            inputs=staging.inputs,
            input_specs=tuple(entry.spec for entry in self.batch.entries),
        )

    def state_specs(self) -> tuple[Any, tuple[str, ...]]:
        """Specs that optimizer state follows: the parameters', split further by zero=1 and 2; and notices."""
        if self.plan.zero not in (1, 2):
            return self.params.specs, ()
        return zero_specs(self.params.specs, self.stored_params, mesh=self.plan.mesh)


def bind(
    model: Any, loss: LossFunction, plan: Plan, batch_spec: Any, *, init: Callable[..., Any] | None = None
) -> Bound:
    """Derives every spec of the model under the plan, and traces the loss once, abstractly, to check it.

    Args:
        model: a linen module; an NNX module; or a callable that takes `nnx.Rngs` and returns an NNX module.
        loss: `(params, batch, rng) -> scalar | Loss`. For linen, params is the unboxed "params" collection; for
            NNX, the `nnx.State` of the `nnx.Param` variables. A model with further collections (linen) or variables
            other than parameters and random state (NNX) has a loss `(params, batch, rng, collections) -> Loss` that
            returns the updated ones as `Loss.state`.
        plan: the plan; its mesh must not hold a -1.
        batch_spec: a pytree of `ArraySpec`.
        init: for linen modules whose call does not take batch entries by name: `(key, batch) -> variables`.

    Raises:
        ShardingError: not a Flax model; a mesh axis that no rule uses; arrays or activations that cannot be placed; a
            loss that is no scalar, or whose weight depends on the parameters.
    """
    mesh = abstract_mesh(plan.mesh)
    check_lengths(batch_spec, plan.mesh)
    create = creator(model, batch_spec, init)
    boxed, boxed_collections = abstract_variables(create)
    logical = unboxed(boxed)
    if plan.vocab_shards > 1:
        create = under(padding(plan.vocab_shards), create)
        boxed, boxed_collections = abstract_variables(create)
    if is_bare(boxed) and not plan.rules.patterns:
        raise ShardingError(
            f"no parameter of {model_name(model)} has logical axes, and the rules have no patterns",
            fix='annotate the model, or save what "shardlib explain MODEL" proposes and pass it as rules',
        )
    abstract_params, abstract_collections = unboxed(boxed), unboxed(boxed_collections)
    constants = _constants(loss, plan, abstract_params, abstract_collections, batch_spec)
    staging = _staging(*_with_constants(loss, batch_spec, constants), plan, boxed)
    staging = staging and staging.with_inputs(plan, batch_spec)
    stored = boxed if staging is None else staging.stored_shapes(boxed)
    params = resolve(stored, plan.placement_rules, mesh)
    params = params if staging is None else place_on_stages(params, staging, plan.mesh)
    batch = resolve(batch_spec, plan.rules, mesh)
    batch = batch if staging is None else place_inputs(batch, staging.inputs, plan.mesh)
    collections = _resolve_collections(boxed_collections, plan)
    _check_patterns(params)
    activations, num_sums, context, kernels = _trace(
        loss, plan, abstract_params, batch_spec, abstract_collections, logical
    )
    unused = _unused_axes(plan)  # last: what is wrong with one rule or array says more
    named = (*params.entries, *batch.entries, *activations)
    return Bound(
        plan=plan,
        loss=loss,
        batch_spec=batch_spec,
        init=lambda key: unboxed(create(key)),
        abstract_params=abstract_params,
        logical_params=logical,
        params=params,
        abstract_collections=abstract_collections,
        collections=collections,
        batch=batch,
        activations=activations,
        ready_params=create(None)[0] if isinstance(model, nnx.Module) else None,
        num_sums=num_sums,
        notices=(
            *params.notices,
            *batch.notices,
            *(notice for entry in activations for notice in notices_of(entry)),
            *_dead_rules(plan, named),
            *unused,
            *_key_notices(),
        ),
        staging=staging,
        context=context,
        kernels=kernels,
        constants=constants,
    )


def _staging(loss: LossFunction, batch_spec: Any, plan: Plan, boxed: Any) -> Staging | None:
    """How a plan with a stage axis cuts the model; None for any other plan."""
    if not plan.is_pipeline:
        return None
    names = [leaf.names for leaf in array_leaves(boxed)]
    with unbound_axes_explained():
        return stage_model(loss, plan, unboxed(boxed), batch_spec, names)


def _constants(loss: LossFunction, plan: Plan, params: Any, collections: Any, batch_spec: Any) -> Any:
    """The collections of a plan that cuts the batch, which the loss must not change; else None."""
    lowering, why = plan.chosen_lowering
    if collections is None or not (lowering == "explicit" or plan.cuts_batch):
        return None
    in_force = active(
        plan.rules, abstract_mesh(plan.mesh), sum_dtype=plan.tensor_reduce_dtype, vocab_shards=plan.vocab_shards
    )
    paths = changed(under(in_force, loss), params, batches.abstract(batch_spec), collections)
    if paths:
        why = plan.cuts_batch or f"explicit lowering, because {why}"
        raise ShardingError(
            f"the loss updates state over the whole batch ({', '.join(paths[:3])}, ...), and the plan cuts the batch "
            f"({why}): statistics of a part are not those of the batch",
            fix="normalise per example (LayerNorm), or leave stage out of the mesh"
            if plan.is_pipeline
            else "lowering=automatic with num_microbatches=1, no random_slices and reduce_dtype=compute_dtype; or "
            "normalise per example (LayerNorm)",
        )
    return collections


def _with_constants(loss: LossFunction, batch_spec: Any, constants: Any) -> tuple[LossFunction, Any]:
    """The loss and its batch, collections that it does not change among the inputs."""
    return (loss, batch_spec) if constants is None else (as_inputs(loss), with_constants(batch_spec, constants))


def _resolve_collections(boxed: Any, plan: Plan) -> Resolution | None:
    """Specs of collections, replicated where they carry no axes."""
    if boxed is None:
        return None
    if not isinstance(boxed, dict):
        return resolve(boxed, plan.rules, plan.mesh)
    # Beside "params" the other collections are known not to be parameters, which need no axes.
    found = resolve({"params": {}, **boxed}, plan.rules, plan.mesh)
    return replace(found, specs={name: specs for name, specs in found.specs.items() if name != "params"})


def _trace(
    loss: LossFunction, plan: Plan, params: Any, batch_spec: Any, collections: Any, logical: Any
) -> tuple[tuple[Entry, ...], int, ContextUse | None, tuple[str, ...]]:
    """Traces the loss once under the rules and checks it.

    Returns:
        The distinct activations it names, how many sums it makes, how its attention runs on divided sequences, and by
        which kernels, in words.
    """
    entries: dict[tuple[Names, tuple[int, ...]], Entry] = {}

    def record(names: Names, x: Any, decisions: tuple[Decision, ...]) -> None:
        path = "(" + ", ".join(name or "none" for name in names) + ")"
        entries.setdefault((names, x.shape), entry_of(path, x.shape, str(x.dtype), names, decisions, plan.mesh))

    heard: list[Heard] = []
    in_force = active(
        plan.rules,
        abstract_mesh(plan.mesh),
        record=record,
        sum_dtype=plan.tensor_reduce_dtype,
        vocab_shards=plan.vocab_shards,
        record_attention=heard.append,
    )
    traced = under(in_force, loss)
    params = jax.eval_shape(lambda tree: cast(tree, plan.compute_dtype), params)
    num_sums = _check_loss(traced, params, batches.abstract(batch_spec), collections, manual=_manual_axes(plan))
    context, calls = None, [call for call in heard if isinstance(call, AttentionCall)]
    if divides_sequence(plan.mesh):
        lengths = {leaf.shape[leaf.axes.index(LENGTH)] for leaf in batches.with_axis(batch_spec, LENGTH)}
        for length in lengths | {call.query[1] for call in calls}:
            check_slot(loss, logical, batch_spec, collections, length=length, shards=plan.mesh.size(CONTEXT))
        context = choose_context(
            calls,
            mesh=plan.mesh,
            batch_shards=plan.num_batch_shards * plan.num_microbatches,
            follows_positions=BY_POSITION in heard,
            in_order=IN_ORDER in heard,
            in_branch=plan.is_pipeline and plan.idle == "skip",
            kind=plan.attention,
            placement=plan.placement,
        )
    lines = kernel_lines(calls, context) if plan.kernels == "fused" else ()
    return tuple(entries.values()), num_sums, context, lines


def _check_patterns(params: Resolution) -> None:
    known = [entry.path for entry in params.entries]
    raise_collected(
        [
            f"pattern {regex!r} names no array: each is annotated, taken by an earlier pattern, or has another path"
            f"{nearest(regex, known)}; fix: correct or delete it"
            for regex in params.dead_patterns
        ],
        heading="patterns that can never fire:",
    )


def _unused_axes(plan: Plan) -> list[str]:
    """Mesh axes that no rule mentions: an error, or notices under rules that replicate what they do not know."""
    used = {axis for rule in plan.placement_rules.rules for axis in rule.mesh_axes}
    used |= {STAGE} if plan.is_pipeline else set()
    found = []
    for axis, size in plan.mesh.axes:
        if size > 1 and axis not in used:
            near = "" if axis in STANDARD_AXES else nearest(axis, used)
            what = (
                f"mesh {plan.mesh}: no rule uses the axis {axis!r}{near}, so its {size} devices would do the same work"
            )
            if plan.rules.unknown == "error":
                raise ShardingError(what, fix=f'leave {axis!r} out, or add a rule such as "batch -> {axis}"')
            found.append(what)
    return found


def _dead_rules(plan: Plan, named: tuple[Entry, ...]) -> list[str]:
    """Rules of the user's own whose logical axis no array of the model has."""
    used = {split_blocks(name)[0] for entry in named for name in entry.names if name}
    stock = default_rules().rules
    return [
        f"rule {str(rule)!r} never fires: no array has the logical axis {rule.logical!r}{nearest(rule.logical, used)}"
        for rule in plan.rules.rules
        if rule.logical not in used and rule not in stock
    ]


def _key_notices() -> list[str]:
    """What to say about keys whose draws depend on how they are batched and split; threefry's do not."""
    kind = str(jax.eval_shape(lambda: jax.random.key(0)).dtype)
    if kind == "key<fry>":
        return []
    return [
        f"keys are {kind} (jax_default_prng_impl): what they draw depends on how it is batched and split, so initial "
        "values and dropout may differ between layouts; those of threefry2x32 are equal on all"
    ]


def _manual_axes(plan: Plan) -> tuple[str, ...]:
    """Mesh axes that the step is manual over around the loss."""
    lowering, _ = plan.chosen_lowering
    axes = (STAGE, *DATA_LIKE) if plan.is_pipeline else DATA_LIKE if lowering == "explicit" else ()
    return tuple(axis for axis in axes if axis in plan.mesh.names and plan.mesh.size(axis) > 1)


def _check_loss(loss: LossFunction, params: Any, batch: Any, collections: Any, *, manual: tuple[str, ...]) -> int:
    """Traces the loss: a scalar or a `Loss`, whose weight does not depend on the parameters; counts its sums."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    seen: list[Sums] = []

    def traced(params: Any, batch: Any, rng: Any, collections: Any) -> Any:
        seen.append(sums_of(loss, params, batch, rng, state=collections))
        return seen[0].weight, seen[0].state

    with unbound_axes_explained():
        jaxpr, (_, state) = jax.make_jaxpr(traced, return_shape=True)(params, batch, key, collections)
    check_sums(jaxpr, manual=manual)
    wanted = [True] * len(jax.tree.leaves(seen[0].weight)) + [False] * len(jax.tree.leaves(state))
    if any(inputs_used(jaxpr, wanted)[: len(jax.tree.leaves(params))]):
        raise ShardingError(
            "the weight of the loss depends on the parameters, so dividing by it would change the gradients",
            fix="compute the weight from the batch alone (jax.lax.stop_gradient does not help here)",
        )
    described = lambda tree: jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree)  # noqa: E731
    if described(state) != described(collections):
        raise ShardingError(
            f"the loss was given the collections {described(collections)} and returned the state {described(state)}",
            fix="return Loss(state=...) with the same structure, shapes and dtypes; or no state for a model without",
        )
    return len(jax.tree.leaves(replace(seen[0], state=None)))
