"""GPipe of the GPT in `plain_gpt` by hand in plain JAX, in two forms: the yardsticks of pipelined steps.

In: a mesh with stage and perhaps data and tensor, an optax optimizer. Out: parameter specs and a train step.
`EVERY_TICK` computes in every tick and leaves data to the compiler; `SKIPPING` skips bubbles, reduces gradients once.

    step = functools.partial(train_step, mesh=mesh, form=SKIPPING, num_microbatches=8, optimizer=optax.adamw(1e-3))
    state, metrics = jax.jit(step, donate_argnums=0)(state, batch)
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from benchmarks import plain_gpt
from benchmarks.plain_gpt import Layout, Metrics, Params

STAGE: Final = "stage"
DATA: Final = "data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How the pipeline is written; a static value.

    Args:
        manual: mesh axes that the region divides by hand, where the mesh has them; the compiler divides the others.
        skip: a stage does nothing in the ticks in which it has no microbatch; otherwise it computes on whatever is
            there.
    """

    manual: tuple[str, ...]
    skip: bool


EVERY_TICK: Final = Form(manual=(STAGE,), skip=False)
SKIPPING: Final = Form(manual=(STAGE, DATA), skip=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Region(Layout):
    """A layout inside the region: only axes left to the compiler are named.

    Args:
        manual: mesh axes divided by hand.
    """

    manual: tuple[str, ...]

    @classmethod
    def within(cls, mesh: Mesh, form: Form) -> "Region":
        """The layout inside the region of a form."""
        manual = tuple(axis for axis in form.manual if axis in mesh.axis_names)
        return cls(mesh=mesh, batch=DATA, fsdp=None, tensor=_tensor(mesh), manual=manual)

    @property
    def stages(self) -> int:
        return self.mesh.shape[STAGE]

    @property
    def shards(self) -> int:
        """Parts of the batch that are divided by hand."""
        return self.mesh.shape[DATA] if DATA in self.manual else 1

    def put(self, x: jax.Array, *spec: str | None) -> jax.Array:
        """Constrains an activation along the axes left to the compiler, if there are any."""
        left = set(self.mesh.axis_names) - set(self.manual)
        names = [name if name in left else None for name in spec]
        return lax.with_sharding_constraint(x, P(*names)) if left else x


def param_specs(mesh: Mesh) -> Params:
    """The partition spec of every parameter: layers over stage, heads, hidden units and vocabulary over tensor."""
    specs = plain_gpt.param_specs(Layout(mesh=mesh, batch=DATA, fsdp=None, tensor=_tensor(mesh)))
    return specs | {"layers": _map_specs(lambda spec: P(STAGE, *spec[1:]), specs["layers"])}


def gradients(params: Params, batch: Any, *, mesh: Mesh, form: Form, num_microbatches: int) -> tuple[Params, Metrics]:
    """Gradients and metrics of the mean loss over the whole batch.

    Args:
        params: as `plain_gpt.init_params` makes them, placed by `param_specs`.
        batch: "inputs" and "targets", int32 [rows, length]; rows divide into microbatches times data shards.
        mesh: stage, which divides the layers, and perhaps data and tensor.
        form: how the pipeline is written.
        num_microbatches: parts of the batch that follow one another through the stages.
    """
    at = Region.within(mesh, form)
    # Each microbatch takes every num_microbatches-th row, so that no row leaves its device.
    parts = jax.tree.map(lambda x: x.reshape(-1, num_microbatches, *x.shape[1:]).swapaxes(0, 1), batch)
    manual_specs = _map_specs(lambda spec: P(*(a if a in at.manual else None for a in spec)), param_specs(mesh))
    rows = P(None, DATA if DATA in at.manual else None)
    return jax.shard_map(
        functools.partial(_local_gradients, at=at, skip=form.skip),
        mesh=mesh,
        axis_names=set(at.manual),
        in_specs=(manual_specs, rows),
        out_specs=(manual_specs, P()),
        check_vma=False,
    )(params, parts)


def train_step(
    state: Any,
    batch: Any,
    *,
    mesh: Mesh,
    form: Form,
    num_microbatches: int,
    optimizer: optax.GradientTransformation,
) -> Any:
    """`((params, opt_state), batch) -> ((params, opt_state), metrics)`."""
    params, opt_state = state
    grads, metrics = gradients(params, batch, mesh=mesh, form=form, num_microbatches=num_microbatches)
    grads = lax.with_sharding_constraint(grads, plain_gpt.named(param_specs(mesh), mesh))
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), metrics


def _local_gradients(params: Params, parts: Any, *, at: Region, skip: bool) -> tuple[Params, Metrics]:
    """One device's part: forward through all ticks, head and loss on the last stage, backward through all ticks."""
    outer = {name: params[name] for name in ("norm", "head")}
    entry = {name: params[name] for name in ("embed", "positions")}
    is_last = lax.axis_index(STAGE) == at.stages - 1

    forward = functools.partial(_forward, tokens=parts["inputs"], at=at, skip=skip)
    outputs, backward = jax.vjp(forward, params["layers"], entry)
    # The loss of a microbatch is differentiated right after it is computed, so that no logits are kept or made twice.
    head = functools.partial(_head, targets=parts["targets"], at=at)
    shapes = jax.eval_shape(head, outer, outputs)
    metrics, d_outer, d_outputs = lax.cond(
        is_last, head, lambda *_: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes), outer, outputs
    )
    d_layers, d_entry = backward(d_outputs)

    d_shared, metrics = lax.psum((d_outer | d_entry, metrics), at.manual)
    d_layers = lax.psum(d_layers, DATA) if DATA in at.manual else d_layers
    return {"layers": d_layers, **d_shared}, metrics


