"""Trainer: a bound model and an optimizer on a real mesh; sharded init, one compilation, donated state.

In: `Bound`, an optax optimizer, numpy or JAX batches. Out: states and metrics.

    trainer = Trainer(bound, optax.adamw(3e-4))
    state = trainer.init(jax.random.key(0))
    state, metrics = trainer.step(state, batch)
"""

from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshes.build import make_mesh, shape_of
from meshes.errors import ShardingError, raise_collected
from shardlib import batch_spec as batches
from shardlib.binding import Bound
from shardlib.optimizer_specs import abstract_state, optimizer_specs
from shardlib.place import active, place, shardings, structure_error
from shardlib.step import Metrics, TrainState, eval_step, train_step
from shardlib.tree_paths import leaves_with_paths


class Trainer:
    """Runs a bound model: one executable for all train steps, one for all eval steps.

    Args:
        bound: the model under its plan.
        optimizer: an optax transformation.
        mesh: the mesh to run on; by default `make_mesh(plan.mesh)`. Explicit axes are rebuilt as Auto ones.

    Raises:
        ShardingError: a mesh of another shape than the plan's.
    """

    def __init__(self, bound: Bound, optimizer: optax.GradientTransformation, *, mesh: Mesh | None = None):
        self.bound = bound
        self.optimizer = optimizer
        self.mesh = _auto_mesh(bound, mesh)
        params = bound.params.specs
        specs = TrainState(
            step=P(), params=params, opt_state=optimizer_specs(optimizer, bound.abstract_params, params), rng=P()
        )
        self.state_shardings: TrainState = shardings(specs, self.mesh)
        self.batch_shardings = shardings(bound.batch.specs, self.mesh)
        self._active = active(bound.plan.rules, self.mesh)
        self._last_state: TrainState | None = None
        self._train: Any = None
        self._eval: Any = None

    @property
    def abstract_state(self) -> TrainState:
        """The state as `jax.ShapeDtypeStruct`s with shardings; nothing is allocated."""
        params = self.bound.abstract_params
        state = TrainState(
            step=jax.ShapeDtypeStruct((), np.int32),
            params=params,
            opt_state=abstract_state(self.optimizer, params),
            rng=jax.eval_shape(lambda: jax.random.key(0)),
        )
        return _with_shardings(state, self.state_shardings)

    @property
    def compiled(self) -> Any:
        """The compiled train step (`jax.stages.Compiled`), compiled on first use and never again."""
        if self._train is None:
            step = train_step(
                self.bound.loss,
                self.optimizer,
                active=self._active,
                param_shardings=self.state_shardings.params,
            )
            replicated = NamedSharding(self.mesh, P())
            jitted = jax.jit(
                step,
                in_shardings=(self.state_shardings, self.batch_shardings),
                out_shardings=(self.state_shardings, replicated),
                donate_argnums=0,
            )
            self._train = self._compile(jitted, self.abstract_state, self._abstract_batch())
        return self._train

    def init(self, key: jax.Array) -> TrainState:
        """Builds the state where it belongs: no device ever holds a whole array that the plan splits.

        Args:
            key: typed PRNG key (`jax.random.key`) for the initial values and, folded, for the run.
        """
        wanted = self.abstract_state.rng.dtype
        if getattr(key, "dtype", None) != wanted or key.shape != ():
            raise ShardingError(
                f"the key to initialise from is {_described(key)}, not one typed key {wanted}",
                fix="use jax.random.key(0)",
            )

        def build(init_key: Any, run_key: Any, params: Any) -> TrainState:
            params = self.bound.init(init_key) if params is None else params
            step = jax.numpy.zeros((), np.int32)
            return TrainState(step=step, params=params, opt_state=self.optimizer.init(params), rng=run_key)

        with jax.set_mesh(self.mesh):
            init_key, run_key = jax.random.split(jax.device_put(key, NamedSharding(self.mesh, P())))
            ready = self.bound.ready_params
            ready = None if ready is None else jax.device_put(ready, self.state_shardings.params)
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
        state, metrics = self.compiled(state, self._placed_batch(batch))
        self._last_state = state
        return state, metrics

    def evaluate(self, state: TrainState, batch: Any) -> Metrics:
        """Metrics of one batch without randomness and without a change of the state."""
        if self._eval is None:
            jitted = jax.jit(
                eval_step(self.bound.loss, active=self._active),
                in_shardings=(self.state_shardings.params, self.batch_shardings),
                out_shardings=NamedSharding(self.mesh, P()),
            )
            self._eval = self._compile(jitted, self.abstract_state.params, self._abstract_batch())
        params = state.params
        if state is not self._last_state:
            _check_fits(params, self.abstract_state.params)
            params = jax.device_put(params, self.state_shardings.params)
        return self._eval(params, self._placed_batch(batch))

    def _compile(self, jitted: Any, *arguments: Any) -> Any:
        # A mesh that the caller has set, perhaps with Explicit axes, must not reach the trace.
        with jax.set_mesh(self.mesh):
            return jitted.lower(*arguments).compile()

    def _abstract_batch(self) -> Any:
        return _with_shardings(batches.abstract(self.bound.batch_spec), self.batch_shardings)

    def _placed_batch(self, batch: Any) -> Any:
        wanted = leaves_with_paths(batches.abstract(self.bound.batch_spec))
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
        return jax.device_put(batch, self.batch_shardings)


def _auto_mesh(bound: Bound, mesh: Mesh | None) -> Mesh:
    wanted = bound.plan.mesh
    if mesh is None:
        return make_mesh(wanted)
    if shape_of(mesh) != wanted:
        raise ShardingError(
            f"the mesh is {shape_of(mesh)} and the plan was bound for {wanted}", fix="bind the plan to the mesh's shape"
        )
    if set(mesh.axis_types) == {AxisType.Auto}:
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


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
            if np.shape(leaf) != want.shape or _canonical(leaf) != want.dtype
        ],
        heading="the state does not fit the model; fix: bind the model this state is of:",
    )


def _described(leaf: Any) -> str:
    return f"{_canonical(leaf)}{list(np.shape(leaf))}"


def _canonical(leaf: Any) -> Any:
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.result_type(leaf)
    return dtype if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else jax.dtypes.canonicalize_dtype(dtype)
