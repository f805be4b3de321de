"""One train step of one GPT, written in each way that is compared: the same sizes, weights, loss and optimizer.

In: a `Case`. Out: per way of writing it, a `Prepared` that compiles itself and runs from given weights.

    prepared = VARIANTS["plain"](case)
    compiled = prepared.compile()
    state, metrics = prepared.step(prepared.start(case.weights()), case.batch())
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import flax.linen as nn
import jax
import numpy as np
import optax
from flax import nnx
from flax.linen.spmd import logical_to_mesh_sharding
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardlib as sl
from benchmarks import flax_linen_gpt, flax_nnx_gpt, plain_explicit, plain_gpt
from meshes.build import make_mesh
from models import gpt, gpt_nnx
from models.gpt import Config
from shardlib.step import TrainState
from shardlib.tree_paths import leaves_with_paths

# Sizes of the published comparisons this benchmark continues: 8 layers of 256 on 4,096 tokens of batch.
FULL: Final = Config(layers=8, embed=256, heads=8, mlp=1024, vocab=4096, length=256, remat=True)
MICRO: Final = Config(layers=2, embed=32, heads=8, mlp=64, vocab=64, length=16, remat=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is computed: sizes, global batch, mesh, microbatches; a static value."""

    config: Config
    batch: int
    mesh: str
    num_microbatches: int = 1

    def make_mesh(self) -> Mesh:
        """The mesh on emulated CPU devices."""
        return make_mesh(self.mesh, devices="cpu")

    def optimizer(self) -> optax.GradientTransformation:
        """The optimizer of every variant."""
        return optax.adamw(1e-3)

    def weights(self) -> Any:
        """The initial parameters of every variant, on the host, in the structure of `plain_gpt`."""
        return jax.tree.map(
            np.asarray, jax.jit(plain_gpt.init_params, static_argnums=1)(jax.random.key(0), self.config)
        )

    def tokens(self) -> dict[str, np.ndarray]:
        """One batch."""
        text = np.random.default_rng(0).integers(0, self.config.vocab, (self.batch, self.config.length + 1), np.int32)
        return {"inputs": text[:, :-1].copy(), "targets": text[:, 1:].copy()}

    def abstract_tokens(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shape of one batch."""
        shape = jax.ShapeDtypeStruct((self.batch, self.config.length), np.int32)
        return {"inputs": shape, "targets": shape}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A train step ready to be compiled.

    Args:
        compile: traces, lowers and compiles the step; every call after `jax.clear_caches()` does all of it again.
        start: weights of `Case.weights` -> the state before the first step, placed.
        step: `(state, batch) -> (state, metrics)`, as a user calls it; the state is donated.
        place_batch: host batch -> batch on the mesh.
    """

    compile: Callable[[], jax.stages.Compiled]
    start: Callable[[Any], Any]
    step: Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]
    place_batch: Callable[[Any], Any]


def plain(case: Case) -> Prepared:
    """By hand: `plain_gpt`."""
    return _plain(case, plain_gpt.train_step)


def plain_explicit_step(case: Case) -> Prepared:
    """By hand, explicit: `plain_explicit.explicit_step`."""
    return _plain(case, functools.partial(plain_explicit.explicit_step, num_microbatches=case.num_microbatches))


def plain_scanned_step(case: Case) -> Prepared:
    """By hand, accumulating under jit: `plain_explicit.scanned_step`."""
    return _plain(case, functools.partial(plain_explicit.scanned_step, num_microbatches=case.num_microbatches))


def _plain(case: Case, train_step: Callable[..., Any]) -> Prepared:
    at, optimizer = plain_gpt.Layout.of(case.make_mesh()), case.optimizer()
    init = functools.partial(plain_gpt.init_params, c=case.config)
    abstract_params = jax.eval_shape(init, jax.random.key(0))
    specs = plain_gpt.param_specs(at)
    moments = optax.ScaleByAdamState(count=P(), mu=specs, nu=specs)  # pyright: ignore[reportArgumentType]
    state_specs = (specs, (moments, optax.EmptyState(), optax.EmptyState()))
    step = functools.partial(train_step, config=case.config, at=at, optimizer=optimizer)
    abstract_state = (abstract_params, jax.eval_shape(optimizer.init, abstract_params))
    return _jitted(
        case,
        step,
        abstract_state=abstract_state,
        state_shardings=plain_gpt.named(state_specs, at.mesh),
        batch_sharding=NamedSharding(at.mesh, P(at.batch)),
        build=lambda weights: (weights, optimizer.init(weights)),
    )


def flax_linen(case: Case) -> Prepared:
    """Flax's own partitioning for linen."""
    mesh, optimizer = case.make_mesh(), case.optimizer()
    rules = flax_linen_gpt.rules(mesh)
    loss = functools.partial(flax_linen_gpt.loss, config=case.config, mesh=mesh)

    def init(key: jax.Array) -> Any:
        params = flax_linen_gpt.GPT(case.config, mesh).init(key, np.zeros((case.batch, case.config.length), np.int32))[
            "params"
        ]
        return params, optimizer.init(params)

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        with nn.logical_axis_rules(rules):
            grads, metrics = jax.grad(loss, has_aux=True)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), metrics

    boxed = jax.eval_shape(init, jax.random.key(0))
    return _jitted(
        case,
        step,
        abstract_state=nn.unbox(boxed),
        state_shardings=logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules),
        batch_sharding=NamedSharding(mesh, P(dict(rules)["batch"])),
        build=lambda weights: (weights, optimizer.init(weights)),
    )


