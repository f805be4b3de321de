"""A linen model with everything that a cut must carry over, small enough to be compiled many times.

A scan of residual layers with dropout and an auxiliary loss each, a mask that every layer reads, a head that may be
the transposed embedding, and tokens that weigh nothing, something or more.

    module, loss, batch_spec = build(layers=4, dropout=0.1, tied=True, balance=0.1)
"""

from typing import Any

import flax.linen as nn
import jax

import shardlib as sl
from models import language
from shardlib import annotate

EMBED, MLP, VOCAB, LENGTH = 16, 32, 32, 8
BROADCAST: Any = nn.broadcast
NORMAL, TABLE = nn.initializers.lecun_normal(), nn.initializers.normal(0.5)


class Layer(nn.Module):
    """x + W2 gelu(W1 x) where a token is real; its output is the mean square of the hidden units."""

    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array, real: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[batch, length, embed] and [batch, length, 1] to the same and a scalar."""
        up, down = annotate.logical(NORMAL, "embed", "mlp"), annotate.logical(NORMAL, "mlp", "embed")
        bias = annotate.logical(TABLE, "mlp")
        hidden = nn.gelu(nn.Dense(MLP, kernel_init=up, bias_init=bias, name="up")(x))
        hidden = annotate.constrain(hidden, "batch", "length", "mlp")
        update = nn.Dense(EMBED, use_bias=False, kernel_init=down, name="down")(hidden)
        update = nn.Dropout(self.dropout, deterministic=not self.has_rng("dropout"))(update)
        return annotate.constrain(x + update * real, "batch", "length", "embed"), (hidden**2).mean()


class Tower(nn.Module):
    """Embedding, layers, head."""

    layers: int
    dropout: float
    tied: bool

    @nn.compact
    def __call__(self, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Token ids [batch, length] to logits [batch, length, vocab] and the auxiliary losses [layers]."""
        embed = nn.Embed(VOCAB, EMBED, embedding_init=annotate.logical(TABLE, "vocab", "embed"), name="embed")
        x = annotate.constrain(embed(inputs), "batch", "length", "embed")
        stack = nn.scan(
            Layer,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=BROADCAST,
            length=self.layers,
            metadata_params={nn.PARTITION_NAME: annotate.LAYERS},
        )
        x, balance = stack(self.dropout, name="layers")(x, (inputs > 2)[..., None].astype(x.dtype))
        if self.tied:
            return language.attend(x, embed.embedding), balance
        head = annotate.logical(NORMAL, "embed", "vocab")
        return nn.Dense(VOCAB, use_bias=False, kernel_init=head, name="head")(x), balance


def build(
    *, layers: int, batch: int = 16, dropout: float = 0.0, tied: bool = False, balance: float = 0.0
) -> language.Example:
    """The model, its loss and its batch.

    Args:
        balance: the coefficient of the auxiliary losses' sum; they are metrics in any case.
    """
    module = Tower(layers, dropout, tied)
    apply: Any = module.apply

    def loss(params: Any, batch: Any, rng: Any) -> sl.Loss:
        rngs: Any = None if rng is None or dropout == 0 else {"dropout": rng}
        logits, aux = apply({"params": params}, batch["inputs"], rngs=rngs)
        main = language.token_loss(logits, batch)
        return sl.Loss(
            total=main.total,
            weight=main.weight,
            per_microbatch=balance * aux.sum(),
            aux={**main.aux, "balance": sl.Mean(aux.sum(), 1.0)},
        )

    return module, loss, language.batch_spec(batch=batch, length=LENGTH)
