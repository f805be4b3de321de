"""A byte-level language model in one page of ordinary linen; the annotations are the lines that name axes.

In: nothing. Out: `tiny()` -> (module, loss, batch_spec), what every MODEL on the command line returns.

    shardlib train shardlib.examples.tiny:tiny --mesh data=2,tensor=4 --steps 50
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from shardlib.annotate import constrain, logical
from shardlib.batch_spec import ArraySpec
from shardlib.loss import Loss

VOCAB, EMBED, MLP, CONTEXT = 256, 64, 256, 8
normal = nn.initializers.lecun_normal()


class Tiny(nn.Module):
    """Predicts the next byte from the last eight: embedding, one MLP with a residual, head."""

    @nn.compact
    def __call__(self, inputs):
        """Token ids [batch, length] -> logits [batch, length, vocab]."""
        x = nn.Embed(VOCAB, EMBED, embedding_init=logical(normal, "vocab", "embed"))(inputs)
        x = constrain(x, "batch", "length", "embed")
        past = [jnp.pad(x, ((0, 0), (k, 0), (0, 0)))[:, : x.shape[1]] for k in range(CONTEXT)]
        h = nn.Dense(MLP, use_bias=False, kernel_init=logical(normal, "embed", "mlp"))(jnp.concatenate(past, -1))
        x = x + nn.Dense(EMBED, use_bias=False, kernel_init=logical(normal, "mlp", "embed"))(nn.gelu(h))
        return nn.Dense(VOCAB, use_bias=False, kernel_init=logical(normal, "embed", "vocab"))(x)


def tiny():
    """The module, its loss, and what one batch looks like."""
    module = Tiny()

    def loss(params, batch, rng):
        logits = jnp.asarray(module.apply({"params": params}, batch["inputs"]))
        hit = jax.nn.one_hot(batch["targets"], VOCAB, dtype=bool)
        nll = jax.nn.logsumexp(logits, axis=-1) - jnp.where(hit, logits, 0.0).sum(-1)
        return Loss(total=nll.sum(), weight=float(nll.size))

    tokens = ArraySpec(shape=(16, 128), dtype="int32", axes=("batch", "length"))
    return module, loss, {"inputs": tokens, "targets": tokens}