def flax_nnx(case: Case) -> Prepared:
    """Flax's own sharding metadata for NNX."""
    mesh, optimizer = case.make_mesh(), case.optimizer()
    rules = flax_linen_gpt.rules(mesh)

    def create() -> Any:
        model = flax_nnx_gpt.GPT(case.config, nnx.Rngs(0))
        return model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
        graphdef, abstract_state = nnx.split(nnx.eval_shape(create))
        shardings = nnx.get_named_sharding(abstract_state, mesh)

    def step(state: Any, batch: Any) -> Any:
        with nnx.logical_axis_rules(rules):
            model, trainer = nnx.merge(graphdef, state)
            grads, metrics = nnx.grad(flax_nnx_gpt.loss, has_aux=True)(model, batch)
            trainer.update(model, grads)
            return nnx.state((model, trainer)), metrics

    def build(weights: Any) -> Any:
        with nnx.logical_axis_rules(rules):
            model, trainer = nnx.merge(
                graphdef, jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), abstract_state)
            )
            nnx.update(model, _like(nnx.state(model), weights))
            return nnx.state((model, trainer))

    return _jitted(
        case,
        step,
        abstract_state=abstract_state,
        state_shardings=shardings,
        batch_sharding=NamedSharding(mesh, P(dict(rules)["batch"])),
        build=build,
        ambient=mesh,
    )


def toolkit_linen(case: Case) -> Prepared:
    """shardlib with `models.gpt`."""
    return _toolkit(case, gpt.build(case.config, batch=case.batch))


def toolkit_nnx(case: Case) -> Prepared:
    """shardlib with `models.gpt_nnx`."""
    return _toolkit(case, gpt_nnx.build(case.config, batch=case.batch))


def toolkit_explicit(case: Case) -> Prepared:
    """shardlib with `models.gpt`, explicit lowering."""
    return _toolkit(case, gpt.build(case.config, batch=case.batch), lowering="explicit")


Variants = dict[str, Callable[[Case], Prepared]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Ways of writing one thing; a static value.

    Args:
        variants: the first is the hand-written one that the others are measured against. It stands there twice:
            what differs between the two is noise.
        ours: the names held to the thresholds.
        num_microbatches: accumulated per step.
        batch: global rows per step.
    """

    variants: Variants
    ours: tuple[str, ...]
    num_microbatches: int = 1
    batch: int = 16


COMPARISONS: Final[dict[str, Comparison]] = {
    "automatic": Comparison(
        variants={
            "plain": plain,
            "plain again": plain,
            "flax linen": flax_linen,
            "flax nnx": flax_nnx,
            "toolkit linen": toolkit_linen,
            "toolkit nnx": toolkit_nnx,
        },
        ours=("toolkit linen", "toolkit nnx"),
    ),
    "explicit": Comparison(
        variants={"plain": plain_explicit_step, "plain again": plain_explicit_step, "toolkit": toolkit_explicit},
        ours=("toolkit",),
    ),
    "accumulation": Comparison(
        variants={
            "plain": plain_explicit_step,
            "plain again": plain_explicit_step,
            "jit and scan": plain_scanned_step,
            "toolkit": toolkit_explicit,
        },
        ours=("toolkit",),
        num_microbatches=8,
        batch=64,
    ),
}


def _toolkit(case: Case, example: Any, **options: Any) -> Prepared:
    module, loss, batch_spec = example
    plan = sl.Plan(mesh=case.mesh, num_microbatches=case.num_microbatches, **options)  # pyright: ignore[reportArgumentType]
    bound = sl.bind(module, loss, plan, batch_spec)
    trainer = sl.Trainer(bound, case.optimizer(), mesh=case.make_mesh(), check_separable=False)

    def start(weights: Any) -> Any:
        params = _like(bound.abstract_params, weights)
        step, rng = np.zeros((), np.int32), jax.random.key(0)
        state = TrainState(step=step, params=params, opt_state=trainer.optimizer.init(params), rng=rng)
        return jax.device_put(state, trainer.state_shardings)

    return Prepared(
        compile=lambda: trainer.compiled,
        start=start,
        step=trainer.step,
        place_batch=lambda batch: jax.device_put(batch, trainer.batch_shardings),
    )


def _jitted(
    case: Case,
    step: Callable[[Any, Any], Any],
    *,
    abstract_state: Any,
    state_shardings: Any,
    batch_sharding: NamedSharding,
    build: Callable[[Any], Any],
    ambient: Mesh | None = None,
) -> Prepared:
    """A step under `jax.jit` with its state donated, compiled ahead of time as the trainer does."""
    cache: list[jax.stages.Compiled] = []

    def in_mesh(function: Callable[..., Any]) -> Callable[..., Any]:
        def entered(*args: Any) -> Any:
            if ambient is None:
                return function(*args)
            with jax.set_mesh(ambient):
                return function(*args)

        return entered

    @in_mesh
    def compile() -> jax.stages.Compiled:
        if not cache:
            replicated = NamedSharding(batch_sharding.mesh, P())
            jitted = jax.jit(
                step,
                in_shardings=(state_shardings, batch_sharding),
                out_shardings=(state_shardings, replicated),
                donate_argnums=0,
            )
            cache.append(jitted.lower(abstract_state, case.abstract_tokens()).compile())
        return cache[0]

    return Prepared(
        compile=compile,
        start=lambda weights: in_mesh(jax.jit(build, out_shardings=state_shardings))(weights),
        step=in_mesh(lambda state, batch: compile()(state, batch)),
        place_batch=lambda batch: jax.device_put(batch, batch_sharding),
    )


def _like(tree: Any, weights: Any) -> Any:
    """The weights in the structure of another tree with the same paths."""
    by_path = dict(leaves_with_paths(weights))
    paths = [path for path, _ in leaves_with_paths(tree)]
    assert sorted(paths) == sorted(by_path), sorted(set(paths) ^ set(by_path))
    return jax.tree.unflatten(jax.tree.structure(tree), [by_path[path] for path in paths])
