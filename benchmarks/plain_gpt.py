"""The GPT of `models.gpt` written by hand in plain JAX: the yardstick that the other ways are measured against.

In: sizes, a mesh of data, fsdp or data x tensor, an optax optimizer. Out: parameters, their shardings, a train step.
Every sharding is written out below for these meshes; nothing of Flax or shardlib is used.

    at = Layout.of(mesh)
    state, metrics = jax.jit(functools.partial(train_step, config=config, at=at, optimizer=optimizer))(state, batch)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.gpt import Config

Params = Any
Metrics = dict[str, jax.Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where things live; a static value.

    Args:
        mesh: the mesh.
        batch: mesh axis that splits the batch.
        fsdp: mesh axis that splits the parameters along embed, or None.
        tensor: mesh axis that splits heads, hidden units, vocabulary and the residual stream's length, or None.
    """

    mesh: Mesh
    batch: str
    fsdp: str | None
    tensor: str | None

    @classmethod
    def of(cls, mesh: Mesh) -> "Layout":
        """The layout of a mesh made of data or fsdp, and perhaps tensor."""
        names = set(mesh.axis_names)
        return cls(
            mesh=mesh,
            batch="fsdp" if "fsdp" in names else "data",
            fsdp="fsdp" if "fsdp" in names else None,
            tensor="tensor" if "tensor" in names else None,
        )

    def put(self, x: jax.Array, *spec: str | None) -> jax.Array:
        """Constrains an activation."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*spec)))

    def stream(self, x: jax.Array) -> jax.Array:
        """Constrains the residual stream [batch, length, embed]."""
        return self.put(x, self.batch, self.tensor, None)


def init_params(key: jax.Array, c: Config) -> Params:
    """Random parameters of the whole model; layers are stacked along the first dim."""
    keys = iter(jax.random.split(key, 9))
    n, d, h, k, m = c.layers, c.embed, c.heads, c.head_dim, c.mlp

    def matrix(*shape: int, fan_in: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / fan_in**0.5

    def norm(*stack: int) -> Params:
        return {"scale": jnp.ones((*stack, d)), "bias": jnp.zeros((*stack, d))}

    layers = {
        "attention_norm": norm(n),
        "attention": {
            "query": {"kernel": matrix(n, d, h, k, fan_in=d), "bias": jnp.zeros((n, h, k))},
            "key": {"kernel": matrix(n, d, h, k, fan_in=d)},
            "value": {"kernel": matrix(n, d, h, k, fan_in=d), "bias": jnp.zeros((n, h, k))},
            "out": {"kernel": matrix(n, h, k, d, fan_in=d), "bias": jnp.zeros((n, d))},
        },
        "mlp_norm": norm(n),
        "mlp": {
            "up": {"kernel": matrix(n, d, m, fan_in=d), "bias": jnp.zeros((n, m))},
            "down": {"kernel": matrix(n, m, d, fan_in=m), "bias": jnp.zeros((n, d))},
        },
    }
    return {
        "embed": {"embedding": 0.02 * jax.random.normal(next(keys), (c.vocab, d))},
        "positions": 0.02 * jax.random.normal(next(keys), (c.length, d)),
        "layers": layers,
        "norm": norm(),
        "head": {"kernel": 0.02 * jax.random.normal(next(keys), (d, c.vocab))},
    }


def param_specs(at: Layout) -> Params:
    """The partition spec of every parameter."""
    f, t = at.fsdp, at.tensor
    column = {"kernel": P(None, f, t, None), "bias": P(None, t, None)}
    layers = {
        "attention_norm": {"scale": P(None, f), "bias": P(None, f)},
        "attention": {
            "query": column,
            "key": {"kernel": P(None, f, t, None)},
            "value": column,
            "out": {"kernel": P(None, t, None, f), "bias": P(None, f)},
        },
        "mlp_norm": {"scale": P(None, f), "bias": P(None, f)},
        "mlp": {
            "up": {"kernel": P(None, f, t), "bias": P(None, t)},
            "down": {"kernel": P(None, t, f), "bias": P(None, f)},
        },
    }
    return {
        "embed": {"embedding": P(t, f)},
        "positions": P(None, f),
        "layers": layers,
        "norm": {"scale": P(f), "bias": P(f)},
        "head": {"kernel": P(f, t)},
    }


def named(specs: Any, mesh: Mesh) -> Any:
    """A tree of shardings from a tree of specs."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda node: isinstance(node, P))