def _forward(layers: Params, entry: Params, *, tokens: jax.Array, at: Region, skip: bool) -> jax.Array:
    """What leaves this stage, [microbatches, batch_local, length, embed]: of use on the last stage."""
    stage, count, ticks = lax.axis_index(STAGE), len(tokens), len(tokens) + at.stages - 1
    # A gather from a table that is split over an axis left to the compiler may abort it.
    entry = jax.tree.map(lambda table: at.put(table, None, None), entry)
    fed = jnp.pad(tokens, ((0, at.stages - 1), (0, 0), (0, 0)))

    def tick(message: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        tokens, time = now
        works = (stage <= time) & (time < stage + count)
        enter = functools.partial(_enter, tokens=tokens, at=at)
        x = lax.cond(stage == 0, enter, lambda entry: message, entry)
        layer = functools.partial(_layer, at=at, works=works if skip else None)
        y, _ = lax.scan(lambda x, p: (layer(x, p), None), x, layers)
        return lax.ppermute(y, STAGE, [(k, k + 1) for k in range(at.stages - 1)]), y

    nothing = jnp.zeros((*tokens.shape[1:], entry["positions"].shape[-1]), entry["positions"].dtype)
    _, outputs = lax.scan(tick, nothing, (fed, jnp.arange(ticks)))
    return outputs[at.stages - 1 :]


def _enter(entry: Params, *, tokens: jax.Array, at: Region) -> jax.Array:
    """Token ids [batch_local, length] to the residual stream."""
    return at.stream(entry["embed"]["embedding"][tokens] + entry["positions"][None, : tokens.shape[1]])


def _layer(x: jax.Array, p: Params, *, at: Region, works: jax.Array | None) -> jax.Array:
    """One layer, recomputed in the backward pass; where `works` is false nothing is computed in either pass."""
    block = functools.partial(plain_gpt.block, at=at)
    if works is None:
        return jax.checkpoint(block, prevent_cse=False)(x, p)
    return _skipping(block)(x, p, works)


def _skipping(block: Callable[[jax.Array, Params], jax.Array]) -> Callable[..., jax.Array]:
    """`block` under a condition in both passes, recomputed in the second.

    By hand, because a `cond` under autodiff hands on what its branches keep: a fifth more temporaries on
    stage=4,tensor=2.
    """

    @jax.custom_vjp
    def layer(x: jax.Array, p: Params, works: jax.Array) -> jax.Array:
        return lax.cond(works, block, lambda x, p: x, x, p)

    def forward(x: jax.Array, p: Params, works: jax.Array) -> tuple[jax.Array, Any]:
        return layer(x, p, works), (x, p, works)

    def backward(kept: Any, dy: jax.Array) -> Any:
        x, p, works = kept

        def run(x: jax.Array, p: Params, dy: jax.Array) -> Any:
            return jax.vjp(block, x, p)[1](dy)

        def rest(x: jax.Array, p: Params, dy: jax.Array) -> Any:
            return dy, jax.tree.map(jnp.zeros_like, p)

        return *lax.cond(works, run, rest, x, p, dy), None

    layer.defvjp(forward, backward)
    return layer


def _head(outer: Params, outputs: jax.Array, *, targets: jax.Array, at: Region) -> tuple[Metrics, Params, jax.Array]:
    """Metrics, gradients of norm and head, and of `outputs`, one microbatch after another."""
    parts = len(outputs) * at.shards

    def loss(outer: Params, y: jax.Array, targets: jax.Array) -> tuple[jax.Array, Metrics]:
        logits = plain_gpt.layer_norm(y, outer["norm"]) @ outer["head"]["kernel"]
        value, metrics = plain_gpt.token_loss(at.put(logits, at.batch, None, at.tensor), targets)
        return value / parts, jax.tree.map(lambda x: x / parts, metrics)

    def one(total: Any, now: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        (d_outer, dy), metrics = jax.grad(loss, argnums=(0, 1), has_aux=True)(outer, *now)
        return jax.tree.map(jnp.add, total, (metrics, d_outer)), dy

    zeros = {"loss": jnp.zeros(()), "accuracy": jnp.zeros(())}, jax.tree.map(jnp.zeros_like, outer)
    (metrics, d_outer), d_outputs = lax.scan(one, zeros, (outputs, targets))
    return metrics, d_outer, d_outputs


def _tensor(mesh: Mesh) -> str | None:
    return "tensor" if "tensor" in mesh.axis_names else None


def _map_specs(function: Callable[[P], P], specs: Any) -> Any:
    return jax.tree.map(function, specs, is_leaf=lambda node: isinstance(node, P))
