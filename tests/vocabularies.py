"""A small vocabulary, its losses by the whole logits on one device, and the places where a split one can stand.

In: where, and how many shards. Out: functions of (x, head, targets, weights): the split one, and the oracle.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from meshes import make_mesh
from shardlib.ops.vocab_loss import token_losses

BATCH, LENGTH, EMBED, STORED = 4, 10, 8, 24
PLACES = ("automatic", "manual", "checked", "nested")


def arrays(*, vocab: int, tied: bool = False, dtype: Any = jnp.float32) -> tuple[jax.Array, ...]:
    """x, head, targets of which some are ignored, and weights of which some are zero."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(BATCH, LENGTH, EMBED))
    head = draw.normal(size=(EMBED, STORED))
    targets = draw.integers(0, vocab, (BATCH, LENGTH))
    targets[0, 1], targets[1, :3] = -1, -100
    targets[2, :2] = np.argmax((x @ head)[2, :2, :vocab], axis=-1)  # hits
    weights = draw.integers(0, 3, (BATCH, LENGTH)) / 2
    head = jnp.asarray(head.T if tied else head, dtype)
    return jnp.asarray(x, dtype), head, jnp.asarray(targets, jnp.int32), jnp.asarray(weights, jnp.float32)


def per_token(
    logits: np.ndarray, targets: np.ndarray, *, smoothing: float = 0.0, z_loss: float = 0.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(loss, nll, hits) per token and the gradient of each token's loss by its logits, in float64 from whole logits."""
    counted = (targets >= 0)[..., None]
    largest = logits.max(axis=-1, keepdims=True)
    log_z = largest + np.log(np.exp(logits - largest).sum(axis=-1, keepdims=True))
    wanted = np.arange(logits.shape[-1]) == targets[..., None]
    target = (logits * wanted).sum(axis=-1, keepdims=True)
    mean = logits.mean(axis=-1, keepdims=True)
    loss = log_z - (1 - smoothing) * target - smoothing * mean + z_loss * log_z**2
    gradient = (
        np.exp(logits - log_z) * (1 + 2 * z_loss * log_z) - (1 - smoothing) * wanted - smoothing / wanted.shape[-1]
    )
    values = loss, log_z - target, target >= largest
    loss, nll, hits = (np.where(counted, value, 0.0)[..., 0] for value in values)
    return loss, nll, hits, gradient * counted


def one_device(*given: Any, vocab: int, vocab_dim: int, **options: float) -> tuple[np.ndarray, ...]:
    """The oracle: what `with_gradients` returns, by formulas, from x, head, targets and weights."""
    x, head, targets, weights = (np.asarray(array.astype(float), np.float64) for array in map(np.asarray, given))
    head = head.T if vocab_dim == 0 else head
    loss, nll, hits, gradient = per_token(x @ head[:, :vocab], targets, **options)
    gradient = gradient * weights[..., None]
    dhead = np.zeros_like(head)
    dhead[:, :vocab] = np.einsum("ble,blv->ev", x, gradient)
    found = (loss * weights).sum(), nll, hits, gradient @ head[:, :vocab].T, dhead.T if vocab_dim == 0 else dhead
    return tuple(np.asarray(array, np.float32) for array in found)


def with_gradients(losses: Callable[..., Any], x: Any, head: Any, targets: Any, weights: Any) -> Any:
    """The weighted sum, nll and hits per token, and the gradients of x and head; all float32."""

    def total(x: Any, head: Any) -> Any:
        loss, nll, hits, *_ = losses(x, head, targets)
        return (loss * weights).sum(), (nll, hits)

    (value, per_token), grads = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(x, head)
    return value, *per_token, *(grad.astype(jnp.float32) for grad in grads)


def mesh_of(place: str, tensor: int) -> Any:
    """A mesh with that many shards of the vocabulary and, if devices are left, another axis beside."""
    if place == "nested":
        return make_mesh(f"stage=2,data={2 if tensor < 4 else 1},tensor={tensor}")
    return make_mesh(f"data={2 if tensor < 8 else 1},tensor={tensor}")


def split(place: str, tensor: int, *, losses: Callable[..., Any] = token_losses, **options: Any) -> Callable[..., Any]:
    """`with_gradients` of split losses: `(x, head, targets, weights)`, whole arrays in and out.

    Args:
        place: "automatic": whole arrays, the axes automatic. "manual": in a region manual over everything, gradients
            taken inside. "checked": the same with `check_vma=True`, gradients taken across its boundary. "nested": in
            a region manual over stage, under a cond that one stage takes, the other axes automatic.
        tensor: shards of the vocabulary.
    """
    mesh = mesh_of(place, tensor)
    if place == "automatic":
        return functools.partial(with_gradients, functools.partial(losses, mesh=mesh, **options))
    local = functools.partial(losses, **options)
    if place == "nested":
        return under_a_stage(functools.partial(with_gradients, local), mesh)
    head = P("tensor", None) if options["vocab_dim"] == 0 else P(None, "tensor")
    in_specs = (P("data"), head, P("data"))
    if place == "checked":
        whole = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=P("data"))
        return functools.partial(with_gradients, whole)

    def region(*arguments: Any) -> Any:
        value, nll, hits, dx, dhead = with_gradients(local, *arguments)
        return jax.lax.psum(value, "data"), nll, hits, dx, jax.lax.psum(dhead, "data")

    out_specs = (P(), P("data"), P("data"), P("data"), head)
    return jax.shard_map(region, mesh=mesh, in_specs=(*in_specs, P("data")), out_specs=out_specs, check_vma=False)


def under_a_stage(function: Callable[..., Any], mesh: Any) -> Callable[..., Any]:
    """The function on the last stage alone: what it sends over other axes must not wait for the first."""

    def region(*arguments: Any) -> Any:
        shapes = jax.eval_shape(function, *arguments)
        nothing = lambda *_: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)  # noqa: E731
        mine = jax.lax.cond(jax.lax.axis_index("stage") == 1, function, nothing, *arguments)
        return jax.lax.psum(mine, "stage")

    return jax.shard_map(region, mesh=mesh, axis_names={"stage"}, in_specs=P(), out_specs=P(), check_vma=False)