def layer_norm(x: jax.Array, p: Params) -> jax.Array:
    """Normalises over the last dim."""
    # In this order and without the reduced dim: other ways to write it make up to 90 more instructions on CPU.
    squared = jnp.square(x)
    mean = x.mean(axis=-1)
    variance = jnp.maximum(0.0, squared.mean(axis=-1) - jnp.square(mean))
    scale, bias = p["scale"][None, None], p["bias"][None, None]
    return (x - mean[..., None]) * (jax.lax.rsqrt(variance[..., None] + 1e-5) * scale) + bias


def attention(x: jax.Array, p: Params, at: Layout) -> jax.Array:
    """Causal self-attention."""

    def heads(p: Params) -> jax.Array:
        y = jnp.einsum("bld,dhk->blhk", x, p["kernel"])
        return at.put(y + p["bias"][None, None] if "bias" in p else y, at.batch, None, at.tensor, None)

    y = jax.nn.dot_product_attention(heads(p["query"]), heads(p["key"]), heads(p["value"]), is_causal=True)
    y = at.put(y, at.batch, None, at.tensor, None)
    return jnp.einsum("blhk,hkd->bld", y, p["out"]["kernel"]) + p["out"]["bias"][None, None]


def mlp(x: jax.Array, p: Params, at: Layout) -> jax.Array:
    """Two matrix products with a gelu between."""
    y = jax.nn.gelu(x @ p["up"]["kernel"] + p["up"]["bias"][None, None])
    return at.put(y, at.batch, None, at.tensor) @ p["down"]["kernel"] + p["down"]["bias"][None, None]


def block(x: jax.Array, p: Params, at: Layout) -> jax.Array:
    """One layer."""
    x = at.stream(x + attention(layer_norm(x, p["attention_norm"]), p["attention"], at))
    return at.stream(x + mlp(layer_norm(x, p["mlp_norm"]), p["mlp"], at))


def loss(params: Params, batch: Mapping[str, jax.Array], *, config: Config, at: Layout) -> tuple[jax.Array, Metrics]:
    """Mean cross entropy over tokens, and the metrics."""
    tokens, targets = batch["inputs"], batch["targets"]
    x = at.stream(params["embed"]["embedding"][tokens] + params["positions"][None, : tokens.shape[1]])

    def body(x: jax.Array, p: Params) -> tuple[jax.Array, None]:
        return block(x, p, at), None

    body = jax.checkpoint(body, prevent_cse=False) if config.remat else body
    x, _ = jax.lax.scan(body, x, params["layers"])
    logits = layer_norm(x, params["norm"]) @ params["head"]["kernel"]
    return token_loss(at.put(logits, at.batch, None, at.tensor), targets)


def token_loss(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, Metrics]:
    """Mean cross entropy and accuracy; the target's logit is picked without a gather, so that it stays local."""
    shifted = logits - jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    is_target = jnp.arange(logits.shape[-1])[None, None, :] == targets[..., None]
    target = jnp.where(is_target, shifted, 0.0).sum(axis=-1)
    nll = jnp.log(jnp.exp(shifted).sum(axis=-1)) - target
    value = nll.mean()
    return value, {"loss": value, "accuracy": (target == 0).mean(dtype=jnp.float32)}


def train_step(state: Any, batch: Any, *, config: Config, at: Layout, optimizer: optax.GradientTransformation) -> Any:
    """`((params, opt_state), batch) -> ((params, opt_state), metrics)`."""
    params, opt_state = state
    grads, metrics = jax.grad(loss, has_aux=True)(params, batch, config=config, at=at)
    # Where the compiler leaves a gradient elsewhere, the parameter and both moments would each be moved afterwards.
    grads = jax.lax.with_sharding_constraint(grads, named(param_specs(at), at.mesh))
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), metrics
