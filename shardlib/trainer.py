"""Trainer: a bound model and an optimizer on a real mesh; sharded init, one compilation, donated state.

In: `Bound`, an optax optimizer, numpy or JAX batches. Out: states and metrics.

    trainer = Trainer(bound, optax.adamw(3e-4))
    state = trainer.init(jax.random.key(0))
    state, metrics = trainer.step(state, batch)
"""

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshes.build import make_mesh, shape_of, with_auto_axes
from meshes.errors import ShardingError, raise_collected
from shardlib import batch_spec as batches
from shardlib.annotate import Active
from shardlib.audit.divergence import check_no_divergence
from shardlib.audit.hlo import parse
from shardlib.binding import Bound
from shardlib.context import ContextUse, attention_itemsize, some_rows
from shardlib.gradients import StepSpecs, gradient_function, staged_evaluation
from shardlib.objective import Metrics, Sums
from shardlib.optimizer_specs import abstract_state, optimizer_specs
from shardlib.place import active, place, shardings, structure_error
from shardlib.plan import Plan
from shardlib.rules import Rules
from shardlib.separable import NUM_PARTS, NUM_ROWS, check_same, compared, first_rows
from shardlib.slices import BATCH, batch_dims
from shardlib.specs import resolve
from shardlib.step import TrainState, eval_step, train_step
from shardlib.trainable import Predicate, mask_from, split
from shardlib.tree_paths import leaves_with_paths

# On TPU a gather that feeds a product becomes a chain of permutes, which the branches of a pipeline must not hold.
_NO_WINDOWS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}


