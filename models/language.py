"""What the language models share: the batch, the token loss, and how an NNX model becomes a loss.

In: logits [batch, length, vocab] and a batch of token ids. Out: a `Loss` in sums that combine exactly over shards.

    batch_spec = language.batch_spec(batch=16, length=128)
    loss = language.nnx_loss(functools.partial(GPT, config))
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shardlib import annotate
from shardlib.batch_spec import ArraySpec
from shardlib.loss import Loss, Mean

# (module, loss, batch_spec); the module is a linen module, or for NNX a function from `nnx.Rngs` to the module.
Example = tuple[Any, Callable[[Any, Mapping[str, Any], Any], Loss], dict[str, ArraySpec]]


def batch_spec(*, batch: int, length: int) -> dict[str, ArraySpec]:
    """The spec of `{"inputs", "targets"}`, each [batch, length] int32. A batch may also hold float32 "weights"."""
    tokens = ArraySpec(shape=(batch, length), dtype="int32", axes=("batch", "length"))
    return {"inputs": tokens, "targets": tokens}


def token_loss(logits: jax.Array, batch: Mapping[str, Any]) -> Loss:
    """Cross entropy summed over tokens, in float32; the weights of tokens count in the loss and in the accuracy.

    The target's logit is picked by comparing with an iota, which stays local where the vocab dim is sharded; a gather
    there would move the logits. A target whose logit ties with the largest counts as predicted.

    Args:
        logits: [batch, length, vocab], floating.
        batch: "targets" [batch, length] integer, and optionally "weights" [batch, length], 0 for a masked token.

    Returns:
        `Loss` with aux "accuracy".
    """
    targets = batch["targets"]
    logits = annotate.constrain(logits, "batch", "length", "vocab").astype(jnp.float32)
    largest = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    shifted = logits - largest
    is_target = jax.lax.broadcasted_iota(targets.dtype, (1, 1, logits.shape[-1]), 2) == targets[..., None]
    target = jnp.where(is_target, shifted, 0.0).sum(axis=-1)
    nll = jnp.log(jnp.exp(shifted).sum(axis=-1)) - target
    hits = (target == 0).astype(jnp.float32)
    weights = batch.get("weights")
    if weights is None:
        weight = jnp.asarray(nll.size, jnp.float32)
        return Loss(total=nll.sum(), weight=weight, aux={"accuracy": Mean(hits.sum(), weight)})
    weights = weights.astype(jnp.float32)
    weight = weights.sum()
    return Loss(total=(nll * weights).sum(), weight=weight, aux={"accuracy": Mean((hits * weights).sum(), weight)})


def embedding(vocab: int, embed: int, *, dtype: Any, embedding_init: Any, rngs: nnx.Rngs) -> nnx.Embed:
    """An `nnx.Embed` whose output follows its table where the dtype is None, as linen's does."""
    module = nnx.Embed(vocab, embed, dtype=dtype, embedding_init=embedding_init, rngs=rngs)
    module.dtype = dtype  # Flax fills in the dtype that the table was made in
    return module


def attend(x: jax.Array, table: jax.Array, *, dtype: Any = None) -> jax.Array:
    """Logits of a tied head: products of x [batch, length, embed] with the rows of table [vocab, embed].

    Args:
        dtype: of the computation; None follows the arguments.
    """
    dtype = dtype or jnp.result_type(x, table)
    dims = (((x.ndim - 1,), (1,)), ((), ()))
    return annotate.dot_general(x.astype(dtype), table.astype(dtype), dims)


def stack(block: Callable[..., nnx.Module], *, count: int, rngs: nnx.Rngs) -> Any:
    """`count` equal layers in one NNX module: every parameter gains a leading dim named "layers".

    Args:
        block: makes one layer, called as `block(rngs=rngs)`.
    """

    @nnx.split_rngs(splits=count)
    @nnx.vmap
    def layers(rngs: nnx.Rngs) -> nnx.Module:
        return block(rngs=rngs)

    return annotate.name_stack(layers(rngs))


def scan(
    layer: Callable[..., jax.Array], layers: Any, x: jax.Array, *, per_layer: Any = None, remat: bool
) -> jax.Array:
    """Runs stacked layers in turn, `x = layer(module, x, slice)`, in one `lax.scan` over the parameters.

    `nnx.scan` would also return every parameter as an output of the loop.

    Args:
        layer: applies one layer's module; what it closes over is the same for every layer.
        layers: what `stack` made.
        x: the carry.
        per_layer: a pytree with one slice per layer along its first dim, such as keys; None passes None.
        remat: recompute each layer in the backward pass.
    """
    graphdef, state = nnx.split(layers)

    def body(x: jax.Array, slices: Any) -> tuple[jax.Array, None]:
        state, own = slices
        return layer(nnx.merge(graphdef, state), x, own), None

    body = jax.checkpoint(body, prevent_cse=False) if remat else body
    return jax.lax.scan(body, x, (state, per_layer))[0]


def nnx_loss(factory: Callable[[nnx.Rngs], nnx.Module]) -> Callable[[Any, Mapping[str, Any], Any], Loss]:
    """The loss of an NNX model called as `module(inputs, key)`, with key None for no dropout.

    Args:
        factory: makes the module; only its structure is used, once, on the first call, and nothing is allocated.

    Returns:
        `loss(params, batch, rng)` with params an `nnx.State` of the module's `nnx.Param` variables.
    """

    @functools.cache
    def structure() -> Any:
        return nnx.graphdef(nnx.eval_shape(lambda: factory(nnx.Rngs(0))))

    def loss(params: Any, batch: Mapping[str, Any], rng: jax.Array | None) -> Loss:
        model: Any = nnx.merge(structure(), params)
        return token_loss(model(batch["inputs"], rng), batch)

    return loss
