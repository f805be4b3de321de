"""An embedding and a cross-entropy head whose vocabulary may be split over devices, in linen.

In: token ids [batch, length]; at the other end x [batch, length, embed] and targets. Out: embeddings; a `Loss`.

    embed, head = VocabEmbed(50257, 768, multiple=8), CrossEntropyHead(50257, 768, tied=True)
    loss = head(x, targets, table=embed.embedding)    # inside a parent module
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from shardlib import annotate
from shardlib.layers.vocab_head import cross_entropy, head_logits, padded_initializer, stored_rows
from shardlib.loss import Loss
from shardlib.ops.vocab_embedding import embed_tokens
from shardlib.ops.vocab_loss import NUM_CHUNKS, TokenLosses, token_losses

TABLE = nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)
KERNEL = nn.initializers.lecun_normal()


class VocabEmbed(nn.Module):
    """A table of embeddings, its rows named "vocab" and padded to a multiple; `attend` is the tied head's product.

    Args:
        vocab, embed: sizes.
        multiple: the stored rows are a multiple of it. The shards of a mesh must be in it, or the plan's rules pad:
            "vocab -> tensor; indivisible=pad".
        dtype: of the output; None follows the table.
        param_dtype: of the table.
        embedding_init: draws the logical rows; the others are zero and stay so.
        lookup: `embed_tokens`, or a `functools.partial` of it that names a mesh and axes.
    """

    vocab: int
    embed: int
    multiple: int = 1
    dtype: Any = None
    param_dtype: Any = jnp.float32
    embedding_init: Callable[..., Any] = TABLE
    lookup: Callable[..., jax.Array] = embed_tokens

    def setup(self) -> None:
        """Makes the table [stored vocab, embed]."""
        initializer = padded_initializer(self.embedding_init, self.vocab, vocab_dim=0)
        shape = stored_rows(self.vocab, multiple=self.multiple), self.embed
        self.embedding = self.param(
            "embedding", annotate.logical(initializer, "vocab", "embed"), shape, self.param_dtype
        )

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Token ids [batch, length] to [batch, length, embed]."""
        table = self.embedding if self.dtype is None else self.embedding.astype(self.dtype)
        return annotate.constrain(
            annotate.slot(annotate.EMBED_TOKENS, self.lookup)(table, ids, vocab=self.vocab), "batch", "length", "embed"
        )

    def attend(self, x: jax.Array) -> jax.Array:
        """Logits [batch, length, stored vocab] of x [batch, length, embed], padding at the lowest finite number."""
        return head_logits(x, self.embedding, vocab=self.vocab, vocab_dim=0, dtype=self.dtype)


class CrossEntropyHead(nn.Module):
    """The output product and its loss in one, so that the logits never exist whole.

    Args:
        vocab, embed: sizes.
        tied: no kernel of its own; every call gets the embedding's table.
        multiple: of the stored columns, as for `VocabEmbed`.
        smoothing, z_loss, num_chunks: as for `token_losses`.
        dtype: of the products; None follows x and the kernel.
        param_dtype: of the kernel.
        kernel_init: draws the logical columns; the others are zero and stay so.
        losses: `token_losses`, or a `functools.partial` of it that names a mesh and axes.
    """

    vocab: int
    embed: int
    tied: bool = False
    multiple: int = 1
    smoothing: float = 0.0
    z_loss: float = 0.0
    num_chunks: int = NUM_CHUNKS
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = KERNEL
    losses: Callable[..., TokenLosses] = token_losses

    def setup(self) -> None:
        """Makes the kernel [embed, stored vocab], unless tied."""
        if not self.tied:
            initializer = padded_initializer(self.kernel_init, self.vocab, vocab_dim=1)
            shape = self.embed, stored_rows(self.vocab, multiple=self.multiple)
            self.kernel = self.param("kernel", annotate.logical(initializer, "embed", "vocab"), shape, self.param_dtype)

    def __call__(
        self, x: jax.Array, targets: jax.Array, *, weights: jax.Array | None = None, table: jax.Array | None = None
    ) -> Loss:
        """The loss of x [batch, length, embed] against integer targets [batch, length].

        Args:
            weights: [batch, length], 0 for a masked token.
            table: [stored vocab, embed], of a tied head.
        """
        return cross_entropy(
            x,
            self._head(table),
            targets,
            vocab=self.vocab,
            vocab_dim=self._vocab_dim,
            weights=weights,
            smoothing=self.smoothing,
            z_loss=self.z_loss,
            num_chunks=self.num_chunks,
            dtype=self.dtype,
            losses=annotate.slot(annotate.TOKEN_LOSSES, self.losses),
        )

    def logits(self, x: jax.Array, *, table: jax.Array | None = None) -> jax.Array:
        """Logits [batch, length, stored vocab], for sampling; padding at the lowest finite number."""
        return head_logits(x, self._head(table), vocab=self.vocab, vocab_dim=self._vocab_dim, dtype=self.dtype)

    @property
    def _vocab_dim(self) -> int:
        return 0 if self.tied else 1

    def _head(self, table: jax.Array | None) -> jax.Array:
        if (table is not None) != self.tied:
            raise ValueError(
                f"CrossEntropyHead(tied={self.tied}) was called {'without' if self.tied else 'with'} a table"
            )
        return self.kernel if table is None else table