class Trainer:
    """Runs a bound model: one executable for all train steps, one for all eval steps.

    Args:
        bound: the model under its plan.
        optimizer: an optax transformation.
        mesh: the mesh to run on; by default `make_mesh(plan.mesh)`. Explicit axes are rebuilt as Auto ones.
        trainable: `(path, logical axes) -> bool`, which parameters are trained; the rest has no gradient and no
            optimizer state and stays bit-equal. None trains all.
        check_separable: where the plan cuts the batch, compare the loss of a few rows with that of their halves before
            the first step; off for a loss known to be a sum over rows.
        check_order: where devices hold tokens in another order than that of positions, compare the loss of a few short
            rows in both before the first step; off for a loss known not to shift tokens itself.

    Raises:
        ShardingError: a mesh of another shape than the plan's.
    """

    def __init__(
        self,
        bound: Bound,
        optimizer: optax.GradientTransformation,
        *,
        mesh: Mesh | None = None,
        trainable: Predicate | None = None,
        check_separable: bool = True,
        check_order: bool = True,
    ):
        self.bound = bound
        self.optimizer = optimizer
        self.mesh = _auto_mesh(bound, mesh)
        self._mask = None if trainable is None else mask_from(trainable, bound.params)
        state_like = self._trained(bound.state_specs()[0])
        specs = TrainState(
            step=P(),
            params=bound.params.specs,
            opt_state=optimizer_specs(optimizer, self._trained(bound.stored_params), state_like),
            rng=P(),
            collections=None if bound.collections is None else bound.collections.specs,
        )
        self._specs = StepSpecs(
            params=specs.params,
            grads=state_like,
            batch=bound.batch.specs,
            batch_spec=bound.batch_spec,
            mask=self._mask,
            staging=bound.staging,
            abstract_params=bound.abstract_params,
            context=bound.context,
            constants=bound.constants,
        )
        self.state_shardings: TrainState = shardings(specs, self.mesh)
        self.batch_shardings = shardings(bound.batch.specs, self.mesh)
        self._loss = bound.loss
        self._to_check = check_separable and bound.plan.cuts_batch is not None
        self._order_to_check = check_order and bound.context is not None and bound.context.placement != "contiguous"
        self._last_state: TrainState | None = None
        self._train: Any = None
        self._evals: dict[Any, tuple[Any, Any]] = {}

    @property
    def abstract_state(self) -> TrainState:
        """The state as `jax.ShapeDtypeStruct`s with shardings; nothing is allocated."""
        params = self.bound.stored_params
        state = TrainState(
            step=jax.ShapeDtypeStruct((), np.int32),
            params=params,
            opt_state=abstract_state(self.optimizer, self._trained(params)),
            rng=jax.eval_shape(lambda: jax.random.key(0)),
            collections=self.bound.abstract_collections,
        )
        return _with_shardings(state, self.state_shardings)

    @property
    def compiled(self) -> Any:
        """The compiled train step (`jax.stages.Compiled`), compiled on first use and never again.

        Raises:
            ShardingError: a pipeline whose program would hang; see `audit.divergence`.
        """
        if self._train is None:
            self._train = self._compile(self.lowered)
        return self._train

    @property
    def lowered(self) -> Any:
        """The train step before the backend's compiler (`jax.stages.Lowered`), traced anew each time."""
        gradients = gradient_function(self._loss, self.bound.plan, mesh=self.mesh, specs=self._specs)
        step = train_step(gradients, self.optimizer, param_shardings=self.state_shardings.params, mask=self._mask)
        replicated = NamedSharding(self.mesh, P())
        jitted = jax.jit(
            step,
            in_shardings=(self.state_shardings, self.batch_shardings),
            out_shardings=(self.state_shardings, replicated),
            donate_argnums=0,
        )
        return self._lower(jitted, self.abstract_state, self._abstract_batch())

    def init(self, key: jax.Array) -> TrainState:
        """Builds the state where it belongs: no device ever holds a whole array that the plan splits.

        Args:
            key: typed PRNG key (`jax.random.key`) for the initial values and, folded, for the run.
        """
        wanted = self.abstract_state.rng.dtype
        if not _is_like(key, jax.ShapeDtypeStruct((), wanted)):
            raise ShardingError(
                f"the key to initialise from is {_described(key)}, not one typed key {wanted}",
                fix="use jax.random.key(0); another generator is for jax_default_prng_impl to choose, and may draw "
                "other values on other layouts",
            )

        def build(init_key: Any, run_key: Any, params: Any) -> TrainState:
            made, collections = self.bound.init(init_key)
            params = self.bound.store(made) if params is None else params
            return TrainState(
                step=jax.numpy.zeros((), np.int32),
                params=params,
                opt_state=self.optimizer.init(self._trained(params)),
                rng=run_key,
                collections=collections,
            )

        with jax.set_mesh(self.mesh):
            init_key, run_key = jax.random.split(jax.device_put(key, NamedSharding(self.mesh, P())))
            ready = self.bound.ready_params
            if ready is not None:
                ready = jax.device_put(self.bound.store(ready), self.state_shardings.params)
            return jax.jit(build, out_shardings=self.state_shardings)(init_key, run_key, ready)

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """One optimizer step; the given state is donated and must not be used again.

        Args:
            state: from `init`, from the last step, or any tree of its structure (numpy too), placed when needed.
            batch: global arrays as the batch spec says.

        Returns:
            The new state, and scalar metrics: exact means over the whole batch.
        """
        if state is not self._last_state:
            _check_fits(state, self.abstract_state)
            state = place(state, self.state_shardings)
        placed = self._placed_batch(batch, self.bound.batch_spec, self.batch_shardings)
        if self._to_check:
            self._check_separable(state, batch)
        if self._order_to_check:
            self._check_order(state, batch)
        state, metrics = self.compiled(state, placed)
        self._last_state = state
        return state, metrics

    def _trained(self, tree: Any) -> Any:
        """The trained part of a tree of the parameters' structure."""
        return tree if self._mask is None else split(tree, self._mask)[0]

    def _check_separable(self, state: TrainState, batch: Any) -> None:
        """Once, before the first step of a plan that cuts the batch."""
        plan, spec = self.bound.plan, self.bound.batch_spec
        self._to_check = False
        dims = batch_dims(spec)
        if any(
            leaf.shape[leaf.axes.index(BATCH)] < NUM_ROWS
            for leaf in jax.tree.leaves(spec, is_leaf=batches.is_spec)
            if BATCH in leaf.axes
        ):
            return
        rows = first_rows(batch, dims)
        # Rows are as they were given: in the order of positions.
        context = self.bound.context and replace(self.bound.context, placement="contiguous")
        replicated = NamedSharding(self.mesh, P())
        if plan.is_pipeline:
            small = batches.resized(spec, batch=NUM_ROWS)
            whole = jax.tree.map(lambda _: replicated, self.batch_shardings)
            staged: Any = functools.partial(self._staged_evaluation, small, whole, plan=plan, context=context)
            runs = [staged(num_microbatches=parts) for parts in (1, NUM_PARTS)]
            compare: Any = lambda *given: [run(*given).metrics() for run in runs]  # noqa: E731
        else:
            in_force = self._in_force(plan, context)
            compare = compared(self._loss, dims, active=in_force, compute_dtype=plan.compute_dtype)
        with jax.set_mesh(self.mesh):
            given = (state.params, jax.device_put(rows, replicated), state.collections)
            compiled = self._compile(jax.jit(compare, out_shardings=replicated).lower(*given))
            together, apart = compiled(*given)
        check_same(together, apart, compute_dtype=plan.compute_dtype, why=plan.cuts_batch or "")

    def _check_order(self, state: TrainState, batch: Any) -> None:
        """Once, before the first step of a plan under which devices hold tokens in another order."""
        self._order_to_check = False
        context, spec = self.bound.context, self.bound.batch_spec
        assert context is not None
        one, rows = some_rows(batch, spec, length=context.short_length)
        itemsize = attention_itemsize(self._loss, self.bound.logical_params, one, self.bound.abstract_collections)
        if itemsize is None:  # made for one length alone
            one, rows = some_rows(batch, spec, length=None)
            itemsize = 4
        # Another kind has the same result and a smaller program; float32 shows more; without branches any model may
        # run in stages.
        context = replace(context, kind="gather")
        plan = replace(self.bound.plan, compute_dtype="float32", reduce_dtype="float32", tensor_reduce_dtype=None)
        plan = replace(plan, idle="mask") if plan.is_pipeline else plan
        found = []
        for use in (context, replace(context, placement="contiguous")):
            executable, placed = self._compiled_evaluation(one, plan, use)
            given = [jax.device_put(use.reordered(row, one), placed) for row in rows]
            found.append([executable(state.params, row, state.collections).metrics() for row in given])
        context.check_same_order(*found, itemsize=itemsize)

    def evaluate(self, state: TrainState, batch: Any) -> Metrics:
        """Metrics of one batch without randomness and without a change of the state; it may be short."""
        return self.evaluate_all(state, [batch])

    def evaluate_all(self, state: TrainState, all_batches: Iterable[Any]) -> Metrics:
        """Metrics over many batches: exact means over all their rows, the last batch short or not.

        Args:
            state: as for `step`; it is not donated.
            all_batches: batches whose batch dim may differ from the spec's; each size is compiled once. Rows that
                the mesh does not divide are evaluated whole on every device, so that none is padded or counted twice.

        Raises:
            ShardingError: no batch, or one that does not fit the batch spec.
        """
        params, collections = state.params, state.collections
        if state is not self._last_state:
            wanted = self.state_shardings
            _check_fits(params, self.abstract_state.params)
            params, collections = jax.device_put((params, collections), (wanted.params, wanted.collections))
        total: Sums | None = None
        with jax.set_mesh(self.mesh):
            for batch in all_batches:
                spec = self._spec_for(batch)
                executable, placed = self._evaluator(spec)
                sums = executable(params, self._placed_batch(batch, spec, placed), collections)
                total = sums if total is None else total + sums
            if total is None:
                raise ShardingError("there is no batch to evaluate", fix="give at least one")
            return total.metrics()

    def _evaluator(self, spec: Any) -> tuple[Any, Any]:
        """The executable and the batch's shardings for batches of this size."""
        key = tuple(leaf.shape for leaf in jax.tree.leaves(spec, is_leaf=batches.is_spec))
        if key not in self._evals:
            self._evals[key] = self._compiled_evaluation(spec, self.bound.plan, self.bound.context)
        return self._evals[key]

    def _in_force(self, plan: Plan, context: ContextUse | None) -> Active:
        """The rules of an evaluation, outside of any manual region."""
        return active(
            _whole_when_indivisible(plan.rules),
            self.mesh,
            sum_dtype=plan.tensor_reduce_dtype,
            vocab_shards=plan.vocab_shards,
            context=context,
            kernels=plan.kernels == "fused",
        )

    def _compiled_evaluation(self, spec: Any, plan: Plan, context: ContextUse | None) -> tuple[Any, Any]:
        rules = _whole_when_indivisible(plan.rules)
        wanted = self.state_shardings
        placed = shardings(resolve(spec, rules, self.mesh).specs, self.mesh)
        in_force = self._in_force(plan, context)
        step: Any = eval_step(self._loss, active=in_force, compute_dtype=plan.compute_dtype)
        if plan.is_pipeline:
            step = self._staged_evaluation(spec, placed, plan=plan, context=context)
        jitted = jax.jit(
            step,
            in_shardings=(wanted.params, placed, wanted.collections),
            out_shardings=NamedSharding(self.mesh, P()),
        )
        state, batch = self.abstract_state, _with_shardings(batches.abstract(spec), placed)
        return self._compile(self._lower(jitted, state.params, batch, state.collections)), placed

    def _staged_evaluation(
        self, spec: Any, placed: Any, *, plan: Plan, context: ContextUse | None, num_microbatches: int | None = None
    ) -> Any:
        batch = jax.tree.map(lambda sharding: sharding.spec, placed)
        specs = replace(self._specs, batch=batch, batch_spec=spec, context=context)
        return staged_evaluation(self._loss, plan, mesh=self.mesh, specs=specs, num_microbatches=num_microbatches)

    def _spec_for(self, batch: Any) -> Any:
        """The batch spec at the number of rows this batch has."""
        spec, given = self.bound.batch_spec, dict(leaves_with_paths(batch))
        for path, leaf in leaves_with_paths(spec, is_leaf=batches.is_spec):
            if BATCH in leaf.axes and path in given and len(np.shape(given[path])) == len(leaf.shape):
                return batches.resized(spec, batch=np.shape(given[path])[leaf.axes.index(BATCH)])
        return spec

    def _compile(self, lowered: Any) -> Any:
        plan = self.bound.plan
        if not (plan.is_pipeline and plan.idle == "skip"):
            return lowered.compile()
        on_tpu = self.mesh.devices.flat[0].platform == "tpu"
        compiled = lowered.compile(compiler_options=_NO_WINDOWS if on_tpu else None)
        check_no_divergence(parse(compiled.as_text()), plan.mesh)
        return compiled

    def _lower(self, jitted: Any, *arguments: Any) -> Any:
        # A mesh that the caller has set, perhaps with Explicit axes, must not reach the trace.
        with jax.set_mesh(self.mesh):
            return jitted.lower(*arguments)

    def _abstract_batch(self) -> Any:
        return _with_shardings(batches.abstract(self.bound.batch_spec), self.batch_shardings)

    def _placed_batch(self, batch: Any, spec: Any, placed: Any) -> Any:
        wanted = leaves_with_paths(batches.abstract(spec))
        given = dict(leaves_with_paths(batch))
        problems = [f"unknown entry {path!r}" for path in given if path not in dict(wanted)]
        for path, leaf in wanted:
            if path not in given:
                problems.append(f"entry {path!r} is missing")
            elif np.shape(given[path]) != leaf.shape:
                problems.append(
                    f"{path!r} has shape {list(np.shape(given[path]))}, and the plan was bound for {list(leaf.shape)}"
                )
            elif _canonical(given[path]) != leaf.dtype:
                problems.append(f"{path!r} has dtype {_canonical(given[path])}, and the batch spec says {leaf.dtype}")
        raise_collected(problems, heading="the batch does not fit its batch spec; fix: resize it, or bind again:")
        if self.bound.context is not None:
            batch = self.bound.context.reordered(batch, spec)
        return jax.device_put(batch, placed)


def _whole_when_indivisible(rules: Rules) -> Rules:
    """The rules with a batch that the mesh does not divide held whole: for evaluation, where rows are counted once."""
    change = lambda rule: replace(rule, indivisible="replicate") if rule.logical == BATCH else rule  # noqa: E731
    return replace(rules, rules=tuple(change(rule) for rule in rules.rules))


def _auto_mesh(bound: Bound, mesh: Mesh | None) -> Mesh:
    wanted = bound.plan.mesh
    if mesh is None:
        return make_mesh(wanted)
    if shape_of(mesh) != wanted:
        raise ShardingError(
            f"the mesh is {shape_of(mesh)} and the plan was bound for {wanted}", fix="bind the plan to the mesh's shape"
        )
    return with_auto_axes(mesh)


def _with_shardings(tree: Any, wanted: Any) -> Any:
    def give(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(give, tree, wanted)


def _check_fits(tree: Any, wanted: Any) -> None:
    """Raises for a tree of another structure, or with arrays of other shapes or dtypes."""
    if jax.tree.structure(tree) != jax.tree.structure(wanted):
        raise structure_error(tree, wanted)
    pairs = zip(leaves_with_paths(tree), jax.tree.leaves(wanted), strict=True)
    raise_collected(
        [
            f"{path}: {_described(leaf)}, and the plan was bound for {_described(want)}"
            for (path, leaf), want in pairs
            if not _is_like(leaf, want)
        ],
        heading="the state does not fit the model; fix: bind the model this state is of:",
    )


def _is_like(leaf: Any, wanted: Any) -> bool:
    # As text: NumPy raises when one of its dtypes is compared with the dtype of typed keys.
    return np.shape(leaf) == wanted.shape and str(_canonical(leaf)) == str(wanted.dtype)


def _described(leaf: Any) -> str:
    return f"{_canonical(leaf)}{list(np.shape(leaf))}"


def _canonical(leaf: Any) -> Any:
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.result_type(leaf)
    return dtype if jax.numpy.issubdtype(dtype, jax.dtypes.extended) else jax.dtypes.canonicalize_dtype(dtype)
